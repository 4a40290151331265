"""Bytes of tensors that exist at the same time: the same in every run, unlike the memory of a process."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of_tensors(work: Callable[[], object]) -> int:
    """The most bytes that torch had allocated on the CPU at a time since the work began, and the work's result with it.

    torch tells of the allocations of this thread, so that the work is done by one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            work()
    finally:
        torch.set_num_threads(threads)
    assert found.profiler is not None
    results = found.profiler.kineto_results
    assert results is not None
    changes = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in _all(results.experimental_event_tree())
        if event.name == "[memory]"
    ]
    now = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return most


def _all(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
