"""Several small networks trained at once, each judged for itself.

    step = DenoisingStep(prepare)                  # instead of a function (model, i, generator) -> loss
    rate_range(build, step, rates=(4e-3, 8e-3))    # U-ViTs of one shape and rate go through each operation together

A step of a small network is bound by the calls of operations, not by arithmetic (docs/performance.md). Runs that share
shapes and rate are one stack (`models.stack`), with one optimiser. Data, noise, loss, clipping and collapse are those
of each run alone. A run that is over leaves the stack, so that it neither slows nor touches the others.

What is trained so differs from a run of its own by rounding. At rates near the edge that decides after some hundred
steps which of two seeds collapses, as it does on another machine; it decides nothing on average.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.call import Denoiser
from ..models.stack import UViTStack, shape_of
from ..skips.plan import SkipPlan
from .features import block_names

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""x_t, t and condition (labels, tokens of a text or None), as `Denoiser` takes them."""
Prepared = tuple[Inputs, Callable[[Tensor], Tensor]]
"""What the network is given, and the loss of what it answers."""
MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
Readings = list[tuple[int, dict[str, float]]]

WATCH_EVERY = 5
"""Steps between readings of the sizes of blocks and skips."""
ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Optimisers that treat each number for itself, so that it does not matter whose it is."""
STACK = 6
"""Networks of a stack. More gain little: features leave a core's cache, and fewer stacks keep fewer cores busy."""
LARGE = 2**14
"""Entries of a network's features, B L D, from which a stack gains little: arithmetic is most of a step, and the
features of a stack leave the cache (`scalelong bench sweep`)."""


@dataclass(frozen=True)
class DenoisingStep:
    """A training step in two halves, so that several networks can take it at once.

    prepare: (i, generator) -> ((x_t, t, condition), function from the network's output to the loss). Draw everything
        random from the generator, and nothing in the function.
    """

    prepare: Callable[[int, torch.Generator], Prepared]

    def __call__(self, model: nn.Module, i: int, generator: torch.Generator) -> Tensor:
        inputs, loss = self.prepare(i, generator)
        return loss(Denoiser(model)(*inputs))


def shape_of_runs(model: nn.Module, inputs: Inputs, make_optimizer: MakeOptimizer) -> tuple[Any, ...] | None:
    """Runs with equal shapes can be trained together; None for one that cannot."""
    network = shape_of(model)
    parameters = list(model.parameters())
    if network is None or getattr(model, "image_size", None) != tuple(inputs[0].shape[2:]):
        return None
    made = make_optimizer(parameters, 1.0)
    groups = made.param_groups
    if type(made) not in ELEMENTWISE or len(groups) != 1 or len(groups[0]["params"]) != len(parameters):
        return None
    position: Any = model.get_parameter("position_embedding.weight")
    return network, len(inputs[0]) * position.numel()


@torch.no_grad()
def stack_of(models: Sequence[Any], inputs: Sequence[Inputs]) -> UViTStack | None:
    """The stack of these networks; None if it does not answer as they do, or if they differ in shape.

    So it shows at once if somebody made of a network what a stack does not know.
    """
    shapes = [
        (shape_of(model), *(each.shape for each in given if each is not None))
        for model, given in zip(models, inputs, strict=True)
    ]
    if len(set(shapes)) != 1 or shapes[0][0] is None:
        return None
    stack = UViTStack(models)
    alone = torch.stack([Denoiser(model)(*given) for model, given in zip(models, inputs, strict=True)])
    same = torch.allclose(stack(*_joined(inputs)), alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max()))
    return stack if same else None


def _joined(inputs: Sequence[Inputs]) -> list[Any]:
    return [None if same[0] is None else torch.stack(same) for same in zip(*inputs, strict=True)]  # type: ignore[arg-type]


def stack_size(shape: tuple[Any, ...]) -> int:
    """How many networks of this shape go at once: by their size alone, so that results repeat anywhere."""
    return STACK if shape[1] < LARGE else 1


