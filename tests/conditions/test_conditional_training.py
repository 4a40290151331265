"""Training on classes, texts and latents, for U-ViT and for diffusers' UNets, from the configuration to images."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelong.config import DiffusionConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TextConfig, TrainConfig
from scalelong.data import load_data, to_float
from scalelong.diffusion import Autoencoder, encode_data
from scalelong.diffusion.conditions import ConditionError
from scalelong.diffusion.latents import sample_latents
from scalelong.errors import InvalidConfigError
from scalelong.runs import load_run, read_metrics
from scalelong.training import train

UVIT = {"patch_size": 4, "dim": 32, "depth": 2, "heads": 2}
UNET = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 4,
}
CONDITIONAL_UNET = {
    **UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
PLAIN_UNET = {**UNET, "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))


def config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "data": "shapes",
        "model": "uvit",
        "model_options": UVIT,
        "steps": 3,
        "batch_size": 4,
        "images": ImagesConfig(size=16, held_out=8),
        "diffusion": DiffusionConfig(condition="text", condition_dropout=0.5),
        "text": TextConfig(text_length=8, text_dim=16),
        "optimizer": OptimizerConfig(lr=1e-3, ema_rate=0.5),
        "logging": LoggingConfig(trackers=(), samples=4, sampler_steps=2, log_every=1),
    }
    return TrainConfig(**{**values, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("model", "options", "condition"),
    [
        ("uvit", UVIT, "text"),
        ("uvit", UVIT, "class"),
        ("unet/mscoco256", CONDITIONAL_UNET, "text"),
        ("unet/cifar10", PLAIN_UNET, "class"),
    ],
)
def test_condition_reaches_the_network(model: str, options: dict[str, object], condition: str, tmp_path: Path) -> None:
    diffusion = DiffusionConfig(condition=condition, condition_dropout=0.5)  # pyright: ignore[reportArgumentType]
    result = train(config(model=model, model_options=options, diffusion=diffusion), tmp_path / "run")
    assert result.finished
    assert (tmp_path / "run" / "samples" / "step-00000003.png").exists()
    assert any("held_out_loss" in line for line in read_metrics(tmp_path / "run"))
    run = load_run(tmp_path / "run")
    prompts = ["a red circle at the top", "a blue ring at the left"] if condition == "text" else ["3", "green cross"]
    x, t = torch.randn(2, *run.shape.image), torch.full((2,), 700.0)
    with torch.no_grad():
        asked, reversed_ = (run.network(x, t, run.conditions.from_prompts(order)) for order in (prompts, prompts[::-1]))
        null = run.conditions.null()
        assert null is not None
        told = run.conditions.from_prompts(prompts)
        assert told is not None
        hidden = run.network(x, t, null.expand_as(told))
    assert not torch.allclose(asked, reversed_, atol=1e-7)
    assert not torch.allclose(asked, hidden, atol=1e-7)
    images = run.sample(2, prompts=prompts, steps=2, guidance=3.0)
    assert images.shape == (2, 3, 16, 16)
    if condition == "text":
        with pytest.raises(InvalidConfigError, match="`prompts`"):
            run.sample(2, steps=2)
        with pytest.raises(ConditionError, match=r"word pink; it knows a, at, .*circle"):
            run.sample(2, prompts=["a pink circle at the top"], steps=2)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="needs captions"):
        train(
            config(data="digits", images=ImagesConfig(size=8), model_options={**UVIT, "patch_size": 2}), tmp_path / "a"
        )
    with pytest.raises(InvalidConfigError, match="cannot be built"):
        train(config(model="unet/cifar10", model_options=PLAIN_UNET), tmp_path / "b")
    with pytest.raises(ConditionError, match="7 words"):
        train(config(text=TextConfig(text_length=6, text_dim=16)), tmp_path / "c")
    with pytest.raises(InvalidConfigError, match="mirrored"):
        ImagesConfig(flip=True, autoencoder="somewhere")
    with pytest.raises(ConditionError, match="no text encoder"):
        train(config(text=TextConfig(text_encoder=str(tmp_path / "absent"))), tmp_path / "d")
    with pytest.raises(InvalidConfigError, match="no autoencoder"):
        train(config(images=ImagesConfig(size=16, autoencoder=str(tmp_path / "absent"))), tmp_path / "e")


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """diffusers' AutoencoderKL, small and with random weights: 16x16 pixels become 8x8 of 4 channels."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    settings: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.5,
    }
    AutoencoderKL(**settings).save_pretrained(folder)
    return folder


