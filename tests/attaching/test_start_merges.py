"""Starting the merges of models that are not ours."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.attaching import start_merges_
from scalelong.errors import NotFreshError, UnsupportedModelError
from scalelong.finding import find_skips


class PlainUNet(nn.Module):
    """Two long skips, concatenated and read by 3x3 convolutions."""

    def __init__(self, width: int = 8, inner: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, inner, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(inner, inner, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.merge_inner = nn.Conv2d(2 * inner, width, 3, padding=1)
        self.merge_outer = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.enter(x).relu()
        inner = self.down(outer).relu()
        x = self.up(self.middle(inner).relu())
        x = self.merge_inner(torch.cat([x, inner], dim=1)).relu()
        x = self.up(x)
        return self.leave(self.merge_outer(torch.cat([outer, x], dim=1)).relu())


def example() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def what_enters(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    seen: list[tuple[Tensor, Tensor]] = []
    layer = model.get_submodule(name)

    def note(_: Any, inputs: Any, output: Any) -> None:
        seen.append((inputs[0], output))

    handle = layer.register_forward_hook(note)
    with torch.no_grad():
        model(example())
    handle.remove()
    return seen[0]


def test_an_additive_start_adds_whichever_operand_comes_first():
    model = PlainUNet()
    report = start_merges_(model, "additive", example())
    assert report.started == {1: ("merge_outer",), 2: ("merge_inner",)}
    assert not report.kept
    for name in ("merge_outer", "merge_inner"):
        joined, output = what_enters(model, name)
        torch.testing.assert_close(output, joined[:, :8] + joined[:, 8:])


def test_a_normalised_start_knows_the_scaling():
    model = sl.scale_skips_(PlainUNet(), "cs:0.5", example())
    start_merges_(model, "normalised", example())
    joined, output = what_enters(model, "merge_inner")  # its skip comes second and is scaled already
    torch.testing.assert_close(output, (joined[:, :8] + joined[:, 8:]) / (1 + 0.5**2) ** 0.5)


def test_identity_leaves_the_skip_part():
    model = PlainUNet()
    before = model.merge_outer.weight.detach().clone()
    start_merges_(model, "identity", example())
    assert torch.equal(model.merge_outer.weight[:, :8], before[:, :8]), "the skip comes first here"
    assert torch.equal(model.merge_outer.weight[:, 8:, 1, 1], torch.eye(8))


@pytest.mark.parametrize("rate", [1e-2, 1e-4])
def test_weights_that_made_a_step_are_not_overwritten(rate):
    model = PlainUNet(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(example()).square().mean().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NotFreshError, match=r"merge_outer is not as torch initialises it.*fresh=True"):
        start_merges_(model, "additive", example())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(start_merges_(model, "additive", example(), fresh=True).started) == 2


def test_fresh_weights_of_many_seeds_pass():
    for seed in range(30):
        torch.manual_seed(seed)
        start_merges_(PlainUNet(), "additive", example())


def test_another_initialisation_needs_a_word():
    model = PlainUNet()
    nn.init.xavier_normal_(model.merge_inner.weight)
    with pytest.raises(NotFreshError, match="merge_inner"):
        start_merges_(model, "additive", example())


def test_widths_that_do_not_fit_are_reported():
    report = start_merges_(PlainUNet(8, 16), "additive", example())
    assert set(report.started) == {1}
    assert report.kept == {2: "merge_inner has 8 outputs, but the main path has 16 channels"}
    assert "kept: 2: merge_inner" in str(report)


def test_models_that_cannot_be_started():
    with pytest.raises(UnsupportedModelError, match="merge_start='additive'"):
        start_merges_(sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2))
    with pytest.raises(sl.InvalidConfigError, match="identity, additive, normalised"):
        start_merges_(PlainUNet(), "authors", example())


def test_the_shortcut_of_diffusers_blocks():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    plan = find_skips(model)
    report = start_merges_(model, "additive", plan=plan)
    assert len(report.started) == len(plan) == 4
    layer = model.get_submodule(report.started[1][0])
    x = torch.randn(1, 32, 4, 4)
    torch.testing.assert_close(layer(x), x[:, :16] + x[:, 16:])


def test_plans_remember_the_readers(tmp_path):
    plan = find_skips(PlainUNet(), example())
    plan.save(tmp_path / "plan.json")
    assert sl.SkipPlan.load(tmp_path / "plan.json") == plan
    assert [target.module for skip in plan for target in skip.readers.direct] == ["merge_outer", "merge_inner"]