def train_together(
    stack: UViTStack,
    models: Sequence[nn.Module],
    plans: Sequence[SkipPlan | None],
    seeds: Sequence[int],
    prepare: Callable[[int, int], Prepared],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    warming: Sequence[float],
    clip: float | None,
    over: Sequence[Callable[[int, float], bool]],
) -> tuple[list[Readings], list[float]]:
    """Train the networks of a stack, in place. Of each: the sizes of its blocks and skips, and its processor time.

    prepare: (i, seed) -> the step; runs of one seed share it. warming: the share of the rate at each step.
    over: for each run, (i, loss) -> whether it ends before this step changes its weights.
    """
    alive = list(range(len(models)))
    optimizer = make_optimizer(list(stack.parameters.values()))
    rate = optimizer.param_groups[0]["lr"]
    watched = [_watched(model, plan) for model, plan in zip(models, plans, strict=True)]
    readings: list[Readings] = [[] for _ in models]
    seconds = [0.0] * len(models)
    for i, share in enumerate(warming):
        began, present = time.process_time(), alive
        optimizer.param_groups[0]["lr"] = rate * share
        prepared = {seed: prepare(i, seed) for seed in dict.fromkeys(seeds[run] for run in alive)}
        inputs, losses_of = zip(*(prepared[seeds[run]] for run in alive), strict=True)
        features: dict[str, Tensor] | None = {} if i % WATCH_EVERY == 0 else None
        outputs = stack(*_joined(inputs), features)
        losses = torch.stack([loss(output) for loss, output in zip(losses_of, outputs, strict=True)])
        if features is not None:
            for run, sizes in zip(alive, _sizes(features), strict=True):
                readings[run].append((i + 1, {name: sizes[block] for name, block in watched[run].items()}))
        ended = [over[run](i, loss) for run, loss in zip(alive, losses.detach().tolist(), strict=True)]
        going = [place for place, end in enumerate(ended) if not end]
        if going:
            optimizer.zero_grad()
            losses[going].sum().backward()
        if any(ended):
            for place, run in enumerate(alive):
                if ended[place]:
                    stack.copy_to(place, models[run])
            alive = [alive[place] for place in going]
            if alive:
                _leave_out(stack, optimizer, going)
        if alive:
            if clip is not None:
                clip_each_(list(stack.parameters.values()), clip)
            optimizer.step()
        spent = (time.process_time() - began) / len(present)
        for run in present:
            seconds[run] += spent
        if not alive:
            break
    for place, run in enumerate(alive):
        stack.copy_to(place, models[run])
    return readings, seconds


def _leave_out(stack: UViTStack, optimizer: torch.optim.Optimizer, going: list[int]) -> None:
    """Only these go on, with the optimiser's memory of them."""
    renewed = stack.keep(going)
    for group in optimizer.param_groups:
        group["params"] = [renewed[parameter] for parameter in group["params"]]
    for old, new in renewed.items():
        state = optimizer.state.pop(old, {})
        optimizer.state[new] = {
            name: value[going] if isinstance(value, Tensor) and value.shape == old.shape else value
            for name, value in state.items()
        }


@torch.no_grad()
def clip_each_(parameters: Sequence[nn.Parameter], largest: float) -> None:
    """`clip_grad_norm_` for each network of a stack."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(each.reshape(len(each), -1), dim=1) for each in gradients])
    factors = (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))


def _sizes(features: dict[str, Tensor]) -> list[dict[str, float]]:
    """Of each network: the RMS of what comes out of its blocks."""
    rms = [torch.linalg.vector_norm(x, dim=(1, 2)) / x[0].numel() ** 0.5 for x in features.values()]
    return [dict(zip(features, values, strict=True)) for values in torch.stack(rms, dim=1).tolist()]


def _watched(model: nn.Module, plan: SkipPlan | None) -> dict[str, str]:
    """The blocks that hooks on blocks and skips would read, by the names of their readings."""
    if plan is None:
        return {}
    blocks = {f"block {name}": name for name in block_names(model, plan)}
    return blocks | {f"skip {skip.index}": skip.producer for skip in plan}
