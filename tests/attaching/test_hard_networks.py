"""Judges of the hard networks: each is scaled right, or refused by name and left as it was.

ok       count, order, output, gradients as in the network's own reference; undone bit for bit
refused  a named error of scalelong, and the model is left as it was
WRONG    no error, and wrong numbers
BROKEN   any other exception, or a model that is not restored
"""

import collections
import copy
import dataclasses
import functools
import math
import random
import warnings
from typing import Any

import pytest
import torch
from hard_networks import NETWORKS
from torch import nn

import scalelong as sl

KAPPA = 0.7


class WrongError(Exception):
    """Wrong numbers without an error."""


class BrokenError(Exception):
    """Not left, or not restored, as it was."""


# ------------------------------------------------------------------------------ runs and comparisons


def flat(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order, whatever they are packed in."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return flat([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return flat(list(value.values()))
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, list | tuple) else []


def run(model, inputs, seed=1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    random.seed(seed)
    return flat(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


def evaluate(model, inputs, seed=1) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        return [tensor.clone() for tensor in run(model, inputs, seed)]


def train(model, inputs, seed) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of a step in training mode."""
    model.train()
    model.zero_grad()
    outputs = run(model, inputs, seed)
    loss = torch.stack([output.square().mean() for output in outputs if output.requires_grad]).sum()
    loss.backward()
    model.eval()
    gradients = [p.grad.clone() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    return [output.detach() for output in outputs], gradients


def distance(found, wanted) -> float:
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in wanted]:
        return math.inf
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def require(found, wanted, what: str, tolerance: float = 1e-5) -> None:
    far = distance(found, wanted)
    if not far <= tolerance:
        raise WrongError(f"{what} differs by {far:.1e}")


def require_gradients(found, wanted) -> None:
    """Gradients that are zero but for rounding (a bias in front of a norm) are measured by the others."""
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    pairs = zip(found, wanted, strict=True) if len(found) == len(wanted) else [(math.inf, torch.zeros(()))]
    far = max(float((a - b).abs().max() / max(float(b.abs().max()), 1e-3 * largest)) for a, b in pairs)
    if not far <= 1e-4:
        raise WrongError(f"gradient differs by {far:.1e}")


def build(net) -> Any:
    torch.manual_seed(0)
    model = net().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, a=0.3)
    return model


def batch(net, seed: int) -> Any:
    torch.manual_seed(seed)
    return net.inputs()


def pair(net) -> tuple[Any, Any]:
    """The model, and its reference. Both see the same inputs in the same order, since some have a memory."""
    model, reference = build(net), build(net)
    net.prepare(model)
    net.prepare(reference)
    same = distance(evaluate(model, batch(net, 2)), evaluate(reference, batch(net, 2)))
    assert same == 0, "the network differs from itself"
    return model, reference


def curve(count: int) -> list[float]:
    return [KAPPA**i for i in range(count)]


def sizes(value: Any) -> Any:
    """How long the containers are that a module keeps, at any depth."""
    if isinstance(value, dict):
        return {key: sizes(item) for key, item in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return [len(value), *map(sizes, value)]
    return type(value).__name__


def fingerprint(model: nn.Module) -> list[Any]:
    """Classes, attributes, hooks and containers of all modules."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            [len(getattr(module, kind)) for kind in hooks],
            [(key, sizes(v)) for key, v in vars(module).items() if isinstance(v, list | dict | collections.deque)],
        )
        for name, module in model.named_modules()
    ]


def require_restored(net, model, reference) -> None:
    reference.k.ks = reference.k.ms = None
    if fingerprint(model) != fingerprint(reference):
        raise BrokenError("classes, attributes, hooks or containers are not as they were")
    weights = zip(model.state_dict().items(), reference.state_dict().items(), strict=True)
    if not all(a == b and torch.equal(v, w) for (a, v), (b, w) in weights):
        raise BrokenError("the state dict is not as it was")
    if distance(evaluate(model, batch(net, 9)), evaluate(reference, batch(net, 9))) != 0:
        raise BrokenError("the output is not as it was")


def scale(net, model, method: Any) -> None:
    """Scale the model. If that is refused, nothing of it may be left."""
    sl.scale_skips_(model, method, batch(net, 3))


