"""Which κ is best, and which estimator would have found it: a grid of very small runs, for one CPU core.

    python -m research.kappa_validation --data FOLDER --results docs/evidence/kappa/validation.json

FOLDER holds Fashion-MNIST in its own IDX files. Giving the same command again goes on where it stopped. The answers of
estimators A and B go to estimates.json beside the results. `python -m research.kappa_regret` reads both.
"""

import argparse
import gzip
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalelong.files import write_text
from scalelong.kappa import GRID, PilotRun, choose_kappa
from scalelong.models import SkipMerge
from scalelong.scaling import BalancedScaling, ConstantScaling, NoScaling, Scaling, UniformScaling
from scalelong.skips import scale_skips_
from scalelong.theory.moments import noisy_batch
from scalelong.theory.sensitivity import skip_sensitivities

SEEDS = (0, 1, 2)
HELD_OUT = 512


class Recipe(NamedTuple):
    learning_rate: float
    batch_size: int
    steps: tuple[int, ...]
    """When the held-out loss is measured; the last is the end."""


# By architecture and depth. Long enough to leave the first plateau: before that, all methods look alike.
RECIPES = {
    ("uvit", 8): Recipe(learning_rate=8e-3, batch_size=16, steps=(50, 100, 200, 400)),
    ("unet", 1): Recipe(learning_rate=2e-3, batch_size=16, steps=(15, 30, 60, 120)),
    ("uvit", 16): Recipe(learning_rate=8e-3, batch_size=16, steps=(20, 40, 80, 160)),
    ("unet", 2): Recipe(learning_rate=2e-3, batch_size=16, steps=(15, 30, 60, 120)),
}
METHODS = (*(f"cs:{kappa}" for kappa in GRID), "uniform", "balanced")


def fashion_mnist(folder: Path, name: str = "train-images-idx3-ubyte.gz") -> Tensor:
    """The images as (n, 1, 8, 8) in [-1, 1]: 28x28 padded to 32x32, then averaged over 4x4."""
    with gzip.open(folder / name) as file:
        header, pixels = file.read(16), torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    images = pixels.view(int.from_bytes(header[4:8], "big"), 1, 28, 28).float() / 127.5 - 1
    return nn.functional.avg_pool2d(nn.functional.pad(images, (2, 2, 2, 2), value=-1.0), 4)


def widen_(model: nn.Module) -> nn.Module:
    """A narrow U-ViT with the merges of a wide one, in place.

    U-ViT draws all matrices with a standard deviation of 0.02, made for width 512. In a narrow network this would all
    but cut the inner skips; with 0.02 √(512/width) the merges have the gain that they have at full size.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | SkipMerge):
                module.weight.mul_((512 / model.dim) ** 0.5)  # pyright: ignore
    return model


def build(architecture: str, depth: int) -> nn.Module:
    """A small U-ViT of `depth` blocks (N = depth / 2), or a small UNet of `depth` layers per resolution."""
    if architecture == "uvit":
        from scalelong.models.uvit import UViT

        sizes: Any = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 32, "depth": depth, "heads": 4}
        return widen_(UViT(**sizes, init_std=0.02, final_start="authors"))
    from diffusers.models.unets.unet_2d import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=depth,
        block_out_channels=(16, 32, 32) if depth == 1 else (16, 16, 16),
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
        norm_num_groups=8,
        add_attention=False,
    )


def method_config(method: str, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Scaling:
    if method.startswith("cs:"):
        kappa = float(method[3:])
        return NoScaling() if kappa == 1 else ConstantScaling(kappa)
    if method == "balanced":
        return BalancedScaling(tuple(skip_sensitivities(model, *inputs)))
    return UniformScaling()


def run(images: Tensor, architecture: str, depth: int, method: str, seed: int) -> dict[str, Any]:
    started, recipe = time.perf_counter(), RECIPES[architecture, depth]
    torch.manual_seed(seed)
    model = build(architecture, depth)
    example = noisy_batch(images[HELD_OUT : HELD_OUT + 32])[:2]
    config = method_config(method, model, example)
    if not isinstance(config, NoScaling):
        scale_skips_(model, config, example_inputs=example)
    pilot = PilotRun(
        model,
        images[HELD_OUT:],
        images[:HELD_OUT],
        seed=seed,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        warmup=recipe.steps[0],
    )
    losses = {}
    for steps in recipe.steps:
        pilot.advance(steps - pilot.steps_done)
        losses[steps] = round(pilot.held_out_loss(), 6)
    return {
        "architecture": architecture,
        "depth": depth,
        "method": method,
        "seed": seed,
        "scaling": config.to_dict(),
        "held_out_loss": losses,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Fashion-MNIST's IDX files")
    parser.add_argument("--results", type=Path, required=True, help="JSON file, appended to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = fashion_mnist(options.data)
    results = json.loads(options.results.read_text()) if options.results.exists() else []
    done = {(r["architecture"], r["depth"], r["method"], r["seed"]) for r in results}
    # Seeds outermost: an interrupted experiment has compared all methods on the seeds that it finished.
    for seed in SEEDS:
        for architecture, depth in RECIPES:
            for method in METHODS:
                if (architecture, depth, method, seed) not in done:
                    results.append(run(images, architecture, depth, method, seed))
                    write_records(options.results, results)
                    print(json.dumps(results[-1]), flush=True)
    write_estimates(images, options.results.with_name("estimates.json"))
    return 0


def write_estimates(images: Tensor, path: Path) -> None:
    """What estimators A and B answer for each network and seed, before any training."""
    estimates = []
    for architecture, depth in RECIPES:
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = build(architecture, depth)
            for method in ("data", "network"):
                choice = choose_kappa(model, images[HELD_OUT : HELD_OUT + 4096], method=method)
                estimates.append({"architecture": architecture, "depth": depth, "seed": seed, **asdict(choice)})
    write_records(path, estimates)


def write_records(path: Path, results: list[dict[str, Any]]) -> None:
    """A JSON list with one line per record, replaced in one go, so that an interruption leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")


if __name__ == "__main__":
    raise SystemExit(main())
