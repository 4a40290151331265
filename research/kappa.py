"""Which κ is best, and which estimator would have found it."""

import argparse
import gzip
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalelong.commands.theory import load_images
from scalelong.console import text_table
from scalelong.kappa import GRID, PilotRun, choose_kappa
from scalelong.models import SkipMerge, UViT
from scalelong.scaling import BalancedScaling, ConstantScaling, NoScaling, Scaling, UniformScaling
from scalelong.skips import scale_skips_
from scalelong.theory.moments import noisy_batch
from scalelong.theory.sensitivity import skip_sensitivities

# Which κ is best, and which estimator would have found it: a grid of very small runs, for one CPU core.
#
#     python -m research.kappa --data FOLDER --results docs/evidence/kappa/validation.json
#
# FOLDER holds Fashion-MNIST in its own IDX files. Giving the same command again goes on where it stopped. The answers
# of
# estimators A and B go to estimates.json beside the results. `python -m research.kappa` reads both.

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


def validation_main(arguments: list[str] | None = None) -> int:
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
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    raise SystemExit(validation_main())


# The table and figure of the κ validation, from its stored results.
#
#     python -m research.kappa docs/evidence/kappa --figure docs/figures/kappa.png
#
# Regret: by how many percent the final held-out loss of a choice exceeds that of the grid's best κ, both as means over
# seeds. A κ between two values of the grid gets the loss on the line between theirs. Estimator C is replayed from the
# stored losses: a pilot of half the length on one seed picks, the other seeds judge.

Key = tuple[str, int]


class Evidence(NamedTuple):
    """Of one network: losses[method][seed][step], and estimates[method][seed]."""

    losses: dict[str, dict[int, dict[int, float]]]
    estimates: dict[str, dict[int, float]]

    @property
    def seeds(self) -> list[int]:
        """Seeds that all methods have run."""
        return sorted(set.intersection(*(set(runs) for runs in self.losses.values())))

    @property
    def grid(self) -> dict[float, str]:
        """The methods that are CS with some κ, by κ, in ascending order."""
        return dict(sorted((float(method[3:]), method) for method in self.losses if method.startswith("cs:")))

    def final(self, method: str, seed: int) -> float:
        run = self.losses[method][seed]
        return run[max(run)]

    def at(self, kappa: float, seed: int) -> float:
        """The final loss of any κ: that of the grid, linear in between, constant beyond its ends."""
        kappas = list(self.grid)
        below = max([value for value in kappas if value <= kappa], default=kappas[0])
        above = min([value for value in kappas if value >= kappa], default=kappas[-1])
        low, high = self.final(self.grid[below], seed), self.final(self.grid[above], seed)
        return low if above <= below else low + (high - low) * (kappa - below) / (above - below)


def load(folder: Path) -> dict[Key, Evidence]:
    evidence: dict[Key, Evidence] = {}
    for run in json.loads((folder / "validation.json").read_text()):
        found = evidence.setdefault((run["architecture"], run["depth"]), Evidence({}, {}))
        steps = {int(step): _number(loss) for step, loss in run["held_out_loss"].items()}
        found.losses.setdefault(run["method"], {})[run["seed"]] = steps
    for answer in json.loads((folder / "estimates.json").read_text()):
        found = evidence.get((answer["architecture"], answer["depth"]))
        if found is not None:
            for name in ("kappa", "low"):
                label = answer["method"] if name == "kappa" else f"{answer['method']} (low end)"
                found.estimates.setdefault(label, {})[answer["seed"]] = answer[name]
    return evidence


def pilot_pick(evidence: Evidence, seed: int) -> float:
    """Estimator C on one seed: successive halving at 1/8 and 1/4 of the full length, decided at half of it."""
    alive = list(evidence.grid)
    *rungs, decision = sorted(evidence.losses[evidence.grid[1.0]][seed])[:-1]
    for rung in rungs:
        ranked = sorted(alive, key=lambda kappa: evidence.losses[evidence.grid[kappa]][seed][rung])
        alive = ranked[: max(2, math.ceil(len(ranked) / 2))]
    return min(alive, key=lambda kappa: evidence.losses[evidence.grid[kappa]][seed][decision])


def choices(evidence: Evidence) -> dict[str, Callable[[int], float]]:
    """The mean loss of each way to choose, as a function of a judging seed."""

    def estimated(name: str) -> Callable[[int], float]:
        return lambda seed: evidence.at(evidence.estimates[name][seed], seed)

    def piloted(seed: int) -> float:
        others = [other for other in evidence.seeds if other != seed]
        return sum(evidence.at(pilot_pick(evidence, other), seed) for other in others) / len(others)

    found: dict[str, Callable[[int], float]] = {
        "A, " + name: estimated(name) for name in evidence.estimates if "data" in name
    }
    found |= {"B, " + name: estimated(name) for name in evidence.estimates if "network" in name}
    if len(evidence.seeds) > 1:
        found["C, pilot"] = piloted
    found["κ = 0.7"] = lambda seed: evidence.at(0.7, seed)
    found["no scaling"] = lambda seed: evidence.at(1.0, seed)
    found["1/√2 uniform"] = lambda seed: evidence.final("uniform", seed)
    found["balanced(0.7)"] = lambda seed: evidence.final("balanced", seed)
    return found


