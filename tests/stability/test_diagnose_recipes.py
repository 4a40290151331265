"""`scalelong diagnose` for every recipe: images and latents, without a condition, by class and by text, all schedules.

The large recipes get tiny stand-ins for their network, their data and their autoencoder; what they are made of stays.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from scalelong.cli import main
from scalelong.config import RECIPES, ImagesConfig, LoggingConfig, TrainConfig, recipe, to_dict
from scalelong.experiments import diagnose_config

SIZE = 16
UVIT = {"patch_size": 4, "dim": 16, "depth": 4, "heads": 2}
UNET = {"norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "unet/cifar10": {**UNET, "block_out_channels": [8, 8, 8, 8]},
    "unet/imagenet64": {**UNET, "block_out_channels": [8, 8, 8, 8]},
    "unet/mscoco256": {**UNET, "block_out_channels": [8, 8, 8]},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of images with captions."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    pixels = torch.randint(0, 256, (20, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for i, image in enumerate(pixels):
        place = folder / ("cats" if i % 2 else "dogs")
        place.mkdir(exist_ok=True)
        Image.fromarray(image.numpy()).save(place / f"{i}.png")
        (place / f"{i}.txt").write_text(f"a {'cat' if i % 2 else 'dog'} on a mat")
    return folder


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16x16 pixels become 8x8 of 4 channels."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("autoencoder")
    settings: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
    }
    AutoencoderKL(**settings).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))


def small(config: TrainConfig, images: Path, autoencoder: Path) -> TrainConfig:
    """The recipe with its condition, schedule, prediction and kind of model, on 20 small images."""
    latents = config.images.autoencoder is not None
    return replace(
        config,
        data=str(images),
        model_options=OPTIONS.get(config.model, UVIT),
        batch_size=4,
        steps=2,
        images=ImagesConfig(size=SIZE, channels=3, held_out=4, autoencoder=str(autoencoder) if latents else None),
        text=replace(config.text, text_encoder="words", text_length=8, text_dim=16),
        hardware=replace(config.hardware, gradient_checkpointing=False),
        logging=LoggingConfig(trackers=(), samples_every=0, log_every=1),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_diagnosed(name, images, autoencoder, tmp_path, capsys) -> None:
    config = small(recipe(name), images, autoencoder)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(config)))
    assert main(["diagnose", "--recipe", name, "--config", str(file), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "recommended:" in shown
    assert "long skips" in shown
    # U-ViT's last layer starts with weights, so its sensitivities say something.
    assert config.model.startswith("unet") or "w_i/w_1" in shown
    assert (tmp_path / "out" / "diagnosis.json").exists()


def test_the_condition_reaches_the_network(images, autoencoder, monkeypatch) -> None:
    """The probe batch of a text recipe holds the captions' tokens, not zeros and not nothing."""
    from scalelong.experiments import plan as experiments

    seen: list[dict[str, torch.Tensor]] = []

    def stop(model: object, batch: dict[str, torch.Tensor], **_: object) -> None:
        seen.append(batch)

    monkeypatch.setattr(experiments, "diagnose", stop)
    diagnose_config(small(recipe("mscoco256-uvit-s2"), images, autoencoder))
    (batch,) = seen
    assert set(batch) == {"x", "t", "context"}
    assert batch["x"].shape == (4, 4, 8, 8)
    assert batch["context"].abs().sum(dim=(1, 2)).min() > 0


def test_the_data_are_opened_once(images, autoencoder, monkeypatch) -> None:
    from scalelong.runs import model

    opened: list[str] = []
    load = model.load_data

    def counted(source: str, **options: Any) -> Any:
        opened.append(source)
        return load(source, **options)

    monkeypatch.setattr(model, "load_data", counted)
    diagnose_config(small(recipe("imagenet64-uvit-m4"), images, autoencoder))
    assert opened == [str(images)]
