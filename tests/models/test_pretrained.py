"""Folders that other tools write come back with their scaling."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")

METHODS = [sl.CustomScaling((1.0, 0.5, 0.5, 0.2)), "ls"]


def plain() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()


def scaled(method: Any) -> Any:
    model = sl.scale_skips_(plain(), method)
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)))
    return model


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model(x, torch.tensor([1, 500])).sample


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_of_save_pretrained(method, tmp_path):
    model = scaled(method)
    assert model.config["scalelong_scaling"]["method"] == sl.as_scaling(method).name
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for folder in ("whole", "shards"):
        other = sl.from_pretrained(tmp_path / folder)
        assert torch.equal(output(other), output(model))
        assert sl.plan_of(other) == sl.plan_of(model)
    sl.unscale_(model)
    assert "scalelong_scaling" not in model.config
    model.save_pretrained(tmp_path / "plain")
    assert not sl.is_scaled(sl.from_pretrained(tmp_path / "plain"))


def test_diffusers_itself_complains_and_we_do_not(tmp_path, caplog):
    scaled("cs").save_pretrained(tmp_path)
    logger = diffusers.utils.logging.get_logger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            sl.from_pretrained(tmp_path)
            assert "scalelong" not in caplog.text
            diffusers.UNet2DModel.from_pretrained(tmp_path)
            assert "not used when initializing UNet2DModel" in caplog.text
            assert "scalelong_scaling" in caplog.text
            assert "scalelong.from_pretrained(folder)" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_a_folder_of_a_pipeline(tmp_path):
    model = scaled("ls")
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    pipeline = sl.from_pretrained(tmp_path)
    assert torch.equal(output(pipeline.unet), output(model))
    assert torch.equal(output(sl.from_pretrained(tmp_path, subfolder="unet")), output(model))


def test_a_state_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, accelerator = scaled("ls"), accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    assert sl.is_scaled(prepared)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    before = output(model)
    other = sl.load_scaling_(plain(), tmp_path)
    from safetensors.torch import load_file

    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(output(other), before)


@pytest.mark.parametrize("method", ["cs:behind_norms=true", "ls"])
def test_averages_of_diffusers_keep_every_tensor(method, tmp_path):
    """The averages go through the model: EMAModel.save_pretrained builds a plain one."""
    from diffusers.training_utils import EMAModel

    model = scaled(method)
    ema = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    ema.step(model.parameters())
    ema.copy_to(model.parameters())
    model.save_pretrained(tmp_path)
    averages = sl.from_pretrained(tmp_path)
    assert all(torch.equal(p, s) for p, s in zip(averages.parameters(), ema.shadow_params, strict=True))
    assert torch.equal(output(averages), output(model))


def test_gates_that_somebody_lost_are_named(tmp_path):
    """Averages that an earlier version, or a model built by hand, has written."""
    model = scaled("ls")
    content = json.loads(model.to_json_string()) | {"optimization_step": 1}
    plain().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(sl.ScalingMismatchError, match=r"says .* scaled by ls.*EMAModel.*copy_to"):
        sl.from_pretrained(tmp_path)


def test_a_configuration_builds_a_plain_model():
    model = scaled("ls")
    assert not sl.is_scaled(type(model).from_config(model.config))
    assert "scalelong" not in type(model).from_config.__module__


@pytest.mark.parametrize("scaling", ["none", "cs:0.5", "ls"])
def test_uvit_by_the_usual_names(scaling, tmp_path):
    model = sl.UViT(image_size=(8, 4), patch_size=2, dim=16, depth=4, heads=2, classes=3, scaling=scaling).eval()
    for parameter in model.skip_scaling.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    x, t, y = torch.randn(2, 3, 8, 4), torch.tensor([1.0, 500.0]), torch.tensor([0, 2])
    for other in (sl.UViT.from_pretrained(tmp_path), sl.from_pretrained(tmp_path)):
        assert torch.equal(other(x, t, y=y), model(x, t, y=y))
        assert other.arguments() == model.arguments()
    plain().save_pretrained(tmp_path / "unet")
    with pytest.raises(sl.InvalidConfigError, match=r"not written by UViT\.save_pretrained"):
        sl.UViT.from_pretrained(tmp_path / "unet")


def test_what_is_no_folder_of_a_model_is_named(tmp_path: Path):
    with pytest.raises(sl.UnsupportedModelError, match="snapshot_download"):
        sl.from_pretrained(tmp_path / "absent")
    with pytest.raises(sl.UnsupportedModelError, match="load_scaling_"):
        sl.from_pretrained(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(sl.UnsupportedModelError, match="load_run"):
        sl.from_pretrained(tmp_path)
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "Nothing"}))
    with pytest.raises(sl.UnsupportedModelError, match="'Nothing'"):
        sl.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(sl.UnsupportedModelError, match="None"):
        sl.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel", "block_out_channels": 3}))
    with pytest.raises(sl.UnsupportedModelError, match="download the folder again"):
        sl.from_pretrained(tmp_path)
