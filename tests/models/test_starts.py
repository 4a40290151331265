"""How a U-ViT starts, against closed forms."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import scalelong as sl
from scalelong.models.arguments import GELU_MOMENT
from scalelong.scaling import start_merge_


def uvit(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(
        **{"image_size": 8, "patch_size": 2, "channels": 3, "dim": 32, "depth": 6, "heads": 4, **changes}  # pyright: ignore[reportArgumentType]
    )


def merged(model: sl.UViT, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Main path, skip and result of merge i, of a call as the model makes it."""
    main, skip = torch.randn(2, 17, 32), torch.randn(2, 17, 32)
    merge = model.get_submodule(f"decoder.{3 - index}.merge")
    return main, skip, merge(main, *model.skip_scaling.prepare(skip, index))


@pytest.mark.parametrize("method", ["none", "cs:0.7", "uniform", "ls", "custom:1,0.5,0"])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_an_additive_start_is_equation_3(method, index):
    model = uvit(scaling=method, merge_start="additive")
    main, skip, result = merged(model, index)
    kappa = model.skip_scaling.coefficient(index)
    torch.testing.assert_close(result, main + kappa * skip)


@pytest.mark.parametrize("kappa", [0.3, 0.7, 1.0])
def test_a_normalised_start_keeps_the_size(kappa):
    model = uvit(scaling=f"cs:{kappa}", merge_start="normalised")
    main, skip, result = merged(model, 3)
    torch.testing.assert_close(result, (main + kappa**2 * skip) / math.sqrt(1 + kappa**4))
    assert float(result.detach().std()) == pytest.approx(1.0, abs=0.12)


def test_identity_keeps_the_random_skip_part_and_all_starts_share_the_rest():
    plain, states = uvit().state_dict(), {}
    for start in ("authors", "identity", "additive", "normalised"):
        states[start] = uvit(merge_start=start).state_dict()
        for name, value in plain.items():
            if not name.endswith("merge.weight"):
                assert torch.equal(states[start][name], value), (start, name)
    for i in range(3):
        name = f"decoder.{i}.merge.weight"
        assert torch.equal(states["authors"][name], plain[name])
        assert torch.equal(states["identity"][name][:, :32], torch.eye(32))
        assert torch.equal(states["identity"][name][:, 32:], plain[name][:, 32:])
        assert torch.equal(states["additive"][name], torch.eye(32).repeat(1, 2))


def test_an_additive_convolution_adds():
    layer = nn.Conv2d(8, 4, 3, padding=1, bias=False)
    with torch.no_grad():
        start_merge_(layer.weight[:, :4], layer.weight[:, 4:], "additive")
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(layer(x), x[:, :4] + x[:, 4:])


def test_the_moment_of_gelu():
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    assert float(torch.trapezoid(nn.functional.gelu(z).square() * density, z)) == pytest.approx(GELU_MOMENT, abs=1e-5)


@pytest.mark.parametrize("depth", [4, 12])
def test_unit_gain_keeps_the_size_of_features(depth):
    model = uvit(dim=256, depth=depth, image_size=16, init_std="unit")
    sizes: dict[str, float] = {}
    names = [f"encoder.{i}" for i in range(depth // 2)] + ["middle"] + [f"decoder.{i}" for i in range(depth // 2)]
    for name in [*names, *(f"{name}.mlp" for name in names)]:
        module = model.get_submodule(name)

        def note(_: Any, __: Any, out: Any, name: str = name) -> None:
            sizes[name] = float(out.square().mean())

        module.register_forward_hook(note)
    with torch.no_grad():
        output = model(torch.randn(8, 3, 16, 16), torch.linspace(0, 999, 8))
    blocks, branches = [sizes[name] for name in names], [sizes[f"{name}.mlp"] for name in names]
    assert 0.5 < min(blocks) <= max(blocks) < 3
    # Branches of gain 1, divided by the root of their number; deviations of 256 channels.
    assert branches == pytest.approx([1 / (2 * len(blocks))] * len(blocks), rel=0.2)
    assert float(output.square().mean()) == pytest.approx(1.0, rel=0.3)


def test_the_last_convolution_starts_as_the_identity_unless_the_authors_start_is_wanted():
    x = torch.randn(2, 3, 8, 8)
    for options in ({}, {"final_start": "identity"}, {"init_std": 0.02}):
        model = uvit(**options)
        torch.testing.assert_close(model.final_conv(x), x)
    for options in ({}, {"init_std": 0.02}):
        assert not torch.allclose(uvit(**options, final_start="authors").final_conv(x), x)
    assert isinstance(uvit(final_conv=False).final_conv, nn.Identity)


def test_presets_start_as_the_authors():
    small = {"dim": 32, "depth": 2, "heads": 4}
    model = sl.UViT.preset("cifar10-s2", **small)
    kernel, expand = model.final_conv.weight, model.get_submodule("middle.mlp.expand").weight
    assert isinstance(kernel, torch.Tensor)
    assert isinstance(expand, torch.Tensor)
    assert float(kernel.detach()[0, 1].abs().max()) > 0
    assert float(expand.detach().std()) == pytest.approx(0.02, rel=0.05)
