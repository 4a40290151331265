"""What a step does: arithmetic, live tensors, operations slice by slice, and where its time goes."""

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from .lockstep import Lockstep
from .record import Spread

if TYPE_CHECKING:
    from scalelong.training.loop import Trainer


# The arithmetic of a step: matrix products, convolutions and attention, forward and backward.

# pyright: reportPrivateUsage=false


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_flops(step: Callable[[], object]) -> float:
    """Floating-point operations of one step, two for each multiplication and addition.

    Attention is counted as plain products, so that what a fused kernel computes twice in backward counts once.
    """
    counter = FlopCounterMode(display=False, custom_mapping={_FLASH: _forward, _FLASH_BACKWARD: _backward})
    with sdpa_kernel(SDPBackend.MATH), counter:
        step()
    return float(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """QKᵀ and its product with V, of shapes (B, H, L, D)."""
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[2] * (dim + value[3])


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ARG001
    return 2 * _forward(query, key, value)


# Bytes of tensors that exist at the same time: the same in every run, unlike the memory of a process.

BUILT = "bench::built"


def peak_of_tensors(build: Callable[[], Callable[[], object]]) -> int:
    """The most bytes that torch has allocated on the CPU at a time during a step, with what was left of building it.

    torch reports the allocations of this thread alone, so that all is done by one thread.
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


# Which operations a step calls in each of its slices, and in which slices two steps differ.

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


# What contenders in lockstep cost over a baseline, from the seconds of their slices.

DRAWS = 400
CONFIDENCE = 0.95


def cost(slices: Tensor, baseline: Tensor, parts: Tensor) -> Spread:
    """Time over the baseline's in these parts, as a share of the baseline's step, with its 95 % interval.

    Both have the shape (rounds, slices). The difference is taken slice by slice in the same round, where the machine is
    as fast for both, and its median over the rounds is not moved by interruptions. The interval is a bootstrap over
    rounds.
    """
    if not parts.any():
        return Spread(0.0, 0.0, 0.0)
    step = float(baseline.median(0).values.sum())
    differences = (slices - baseline)[:, parts]
    rounds = len(differences)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        _middle(differences[torch.randint(rounds, (rounds,), generator=generator)]).sum() / step for _ in range(DRAWS)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.stack(drawn).quantile(torch.tensor([tail, 1 - tail], dtype=differences.dtype)).tolist()
    return Spread(float(_middle(differences).sum() / step), low, high)


def _middle(values: Tensor) -> Tensor:
    # torch.median takes the lower of the two middle values, and a difference must not lean to a side.
    return values.quantile(0.5, dim=0)


def table_of(rounds: list[dict[str, list[float]]]) -> Mapping[str, Tensor]:
    """From the slices of each round to (rounds, slices) of each contender."""
    return {name: torch.tensor([each[name] for each in rounds], dtype=torch.float64) for name in rounds[0]}


# Where the time of a training step goes, on all cores, by groups of operations.

SCOPES = {
    "Optimizer.step": "optimiser",
    "bench::optimiser": "optimiser",
    "bench::ema": "moving average",
    "bench::examples": "data and noise",
}
"""Everything inside these counts for them, whatever it is."""

GROUPS = {
    "attention": r"scaled_dot_product|flash_attention|softmax",
    "matrix products": r"aten::(addmm|mm|bmm|baddbmm|_?addmm_activation|matmul|linear)\b|mkldnn.*linear|mkl.*linear",
    "convolutions": r"convolution|conv2d",
    "GELU": r"gelu",
    "norms": r"layer_norm|group_norm",
    "copies": r"aten::(copy_|clone|contiguous|cat|_to_copy|to|stack|fill_|zero_|select_backward|slice_backward)\b",
    "additions and products": r"aten::(add|sub|mul|div)_?\b",
    "sums": r"aten::(sum|mean|norm|linalg_vector_norm|_foreach_norm)\b",
}
REST = "rest (Python, autograd, allocation, waiting)"
STEP, SPLIT = "bench::step", "bench::split"
STEPS, SECONDS = 3, 10.0
"""How many steps are profiled: fewer if they are longer."""


def profile_by_group(trainer: "Trainer", step: Callable[[], object]) -> dict[str, float]:
    """Share of all cores' time in each group. Operations count without those that they call.

    Where each core takes its own images, an operation is the work of one core; elsewhere all cores share it.
    """
    began = time.perf_counter()
    step()
    steps = min(STEPS, max(1, int(SECONDS / (time.perf_counter() - began))))
    every_thread = _every_thread()
    if every_thread is None:
        trainer.cores = None  # in this process for good: nothing else is asked after a profile
    with _marked(trainer), profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
        for _ in range(steps):
            with record_function(STEP):
                step()
    return shares_of(list(found.events() or ()), torch.get_num_threads())


def seconds_by_group(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Seconds of a step in each group, on one thread. Operations count without those that they call."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    seconds = dict.fromkeys([*GROUPS, *SCOPES.values()], 0.0)
    for event in found.events() or ():
        group = group_of(event)
        if group != REST:
            seconds[group] += event.self_cpu_time_total / steps / 1e6
    return seconds


def shares_of(events: list[Any], cores: int) -> dict[str, float]:
    steps = [event for event in events if event.name == STEP]
    total = cores * sum(event.time_range.elapsed_us() for event in steps)
    shares = dict.fromkeys([*GROUPS, *SCOPES.values()], 0.0)
    for event in events:
        group = group_of(event)
        if group != REST:
            alone = event.thread != steps[0].thread or _inside(event, SPLIT)
            shares[group] += event.self_cpu_time_total * (1 if alone else cores) / total
    return {name: share for name, share in shares.items() if share > 0} | {REST: 1 - sum(shares.values())}


def _every_thread() -> Any:
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # an older torch
        return None


def _inside(event: Any, scope: str) -> bool:
    while event is not None:
        if event.name.startswith(scope):
            return True
        event = event.cpu_parent
    return False


def group_of(event: Any) -> str:
    for scope, group in SCOPES.items():
        if _inside(event, scope):
            return group
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, event.name)), REST)


@contextmanager
def _marked(trainer: "Trainer") -> Iterator[None]:
    """Give the parts that are not one operation of torch a name in the profile."""
    state, examples, cores = trainer.state, trainer.examples, trainer.cores
    update, optimise = state.ema.update, state.prepared_optimizer.step

    def named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with record_function(name):
                return work(*arguments, **keywords)

        return call

    state.ema.update = named("bench::ema", update)
    state.prepared_optimizer.step = named("bench::optimiser", optimise)
    trainer.examples = named("bench::examples", examples)  # pyright: ignore[reportAttributeAccessIssue]
    if cores is not None:
        cores.backward = named(SPLIT, cores.backward)
    try:
        yield
    finally:
        state.ema.update, trainer.examples, state.prepared_optimizer.step = update, examples, optimise
        if cores is not None:
            del cores.backward  # the method itself again
