"""One battery for every family and every method: what a scaled model must do, whoever wrote the model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import scalelong as sl
from families import FAMILIES, UVIT, WRITTEN, call, case, reference
from scalelong.attaching import plan_of, scaling_of
from scalelong.finding import SkipPlan

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")

HOOKED = [name for name in FAMILIES if name not in UVIT]
NORMED = "merge_norm:everywhere=true"
METHODS = ["uniform:0.6", "cs", "ls", "ls:module=ie,shared=false", "ls:module=scalar", "norm", "mp:0.3"]
METHODS += [NORMED, f"{NORMED},on=both,norm=rms,kappa=0.7,gain=true"]
# Verifying takes a few seconds for large families.
VERIFIED = ("UNet2DModel DDPM", "smp", "video", *WRITTEN)
EVERY_METHOD = ("UNet2DModel DDPM", "hand-written", "additive", "HDiT", "run twice", "video")
PAIRS = [(name, m) for name in HOOKED for m in (METHODS if name in EVERY_METHOD else METHODS[1:4:2])]
"""Every method on families that differ in how their skips are scaled; a constant and a gate on the others."""
PAIRS += [
    (name, f"{NORMED},on=concatenation,kappa=0.7{gain}")
    for gain in ("", ",gain=true")
    for name in ("UNet2DModel DDPM", "hand-written", "smp", "run twice", "U-ViT, authors'", "guided-diffusion")
]
# What differs between families in copies, sizes and gradients is how their skips are scaled, and by whom.
SOME = (*EVERY_METHOD, "UViT", "HunyuanDiT2DModel", "cat then function", "shared decoder")
SPREAD = [(name, method) for name in SOME for method in ("ls", "cs", NORMED)]
LEARNED = ("ls", "ls:module=ie,shared=false", "ls:module=scalar")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", FAMILIES)
def test_finds_the_long_skips_of_the_architecture(name):
    plan = case(name).plan
    assert len(plan) == FAMILIES[name].count
    assert [skip.index for skip in plan] == list(range(1, len(plan) + 1))
    assert SkipPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_equals_the_reference_and_can_be_undone(name, method):
    if name == "video" and method.startswith(("ls", "norm")):
        pytest.skip("its frames are in the batch where the skip is scaled: a gate for each frame")
    c = case(name)
    verified = method in ("cs", "ls:module=ie,shared=false") or method.startswith("merge_norm")
    model = c.scaled(method, verify=verified and name in VERIFIED)
    with torch.no_grad():
        output = call(model, c.inputs)
    close(output, reference(c, scaling_of(model)))
    # A single skip is the outermost one, which CS keeps.
    assert torch.equal(output, c.output) == (method == "cs" and len(c.plan) == 1)
    added = [key for key in model.state_dict() if key not in c.model.state_dict()]
    assert added[-1] == "scalelong_scaling"
    assert bool(added[:-1]) == (method in LEARNED or "gain" in method)
    assert all(key.startswith("skip_scaling.") for key in added[:-1])
    with pytest.warns(sl.UnscaledWeightsWarning, match="scalelong_scaling is missing"):
        model.load_state_dict(c.model.state_dict(), strict=True)
    model.load_state_dict(model.state_dict(), strict=True)
    sl.unscale_(model)
    with torch.no_grad():
        assert torch.equal(call(model, c.inputs), c.output)
    assert list(model.state_dict()) == list(c.model.state_dict())
    assert all(type(a) is type(b) for a, b in zip(model.modules(), c.model.modules(), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_kappa_one_is_bit_identical_and_zero_cuts_the_skips(name):
    c = case(name)
    one = c.scaled(sl.CustomScaling((1.0,) * len(c.plan)))
    with torch.no_grad():
        assert torch.equal(call(one, c.inputs), c.output)
    hooks, before = ([len(m._forward_pre_hooks) + len(m._forward_hooks) for m in x.modules()] for x in (one, c.model))
    assert hooks == before
    zero = c.scaled(sl.CustomScaling((0.0,) * len(c.plan)))
    if name in HOOKED:
        with torch.no_grad():
            close(call(zero, c.inputs), reference(c, scaling_of(zero)))
    assert sl.coefficients(zero) == [0.0] * len(c.plan)


@pytest.mark.parametrize("method", ["cs", "ls:activation=gelu", f"{NORMED},gain=true"])
@pytest.mark.parametrize("name", SOME)
def test_gradients_reach_host_and_gate(name, method):
    c = case(name)
    model = c.scaled(method)
    call(model, c.inputs).square().mean().backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    plain = copy.deepcopy(c.model)
    call(plain, c.inputs).square().mean().backward()
    assert {n for n, p in plain.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0} <= reached
    gate = {n for n, _ in model.named_parameters() if n.startswith("skip_scaling.")}
    assert bool(gate) == (method != "cs")
    assert gate <= reached


@pytest.mark.parametrize(("name", "method"), SPREAD)
def test_copies_and_pickles_keep_the_scaling_and_are_isolated(name, method):
    c = case(name)
    model = c.scaled(method)
    with torch.no_grad():
        expected = call(model, c.inputs)
        copies: list[nn.Module] = [copy.deepcopy(model), AveragedModel(model)]
        if c.family.picklable:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            copies += [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        for other in copies:
            assert torch.equal(call(other, c.inputs), expected)
            assert sl.is_scaled(other)
            assert scaling_of(other) is not scaling_of(model)
        for parameter in scaling_of(model).parameters():
            parameter.fill_(-20.0)
        for other in copies:
            assert torch.equal(call(other, c.inputs), expected)
            sl.unscale_(other)
            close(call(other, c.inputs), c.output)
        assert sl.is_scaled(model)


@pytest.mark.parametrize(("name", "method"), SPREAD)
def test_other_sizes_autocast_and_training_mode(name, method):
    c = case(name)
    model = c.scaled(method).train()
    factor = 2 if c.family.resizable else 1
    assert torch.isfinite(call(model, c.family.inputs(1, factor))).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(model, c.family.inputs(3, 1))
    assert torch.isfinite(output.float()).all()


@pytest.mark.parametrize("method", ["ls", f"{NORMED},gain=true"])
@pytest.mark.parametrize("name", SOME)
def test_save_and_load(name, method, tmp_path):
    c = case(name)
    model, other = c.scaled(method), copy.deepcopy(c.model)
    sl.save_scaling(model, tmp_path / "scaling.safetensors")
    sl.load_scaling_(other, tmp_path / "scaling.safetensors")
    with torch.no_grad():
        assert torch.equal(call(other, c.inputs), call(model, c.inputs))
    assert plan_of(other) == plan_of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_keeps_the_function(name):
    c = case(name)
    model = c.scaled("cs")
    with torch.no_grad():
        scaled = call(model, c.inputs)
        report = sl.fold_(model)
        folded = call(model, c.inputs)
    assert set(report.folded) | set(report.kept) == set(range(1, len(c.plan) + 1))
    close(folded, scaled)
    again = sl.fold_(model)
    assert again.kept == report.kept
    assert not again.folded
    with torch.no_grad():
        assert torch.equal(call(model, c.inputs), folded)
    if not report.kept:
        assert not sl.is_scaled(model)
        assert all(type(m).__module__ != "scalelong" for m in model.modules())


@pytest.mark.parametrize("name", SOME)
def test_scaling_a_trained_model_without_changing_it(name):
    c = case(name)
    model = c.scaled("cs")
    report = sl.fold_(model, inverse=True)
    assert sl.fold_(model, inverse=True).folded == ()
    with torch.no_grad():
        if not report.kept:
            close(call(model, c.inputs), c.output)
        sl.unscale_(model)
        close(call(model, c.inputs), c.output)


COMPILED = [
    "UNet2DModel DDPM",
    "smp",
    "hand-written",
    "cat then function",
    "additive",
    "HDiT",
    "run twice",
    "UViT",
]


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "ls") for name in COMPILED), *((COMPILED[0], method) for method in ("cs", NORMED))]
)
def test_compile_applies_the_scaling_also_to_a_host_that_ran_before(name, method):
    c = case(name)
    model = copy.deepcopy(c.model)
    compiled: nn.Module = torch.compile(model, backend="eager")  # pyright: ignore
    with torch.no_grad():
        close(call(compiled, c.inputs), c.output)
        sl.scale_skips_(compiled, method, plan=c.plan, verify=False)
        expected = call(c.scaled("cs"), c.inputs) if method == "cs" else call(model, c.inputs)
        close(call(compiled, c.inputs), expected)
        assert not torch.allclose(expected, c.output)
        sl.unscale_(compiled)
        close(call(compiled, c.inputs), c.output)


class Checkpointed(nn.Module):
    """Any module, recomputed in the backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args):
        return checkpoint(self.inner, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("name", ["hand-written", "additive", "cat then function", "nested function", "run twice"])
def test_activation_checkpointing_gives_the_same_gradients(name, method, reentrant):
    c = case(name)
    model = c.scaled(method)
    inputs = tuple(i.clone().requires_grad_(i.is_floating_point()) for i in c.inputs)
    call(model, inputs).square().mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    call(Checkpointed(model, reentrant), inputs).square().mean().backward()
    for n, p in model.named_parameters():
        if expected[n] is not None:
            torch.testing.assert_close(p.grad, expected[n])
