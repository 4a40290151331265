"""A stack of U-ViTs against each of them alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.models.stack import UViTStack, shape_of

torch.set_num_threads(1)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True, "merge_norm": True, "classes": 5, "time_mlp": True, "qkv_bias": True},
    {"residual_scaling": "rezero", "context_dim": 5, "context_length": 3, "final_conv": False},
    {"residual_scaling": 0.3, "mlp_ratio": 2.0, "image_size": (8, 16), "channels": 2},
]


def networks(dtype: torch.dtype = torch.float32, **options: Any) -> list[sl.UViT]:
    """Three that differ in scaling, start and seed."""
    found = []
    starts: list[tuple[str, Any]] = [("none", 0.05), ("cs:0.7", 0.05), ("mp", "unit")]
    for seed, (scaling, std) in enumerate(starts):
        torch.manual_seed(seed)
        given = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 16, "depth": 4, "heads": 2, **options}
        found.append(sl.UViT(**given, scaling=scaling, init_std=std).to(dtype).train())
    return found


def batches(models: list[sl.UViT], steps: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(x, t, condition) for three networks."""
    model, source = models[0], torch.Generator().manual_seed(0)
    kind = model.norm.weight.dtype
    found = []
    for _ in range(steps):
        x = torch.randn(3, 4, model.channels, *model.image_size, generator=source, dtype=kind)
        condition = torch.randint(5, (3, 4), generator=source) if model.classes else None
        if model.context_dim:
            condition = torch.randn(3, 4, 3, 5, generator=source, dtype=kind)
        found.append((x, 999 * torch.rand(3, 4, generator=source), condition))
    return found


def call(model: nn.Module, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
    return sl.models.Denoiser(model)(x, t, condition)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_stack_trains_as_each_network_does_alone(options):
    stacked, alone = networks(torch.float64, **options), networks(torch.float64, **options)
    stack = UViTStack(stacked)
    together, own = adamw(stack.parameters.values()), [adamw(model.parameters()) for model in alone]
    for x, t, condition in batches(alone, 25):
        losses = (stack(x, t, condition) - x).square().flatten(1).mean(1)
        together.zero_grad()
        losses.sum().backward()
        together.step()
        for place, (model, optimizer) in enumerate(zip(alone, own, strict=True)):
            given = None if condition is None else condition[place]
            loss = (call(model, x[place], t[place], given) - x[place]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert math.isclose(float(loss.detach()), float(losses[place].detach()), rel_tol=1e-11)
    for place, model in enumerate(stacked):
        stack.copy_to(place, model)
        for mine, theirs in zip(model.parameters(), alone[place].parameters(), strict=True):
            # Where a gradient is nothing but rounding (biases of keys), Adam makes steps of it.
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-8)


def test_numbers_that_are_not_finite_stay_in_their_network():
    models = networks()
    (x, t, _), *_ = batches(models, 1)
    with torch.no_grad():
        models[1].get_parameter("middle.mlp.reduce.weight").fill_(math.nan)
    stack = UViTStack(models)
    losses = (stack(x, t) - x).square().flatten(1).mean(1)
    losses.sum().backward()
    assert losses.isfinite().tolist() == [True, False, True]
    for name, parameter in stack.parameters.items():
        assert parameter.grad is not None
        assert parameter.grad[[0, 2]].isfinite().all(), name
    # Without it, the others are what they were.
    before = {name: value.grad[2].clone() for name, value in stack.parameters.items() if value.grad is not None}
    stack.keep([0, 2])
    assert len(stack) == 2
    torch.testing.assert_close((stack(x[[0, 2]], t[[0, 2]]) - x[[0, 2]]).square().flatten(1).mean(1), losses[[0, 2]])
    for name, parameter in stack.parameters.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad[1], before[name])


class Other(sl.UViT):
    pass


def test_what_is_no_plain_uvit_has_no_shape():
    plain, scaled, unit = networks()
    assert shape_of(plain) == shape_of(scaled) == shape_of(unit) is not None
    assert shape_of(networks(dim=32)[0]) not in (None, shape_of(plain))
    assert shape_of(networks(torch.float64)[0]) not in (None, shape_of(plain))
    size: dict[str, Any] = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 4, "heads": 2}
    (hooked, frozen, round_edges), (tied, *_) = networks(), networks()
    tied.decoder[0] = tied.decoder[1]
    assert isinstance(round_edges.final_conv, nn.Conv2d)
    round_edges.final_conv.padding_mode = "circular"
    hooked.middle.register_forward_hook(lambda *_: None)
    frozen.norm.weight.requires_grad_(False)
    others = [
        hooked,
        frozen,
        round_edges,
        tied,
        Other(**size),
        sl.UViT(**size, scaling="ls"),
        sl.UViT(**size, self_conditioning="middle"),
        sl.UViT(**size, checkpointing=True),
        nn.Linear(2, 2),
    ]
    assert [shape_of(model) for model in others] == [None] * len(others)
    with pytest.raises(ValueError, match="same shape"):
        UViTStack([plain, networks(dim=32)[0]])
