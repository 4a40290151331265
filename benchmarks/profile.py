"""Where the time of a training step goes, on all cores, by groups of operations."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from scalelong.training.loop import Trainer


SCOPES = {"Optimizer.step": "optimiser", "bench::ema": "moving average", "bench::examples": "data and noise"}
"""Everything inside of these counts for them, whatever it is."""

GROUPS = {
    "attention": r"scaled_dot_product|flash_attention",
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
    update = state.ema.update

    def named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with record_function(name):
                return work(*arguments, **keywords)

        return call

    state.ema.update = named("bench::ema", update)
    trainer.examples = named("bench::examples", examples)  # pyright: ignore[reportAttributeAccessIssue]
    if cores is not None:
        cores.backward = named(SPLIT, cores.backward)
    try:
        yield
    finally:
        state.ema.update, trainer.examples = update, examples
        if cores is not None:
            del cores.backward  # the method itself again
