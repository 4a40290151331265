"""The tensors in arguments and results, whatever they are packed in, and whether a call changed what it was given."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

TreePath = tuple[int | str, ...]


def leaves(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """The tensors of nested tuples, lists and dictionaries, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list | deque):
        for position, item in enumerate(value):
            yield from leaves(item, (*path, position))


def held_tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in objects of any class, such as dataclasses, and in what these hold."""
    seen = set() if seen is None else seen
    for item in _objects(value):
        if id(item) not in seen:
            seen.add(id(item))
            for content in _attributes(item):
                yield from (tensor for _, tensor in leaves(content))
                yield from held_tensors(content, seen)


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _objects(item)
    elif isinstance(value, tuple | list | deque | set | frozenset):
        for item in value:
            yield from _objects(item)
    elif not isinstance(value, Tensor | nn.Module | type) and (
        dataclasses.is_dataclass(value) or type(value).__module__ not in ("builtins", "types", "torch")
    ):
        yield value


def _attributes(value: Any) -> list[Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    try:
        return [*vars(value).values()] if hasattr(value, "__dict__") else [getattr(value, n, None) for n in slots]
    except TypeError:
        return []


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict | deque | set):
        yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list | deque) else ()
    for item in items:
        yield from containers(item)
    for item in _objects(value) if not items else ():
        for content in _attributes(item):
            if isinstance(content, list | dict | deque | set):
                yield content


def content_of(container: Any) -> list[Any]:
    return [*container.items()] if isinstance(container, dict) else [*container]


def is_changed(container: Any, before: list[Any]) -> bool:
    now = content_of(container)
    if len(now) != len(before):
        return True
    if isinstance(container, dict):
        return any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(now, before, strict=True))
    return any(a is not b for a, b in zip(now, before, strict=True))
