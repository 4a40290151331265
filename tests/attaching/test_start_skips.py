"""The scaling as a start: in the weights, exact, and gone."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import scalelong as sl
from families import FAMILIES, call, case
from zoo import NormedMerges, RMSNorm

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 6, "heads": 4, **changes})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], before[name]) for name in before)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("method", ["cs", "cs:0.5", "uniform", "mp:0.3", "custom:1,0.5,0"])
def test_uvit_computes_what_scaling_computes_and_keeps_nothing(method):
    batch = torch.randn(2, 3, 8, 8), torch.tensor([10.0, 800.0])
    model = tiny()
    report = sl.start_skips_(model, method)
    with torch.no_grad():
        torch.testing.assert_close(model(*batch), sl.scale_skips_(tiny(), method)(*batch))
    assert not sl.is_scaled(model)
    assert hooks(model) == 0
    assert list(model.state_dict()) == list(tiny().state_dict())
    factors = [sl.scaling_of(sl.scale_skips_(tiny(), method)).constants(i) for i in (1, 2, 3)]
    assert list(report.factors.values()) == [found.skip for found in factors if found is not None]
    # The outermost skip is merged in the last block.
    changed = {
        name.partition(".merge")[0] for name, value in weights(tiny()).items() if not same_as(model, name, value)
    }
    assert changed == {layer for layers in report.layers.values() for layer in layers}


def same_as(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    return torch.equal(model.state_dict()[name], value)


def test_the_report_says_what_is_where():
    text = str(sl.start_skips_(tiny(), "cs:0.5"))
    assert [line.split() for line in text.splitlines()[3:]] == [
        ["1", "1", "-"],
        ["2", "0.5", "decoder.1"],
        ["3", "0.25", "decoder.0"],
    ]


REFUSED = {
    *("additive", "HDiT", "hourglass", "nested function"),
    *("cat then function", "free function", "helper method", "functional", "one concat"),
    *("mixed", "shared decoder", "MONAI SegResNet", "additive tokens"),
}
"""Skips that are added and read by others, too; an activation before the layer; a layer that reads several merges."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_started_exactly_or_refused_and_left_alone(name):
    """After norms, if the merges have any: what is attached there is verified, and must be the same."""
    c = case(name)
    model, before = copy.deepcopy(c.model), weights(c.model)
    count = hooks(model)
    if name in REFUSED:
        with pytest.raises(sl.UnfoldableSkipsError, match="scale_skips_") as raised:
            sl.start_skips_(model, "cs", plan=c.plan)
        assert set(raised.value.reasons) <= set(range(1, len(c.plan) + 1))
        assert same(model, before)
        return
    report = sl.start_skips_(model, "cs", plan=c.plan)
    scaled = c.scaled("cs:behind_norms=true")
    with torch.no_grad():
        expected, found = call(scaled, c.inputs), call(model, c.inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.abs().max())))
    assert list(report.factors.values()) == pytest.approx([0.7**i for i in range(len(c.plan))])
    assert set(report.norms) == {skip.index for skip in c.plan if skip.readers.norm and skip.index > 1}
    assert list(model.state_dict()) == list(before)
    assert not sl.is_scaled(model)
    assert hooks(model) == count
    assert all(type(a) is type(b) for a, b in zip(model.modules(), c.model.modules(), strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RMSNorm, partial(nn.GroupNorm, 4)])
def test_after_a_norm_the_half_that_reads_the_skip_is_multiplied(norm):
    torch.manual_seed(0)
    axis = 1 if isinstance(norm, partial) else -1
    model, x = NormedMerges(norm, axis).double(), torch.randn(2, *((8, 5) if axis == 1 else (5, 8))).double()
    started = copy.deepcopy(model)
    report = sl.start_skips_(started, "cs:0.5", (x,))
    assert [report.norms[i].rpartition(" in ")[2] for i in (2, 3)] == ["norms.1", "norms.0"]
    torch.testing.assert_close(started(x), model(x, kappas=(0.25, 0.5, 1.0)))


@pytest.mark.parametrize("method", ["ls", "norm"])
def test_coefficients_that_are_no_constants_are_refused(method):
    model = tiny()
    before = weights(model)
    with pytest.raises(sl.UnfoldableSkipsError, match=r'needs constants, such as "cs"'):
        sl.start_skips_(model, method)
    assert same(model, before)


def test_a_scaled_model_is_refused():
    for model in (tiny(scaling="cs"), sl.scale_skips_(tiny(), "ls")):
        with pytest.raises(sl.AlreadyScaledError, match="fold_"):
            sl.start_skips_(model)


class Plain(nn.Module):
    """Two long skips, read by linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.middle = nn.Linear(6, 6)
        self.up = nn.ModuleList(nn.Linear(12, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        x = self.middle(x).relu()
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1)).relu()
        return x


def test_skips_can_be_left_out_and_another_models_plan_is_refused():
    x = torch.randn(2, 5, 6)
    plan = sl.find_skips(Plain(), (x,))
    model = Plain()
    before = weights(model)
    sl.start_skips_(model, "custom:0.5", plan=plan.select([2]))
    changed = [name for name, value in before.items() if not same_as(model, name, value)]
    assert changed == ["up.0.weight"]
    with pytest.raises(sl.UnfoldableSkipsError, match="not the layer that the plan names"):
        sl.start_skips_(nn.Sequential(nn.Linear(2, 2)), "cs", plan=plan)
    with pytest.raises(sl.InvalidConfigError, match="different model"):
        sl.start_skips_(tiny(), "cs", plan=sl.find_skips(tiny(depth=4)))
