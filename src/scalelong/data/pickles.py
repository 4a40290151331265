"""Pickles of plain values, read without Python's unpickler.

Pickle is a small language of a stack. Python's reader of it can be made to call functions, to crash and to take all
memory. This one knows plain values and the one way in which numpy writes a uint8 array. It builds nothing else.
"""

from __future__ import annotations

import pickletools
from math import prod
from typing import Any, NamedTuple

from ..errors import UnreadableDataError
from ..files import in_words
from ..optional import needs

_VALUES = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"}
_VALUES |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_OLD_TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_NAMES = {f"{home} _reconstruct": "reconstruct" for home in ("numpy.core.multiarray", "numpy._core.multiarray")}
_NAMES |= {"numpy ndarray": "ndarray", "numpy dtype": "dtype", "_codecs encode": "encode"}
_MARK = object()


class _Name(NamedTuple):
    """A name that numpy's arrays are written with. It is never looked up."""

    name: str


class _Built:
    """What a name was called for: a dtype, or an array that waits for its bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.array: Any = None


def read_plain_pickle(content: bytes) -> Any:
    """Lists, dictionaries, texts, whole numbers and uint8 arrays. UnreadableDataError for anything else."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for code, argument, _ in pickletools.genops(content):
            if code.name == "STOP":
                return _finished(stack.pop())
            _obey(code.name, argument, stack, memo)
    except UnreadableDataError:
        raise
    # A damaged pickle can fail in many ways: an empty stack, a key that is a list, an argument that is cut off.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, StopIteration) as error:
        raise UnreadableDataError(f"it is damaged ({in_words(error)})") from error
    raise UnreadableDataError("it is cut off")


def _obey(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _VALUES:
        stack.append(argument)
    elif name in _OLD_TEXTS:  # of Python 2, where texts are bytes
        stack.append(argument.encode("latin1"))
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("LIST", "TUPLE", "DICT"):
        values = _since_mark(stack)
        stack.append(_pairs(values) if name == "DICT" else list(values) if name == "LIST" else tuple(values))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name in ("APPEND", "APPENDS"):
        values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _container(stack, list).extend(values)
    elif name in ("SETITEM", "SETITEMS"):
        values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        _container(stack, dict).update(_pairs(values))
    elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if argument is None else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        asked = argument if name == "GLOBAL" else " ".join((stack.pop(-2), stack.pop()))
        if asked not in _NAMES:
            raise UnreadableDataError(f"it asks for {asked.replace(' ', '.')}, which a CIFAR-10 batch does not need")
        stack.append(_Name(_NAMES[asked]))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_called(stack.pop(), arguments))
    elif name == "BUILD":
        state = stack.pop()
        _fill(stack[-1], state)
    elif name not in ("PROTO", "FRAME"):
        raise UnreadableDataError(f"it uses {name}, which a CIFAR-10 batch does not need")


def _since_mark(stack: list[Any]) -> list[Any]:
    start = next(place for place in range(len(stack) - 1, -1, -1) if stack[place] is _MARK)
    values = stack[start + 1 :]
    del stack[start:]
    return values


def _pairs(values: list[Any]) -> dict[Any, Any]:
    if not all(isinstance(key, str | bytes) for key in values[::2]):  # a tuple of tuples may take for ever to hash
        raise UnreadableDataError("its keys must be texts")
    return dict(zip(values[::2], values[1::2], strict=True))


def _container(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise UnreadableDataError(f"it fills a {type(stack[-1]).__name__} as if it were a {kind.__name__}")
    return stack[-1]


def _called(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name("encode"), (str() as text, "latin1"):  # how Python 3 writes bytes in old pickles
            return text.encode("latin1")
        case _Name("dtype"), ("u1" | "|u1" | b"u1" | b"|u1", *_):
            return _Built("dtype")
        case _Name("dtype"), (str() | bytes() as kind, *_):
            raise UnreadableDataError(f"it holds an array of {kind[:20]!r}, where bytes (u1) are needed")
        case _Name("reconstruct"), (_Name("ndarray"), *_):
            return _Built("array")
    raise UnreadableDataError("it makes a call that a CIFAR-10 batch does not need")


def _fill(target: Any, state: Any) -> None:
    """An array's state is (version, shape, dtype, order, bytes). A dtype's says nothing about single bytes."""
    np = needs("numpy", "train", "reading CIFAR-10")
    match target, state:
        case _Built(name="dtype"), tuple():
            return
        case _Built(name="array"), (_, tuple() as shape, _Built(name="dtype"), order, bytes() as content):
            if not all(type(side) is int and 0 <= side <= len(content) for side in shape) or order:
                raise UnreadableDataError(f"it holds {len(content)} bytes for an array of another size")
            if prod(shape) != len(content):
                raise UnreadableDataError(f"it holds {len(content)} bytes for an array of the shape {shape}")
            target.array = np.frombuffer(content, np.uint8).reshape(shape)
            return
    raise UnreadableDataError("it builds something that a CIFAR-10 batch does not need")


def _finished(value: Any) -> Any:
    """With arrays in place of what was built; they stand in the dictionary itself."""
    if not isinstance(value, dict):
        return value
    return {key: entry.array if isinstance(entry, _Built) else entry for key, entry in value.items()}