def test_latents_are_what_the_autoencoder_says_and_are_made_once(vae: Path, caplog) -> None:
    caplog.set_level("INFO", "scalelong.files")
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    data = load_data("shapes", size=16, limit=20)
    latents = encode_data(data, Autoencoder(vae))
    assert (len(latents), latents.channels, latents.height, latents.width) == (20, 4, 8, 8)
    batch = latents.fetch([3, 17])
    assert batch.captions == data.fetch([3, 17]).captions
    model: Any = AutoencoderKL.from_pretrained(vae)
    with torch.no_grad():
        distribution = model.encode(to_float(data.fetch([3, 17]).images)).latent_dist
        torch.testing.assert_close(sample_latents(batch.images), distribution.mean * 0.5, atol=1e-5, rtol=1e-4)
        noise = torch.randn(2, 4, 8, 8)
        expected = (distribution.mean + distribution.std * noise) * 0.5
        torch.testing.assert_close(sample_latents(batch.images, noise), expected, atol=1e-5, rtol=1e-4)
        decoded = Autoencoder(vae).decode(distribution.mean * 0.5)
        torch.testing.assert_close(decoded, model.decode(distribution.mean).sample, atol=1e-5, rtol=1e-4)
    assert len(caplog.records) == 1
    encode_data(data, Autoencoder(vae))
    assert len(caplog.records) == 1
    left, right = latents.split(5)
    assert len(left) == 15
    assert torch.equal(right.fetch([0]).images, latents.fetch(torch.as_tensor([_row(latents, right)])).images)
    assert latents.fingerprint() != data.fingerprint()


def _row(whole, part) -> int:
    first = part.fetch([0]).images
    return next(i for i in range(len(whole)) if torch.equal(whole.fetch([i]).images, first))


def test_an_autoencoder_that_lacks_weights_and_sizes_that_do_not_fit_are_refused(vae: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(vae, tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "decoder.conv_out.bias"}, file)
    with pytest.raises(InvalidConfigError, match=r"lack 1 tensors of .*, such as ..decoder.conv_out.bias"):
        encode_data(load_data("shapes", size=16, limit=4), Autoencoder(tmp_path / "vae"))
    with pytest.raises(InvalidConfigError, match="multiples of 2"):
        encode_data(load_data("shapes", size=15, limit=4), Autoencoder(vae))
    with pytest.raises(InvalidConfigError, match="3 channels and the images have 1"):
        encode_data(load_data("digits", limit=4), Autoencoder(vae))


def test_text_to_image_in_latent_space_with_exact_resume(vae: Path, tmp_path: Path) -> None:
    settings = config(
        images=ImagesConfig(size=16, held_out=8, autoencoder=str(vae)), model_options={**UVIT, "patch_size": 2}
    )
    train(settings, tmp_path / "once")
    train(replace(settings, steps=2), tmp_path / "twice")
    train(settings, tmp_path / "twice")
    names = ("model", "ema")
    once, twice = (
        [(tmp_path / run / "checkpoints" / "latest" / f"{name}.safetensors").read_bytes() for name in names]
        for run in ("once", "twice")
    )
    assert once == twice
    run = load_run(tmp_path / "once")
    assert run.shape.image == (4, 8, 8)
    assert run.sample(3, prompts=["a red circle at the top"], steps=2).shape == (3, 3, 16, 16)


def test_scores_during_training_do_not_disturb_it(tmp_path: Path) -> None:
    digits = config(
        data="digits",
        images=ImagesConfig(size=8),
        # Dropout draws from the global generator: a disturbance would show.
        model="unet/cifar10",
        model_options={**PLAIN_UNET, "dropout": 0.3},
        diffusion=DiffusionConfig(condition="class"),
        steps=4,
    )
    looking = replace(digits, logging=replace(digits.logging, scores_every=2, scores_images=16))
    train(digits, tmp_path / "blind")
    train(looking, tmp_path / "looking")
    train(replace(looking, steps=3), tmp_path / "resumed")
    train(looking, tmp_path / "resumed")
    weights = {
        (tmp_path / run / "checkpoints" / "latest" / "model.safetensors").read_bytes()
        for run in ("blind", "looking", "resumed")
    }
    assert len(weights) == 1
    scored = [line for line in read_metrics(tmp_path / "looking") if "frechet" in line]
    assert [line["step"] for line in scored] == [2, 4]
    for name in ("frechet", "precision", "recall"):
        assert scored[0][f"{name}_low"] <= scored[0][name] <= scored[0][f"{name}_high"]
    resumed = [line for line in read_metrics(tmp_path / "resumed") if "frechet" in line]
    assert resumed[-1] == scored[-1]
    assert (tmp_path / "looking" / "scores_protocol.json").exists()
