"""Prove that a scaled model computes what it should.

The model runs twice on the same inputs with the same random numbers. In the first run its scaling is off, and a
dispatch mode counts the operations and changes the recorded operand of each recorded merge: the reference. It shares
nothing with hooks and rewritten functions. In the second run the edits themselves act. Both runs note what every layer
gets and gives (reruns.py).

    reference   unscaled model, cat(x, f_i · skip_i) by the mode
    found       scaled model, every edit multiplies by its f_i

Each edit has a factor of its own, so that one which does not act, or acts on something else, shows. Methods that look
at the data are then compared once more as they are, with the gate at the merge.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError, VerificationError
from ..finding import ExampleInputs, LongSkip, SkipPlan, candidates, example_call
from ..scaling import NoScaling, SkipScaling
from ..tracing import Merge, Trace
from .actions import OFF, UNSEEN, Attached, Edit, Mode
from .attach import weights_reading
from .host import Host, require_scaled
from .reruns import WAY_OUT, Call, Place, Reruns, obstacle_to_reruns, rerunning

logger = logging.getLogger(__name__)


def verify(model: nn.Module, example_inputs: ExampleInputs = None) -> None:
    """Prove on these inputs that the scaled model computes what it should, in evaluation and in training mode.

    `scale_skips_` does so on its example inputs. Call it for inputs of another size or kind, or after the model was
    changed. A difference raises VerificationError. The model is left as it was, random states included.
    """
    host = require_scaled(model)
    if host.state is None:
        return  # the model scales its skips itself
    call = example_call(host.model, example_inputs)
    reason = obstacle_to_reruns(host.model, host.state.plan, call)
    if reason:
        raise UnsupportedModelError(f"this {type(host.model).__name__} cannot be verified: {reason}")
    verify_attached(host.model, host.state, call)


def verify_attached(host: nn.Module, state: Attached, call: Call) -> None:
    """Verify a scaling in evaluation and in training mode, where the model can run on these inputs."""
    if not state.edits or obstacle_to_reruns(host, state.plan, call):
        return
    call = _without_zeros(call)
    orders: dict[str, list[set[int]]] = {}  # which operand of each merge is the skip, as a forward shows it
    with rerunning(host, state) as runs:
        for training in (False, True):
            runs.train(training)
            trace = runs.trace(call)
            # Some models cannot be trained on such inputs, as BatchNorm cannot on one value per channel.
            if trace is not None:
                orders["in training" if training else ""] = _operands(trace, state.plan)
                _compare(runs, call, trace)
        if not orders:
            raise VerificationError(
                f"{type(host).__name__} does not run on these inputs, so its scaling cannot be verified "
                f"({type(runs.failure).__name__}: {runs.failure})"
            )
        runs.train(False)
        # A second path for small inputs may take the operands in a different order, which no count would notice.
        trace = runs.trace(_half_size(call))
        if trace is not None:
            orders["at half the size of these inputs"] = _operands(trace, state.plan)
    first, *others = orders.items()
    for when, order in others:
        for number, (one, other) in enumerate(zip(first[1], order, strict=True), start=1):
            if one and other and one != other:
                raise VerificationError(
                    f"the operands of long skip {number} change places {when}: which is the skip depends on the "
                    f"inputs. {WAY_OUT}"
                )


def _compare(runs: Reruns, call: Call, trace: Trace) -> None:
    """The scaled model against the reference, for one call in one mode."""
    state, edits = runs.state, runs.state.edits
    places = [_place(runs.host, trace, edit, state.plan.repeats) for edit in edits]
    factors = {slot: 0.4 + 0.5 * (0.618034 * (slot + 1) % 1) for slot in range(len(edits)) if places[slot].is_known}

    def difference(factors: dict[int, float]) -> float | None:
        wanted = runs.run(call, OFF, [(places[slot], lambda x, f=f: x * f) for slot, f in factors.items()])
        return runs.run_scaled(call, Mode(constants=factors)).difference(wanted)

    far = difference(factors)
    if far is not None:
        plain, again = runs.run(call, OFF), runs.run(call, OFF)
        if again.difference(plain) is not None:
            raise VerificationError(
                f"{type(runs.host).__name__} gives different results for the same inputs and random seed, so its "
                f"scaling cannot be verified. Nothing was changed. Make its randomness follow torch's seed, or pass "
                f"verify=False"
            )
        wrong = [edits[slot] for slot, f in factors.items() if difference({slot: f}) is not None]  # each by itself
        named = "; ".join(f"{e.label} as {e.attachment}, merged at {e.skip.merge.location}" for e in wrong[:4])
        raise VerificationError(
            f"{'in training mode, ' if runs.training else ''}scaling {named or 'the skips together'} does not change "
            f"its merge, or not that alone: the layers differ by {far:.1e}. {WAY_OUT}"
        )

    learned = [slot for slot, edit in enumerate(edits) if edit.factor is None]
    if not learned or any(places[slot].axis != edits[slot].attachment.axis for slot in learned):
        return
    with _random_gates(state.scaling):
        wanted = runs.run(call, OFF, [(at, lambda x, at=at: at.edit.scaled(x, state.scaling)) for at in places])
        far = runs.run_scaled(call, UNSEEN).difference(wanted)
    if far is not None:
        raise VerificationError(
            f"the scaled {type(runs.host).__name__} differs by {far:.1e} from one whose skips are scaled at their "
            f"merges: {type(state.scaling.config).__name__} looks at the data, and what lies between a merge and the "
            f"place where its skip is scaled changes them. {WAY_OUT}"
        )


@contextmanager
def _random_gates(scaling: SkipScaling) -> Iterator[None]:
    """Noise in the weights of the gates: new gates are flat, and one that reads the wrong data shows only so."""
    saved = [(parameter, parameter.detach().clone()) for parameter in scaling.parameters()]
    generator = torch.Generator().manual_seed(0)
    for parameter, _ in saved:
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        for parameter, before in saved:
            parameter.copy_(before)


# Where the merges of a plan are in the forward at hand.


def _place(host: nn.Module, trace: Trace, edit: Edit, repeats: int) -> Place:
    """Where the reference scales what an edit scales."""
    target, merge = edit.attachment, edit.skip.merge
    if edit.after_norm:
        layer = host.get_submodule(target.module)
        # An adapter, or a weight that is computed: what reads the skip is not one tensor.
        plain = isinstance(layer._parameters.get("weight"), Tensor)
        weights = weights_reading(layer, target.start, target.length) if plain else ()
        return Place(edit, axis=target.axis, weights=tuple(weights))
    merges = _merges(trace, edit.skip, repeats)
    if not merges:
        raise VerificationError(
            f"the merge of long skip {edit.skip.index} is number {merge.occurrence + 1} of those at {merge.location} "
            f"in the plan, and did not run there now"
        )
    whole = edit.operand == "merged"
    number = 0 if whole else merge.main_operand if edit.operand == "main" else merge.operand
    operations = tuple((found.name, found.ordinal, None if whole else found.positions[number]) for found in merges)
    axis = edit.skip.site.channel_axis if merges[0].axis is None else merges[0].axis
    return Place(edit, operations, axis % len(merges[0].shapes[number]))


def _merges(trace: Trace, skip: LongSkip, repeats: int) -> list[Merge]:
    """The merge of a skip, in each run of the network."""
    named = [merge for merge in trace.merges if merge.named is not None and merge.named[0] == skip.index]
    if named and skip.is_named:
        return named
    place = (skip.merge.location, skip.merge.module, skip.merge.kind)
    here = [merge for merge in trace.merges if (merge.site.text, merge.call.name, merge.kind) == place]
    per_run = len(here) // repeats
    numbers = [skip.merge.occurrence + run * per_run for run in range(repeats)]
    fits = len(here) % repeats == 0 and numbers[-1] < len(here)
    return [here[number] for number in numbers] if fits else []


def _operands(trace: Trace, plan: SkipPlan) -> list[set[int]]:
    """For each long skip: the operands of its merge that go around a path, as this forward shows it."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for candidate in candidates(trace):
        found[candidate.end].add(candidate.operand)
    unnamed = [skip for skip in plan if not skip.is_named]
    return [{n for merge in _merges(trace, skip, plan.repeats) for n in found[merge.node]} for skip in unnamed]


