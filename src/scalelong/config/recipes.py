"""Runs by name: every setting of the paper, and small ones that learn something visible on a CPU in minutes.

U-ViT's numbers are those of its authors' configurations. The paper says of its UNets only which networks they follow:
DDPM for CIFAR-10 and IDDPM for ImageNet 64, so their numbers are those of these papers.
"""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError
from .train import TrainConfig, from_dict, result_values


def _tiny(
    data: str, size: int, channels: int, steps: int, images: dict[str, Any], lr: float = 2e-3, **options: Any
) -> dict[str, Any]:
    """A small U-ViT that two CPU cores train in minutes. Small batches: on a CPU, more steps beat larger ones."""
    return {
        "data": data,
        "model_options": {"patch_size": 2, "dim": 96, "depth": 4, "heads": 4, **options},
        "steps": steps,
        "batch_size": 32,
        "images": {"size": size, "channels": channels, **images},
        # A network that predicts ε must get it right to a hundredth where there is almost nothing but noise before
        # its samples look like anything; one that predicts v needs not, and shows something much earlier.
        "diffusion": {"prediction": "v"},
        "optimizer": {"lr": lr, "betas": (0.9, 0.99), "warmup": 100, "clip": 1.0, "ema_rate": 0.997},
        "checkpoints": {"save_every": 500},
    }


# Photographs at 16x16 in patches of 2x2: patches of 4x4 at full size are about as many, and their grain takes far
# longer to vanish. The authors' deviation of 0.02 is for widths of 512 and more.
_PHOTOGRAPHS: dict[str, Any] = {"images": {"held_out": 1000, "flip": True}, "init_std": 0.06}
_UNET = {"weight_decay": 0.0, "betas": (0.9, 0.999)}

