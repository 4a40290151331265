"""Bytes of tensors that exist at the same time: the same in every run, unlike the memory of a process."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

BUILT = "bench::built"


def peak_of_tensors(build: Callable[[], Callable[[], object]]) -> int:
    """The most bytes that torch has allocated on the CPU at a time during a step, with what was left of building it.

    torch tells of the allocations of this thread, so that all is done by one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step = build()
            gc.collect()  # what only waits for it is not the step's
            with record_function(BUILT):
                pass
            step()
    finally:
        torch.set_num_threads(threads)
    assert found.profiler is not None
    results = found.profiler.kineto_results
    assert results is not None
    now = most = 0
    for event in sorted(_all(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
        if event.name == BUILT:
            most = now
        elif event.name == "[memory]":
            now += event.extra_fields.alloc_size
            most = max(most, now)
    return most


def _all(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
