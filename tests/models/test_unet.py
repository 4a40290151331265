"""The UNet presets on diffusers, and block-output scaling of their residual branches."""

import sys

import pytest
import torch

import scalelong as sl
from scalelong.models import UNET_PRESETS, unet
from scalelong.models.presets import scale_residuals_

SMALL = {"block_out_channels": (16, 32, 32, 32), "norm_num_groups": 8, "sample_size": 16, "dropout": 0.0}


@pytest.mark.parametrize(
    ("name", "published"), [(name, preset.published) for name, preset in UNET_PRESETS.items() if preset.published]
)
def test_sizes_are_near_the_published_ones(name, published):
    with torch.device("meta"):
        model = unet(name)
    assert type(model).__name__ == UNET_PRESETS[name].kind
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published * 1e6, rel=0.02)


def test_a_preset_with_changes_runs():
    model = unet("cifar10", **SMALL)
    x = torch.randn(2, 3, 16, 16)
    assert model(x, torch.tensor([3, 900])).sample.shape == x.shape


def test_without_diffusers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(sl.MissingDependencyError, match=r"pip install 'scalelong\[train\]'"):
        unet("cifar10")


def test_unknown_preset():
    with pytest.raises(sl.InvalidConfigError, match="cifar10, imagenet64, mscoco256"):
        unet("cifar100")


def test_residual_baselines():
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([3, 900])
    torch.manual_seed(0)
    plain = unet("cifar10", **SMALL)
    torch.manual_seed(0)
    same = unet("cifar10", residual_scaling=1.0, **SMALL)
    assert torch.equal(plain(x, t).sample, same(x, t).sample)
    torch.manual_seed(0)
    stable = unet("cifar10", residual_scaling=0.3, **SMALL)
    block, reference = stable.down_blocks[0].resnets[0], plain.down_blocks[0].resnets[0]  # pyright: ignore
    h, time = torch.randn(1, 16, 8, 8), torch.randn(1, 64)
    torch.testing.assert_close(block(h, time), h + 0.3 * (reference(h, time) - h))
    rezero = unet("cifar10", residual_scaling="rezero", **SMALL)
    rezero(x, t).sample.square().mean().backward()
    alphas = [p for name, p in rezero.named_parameters() if name.endswith("alpha")]
    assert alphas
    assert all(p.grad is not None for p in alphas)
    assert not any(p.detach().any() for p in alphas)
    with pytest.raises(sl.AlreadyScaledError):
        scale_residuals_(rezero, 0.5)
    with pytest.raises(sl.InvalidConfigError, match="ResnetBlock2D"):
        scale_residuals_(torch.nn.Linear(3, 3), 0.5)