# ------------------------------------------------------------------------------ judges


def by_constants(net) -> str:
    """CS against the reference: evaluation, training, other ways to call it, later changes, and undone."""
    model, reference = pair(net)
    before = evaluate(reference, batch(net, 2))
    evaluate(model, batch(net, 2))
    keys, ks = list(model.state_dict()), curve(net.N)
    recorded = [*keys, "scalelong_scaling"]
    try:
        counts = {len(sl.find_skips(model, batch(net, 3))) for _ in range(net.times)}
        scale(net, model, sl.ConstantScaling(kappa=KAPPA))
        reference.k.ks = ks
        wanted = evaluate(reference, batch(net, 2))
        assert distance(before, wanted) > 1e-3, "the skips do not matter"
        far = distance(evaluate(model, batch(net, 2)), wanted)
        if counts != {net.N}:
            raise WrongError(f"found {' or '.join(map(str, sorted(counts)))} of {net.N}, output differs by {far:.1e}")
        require(evaluate(model, batch(net, 2), 3), evaluate(reference, batch(net, 2), 3), "output")
        net.change(model)
        net.change(reference)
        require(evaluate(model, batch(net, 2)), evaluate(reference, batch(net, 2)), "output after the change")
        for seed in range(4, 7):
            right, slopes = train(reference, batch(net, seed), seed)
            output, gradients = train(model, batch(net, seed), seed)
            require(output, right, "output in training")
            require_gradients(gradients, slopes)
        torch.manual_seed(3)
        for inputs in net.others():
            require(evaluate(model, inputs), evaluate(reference, inputs), "output on another path")
        with sl.without_records():
            plain = list(model.state_dict())
        if (plain != keys or list(model.state_dict()) != recorded) and net.kind != "after":
            raise BrokenError("the keys of the state dict changed")
        sl.unscale_(model)
    except sl.ScaleLongError:
        if sl.is_scaled(model):
            require_planned_path(net, model, reference)
            sl.unscale_(model)
        require_restored(net, model, reference)
        raise
    require_restored(net, model, reference)
    return f"{net.N} skips, effect {distance(before, wanted):.0e}"


def require_planned_path(net, model, reference) -> None:
    """A forward that was refused must not spoil the next one."""
    model.eval()
    try:
        again = evaluate(model, batch(net, 2))
    except sl.ScaleLongError:
        return
    require(again, evaluate(reference, batch(net, 2)), "output after a refused forward")


def by_none(net) -> str:
    """No long skip: NoLongSkipsError each time."""
    model, reference = pair(net)
    found: collections.Counter[str] = collections.Counter()
    for _ in range(net.times):
        try:
            found[f"{len(sl.find_skips(model, batch(net, 3)))} skips"] += 1
        except sl.NoLongSkipsError:
            found["none"] += 1
        except sl.AmbiguousSkipsError:
            found["ambiguous"] += 1
    if net.doubtful and set(found) == {"ambiguous"}:
        require_restored(net, model, reference)
        return "ambiguous each time"
    if set(found) != {"none"}:
        raise WrongError("found " + ", ".join(f"{what} in {count} runs" for what, count in found.items()))
    with pytest.raises(sl.NoLongSkipsError):
        scale(net, model, "cs")
    require_restored(net, model, reference)
    return "none found"


def by_reference(net, method: str, coefficients) -> tuple[Any, Any]:
    """A method, against a reference whose coefficients come from `coefficients(model)`. Then undone."""
    model, reference = pair(net)
    try:
        scale(net, model, method)
        coefficients(model, reference)
        require(evaluate(model, batch(net, 2)), evaluate(reference, batch(net, 2)), "output")
        (output, gradients), (right, slopes) = (train(m, batch(net, 4), 4) for m in (model, reference))
        require(output, right, "output in training")
        hosts = {name for name, p in reference.named_parameters() if p.grad is not None}
        named = [name for name, p in sorted(model.named_parameters()) if p.grad is not None]
        require_gradients([g for name, g in zip(named, gradients, strict=True) if name in hosts], slopes)
        sl.unscale_(model)
    except sl.ScaleLongError:
        if sl.is_scaled(model):
            sl.unscale_(model)
        require_restored(net, model, reference)
        raise
    require_restored(net, model, reference)
    return model, reference


