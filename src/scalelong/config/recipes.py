"""Runs by name: every setting of the paper, and small ones that learn something visible on a CPU in minutes.

U-ViT's numbers are those of its authors' configurations. The paper says of its UNets only which networks they follow:
DDPM for CIFAR-10 and IDDPM for ImageNet 64, so their numbers are those of these papers.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError
from .fields import result_values
from .train import (
    CheckpointConfig,
    DiffusionConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TextConfig,
    TrainConfig,
)

_LONG = CheckpointConfig(save_every=10_000, keep_last=3, keep_every=50_000)
_LONG_LOGGING = LoggingConfig(log_every=100, samples_every=10_000, samples=100, sampler_steps=50)
# The authors average without warm-up, which in their hundreds of thousands of steps makes no difference.
_AUTHORS_AVERAGE: dict[str, Any] = {"ema_rate": 0.9999, "ema_warmup": False}
_AUTHORS_PRECISION = HardwareConfig(precision="fp32")


def cifar10_uvit_s2() -> TrainConfig:
    """U-ViT-S/2, unconditional CIFAR-10, 44M parameters."""
    return TrainConfig(
        data="cifar10",
        model="uvit/cifar10-s2",
        steps=500_000,
        batch_size=128,
        images=ImagesConfig(size=32, channels=3, flip=True),
        optimizer=OptimizerConfig(lr=2e-4, betas=(0.99, 0.999), warmup=2500, **_AUTHORS_AVERAGE),
        hardware=_AUTHORS_PRECISION,
        checkpoints=_LONG,
        logging=_LONG_LOGGING,
    )


def celeba64_uvit_s4() -> TrainConfig:
    """U-ViT-S/4, unconditional CelebA 64x64, 44M parameters."""
    return replace(
        cifar10_uvit_s2(),
        data="celeba",
        model="uvit/celeba64-s4",
        images=ImagesConfig(size=64, channels=3, flip=True, workers=8),
        optimizer=OptimizerConfig(lr=2e-4, betas=(0.99, 0.99), warmup=5000, **_AUTHORS_AVERAGE),
    )


def imagenet64_uvit_m4() -> TrainConfig:
    """U-ViT-M/4, class-conditional ImageNet 64x64, 131M parameters."""
    base = celeba64_uvit_s4()
    return replace(
        base,
        data="imagenet",
        model="uvit/imagenet64-m4",
        steps=300_000,
        batch_size=1024,
        # The authors train on labels without guidance, so there is no null class.
        diffusion=DiffusionConfig(condition="class", condition_dropout=0.0),
        optimizer=replace(base.optimizer, lr=3e-4),
        hardware=replace(base.hardware, gradient_checkpointing=True),
    )


def imagenet64_uvit_l4() -> TrainConfig:
    """U-ViT-L/4, class-conditional ImageNet 64x64, 287M parameters."""
    return replace(imagenet64_uvit_m4(), model="uvit/imagenet64-l4")


def cifar10_unet() -> TrainConfig:
    """DDPM's UNet, unconditional CIFAR-10, 36M parameters."""
    return replace(
        cifar10_uvit_s2(),
        model="unet/cifar10",
        steps=800_000,
        diffusion=DiffusionConfig(schedule="ddpm"),
        optimizer=OptimizerConfig(
            lr=2e-4, weight_decay=0.0, betas=(0.9, 0.999), warmup=5000, clip=1.0, **_AUTHORS_AVERAGE
        ),
    )


def imagenet64_unet() -> TrainConfig:
    """IDDPM's UNet, class-conditional ImageNet 64x64, 144M parameters."""
    return replace(
        imagenet64_uvit_m4(),
        model="unet/imagenet64",
        steps=500_000,
        batch_size=2048,
        diffusion=DiffusionConfig(schedule="cosine", condition="class", condition_dropout=0.0),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, betas=(0.9, 0.999), **_AUTHORS_AVERAGE),
    )


def mscoco256_uvit_s2() -> TrainConfig:
    """U-ViT-S/2, text to image on MS-COCO 256x256, 45M parameters, on latents.

    Put the images with their captions into `mscoco`, an AutoencoderKL such as stabilityai/sd-vae-ft-ema into
    `weights/autoencoder`, and openai/clip-vit-large-patch14 into `weights/text_encoder`, or give other folders.
    """
    return TrainConfig(
        data="mscoco",
        model="uvit/mscoco256-s2",
        steps=1_000_000,
        batch_size=256,
        images=ImagesConfig(size=256, channels=3, autoencoder="weights/autoencoder"),
        diffusion=DiffusionConfig(schedule="sd", condition="text", condition_dropout=0.1),
        text=TextConfig(text_encoder="weights/text_encoder", text_length=77, text_dim=768),
        optimizer=OptimizerConfig(lr=2e-4, betas=(0.9, 0.9), warmup=5000, **_AUTHORS_AVERAGE),
        hardware=_AUTHORS_PRECISION,
        checkpoints=_LONG,
        logging=_LONG_LOGGING,
    )


def mscoco256_uvit_s2_deep() -> TrainConfig:
    """U-ViT-S/2 with 17 blocks, text to image on MS-COCO 256x256, 58M parameters, on latents."""
    return replace(mscoco256_uvit_s2(), model="uvit/mscoco256-s2-deep")


def mscoco256_unet() -> TrainConfig:
    """A UNet with cross-attention, text to image on MS-COCO 256x256, 53M parameters, on latents."""
    return replace(mscoco256_uvit_s2(), model="unet/mscoco256")


