"""Bare models, without a run: folders for diffusers, files for the others, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import scalelong as sl

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.CancelledScalingWarning")


def small_unet(**options: Any) -> Any:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DModel(**{**sizes, **blocks, "block_out_channels": (8, 16), **options})


def small_uvit(**options: Any) -> sl.UViT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 4, "heads": 2}
    model = sl.UViT(**{**sizes, **options})
    for parameter in model.parameters():  # the gates, too: they start as constants
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


class Own(nn.Module):
    """A network of somebody's own, with two long skips."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.middle, self.merge, self.up = nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = self.outer(x).relu()
        inner = self.inner(outer).relu()
        middle = nn.functional.interpolate(self.middle(inner).relu(), scale_factor=2)
        merged = self.merge(torch.cat([middle, inner], dim=1)).relu()
        return self.up(torch.cat([nn.functional.interpolate(merged, scale_factor=2), outer], dim=1))


X = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
T = torch.tensor([10, 900])


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where diffusers copies the code of a folder before it runs it."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    return model.eval()(X, T).sample


def test_constants_in_the_weights_leave_a_plain_folder(tmp_path: Path) -> None:
    unet = sl.scale_skips_(small_unet(), "cs:kappa=0.5,behind_norms=true")
    before, expected = {name: value.clone() for name, value in unet.state_dict().items()}, outputs(unet)
    assert sl.export_model(unet, tmp_path / "model") == tmp_path / "model"
    plain = UNet2DModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(outputs(plain), expected)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"README.md", "config.json", "diffusion_pytorch_model.safetensors", "scalelong.json"}
    assert "scalelong" not in (tmp_path / "model" / "config.json").read_text()
    assert sl.is_scaled(unet), "the model is left as it was"
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())
    card = (tmp_path / "model" / "README.md").read_text()
    assert "UNet2DModel.from_pretrained" in card
    assert "not recorded" in card


@pytest.mark.parametrize(("scaling", "fold"), [("cs", True), ("ls", True), ("cs:kappa=0.5,behind_norms=true", False)])
def test_what_is_not_folded_comes_back_with_its_scaling(scaling: str, fold: bool, tmp_path: Path) -> None:
    unet = sl.scale_skips_(small_unet(), scaling)
    for parameter in sl.scaling_of(unet).parameters():
        parameter.data += torch.randn_like(parameter)
    sl.export_model(unet, tmp_path / "model", fold=fold)
    back = sl.from_pretrained(tmp_path / "model")
    assert sl.scaling_of(back).config == sl.scaling_of(unet).config
    assert torch.equal(outputs(back), outputs(unet))
    assert "scalelong.from_pretrained" in (tmp_path / "model" / "README.md").read_text()


def pipeline_of(folder: Path) -> Any:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize(("scaling", "written"), [("cs:0.5", "none"), ("ls", "ls")])
def test_a_uvit_becomes_a_pipeline(scaling: str, written: str, tmp_path: Path) -> None:
    options = {"mlp_ratio": 2.5, "qkv_bias": True, "time_mlp": True, "final_conv": False, "residual_scaling": "rezero"}
    model = small_uvit(scaling=scaling, classes=4, **options).eval()
    labels = torch.tensor([1, 3])
    with torch.no_grad():
        expected = model(X, T, labels)
    sl.export_model(model, tmp_path / "model", schedule="cosine", prediction="v", classes=["a", "b", "c"])
    pipeline = pipeline_of(tmp_path / "model")
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    with torch.no_grad():
        torch.testing.assert_close(pipeline.unet(X, T, class_labels=labels).sample, expected)
    images = pipeline(class_labels=["b", 2], guidance_scale=2.0, num_inference_steps=3, output_type="pt").images
    assert images.shape == (2, 1, 8, 8)
    with pytest.raises(ValueError, match="no class 'd'"):
        pipeline(class_labels=["d"])
    assert pipeline.unet.config.arguments["scaling"]["method"] == written
    assert sl.is_scaled(model)


