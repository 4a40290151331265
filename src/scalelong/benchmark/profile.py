"""Where the time of a training step goes, by groups of operations."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from ..training.loop import Trainer

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
REST = "rest (Python, autograd, allocation)"
STEPS = 3


def profile_by_group(trainer: "Trainer", step: Callable[[], object]) -> dict[str, float]:
    """Share of a step's time in each group. Operations count without those that they call."""
    with _marked(trainer):
        step()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(STEPS):
                with record_function("bench::step"):
                    step()
    shares = dict.fromkeys([*GROUPS, *SCOPES.values(), REST], 0.0)
    for event in found.events() or ():
        shares[group_of(event)] += event.self_cpu_time_total
    total = sum(shares.values())
    return {name: value / total for name, value in shares.items() if value > 0}


def group_of(event: Any) -> str:
    parent = event
    while parent is not None:
        for scope, group in SCOPES.items():
            if parent.name.startswith(scope):
                return group
        parent = parent.cpu_parent
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, event.name)), REST)


@contextmanager
def _marked(trainer: "Trainer") -> Iterator[None]:
    """Give the parts that are not one operation of torch a name in the profile."""
    state, examples = trainer.state, trainer.examples
    update = state.ema.update

    def named(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with record_function(name):
                return work(*arguments)

        return call

    state.ema.update = named("bench::ema", update)
    trainer.examples = named("bench::examples", examples)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        state.ema.update, trainer.examples = update, examples
