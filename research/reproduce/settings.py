"""Where the methods are compared: data, network, depth, batch. `paper` for GPUs, `tiny` for two CPU cores."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from scalelong.runs.config import (
    CheckpointConfig,
    DiffusionConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
)
from scalelong.runs.recipes import recipe

Scale = Literal["tiny", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "paper")

TINY_STEPS = 600
PRESET_DEPTH = 12


@dataclass(frozen=True)
class Setting:
    """A run's configuration but for the method and the seed, under the name that our pages call it by."""

    name: str
    config: TrainConfig
    recipe: str = ""
    """The recipe that it follows, if it has one."""


def tiny_uvit(**changes: Any) -> TrainConfig:
    """Fashion-MNIST at 16x16 and a narrow U-ViT with N = 4 long skips: some 30 s on one core.

    The paper's objective without clipping of gradients, which would hide what scaling is for. Two things keep a small
    network from hiding it as well (docs/recipe.md), and are the same for all methods: the deviation of the initial
    weights is the authors' 0.02 scaled from width 512 to this one, so that inner skips are heard, and the last
    convolution starts as the identity, which takes a plateau away that has nothing to do with skips.

    The rate is the best one for no scaling of 2e-3, 4e-3 and 8e-3 (seed 0, step 600).
    """
    base = TrainConfig(
        data="fashion-mnist",
        model="uvit",
        model_options={
            "patch_size": 4,
            "dim": 64,
            "depth": 8,
            "heads": 4,
            "init_std": 0.0566,
            "final_start": "identity",
        },
        steps=TINY_STEPS,
        batch_size=8,
        images=ImagesConfig(size=16, channels=1, flip=True, held_out=256),
        diffusion=DiffusionConfig(schedule="vp", prediction="epsilon"),
        optimizer=OptimizerConfig(
            lr=4e-3, weight_decay=0.03, betas=(0.9, 0.99), warmup=50, ema_rate=0.99, ema_warmup=True
        ),
        checkpoints=CheckpointConfig(save_every=TINY_STEPS, keep_last=1),
        logging=LoggingConfig(
            log_every=50,
            trackers=(),
            held_out_every=50,
            samples_every=0,
            scores_every=TINY_STEPS,
            scores_images=500,
            sampler_steps=10,
        ),
    )
    return replace(base, **changes)


def tiny_unet() -> TrainConfig:
    """DDPM's UNet with two narrow levels and one block in each: N = 4 as well.

    The rate is the best one for no scaling of 1e-3, 2e-3 and 4e-3 (seed 0, step 500).
    """
    found = tiny_uvit(
        model="unet/cifar10",
        model_options={
            "block_out_channels": [16, 32],
            "down_block_types": ["DownBlock2D"] * 2,
            "up_block_types": ["UpBlock2D"] * 2,
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "add_attention": False,
            "dropout": 0.0,
        },
    )
    return replace(found, optimizer=replace(found.optimizer, lr=2e-3))


def base(scale: Scale) -> Setting:
    """U-ViT where the paper does most of its work."""
    return Setting("U-ViT", tiny_uvit()) if scale == "tiny" else _of_recipe("U-ViT", "cifar10-uvit-s2")


def depths(scale: Scale) -> list[Setting]:
    """N = 4 and 6 here; the paper's network and deeper ones there."""
    values = (8, 12) if scale == "tiny" else (12, 16, 20)
    return [_deeper(base(scale), depth) for depth in values]


def _deeper(start: Setting, depth: int) -> Setting:
    # The usual depth of a preset needs no option, so that the run is that of the other items.
    usual = start.config.model_options.get("depth", PRESET_DEPTH)
    options = {**start.config.model_options, "depth": depth}
    config = start.config if depth == usual else replace(start.config, model_options=options)
    return replace(start, name=f"depth {depth}", config=config)


def deepest(scale: Scale) -> Setting:
    return depths(scale)[-1]


def batch_sizes(scale: Scale) -> list[Setting]:
    values = (2, 8) if scale == "tiny" else (32, 64, 128)
    start = base(scale)
    return [replace(start, name=f"batch {value}", config=replace(start.config, batch_size=value)) for value in values]


def unet(scale: Scale) -> Setting:
    return Setting("UNet", tiny_unet()) if scale == "tiny" else _of_recipe("UNet", "cifar10-unet")


def other_data(scale: Scale) -> list[Setting]:
    """U-ViT on other data than the base setting's; two cores have no time for them."""
    if scale == "tiny":
        return []
    return [
        _of_recipe("U-ViT-S/4, CelebA 64", "celeba64-uvit-s4"),
        _of_recipe("U-ViT-M/4, ImageNet 64", "imagenet64-uvit-m4"),
        _of_recipe("U-ViT-L/4, ImageNet 64", "imagenet64-uvit-l4"),
        _of_recipe("U-ViT-S/2, MS-COCO 256", "mscoco256-uvit-s2"),
    ]


def other_unets(scale: Scale) -> list[Setting]:
    if scale == "tiny":
        return []
    return [
        _of_recipe("UNet, ImageNet 64", "imagenet64-unet"),
        _of_recipe("UNet, MS-COCO 256", "mscoco256-unet"),
    ]


def _of_recipe(name: str, followed: str) -> Setting:
    """A recipe of the paper as a comparison needs it: with a held-out loss, and scores of 10,000 images."""
    config = recipe(followed)
    judged = replace(
        config,
        images=replace(config.images, held_out=1280),
        logging=replace(config.logging, trackers=(), held_out_every=5000, scores_every=50_000, scores_images=10_000),
    )
    return Setting(name, judged, followed)
