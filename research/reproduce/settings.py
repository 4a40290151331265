"""Where and what the methods are compared: settings, methods, and the runs that they need."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from scalelong.config import (
    CheckpointConfig,
    DiffusionConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
    differences,
    recipe,
    slug,
    with_values,
)
from scalelong.experiments import PlannedRun

# Where the methods are compared: data, network, depth, batch. `paper` for GPUs, `tiny` for two CPU cores.

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
    network from hiding it as well (docs/evidence/recipe), and are the same for all: the deviation of the initial
    weights is the authors' 0.02 scaled from width 512 to this one, so that inner skips count, and the last
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


# The methods that the paper compares, under the names that our pages call them by.


@dataclass(frozen=True)
class Method:
    """A row of a table: a scaling of the long skips, or other options of the network."""

    label: str
    scaling: str = "none"
    model_options: dict[str, Any] = field(default_factory=dict)


NONE = Method("none")
UNIFORM = Method("1/√2", "uniform")
CS = Method("CS(0.7)", "cs:0.7")
# The paper's LS begins where its authors' code begins, at about 0.5 for every skip; ours begins on the curve of CS.
LS = Method("LS", "ls:start=paper")
LS_FROM_CS = Method("LS from CS", "ls:start=cs")
REVERSED = Method("CS(0.7) reversed", "cs:kappa=0.7,reverse=true")

PAPER = (NONE, UNIFORM, CS, LS)
"""The rows that almost every figure and table of the paper has."""

CORE = (*PAPER, LS_FROM_CS)

KAPPAS = (Method("CS(0.5)", "cs:0.5"), Method("CS(0.9)", "cs:0.9"))
"""Towards the ends of the range that Section 4.1 suggests, beside CS(0.7)."""

LS_RATIOS = tuple(Method(f"LS, ratio {ratio}", f"ls:start=paper,ratio={ratio}") for ratio in (4, 8))
LS_ACTIVATIONS = tuple(Method(f"LS, {name}", f"ls:start=paper,activation={name.lower()}") for name in ("ELU", "Mish"))
LS_SCALAR = Method("LS, scalars", "ls:start=paper,module=scalar")
LS_IE = Method("LS, IE", "ls:start=paper,module=ie")
LS_PER_SKIP = Method("LS, per skip", "ls:start=paper,shared=false")

STABLE = tuple(Method(f"stable τ = {tau}", model_options={"residual_scaling": tau}) for tau in (0.1, 0.3))
REZERO = Method("ReZero", model_options={"residual_scaling": "rezero"})


# Arms of an experiment, a method in a setting, and the runs that they need. Equal configurations are one run.


@dataclass(frozen=True)
class Arm:
    setting: Setting
    method: Method

    def config(self, seed: int) -> TrainConfig:
        start = self.setting.config
        options = {**start.model_options, **self.method.model_options}
        return replace(start, scaling=self.method.scaling, model_options=options, seed=seed)

    def run(self, seed: int, folder: Path) -> PlannedRun:
        config = self.config(seed)
        options = {f"model_options.{name}": value for name, value in self.method.model_options.items()}
        changes = {"scaling": self.method.scaling, **options}
        return PlannedRun(self.method.label, seed, folder / run_name(config), config, changes)


def arms(settings: Iterable[Setting], methods: Sequence[Method]) -> list[Arm]:
    return [Arm(setting, method) for setting in settings for method in methods]


def run_name(config: TrainConfig) -> str:
    """The configuration as the name of a folder: arms of different items that agree share the run."""
    # What differs from the defaults, so that a new option with a default does not rename old runs.
    identity = {name: value for name, (_, value) in sorted(differences(TrainConfig(), config).items())}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    model = config.model.partition(":")[2] or config.model
    return f"{slug(config.data)}-{slug(model)}-{slug(config.scaling)}-seed{config.seed}-{digest}"


def planned(wanted: Sequence[Arm], seeds: int, folder: Path) -> list[PlannedRun]:
    """Each run once. Seed by seed, so that what an interrupted command leaves holds complete seeds."""
    found = {run.folder: run for seed in range(seeds) for run in (arm.run(seed, folder) for arm in wanted)}
    # Which precision is faster depends on the machine, and a study must not.
    return [
        replace(run, config=with_values(run.config, {"hardware.precision": "fp32"}))
        if run.config.hardware.precision == "auto"
        else run
        for run in found.values()
    ]
