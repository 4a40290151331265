"""CS behind a normalisation that would divide a constant out again."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.errors import CancelledScalingWarning, UnreachableSkipError
from scalelong.models import unet

BEHIND = "cs:kappa=0.5,behind_norms=true"


class Block(nn.Module):
    """A residual block as DDPM has it: a branch behind GroupNorm, and a shortcut past it."""

    def __init__(self, wide: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, wide)
        self.branch = nn.Conv2d(wide, width, 3, padding=1)
        self.shortcut = nn.Conv2d(wide, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(nn.functional.silu(self.norm(x))) + self.shortcut(x)


class Net(nn.Module):
    """Two long skips; the inner one has κ_2 = κ."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.inner: Any = block(16, 8)
        self.outer: Any = block(16, 8)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.enter(x)
        inner = self.down(outer)
        x = self.inner(torch.cat([self.up(self.middle(inner)), inner], dim=1))
        return self.leave(self.outer(torch.cat([self.up(x), outer], dim=1)))


def example() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def test_the_skip_is_multiplied_where_the_convolutions_read_it():
    model, x = Net(), example()
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (expected.inner.branch, expected.inner.shortcut):
            layer.weight[:, 8:] *= 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error", CancelledScalingWarning)
        sl.scale_skips_(model, BEHIND, (x,))
    torch.testing.assert_close(model(x), expected(x))
    assert sl.coefficients(model) == [1.0, 0.5]


def test_usual_scaling_is_cancelled_and_the_warning_names_the_way_out():
    model, x = Net(), example()
    nn.init.zeros_(model.inner.shortcut.weight)
    before = model(x)
    with pytest.warns(CancelledScalingWarning, match="behind_norms=true"):
        sl.scale_skips_(model, "cs:0.5", (x,))
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)
    sl.unscale_(model)
    sl.scale_skips_(model, BEHIND, (x,))
    assert (model(x) - before).abs().max() > 0.01


def test_it_folds_exactly_and_is_undone_bit_for_bit():
    model = unet(
        "cifar10",
        block_out_channels=[16, 32],
        down_block_types=["DownBlock2D", "AttnDownBlock2D"],
        up_block_types=["AttnUpBlock2D", "UpBlock2D"],
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        sample_size=16,
    ).eval()
    x, t = example(), torch.tensor([3.0, 500.0])
    with torch.no_grad():
        before = model(x, t).sample
        sl.scale_skips_(model, BEHIND)
        scaled = model(x, t).sample
        assert (scaled - before).norm() > 0.02 * before.norm()
        sl.unscale_(model)
        assert torch.equal(model(x, t).sample, before)
        sl.scale_skips_(model, BEHIND)
        report = sl.fold_(model)
        assert (report.folded, report.kept) == ((1, 2, 3, 4), {})
        torch.testing.assert_close(model(x, t).sample, scaled)
    assert not sl.is_scaled(model)


class Pooling(Block):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.branch(normed) + normed.mean(dim=1, keepdim=True)


def test_another_reader_behind_the_norm_is_refused_before_anything_changes():
    model, x = Net(Pooling), example()
    before = model(x)
    with pytest.raises(UnreachableSkipError, match="after its GroupNorm"):
        sl.scale_skips_(model, BEHIND, (x,))
    assert torch.equal(model(x), before)


class DropoutBlock(Block):
    """With dropout, which draws its numbers in the order in which its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.branch(nn.functional.silu(self.norm(x))), 0.5, self.training)


def test_verification_runs_with_equal_draws_whatever_the_layout_in_memory():
    # One image of 2x2 pixels and many channels: some builds of torch choose channels-last for it by themselves.
    example = torch.randn(1, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    model = sl.scale_skips_(Net(DropoutBlock), BEHIND, example)
    model.train()(example)
    assert sl.coefficients(model) == [1.0, 0.5]
