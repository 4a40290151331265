"""Which operations a step calls in each of its slices, and in which slices two steps differ."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

from .lockstep import Lockstep

_CUT = "bench::cut"


def operations(step: Callable[[], object], lockstep: Lockstep) -> list[list[str]]:
    """Names and sizes of what one step calls, slice by slice. Nothing else may run meanwhile."""
    lockstep.on_cut = _mark
    try:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            step()
    finally:
        lockstep.on_cut = None
    slices: list[list[str]] = [[]]
    for event in sorted(found.events() or (), key=lambda event: event.time_range.start):
        if event.name == _CUT:
            slices.append([])
        else:
            slices[-1].append(f"{event.name} {event.input_shapes}")
    return slices


def differing(first: list[list[str]], second: list[list[str]]) -> set[int]:
    """The slices in which they do not do the same."""
    assert len(first) == len(second), (len(first), len(second))
    return {number for number, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}


def _mark() -> None:
    with record_function(_CUT):
        pass