# Other inputs than those that were given.


def _half_size(call: Call) -> Call:
    def halved(tensor: Tensor) -> Tensor:
        return tensor[(..., *(slice(size // 2) for size in tensor.shape[2:]))] if tensor.dim() > 3 else tensor

    return pytree.tree_map_only(Tensor, halved, call)


def _without_zeros(call: Call) -> Call:
    """Zeros as example inputs leave networks without biases at zero: noise in their place."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        dead = tensor.is_floating_point() and tensor.dim() > 2 and not bool(tensor.any())
        return torch.randn(tensor.shape, generator=generator).to(tensor) if dead else tensor

    return pytree.tree_map_only(Tensor, filled, (tuple(call[0]), dict(call[1])))


# Which axis holds the batch: measured by changing one image.


def with_batch_axes(host: Host, plan: SkipPlan, call: Call) -> SkipPlan:
    """The plan, with the axis of each skip along which the images of a batch lie."""
    if obstacle_to_reruns(host.model, plan, call) or any(skip.places.skip is None for skip in plan):
        return plan
    sizes = [t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, Tensor) and t.dim() > 1]
    batch = max(sizes[0] if sizes else 1, 2)
    generator = torch.Generator().manual_seed(1)

    def as_batch(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if sizes[:1] in ([], [1]) and value.dim() and len(value) == 1 else value

    def with_another_image(value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dim() < 2 or len(value) != batch:
            return value
        other = value.clone()
        other[0] = torch.randn(value[0].shape, generator=generator).to(value)
        return other

    several = pytree.tree_map_only(Tensor, as_batch, (tuple(call[0]), dict(call[1])))
    seen: list[dict[int, Tensor]] = []
    with rerunning(host.model, Attached(plan, NoScaling().build(plan.sites))) as runs:
        trace = runs.trace(several)
        if trace is None or not all(_merges(trace, skip, plan.repeats) for skip in plan):
            # Not every model takes two images where it was shown one.
            logger.info("the axis of the batch is taken for the first, because two images do not run")
            return plan
        edits = [Edit(skip, skip.places.skip, None) for skip in plan if skip.places.skip is not None]
        places = [_place(host.model, trace, edit, plan.repeats) for edit in edits]
        for inputs in (several, pytree.tree_map_only(Tensor, with_another_image, several)):
            skips: dict[int, Tensor] = {}
            runs.run(inputs, OFF, [(place, _keep(skips, place.edit.skip.index)) for place in places])
            seen.append(skips)
    before, after = seen
    found = {i: _batch_axis(before[i], after[i], batch, plan[i].site.channel_axis) for i in before.keys() & after}
    return replace(
        plan,
        skips=tuple(
            skip.replace(site=replace(skip.site, batch_axis=found.get(skip.index, skip.site.batch_axis)))
            for skip in plan
        ),
    )


def _keep(skips: dict[int, Tensor], index: int) -> Any:
    def keep(tensor: Tensor) -> Tensor:
        skips[index] = tensor.detach().clone()
        return tensor

    return keep


def _batch_axis(before: Tensor, after: Tensor, batch: int, channel_axis: int) -> int | None:
    """The axis along which only the share of one image has changed."""
    changed = before != after
    for axis in range(before.dim()):
        if axis == channel_axis % before.dim() or before.shape[axis] % batch:
            continue
        touched = changed.movedim(axis, 0).reshape(before.shape[axis], -1).any(1)
        if int(touched.sum()) * batch == before.shape[axis]:
            return axis
    return None if bool(changed.any()) else 0