RECIPES: dict[str, dict[str, Any]] = {
    "digits-tiny": _tiny("digits", 8, 1, 5000, {"held_out": 297}, depth=6),
    "digits-class-tiny": {
        "like": "digits-tiny",
        "model_options": {"patch_size": 2, "dim": 96, "depth": 4, "heads": 4},
        "scaling": "cs",
        "steps": 1500,
        "diffusion": {"condition": "class"},
        "optimizer": {"lr": 1e-3},
    },
    "shapes-text-tiny": {
        **_tiny("shapes", 16, 3, 4000, {}, lr=1e-3, patch_size=4),
        "scaling": "cs",
        "diffusion": {"prediction": "v", "condition": "text"},
        "text": {"text_length": 8},
    },
    "fashion-tiny": _tiny("fashion-mnist", 16, 1, 3000, **_PHOTOGRAPHS),
    "cifar10-tiny": _tiny("cifar10", 16, 3, 5000, **_PHOTOGRAPHS, dim=128),
    "cifar10-uvit-s2": {
        "data": "cifar10",
        "model": "uvit/cifar10-s2",
        "steps": 500_000,
        "images": {"size": 32, "channels": 3, "flip": True},
        # The authors average without warm-up, which in their hundreds of thousands of steps makes no difference.
        "optimizer": {"lr": 2e-4, "betas": (0.99, 0.999), "warmup": 2500, "ema_rate": 0.9999, "ema_warmup": False},
        "hardware": {"precision": "fp32"},
        "checkpoints": {"save_every": 10_000, "keep_last": 3, "keep_every": 50_000},
        "logging": {"log_every": 100, "samples_every": 10_000, "samples": 100, "sampler_steps": 50},
    },
    "celeba64-uvit-s4": {
        "like": "cifar10-uvit-s2",
        "data": "celeba",
        "model": "uvit/celeba64-s4",
        "images": {"size": 64, "workers": 8},
        "optimizer": {"betas": (0.99, 0.99), "warmup": 5000},
    },
    "imagenet64-uvit-m4": {
        "like": "celeba64-uvit-s4",
        "data": "imagenet",
        "model": "uvit/imagenet64-m4",
        "steps": 300_000,
        "batch_size": 1024,
        # The authors train on labels without guidance, so there is no null class.
        "diffusion": {"condition": "class", "condition_dropout": 0.0},
        "optimizer": {"lr": 3e-4},
        "hardware": {"gradient_checkpointing": True},
    },
    "imagenet64-uvit-l4": {"like": "imagenet64-uvit-m4", "model": "uvit/imagenet64-l4"},
    "cifar10-unet": {
        "like": "cifar10-uvit-s2",
        "model": "unet/cifar10",
        "steps": 800_000,
        "diffusion": {"schedule": "ddpm"},
        "optimizer": {**_UNET, "warmup": 5000, "clip": 1.0},
    },
    "imagenet64-unet": {
        "like": "imagenet64-uvit-m4",
        "model": "unet/imagenet64",
        "steps": 500_000,
        "batch_size": 2048,
        "diffusion": {"schedule": "cosine"},
        "optimizer": {**_UNET, "lr": 1e-4, "warmup": 0},
    },
    # The images with their captions stand in `mscoco`, an AutoencoderKL such as stabilityai/sd-vae-ft-ema in
    # `weights/autoencoder`, openai/clip-vit-large-patch14 in `weights/text_encoder`; or other folders are given.
    "mscoco256-uvit-s2": {
        "like": "cifar10-uvit-s2",
        "data": "mscoco",
        "model": "uvit/mscoco256-s2",
        "steps": 1_000_000,
        "batch_size": 256,
        "images": {"size": 256, "flip": False, "autoencoder": "weights/autoencoder"},
        "diffusion": {"schedule": "sd", "condition": "text"},
        "text": {"text_encoder": "weights/text_encoder", "text_length": 77, "text_dim": 768},
        "optimizer": {"betas": (0.9, 0.9), "warmup": 5000},
    },
    "mscoco256-uvit-s2-deep": {"like": "mscoco256-uvit-s2", "model": "uvit/mscoco256-s2-deep"},
    "mscoco256-unet": {"like": "mscoco256-uvit-s2", "model": "unet/mscoco256"},
}
"""Each has the values of the one that it is `like`, or the defaults, and its own."""


def recipe(name: str) -> TrainConfig:
    if name not in RECIPES:
        raise InvalidConfigError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    own = dict(RECIPES[name])
    base = recipe(own.pop("like")) if "like" in own else None
    return from_dict(own, base)


# The default run folder. The same configuration gives the same folder, so that the same command continues.


def default_folder(config: TrainConfig, network_open: bool = False) -> Path:
    """runs/RECIPE-SCALING-seedN, with a short hash if it differs from the recipe in other things, too.

    `network_open`: the network is still to be chosen, and not in the name.
    """
    scaling = slug(config.scaling)
    for name in RECIPES:
        if _identity(config) == _identity(replace(recipe(name), scaling=config.scaling, seed=config.seed)):
            return Path("runs") / f"{name}-{scaling}-seed{config.seed}"
    data = slug(Path(config.data).name or "data")
    if Path(config.data).exists():  # a configuration that was written down has the absolute path
        config = replace(config, data=str(Path(config.data).absolute()))
    digest = hashlib.sha256(_identity(config).encode()).hexdigest()[:6]
    network = "" if network_open else f"{slug(config.model)}-"
    return Path("runs") / f"{data}-{network}{scaling}-seed{config.seed}-{digest}"


def _identity(config: TrainConfig) -> str:
    """The values that make the run what it is, as text. Defaults and the length of the run are left out; so is the
    precision, which a run chooses itself where none is given."""
    defaults, apart = result_values(TrainConfig()), ("steps", "hardware.precision")
    values = result_values(config)
    kept = {name: value for name, value in values.items() if name not in apart and value != defaults.get(name)}
    return json.dumps(kept, sort_keys=True)


def slug(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"
