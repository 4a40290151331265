"""A contender's own process: it builds its step, then does as many as it is asked for, and sleeps in between.

Each line of its input is a request in JSON, each line of its output the reply. It has a process to itself so that its
peak memory is its own, and so that it can have its own allocator and environment.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from scalelong.errors import ScaleLongError


def main() -> None:
    replies = _private_output()
    try:
        build, before = _prepare(json.loads(sys.stdin.readline()))
        step = build()
    except Exception as error:
        _reply(replies, _failure(error))
        return
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply = {"answer": _tensors(build)} if "tensors" in request else _answer(step, request, before)
            _reply(replies, reply)
        except Exception as error:
            _reply(replies, _failure(error))


def _prepare(request: dict[str, Any]) -> tuple[Callable[[], Callable[[], object]], float]:
    """What builds the step, and the memory of this process before it does."""
    warnings.simplefilter("ignore")  # they were shown to whoever trains such a model
    module, _, name = request["factory"].partition(":")
    factory = getattr(importlib.import_module(module), name)
    for package in request["imports"]:
        with suppress(ImportError):  # the factory says it better
            importlib.import_module(package)
    if "torch" in sys.modules:
        _warm_torch(request["threads"])
    return partial(factory, **request["arguments"]), current_memory()


def _warm_torch(threads: int) -> None:
    """What is loaded at the first use is not memory of the model, so it is used now."""
    import torch

    torch.set_num_threads(threads)
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(64, 64)).sum().backward()
    optimizer.step()
    torch.manual_seed(0)


def _answer(step: Callable[[], object], request: dict[str, Any], before: float) -> dict[str, Any]:
    if "ask" in request:
        return {"answer": getattr(step, request["ask"])()}
    start = time.perf_counter()
    for _ in range(request["steps"]):
        step()
    return {"seconds": time.perf_counter() - start, "memory": peak_memory() - before}


def _tensors(build: Callable[[], Callable[[], object]]) -> int:
    """Bytes of tensors at the peak of one step that is built anew."""
    from .profile import peak_of_tensors

    return peak_of_tensors(build)


def current_memory() -> float:
    """Bytes of this process in memory now."""
    return _status("VmRSS") or peak_memory()


def peak_memory() -> float:
    """The most bytes of this process that have been in memory at a time."""
    # Not by getrusage, if it can be helped: on Linux a new process inherits the peak of the one that started it.
    peak = _status("VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def _status(name: str) -> float | None:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((1024.0 * int(line.split()[1]) for line in file if line.startswith(f"{name}:")), None)
    except OSError:  # not Linux
        return None


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    text = str(error) if isinstance(error, ScaleLongError) else f"{type(error).__name__}: {error}"
    return {"error": text}


def _private_output() -> TextIO:
    """What contenders print must not mix with the replies: it goes where errors go."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def _reply(file: TextIO, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