def _tiny(data: str, size: int, channels: int, patch_size: int, dim: int, steps: int) -> TrainConfig:
    """A small U-ViT that two CPU cores train in minutes. Small batches: on a CPU, more steps beat larger ones."""
    return TrainConfig(
        data=data,
        model="uvit",
        model_options={"patch_size": patch_size, "dim": dim, "depth": 6, "heads": 4},
        steps=steps,
        batch_size=32,
        images=ImagesConfig(size=size, channels=channels),
        # A network that predicts ε must get it right to a hundredth where there is almost nothing but noise before
        # its samples look like anything; one that predicts v needs not, and shows something much earlier.
        diffusion=DiffusionConfig(prediction="v"),
        optimizer=OptimizerConfig(
            lr=2e-3, weight_decay=0.03, betas=(0.9, 0.99), warmup=100, clip=1.0, ema_rate=0.997, ema_warmup=True
        ),
        checkpoints=CheckpointConfig(save_every=500, keep_last=2),
        logging=LoggingConfig(log_every=50, samples=64, sampler_steps=25),
    )


def digits_tiny() -> TrainConfig:
    """Handwritten digits of 8x8 pixels, which come with the package."""
    base = _tiny("digits", 8, 1, patch_size=2, dim=96, steps=5000)
    return replace(base, images=replace(base.images, held_out=297))


def digits_class_tiny() -> TrainConfig:
    """Handwritten digits by class: `scalelong sample RUN --class 3 --guidance 2`."""
    base = digits_tiny()
    return replace(
        base,
        model_options={**base.model_options, "depth": 4},
        steps=1500,
        diffusion=replace(base.diffusion, condition="class"),
        optimizer=replace(base.optimizer, lr=1e-3),
        scaling="cs",
    )


def shapes_text_tiny() -> TrainConfig:
    """Drawn shapes from a text: `scalelong sample RUN --prompt "a red circle at the top left" --guidance 3`."""
    base = _tiny("shapes", 16, 3, patch_size=4, dim=96, steps=4000)
    return replace(
        base,
        model_options={**base.model_options, "depth": 4},
        diffusion=replace(base.diffusion, condition="text"),
        text=TextConfig(text_encoder="words", text_length=8, text_dim=64),
        optimizer=replace(base.optimizer, lr=1e-3),
        scaling="cs",
    )


def _tiny_photographs(data: str, channels: int, dim: int, steps: int) -> TrainConfig:
    """At 16x16 in patches of 2x2: patches of 4x4 at full size are about as many, and their grain takes far longer."""
    base = _tiny(data, 16, channels, patch_size=2, dim=dim, steps=steps)
    return replace(
        base,
        # The authors' deviation of 0.02 is for widths of 512 and more.
        model_options={**base.model_options, "depth": 4, "init_std": 0.06},
        images=replace(base.images, held_out=1000, flip=True),
    )


def fashion_tiny() -> TrainConfig:
    """Fashion-MNIST at 16x16: garments are recognisable from about step 1000."""
    return _tiny_photographs("fashion-mnist", channels=1, dim=96, steps=3000)


def cifar10_tiny() -> TrainConfig:
    """CIFAR-10 at 16x16."""
    return _tiny_photographs("cifar10", channels=3, dim=128, steps=5000)


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "digits-tiny": digits_tiny,
    "digits-class-tiny": digits_class_tiny,
    "shapes-text-tiny": shapes_text_tiny,
    "fashion-tiny": fashion_tiny,
    "cifar10-tiny": cifar10_tiny,
    "cifar10-uvit-s2": cifar10_uvit_s2,
    "celeba64-uvit-s4": celeba64_uvit_s4,
    "imagenet64-uvit-m4": imagenet64_uvit_m4,
    "imagenet64-uvit-l4": imagenet64_uvit_l4,
    "cifar10-unet": cifar10_unet,
    "imagenet64-unet": imagenet64_unet,
    "mscoco256-uvit-s2": mscoco256_uvit_s2,
    "mscoco256-uvit-s2-deep": mscoco256_uvit_s2_deep,
    "mscoco256-unet": mscoco256_unet,
}


def recipe(name: str) -> TrainConfig:
    if name not in RECIPES:
        raise InvalidConfigError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]()


# The default run folder. The same configuration gives the same folder, so that the same command continues.


def default_folder(config: TrainConfig, network_open: bool = False) -> Path:
    """runs/RECIPE-SCALING-seedN, with a short hash if it differs from the recipe in other things, too.

    `network_open`: the network is still to be chosen, and not in the name.
    """
    scaling = _slug(config.scaling)
    for name in RECIPES:
        if _identity(config) == _identity(replace(recipe(name), scaling=config.scaling, seed=config.seed)):
            return Path("runs") / f"{name}-{scaling}-seed{config.seed}"
    data = _slug(Path(config.data).name or "data")
    if Path(config.data).exists():  # a configuration that was written down has the absolute path
        config = replace(config, data=str(Path(config.data).absolute()))
    digest = hashlib.sha256(_identity(config).encode()).hexdigest()[:6]
    network = "" if network_open else f"{_slug(config.model)}-"
    return Path("runs") / f"{data}-{network}{scaling}-seed{config.seed}-{digest}"


def _identity(config: TrainConfig) -> str:
    """The values that make the run what it is, as text. Defaults and the length of the run are left out; so is the
    precision, which a run that was told none has chosen itself."""
    defaults, apart = result_values(TrainConfig()), ("steps", "hardware.precision")
    values = result_values(config)
    kept = {name: value for name, value in values.items() if name not in apart and value != defaults.get(name)}
    return json.dumps(kept, sort_keys=True)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"
