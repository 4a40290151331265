import json
from typing import Any

import pytest
import torch
from torch import nn

import scalelong as sl
from scalelong.cli import main
from scalelong.errors import InvalidInputError
from scalelong.stability import diagnose


def tiny(depth: int = 8, **options: Any) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=depth, heads=2, **options)


def batch(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 1, 8, 8), 999 * torch.rand(count)


def unet(**options: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        **options,
    )


def test_one_page_about_a_uvit():
    model, inputs = tiny(), batch()
    found = diagnose(model, inputs)
    assert [skip.index for skip in found.skips] == [1, 2, 3, 4]
    assert found.skips[0].sensitivity == 1
    assert all(skip.not_cancelled == 1 and skip.rms > 0 for skip in found.skips)
    assert all(skip.similarity is not None and -1 <= skip.similarity < 0.9 for skip in found.skips)
    text = str(found)
    for part in ("4 long skips", "encoder.3", "w_i/w_1", "fp16 headroom", "recommended:"):
        assert part in text


def test_the_model_is_left_as_it_was():
    model, inputs = tiny(scaling="ls"), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    diagnose(model, inputs)
    assert model.training
    assert torch.equal(random, torch.get_rng_state())
    assert isinstance(model.skip_scaling.config, sl.LearnableScaling)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_unet_with_norms_after_its_merges_needs_nothing_and_says_which_norms():
    found = diagnose(unet(norm_num_groups=4), (torch.randn(2, 1, 8, 8), torch.tensor([3, 5])))
    assert all(skip.not_cancelled == 0 and skip.shortcut for skip in found.skips)
    assert found.recommendation == "none"
    assert "GroupNorm" in found.advice
    assert "0% + shortcut" in str(found)


def test_an_output_that_starts_at_zero_and_little_room_for_half_precision_are_said():
    model = tiny()
    nn.init.constant_(model.position_embedding.weight, 30000.0)
    for parameter in model.to_patches.parameters():
        nn.init.zeros_(parameter)
    found = diagnose(model, batch())
    assert all(skip.sensitivity is None for skip in found.skips)
    assert any("starts at zero" in reason for reason in found.reasons)
    assert found.fp16_headroom < 8
    assert any("bf16" in reason for reason in found.reasons)


def test_clear_errors():
    with pytest.raises(InvalidInputError, match="cannot be called"):
        diagnose(tiny(), {"x": batch()[0]})
    with pytest.raises(InvalidInputError, match="floating-point"):
        diagnose(unet(norm_num_groups=1), (torch.zeros(1, 1, 8, 8, dtype=torch.long), torch.tensor([1])))


def test_advice_and_recommendation_are_one_thing_and_follow_the_evidence():
    few = diagnose(tiny(), batch())
    assert json.loads(few.to_json())["recommendation"] == few.recommendation == "none"
    assert few.advice.startswith("none at ordinary learning rates")
    deep = diagnose(tiny(depth=24), batch())
    assert deep.recommendation == "merge_norm"
    assert deep.advice.startswith('sl.scale_skips_(model, "merge_norm", inputs)')
    assert diagnose(tiny(depth=24, merge_norm=True), batch()).recommendation == "none"


class Segmentation(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.up = (torch.nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 8), (8, 8), (16, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x).relu()
        inner = torch.nn.functional.interpolate(self.inner(torch.nn.functional.avg_pool2d(skip, 2)), scale_factor=2.0)
        return self.up(torch.cat([inner, skip], dim=1))


def test_a_network_without_times_is_not_argued_with_noise():
    found = diagnose(Segmentation(), (torch.randn(2, 1, 8, 8),))
    assert found.recommendation == "none"
    assert "no diffusion model" in str(found)
    assert "<td" in found._repr_html_()


def test_the_command_takes_sizes_from_the_model_and_a_python_file(tmp_path, capsys):
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 12,
        "in_channels": 1,
        "out_channels": 1,
        "norm_num_groups": 4,
    }
    blocks = {"block_out_channels": [8, 8], "layers_per_block": 1}
    kinds = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config | blocks | kinds))
    assert main(["diagnose", "--data", "digits", "--model", str(tmp_path / "config.json")]) == 0
    assert "x8x12x12" in capsys.readouterr().out
    lines = [
        "import torch",
        "from scalelong import UViT",
        "def Net():",
        "    return UViT(image_size=8, patch_size=2, channels=1, dim=16, depth=2, heads=2)",
    ]
    lines += ["def example_inputs():", "    return torch.randn(2, 1, 8, 8), torch.rand(2)"]
    (tmp_path / "nets.py").write_text("\n".join(lines))
    assert main(["diagnose", "--model", f"{tmp_path / 'nets.py'}:Net", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["model"].startswith("UViT")


def test_a_python_file_without_example_inputs_is_given_images_of_the_data(tmp_path, capsys):
    lines = ["import torch", "from torch import nn", "class Net(nn.Module):", "    def __init__(self):"]
    lines += [
        "        super().__init__()",
        "        self.a, self.b = nn.Conv2d(1, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1)",
    ]
    lines += ["        self.c = nn.Conv2d(8, 1, 3, 1, 1)", "    def forward(self, x, t):", "        skip = self.a(x)"]
    lines += ["        up = nn.functional.interpolate(self.b(skip), scale_factor=2.0)"]
    lines += ["        return self.c(torch.cat([up, skip], 1))", "model = Net"]
    file = tmp_path / "net.py"
    file.write_text("\n".join(lines))
    assert main(["diagnose", "--model", str(file), "--data", "digits", "--json"]) == 0
    assert "x4x8x8" in json.loads(capsys.readouterr().out)["text"]
    assert main(["diagnose", "--model", str(file)]) == 1
    assert "example_inputs() in" in (said := capsys.readouterr().err)
    assert "--data" in said
    assert main(["find", str(file)]) == 1
    assert "--input 1,3,64,64 --input 1:long" in capsys.readouterr().err