def regret_rows(evidence: dict[Key, Evidence]) -> list[dict[str, Any]]:
    """One row per way to choose: mean regret in % per network, with its standard error over seeds, and over all."""
    names = list(choices(next(iter(evidence.values()))))
    rows = []
    for name in names:
        row: dict[str, Any] = {"choice": name}
        overall = []
        for key, found in evidence.items():
            best = min(found.grid, key=lambda kappa: _mean([found.at(kappa, seed) for seed in found.seeds]))
            way = choices(found)[name]
            regrets = [100 * (way(seed) / found.at(best, seed) - 1) for seed in found.seeds]
            overall.append(_mean(regrets))
            row[_title(key)] = f"{_mean(regrets):+.1f} ± {_error(regrets):.1f}"
        row["mean"] = round(_mean(overall), 2)
        rows.append(row)
    return rows


def grid_rows(evidence: dict[Key, Evidence]) -> list[dict[str, Any]]:
    """One row per network and κ or method: the final held-out loss of every seed."""
    rows = []
    for key, found in evidence.items():
        for method in found.losses:
            losses = [found.final(method, seed) for seed in found.seeds]
            row: dict[str, Any] = {"network": _title(key), "method": method, "mean": round(_mean(losses), 5)}
            rows.append(row | {f"seed {seed}": loss for seed, loss in zip(found.seeds, losses, strict=True)})
    return rows


def draw(evidence: dict[Key, Evidence], path: Path) -> None:
    """Final loss against κ, relative to the best mean: seeds thin, their mean thick, estimators as vertical lines."""
    from scalelong.theory.checks import new_figure, save

    figure, axes = new_figure(len(evidence))
    figure.set_size_inches(3.2 * len(evidence), 3.0)
    for axis, (key, found) in zip(axes, evidence.items(), strict=True):
        kappas = list(found.grid)
        means = [_mean([found.at(kappa, seed) for seed in found.seeds]) for kappa in kappas]
        for seed in found.seeds:
            axis.plot(kappas, [found.at(kappa, seed) / min(means) for kappa in kappas], color="gray", linewidth=0.7)
        axis.plot(kappas, [mean / min(means) for mean in means], "o-", markersize=4)
        for color, name in (("tab:green", "data"), ("tab:red", "network")):
            axis.axvline(_mean(list(found.estimates[name].values())), color=color, linestyle="--", label=name)
        axis.set(title=_title(key), xlabel="κ of CS")
    axes[0].set_ylabel("held-out loss / best")
    axes[0].legend(fontsize=7)
    save(figure, path)


def regret_main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with validation.json and estimates.json")
    parser.add_argument("--figure", type=Path, help="PNG or SVG file to draw")
    options = parser.parse_args(arguments)
    evidence = load(options.folder)
    print(text_table(grid_rows(evidence)))
    print(f"\nRegret in % of the grid's best, mean ± standard error over seeds\n{text_table(regret_rows(evidence))}")
    if options.figure is not None:
        draw(evidence, options.figure)
    return 0


def _title(key: Key) -> str:
    names = {("uvit", 8): "U-ViT N=4", ("uvit", 16): "U-ViT N=8", ("unet", 1): "UNet N=6", ("unet", 2): "UNet N=9"}
    return names.get(key, f"{key[0]} {key[1]}")


def _number(loss: Any) -> float:
    return math.inf if loss is None else float(loss)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


if __name__ == "__main__":
    raise SystemExit(regret_main())


# What the three estimators answer for a small U-ViT on real data.
#
# python -m research.kappa --data fashion-mnist --data cifar10 --results FILE.json

SIZE, DEPTH = 16, 12


def small_uvit(channels: int) -> nn.Module:
    sizes: Any = {"image_size": SIZE, "patch_size": 4, "channels": channels, "dim": 32, "depth": DEPTH, "heads": 4}
    return widen_(UViT(**sizes, init_std=0.02, final_start="authors"))


def answers_main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="a data set; repeatable")
    parser.add_argument("--results", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    answers = []
    for spec in options.data:
        images = load_images(spec, size=SIZE)

        def build(channels: int = images.shape[1]) -> nn.Module:
            return small_uvit(channels)

        torch.manual_seed(0)
        for method in ("data", "network", "pilot"):
            pilot = {"steps": 120, "seeds": 1, "learning_rate": 8e-3, "batch_size": 16} if method == "pilot" else {}
            choice = choose_kappa(build, images, method=method, **pilot)
            answers.append({"data": spec, **asdict(choice)})
            print(f"{spec}: {choice}\n", flush=True)
    write_records(options.results, answers)
    print(text_table([{key: answer[key] for key in ("data", "method", "kappa", "low", "high")} for answer in answers]))
    return 0


if __name__ == "__main__":
    raise SystemExit(answers_main())