def test_a_uvit_with_a_context_takes_tokens(tmp_path: Path) -> None:
    model = small_uvit(image_size=(8, 12), context_dim=6, context_length=3, scaling="cs")
    sl.export_model(model, tmp_path / "model", fold=False)
    pipeline, tokens = pipeline_of(tmp_path / "model"), torch.randn(2, 3, 6)
    draw = {"num_inference_steps": 2, "output_type": "pt"}
    guided = {"negative_prompt_embeds": torch.zeros(1, 3, 6), "guidance_scale": 2.0}
    assert pipeline(prompt_embeds=tokens, **guided, **draw).images.shape == (2, 1, 8, 12)
    with pytest.raises(ValueError, match="no text encoder"):
        pipeline(prompt="a red circle")
    with pytest.raises(ValueError, match="guidance_scale must be 1"):
        pipeline(prompt_embeds=tokens, guidance_scale=2.0)


@pytest.mark.parametrize("scaling", ["cs", "ls"])
def test_any_model_as_a_file(scaling: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sl.scale_skips_(Own(), scaling, X)
    sl.export_model(model, tmp_path / "model", format="safetensors")
    path, back = tmp_path / "model" / "model.safetensors", Own()
    if scaling == "ls":  # constants went into the weights of the convolutions behind
        sl.load_scaling_(back, path)
    back.load_state_dict(load_file(path))
    torch.testing.assert_close(back.eval()(X), model.eval()(X))
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["scalelong"])
    assert about["class"].endswith(".Own")
    assert bool(about["scaling"]) is (scaling == "ls")
    assert sl.is_scaled(model)


def test_the_header_builds_a_uvit(tmp_path: Path) -> None:
    model = small_uvit(scaling="ls", mlp_ratio=3.0)
    path = sl.export_model(model, tmp_path / "uvit.safetensors", format="safetensors")
    with safe_open(path, "pt") as file:
        back = sl.UViT(**json.loads(file.metadata()["scalelong"])["arguments"])
    back.load_state_dict(load_file(path))
    with torch.no_grad():
        assert torch.equal(back(X, T), model(X, T))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (Own, {}, "Own is neither.*format='safetensors'"),
        (lambda: sl.unet("cifar10", residual_scaling="rezero", **TINY), {}, "residual_scaling"),
        (small_unet, {"schedule": "cosine"}, "leave them out"),
        (small_uvit, {"classes": ["a"]}, "has none"),
        (lambda: small_uvit(classes=5), {"classes": ["a", "b"]}, "5 labels"),
        (Own, {"format": "onnx"}, "unknown format 'onnx'"),
        (lambda: Own().to("meta"), {"format": "safetensors"}, "meta"),
        (lambda: "unet", {}, "not a str"),
    ],
)
def test_what_cannot_be_written_says_why(make: Any, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(sl.ExportError, match=said):
        sl.export_model(make(), tmp_path / "model", **options)
    assert not list(tmp_path.iterdir())


TINY: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}


def test_a_folder_that_would_compute_something_else_is_not_left(tmp_path: Path) -> None:
    """A forward that was changed by hand is not in the folder."""
    unet = small_unet()
    unet.conv_out.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    with pytest.raises(sl.ExportError, match="compute something else"):
        sl.export_model(unet, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_wrappers_and_half_precision(tmp_path: Path) -> None:
    model = small_uvit(scaling="cs").to(torch.bfloat16)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    sl.export_model(averaged, tmp_path / "model")
    state = load_file(tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    example = page.partition("## A model without a run")[2].partition("```python\n")[2].partition("```")[0]
    exec(compile(example, "docs/export.md", "exec"), {"folder": tmp_path})
    assert {path.name for path in tmp_path.iterdir()} >= {"unet", "scaled", "uvit", "uvit.safetensors"}


@pytest.mark.parametrize("form", ["diffusers", "safetensors"])
def test_weights_that_are_not_finite_are_refused(tmp_path, form):
    model = sl.UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=2, heads=2)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(sl.ExportError, match=r"norm.weight has values that are not finite"):
        sl.export_model(model, tmp_path / "out", format=form)
    assert not (tmp_path / "out").exists()