def by_norm(net) -> str:
    """norm: zero mean and unit variance over the channels, at each position, of what enters the merge."""

    def normalised(skip):
        centred = skip - skip.mean(net.axis, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(net.axis, keepdim=True) + 1e-6)

    def norms(model, reference):
        reference.k.ks = [normalised] * net.N

    by_reference(net, "norm", norms)
    return f"{net.N} norms"


def shaken(model) -> None:
    """Gates that look at the data, where at first they are constant."""
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in sl.scaling_of(model).parameters():
            parameter.add_(torch.randn_like(parameter))


def by_gates(net) -> str:
    """LS: on the curve at first; then each sample by itself, and the gate of what enters the merge."""

    def gates(model, reference):
        reference.k.ks = [min(kappa, 0.999) for kappa in curve(net.N)]
        require(evaluate(model, batch(net, 2)), evaluate(reference, batch(net, 2)), "output at the start")
        shaken(model)
        output = evaluate(model, batch(net, 2))
        alone = evaluate(model, tuple(tensor[:1] for tensor in batch(net, 2)))
        require(alone, [tensor[:1] for tensor in output], "the output for one sample without the rest of its batch")
        reference.k.ks = sl.coefficients(model, *batch(net, 2), reduce=False)
        require(output, evaluate(reference, batch(net, 2)), "output with the reported coefficients")
        gate = copy.deepcopy(sl.scaling_of(model))
        reference.k.ks = [functools.partial(gate.scale, index=i) for i in range(1, net.N + 1)]

    by_reference(net, "ls:module=ie,shared=false", gates)
    return f"{net.N} gates"


def by_meta(net) -> str:
    """Planned and scaled on the meta device; then made real, and the plain weights are loaded."""
    with torch.device("meta"):
        model, example = net(), net.inputs()
    sl.scale_skips_(model, "ls", example)
    model.to_empty(device="cpu")
    reference = build(net)
    model.load_state_dict(reference.state_dict())
    reference.k.ks = [min(kappa, 0.999) for kappa in curve(net.N)]
    require(evaluate(model, batch(net, 2)), evaluate(reference, batch(net, 2)), "output of the loaded model", 1e-4)
    return f"{net.N} gates"


def by_folding(net) -> str:
    """CS, folded: the output stays. The inverse, where all is folded: the output is that of the plain model."""
    model, reference = pair(net)
    try:
        plain = evaluate(model, batch(net, 2))
        evaluate(reference, batch(net, 2))
        other = copy.deepcopy(model)
        scale(net, model, sl.ConstantScaling(kappa=KAPPA))
    except sl.ScaleLongError:
        require_restored(net, model, reference)
        raise
    reference.k.ks = curve(net.N)
    wanted = evaluate(reference, batch(net, 2))
    require(evaluate(model, batch(net, 2)), wanted, "output")
    report = sl.fold_(model)
    require(evaluate(model, batch(net, 2)), wanted, f"output after folding {list(report.folded)}")
    scale(net, other, sl.ConstantScaling(kappa=KAPPA))
    inverse = sl.fold_(other, inverse=True)
    if not inverse.kept:
        require(evaluate(other, batch(net, 2)), plain, "output after the inverse")
    sl.unscale_(other)
    require(evaluate(other, batch(net, 2)), plain, "output after the inverse was undone")
    return f"folded {list(report.folded)}"


JUDGES = {
    "constants": by_constants,
    "none": by_none,
    "norm": by_norm,
    "gates": by_gates,
    "meta": by_meta,
    "folding": by_folding,
}


def verdict(net) -> tuple[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "ok", JUDGES[net.judge](net)
        except WrongError as wrong:
            return "WRONG", str(wrong)
        except BrokenError as broken:
            return "BROKEN", str(broken)
        except sl.ScaleLongError as error:
            return "refused", f"{type(error).__name__}: {str(error).splitlines()[0]}"
        except Exception as error:
            return "BROKEN", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            net.undo(None)


@pytest.mark.parametrize("net", NETWORKS, ids=lambda net: net.__name__)
def test_right_or_refused(net):
    found, detail = verdict(net)
    allowed = ("ok",) if net.must or net.kind == "none" else ("ok", "refused")
    assert found in allowed, f"{found}: {detail}"
