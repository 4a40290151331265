"""U-ViT, UNet presets, a diffusers config file, and networks of a user's own, with and without attached scaling."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import nn
from torch.utils.data import TensorDataset

from scalelong.attaching import coefficients
from scalelong.config import DiffusionConfig, HardwareConfig, TrainConfig
from scalelong.data import load_data
from scalelong.diffusion import as_picture
from scalelong.errors import CannotReadError, InvalidConfigError, NoLongSkipsError
from scalelong.models import Denoiser, UViT
from scalelong.runs import DataShape, build_model, load_run
from scalelong.runs.model import uses_channels_last
from scalelong.training import train
from scalelong.training.dry_run import memory_needed

# GroupNorm right behind the merges of small UNets divides most of a constant κ out, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")

SHAPE = DataShape(1, 8, 8, ("a", "b", "c"))
LABELS = DiffusionConfig(condition="class", condition_dropout=0.1)
SMALL_UNET = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
UNET = {"model": "diffusers:UNet2DModel", "model_options": {**SMALL_UNET, "in_channels": 1, "out_channels": 1}}


class Plain(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 1)

    def forward(self, x, t):
        return self.layer(x)


class Labelled(Plain):
    def __init__(self, channels, classes, image_size):
        super().__init__(channels)
        assert image_size == 8
        self.embedding = nn.Embedding(classes, 1)

    def forward(self, x, t, labels=None):
        return self.layer(x) + self.embedding(labels)[..., None, None]


class Wrong(Plain):
    def forward(self, x, t):
        return x.mean(dim=1, keepdim=True)[..., :4]


def run_once(config, shape=SHAPE):
    model = build_model(config, shape)
    labels = torch.tensor([0, len(shape.classes or ())]) if config.diffusion.condition == "class" else None
    return model, Denoiser(model)(torch.randn(2, *shape.image), torch.tensor([1.0, 2.0]), labels)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_options": {"dim": 16, "depth": 2, "heads": 2}},
        {"model": "uvit/cifar10-s2", "model_options": {"dim": 16, "depth": 2, "heads": 2}},
        {"model": "unet/cifar10", "model_options": SMALL_UNET},
        {"model": f"{__name__}:Labelled"},
    ],
)
def test_labels_and_shapes_come_from_the_data(changes):
    model, output = run_once(TrainConfig(diffusion=LABELS, **changes))
    assert output.shape == (2, 1, 8, 8)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert [embedding.num_embeddings for embedding in embeddings] == [4]


def test_a_diffusers_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "UNet2DModel", **SMALL_UNET}))
    model, output = run_once(TrainConfig(model=str(path)))
    assert isinstance(model, UNet2DModel)
    assert output.shape == (2, 1, 8, 8)
    path.write_text("{")
    with pytest.raises(CannotReadError):
        build_model(TrainConfig(model=str(path)), SHAPE)
    path.write_text(json.dumps({"format": 1, "skips": []}))  # a plan, not a network
    with pytest.raises(InvalidConfigError, match="no network of diffusers"):
        build_model(TrainConfig(model=str(path)), SHAPE)
    for name, value in {"block_out_channels": None, "norm_num_groups": [1, 2], "layers_per_block": 0.5}.items():
        path.write_text(json.dumps({"_class_name": "UNet2DModel", **SMALL_UNET, name: value}))
        with pytest.raises(InvalidConfigError, match="cannot be built: its code raises"):
            build_model(TrainConfig(model=str(path)), SHAPE)
    path.write_text(json.dumps({"_class_name": "UNet2DModel", **SMALL_UNET, "layers_per_block": 2**40}))
    with pytest.raises(InvalidConfigError, match="layers_per_block may be at most 1000"):
        build_model(TrainConfig(model=str(path)), SHAPE)


def test_scaling_is_attached_to_networks_we_did_not_write():
    model = build_model(TrainConfig(**UNET, scaling="cs:0.5"), SHAPE)
    values = coefficients(model)
    assert values[:3] == [1.0, 0.5, 0.25]
    plain = build_model(TrainConfig(**UNET), SHAPE)
    # Constant scaling adds nothing and draws nothing: the weights are those of the unscaled network.
    assert {*model.state_dict()} - {*plain.state_dict()} == {"scalelong_scaling"}  # which says how it is scaled
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_every_method_begins_with_the_same_weights():
    states = {
        method: build_model(TrainConfig(model_options={"dim": 16, "depth": 4, "heads": 2}, scaling=method), SHAPE)
        for method in ("none", "cs", "ls")
    }
    for name, value in states["none"].state_dict().items():
        assert all(torch.equal(value, model.state_dict()[name]) for model in states.values())
    other = build_model(TrainConfig(model_options={"dim": 16, "depth": 4, "heads": 2}, seed=1), SHAPE)
    assert not torch.equal(other.state_dict()["to_patches.weight"], states["none"].state_dict()["to_patches.weight"])


def test_a_network_without_long_skips_cannot_be_scaled():
    with pytest.raises(NoLongSkipsError):
        build_model(TrainConfig(model=f"{__name__}:Plain", scaling="cs"), SHAPE)


def test_mistakes_are_named():
    with pytest.raises(InvalidConfigError, match="forward takes labels as one of y, class_labels, labels"):
        build_model(TrainConfig(model=f"{__name__}:Plain", diffusion=LABELS), SHAPE)
    with pytest.raises(InvalidConfigError, match=r"must return a tensor of the shape of its input, \(2, 1, 8, 8\)"):
        run_once(TrainConfig(model=f"{__name__}:Wrong"))
    with pytest.raises(InvalidConfigError, match="no patch size divides images of 17x17"):
        build_model(TrainConfig(), DataShape(1, 17, 17))
    with pytest.raises(InvalidConfigError, match="enable_gradient_checkpointing"):
        build_model(TrainConfig(model=f"{__name__}:Plain", hardware=HardwareConfig(gradient_checkpointing=True)), SHAPE)


def test_patches_of_a_uvit_keep_it_affordable():
    def patch(size):
        return build_model(
            TrainConfig(model_options={"dim": 8, "depth": 2, "heads": 1}), DataShape(3, size, size)
        ).patch_size

    assert [patch(size) for size in (8, 28, 32, 64, 128)] == [2, 2, 2, 4, 8]


def test_gradient_checkpointing_keeps_less():
    options = {"dim": 32, "depth": 6, "heads": 2}
    kept = [
        memory_needed(config, build_model(config, SHAPE), SHAPE)[1]
        for config in (
            TrainConfig(model_options=options),
            TrainConfig(model_options=options, hardware=HardwareConfig(gradient_checkpointing=True)),
        )
    ]
    assert kept[1] < 0.3 * kept[0]


def test_unets_are_channels_last_unless_told_otherwise():
    unet, uvit = build_model(TrainConfig(**UNET), SHAPE), build_model(TrainConfig(), SHAPE)
    assert uses_channels_last(TrainConfig(), unet)
    assert not uses_channels_last(TrainConfig(), uvit)
    assert not uses_channels_last(TrainConfig(hardware=HardwareConfig(channels_last=False)), unet)


@pytest.mark.parametrize("scaling", ["cs:0.7", "ls"])
def test_an_attached_unet_trains_resumes_and_loads(tiny, crash_at, final_state, tmp_path, scaling):
    config = replace(tiny, **UNET, scaling=scaling, steps=6)
    train(config, tmp_path / "a")
    crash_at(config, tmp_path / "b", 5)
    train(config, tmp_path / "b")
    first, second = final_state(tmp_path / "a"), final_state(tmp_path / "b")
    assert all(torch.equal(value, second.model[name]) for name, value in first.model.items())
    run = load_run(tmp_path / "b", trust=True)
    assert len(coefficients(run.model, torch.zeros(1, 1, 8, 8), torch.tensor([5.0]))) >= 3
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in first.ema.items())


@pytest.mark.parametrize("hardware", [HardwareConfig(precision="bf16"), HardwareConfig(gradient_checkpointing=True)])
def test_hardware_options_train(tiny, tmp_path, hardware):
    assert train(replace(tiny, hardware=hardware, steps=3), tmp_path / "a").finished


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    train_own_unet = importlib.import_module("train_own_unet")

    train_own_unet.main(str(tmp_path / "run"), steps=4)
    sys.modules.pop("train_own_unet")
    assert "UNet2DModel at step 4" in capsys.readouterr().out


def of_torch(images):
    return TensorDataset(images.images.float() / 255, images.labels)


def of_hugging_face(images):
    datasets = pytest.importorskip("datasets")
    columns = {"image": [as_picture(image) for image in images.images], "label": images.labels.tolist()}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


@pytest.mark.parametrize("kind", [lambda images: images, of_torch, of_hugging_face], ids=["ours", "torch", "datasets"])
def test_a_module_and_a_data_set_object(tiny, kind, tmp_path):
    def network():
        torch.manual_seed(0)
        return UViT(image_size=8, channels=1, patch_size=4, dim=16, depth=2, heads=2)

    digits = load_data("digits", limit=40)
    data = digits if kind.__name__ == "<lambda>" else kind(digits.fetch(range(40)))
    config = replace(tiny, scaling="cs", steps=2)
    train(config, tmp_path / "run", model=network(), data=data, quiet=True)
    result = train(replace(config, steps=4), tmp_path / "run", model=network(), data=data, quiet=True)
    whole = train(replace(config, steps=4), tmp_path / "whole", model=network(), data=data, quiet=True)
    one, other = (load_run(each.folder, weights="raw", model=network()) for each in (result, whole))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_module_again_and_again(tiny, precision, tmp_path):
    torch.manual_seed(0)
    model = UViT(image_size=8, channels=1, patch_size=4, dim=16, depth=2, heads=2)
    block, config = (
        type(model.middle),
        replace(tiny, scaling="cs", hardware=HardwareConfig(precision=precision, cpu=True)),
    )
    for steps in (2, 4):
        train(replace(config, steps=steps), tmp_path / "run", model=model, quiet=True)
        assert type(model.middle) is block, "it is as it was, but for its weights"
        assert not {"forward", "_original_forward"} & set(vars(model))
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    loaded = load_run(tmp_path / "run", weights="raw", model=model).model
    assert all(map(torch.equal, loaded.parameters(), trained))
