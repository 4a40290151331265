"""Start and rates of μP, and κ and branch factors as what they are to Adam: other starts, rates, decays and ε."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong import InvalidConfigError, UViT, fold_
from scalelong.errors import AlreadyScaledError
from scalelong.models.uvit import SkipMerge
from scalelong.mup import parameter_groups, start_


def uvit(width: int, seed: int = 0, **options: Any) -> UViT:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"image_size": 4, "patch_size": 2, "channels": 1, "depth": 4, "heads": width // 8}
    return UViT(**{**sizes, "dim": width, **options})


X, T = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.linspace(0, 999, 4)
Y = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(2))
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.03}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None) -> list[Tensor]:
    kind = next(model.parameters()).dtype
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X.to(kind), T.to(kind)) - Y.to(kind)).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(loss.detach())
    return [*found, model(X.to(kind), T.to(kind)).detach()]


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference of losses and outputs, relative."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(first, second, strict=True))


# Groups


def test_groups_of_a_wide_network():
    model = uvit(32)
    model.patch_embedding.requires_grad_(False)
    plain, scaled = parameter_groups(model, base=16, lr=8e-3, weight_decay=0.03)
    assert (plain["lr"], plain["weight_decay"]) == (8e-3, 0.03)
    assert "lr_scale" not in plain
    assert (scaled["lr"], scaled["weight_decay"], scaled["lr_scale"]) == (4e-3, 0.06, 0.5)
    listed = [id(parameter) for group in (plain, scaled) for parameter in group["params"]]
    assert sorted(listed) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert any(parameter is model.to_patches.weight for parameter in scaled["params"])
    assert any(parameter is model.position_embedding.weight for parameter in plain["params"])
    optimizer = torch.optim.AdamW([plain, scaled])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [4e-3, 2e-3]


def test_at_the_base_a_run_is_the_standard_one_to_the_last_bit():
    standard, model = uvit(16), uvit(16)
    start_(model, base=16)
    (group,) = groups = parameter_groups(model, base=16, lr=1e-2, weight_decay=0.03)
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model.parameters()]
    first = train(standard, torch.optim.AdamW(standard.parameters(), **ADAMW), 5)
    second = train(model, torch.optim.AdamW(groups, **ADAMW), 5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(standard.parameters(), model.parameters(), strict=True))


# The start


@pytest.mark.parametrize(
    ("start", "factor"), [("strict", 0.5), ("unit", 1.0), ("zero", 0.0), (0.5, 0.25), ("0.5", 0.25)]
)
def test_starts_of_the_output(start, factor):
    before, model = uvit(64), uvit(64)
    report = start_(model, base=16, output_start=start)
    for name, weight in model.named_parameters():
        expected = before.get_parameter(name) * (factor if name == "to_patches.weight" else 1.0)
        assert torch.equal(weight, expected), name
    assert report.factors == ({} if factor == 1 else {"to_patches.weight": factor})
    assert str(start) in str(report)
    with pytest.raises(AlreadyScaledError, match="started for μP before"):
        start_(model, base=16)


def test_at_the_base_an_output_multiplier_still_acts():
    model = uvit(16)
    assert start_(model, base=16, output_start=0.5).factors == {"to_patches.weight": 0.5}
    with pytest.raises(InvalidConfigError, match="none is known"):
        start_(uvit(16), base=uvit(16), output_start="zero")
    with pytest.raises(InvalidConfigError, match="`output_start` must be one of strict, unit, zero or a number"):
        start_(uvit(32), base=16, output_start=-1)


def test_a_constant_deviation_becomes_that_of_the_base():
    """With a number for all widths, as presets have it, hidden layers are divided by √m as well."""
    before, model = uvit(64, init_std=0.02), uvit(64, init_std=0.02)
    report = start_(model, base=16)
    assert report.init == "constant"
    assert torch.equal(model.encoder[0].mlp.expand.weight, before.encoder[0].mlp.expand.weight / 2)  # pyright: ignore
    assert torch.equal(model.to_patches.weight, before.to_patches.weight / 4)
    assert torch.equal(model.patch_embedding.weight, before.patch_embedding.weight)


def test_an_identity_stays_an_identity():
    model = uvit(64, init_std=0.02, merge_start="additive")
    before = model.decoder[0].merge.weight.clone()  # pyright: ignore
    start_(model, base=16)
    assert torch.equal(model.decoder[0].merge.weight, before)  # pyright: ignore


def mlp(width: int, deviation: float | str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2))
    for layer in model if deviation else ():
        assert isinstance(layer, nn.Linear)
        std = layer.in_features**-0.5 if isinstance(deviation, str) else deviation
        nn.init.normal_(layer.weight, std=std or 0.0)
    return model


def test_how_weights_are_drawn_is_seen_from_them():
    shapes = lambda: mlp(64)  # noqa: E731, on the meta device: without values
    assert start_(mlp(256), base=shapes).init == "fan-in"  # torch's own
    assert start_(mlp(256, "fan-in"), base=mlp(64, "fan-in")).init == "fan-in"
    assert start_(mlp(256, 0.02), base=mlp(64, 0.02)).init == "constant"
    with pytest.raises(InvalidConfigError, match="is not clear from them: pass init='fan-in'"):
        start_(mlp(256, 0.02), base=shapes)
    assert start_(mlp(256, 0.02), base=shapes, init="constant").factors["3.weight"] == 0.25


# κ in the forward pass is another start, rate, decay and ε of the skip half (docs/theory.md)


class SplitMerge(SkipMerge):
    """Main and skip half are parameters of their own, so that they can be in different groups."""

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.cat([self.main, self.skip], dim=1)  # pyright: ignore


def split(model: UViT) -> UViT:
    for block in model.decoder:
        merge: Any = block.merge
        main, skip = merge.weight.detach().split(merge.dim, dim=1)
        del merge.weight
        merge.__class__ = SplitMerge
        merge.main, merge.skip = nn.Parameter(main.clone()), nn.Parameter(skip.clone())
    return model


def scaled_groups(model: nn.Module, factor: Callable[[str], float], scaled: tuple[str, ...]) -> list[dict[str, Any]]:
    """Start × a, rate × a, decay / a, ε / a: of those, what `scaled` names, with a by parameter."""
    groups = []
    for name, parameter in model.named_parameters():
        a = factor(name)
        with torch.no_grad():
            parameter *= a if "start" in scaled else 1.0
        group: dict[str, Any] = {"params": [parameter]}
        group["lr"] = 1e-2 * (a if "rate" in scaled else 1.0)
        group["weight_decay"] = 0.03 / (a if "decay" in scaled else 1.0)
        group["eps"] = 1e-8 / (a if "eps" in scaled else 1.0)
        groups.append(group)
    return groups


ALL = ("start", "rate", "decay", "eps")


def runs_with_kappa(scaled: tuple[str, ...], clip: float | None = None) -> float:
    kappas = {f"decoder.{position}.merge.skip": 0.7 ** (1 - position) for position in range(2)}
    attached = split(uvit(16, scaling="cs:0.7").double())
    plain = split(uvit(16).double())
    first = train(attached, torch.optim.AdamW(attached.parameters(), **ADAMW), 30, clip)
    groups = scaled_groups(plain, lambda name: kappas.get(name, 1.0), scaled)
    return apart(first, train(plain, torch.optim.AdamW(groups, **ADAMW), 30, clip))


def test_cs_is_another_start_rate_decay_and_epsilon():
    assert runs_with_kappa(ALL) < 1e-14
    assert 1e-10 < runs_with_kappa(("start", "rate", "decay")) < 1e-5
    assert 1e-6 < runs_with_kappa(("start", "rate", "eps")) < 1e-2
    assert runs_with_kappa(ALL, clip=0.1) > 1e-4  # a global norm sees κ


def test_folding_before_training_is_another_run():
    attached, folded = uvit(16, scaling="cs:0.7").double(), uvit(16, scaling="cs:0.7").double()
    fold_(folded)
    first, second = (train(model, torch.optim.AdamW(model.parameters(), **ADAMW), 30) for model in (attached, folded))
    assert apart(first[:1], second[:1]) < 1e-14  # the function is the same, the rate of the skip half is not
    assert apart(first, second) > 1e-3
