"""Which κ is best, and which estimator would have found it: very small runs, for one CPU core.

    python -m research.kappa run --data fashion-mnist --results docs/evidence/kappa/validation.json
    python -m research.kappa regret docs/evidence/kappa --figure docs/figures/kappa.png
    python -m research.kappa answers --data fashion-mnist --data cifar10 --results docs/evidence/kappa/answers.json

`run` trains a grid of κ in four networks; giving the same command again goes on where it stopped. The answers of
estimators A and B go to estimates.json beside the results. `regret` makes table and figure of both. `answers` asks all
three estimators about a small U-ViT on real data.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scalelong.console import text_table
from scalelong.data import load_data
from scalelong.errors import InvalidConfigError
from scalelong.experiments.figures import legend, panels, save
from scalelong.experiments.records import Curve, RunRecord
from scalelong.experiments.results import Results
from scalelong.experiments.runs import exit_code
from scalelong.files import write_text
from scalelong.kappa import GRID, PilotRun, choose_kappa
from scalelong.models import SkipMerge, UViT
from scalelong.scaling import BalancedScaling, ConstantScaling, NoScaling, Scaling, UniformScaling
from scalelong.skips import scale_skips_
from scalelong.theory.moments import noisy_batch
from scalelong.theory.sensitivity import skip_sensitivities

# The grid of runs

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


def fashion_mnist(spec: str) -> Tensor:
    """The images as (n, 1, 8, 8) in [-1, 1]: 28x28 padded to 32x32, then averaged over 4x4."""
    data = load_data(spec)
    if (data.channels, data.height, data.width) != (1, 28, 28):
        raise InvalidConfigError(
            f"the runs of κ need gray images of 28x28, as Fashion-MNIST has; {spec} has {data.channels} channel(s) of "
            f"{data.height}x{data.width}"
        )
    images = data.fetch(torch.arange(len(data))).images.float() / 127.5 - 1
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


def run_grid(spec: str, path: Path) -> None:
    """All runs that the file of results does not have yet, and what the estimators answer."""
    images = fashion_mnist(spec)
    results = json.loads(path.read_text()) if path.exists() else []
    done = {(r["architecture"], r["depth"], r["method"], r["seed"]) for r in results}
    # Seeds outermost: an interrupted experiment has compared all methods on the seeds that it finished.
    for seed in SEEDS:
        for architecture, depth in RECIPES:
            for method in METHODS:
                if (architecture, depth, method, seed) not in done:
                    results.append(run(images, architecture, depth, method, seed))
                    write_records(path, results)
                    print(json.dumps(results[-1]), flush=True)
    write_estimates(images, path.with_name("estimates.json"))


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
    """A JSON list with one line per record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")


# Table and figure from the stored results
#
# Regret: by how many percent the final held-out loss of a choice exceeds that of the grid's best κ, both as means over
# seeds. A κ between two values of the grid gets the loss on the line between theirs. Estimator C is replayed from the
# stored losses: a pilot of half the length on one seed picks, the other seeds judge.

Key = tuple[str, int]


@dataclass(frozen=True)
class KappaResults(Results):
    """The runs of one network, and what estimators answered: estimates[method][seed]."""

    estimates: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Seeds that all methods have run."""
        return sorted(set.intersection(*({run.seed for run in self.of(method)} for method in self.methods())))

    @property
    def grid(self) -> dict[float, str]:
        """The methods that are CS with some κ, by κ, in ascending order."""
        return dict(sorted((float(method[3:]), method) for method in self.methods() if method.startswith("cs:")))

    def curve(self, method: str, seed: int) -> Curve:
        return next(run.held_out for run in self.runs if (run.method, run.seed) == (method, seed))

    def final(self, method: str, seed: int) -> float:
        return self.curve(method, seed).values[-1]

    def at(self, kappa: float, seed: int) -> float:
        """The final loss of any κ: that of the grid, linear in between, constant beyond its ends."""
        kappas = list(self.grid)
        below = max([value for value in kappas if value <= kappa], default=kappas[0])
        above = min([value for value in kappas if value >= kappa], default=kappas[-1])
        low, high = self.final(self.grid[below], seed), self.final(self.grid[above], seed)
        return low if above <= below else low + (high - low) * (kappa - below) / (above - below)


def load(folder: Path) -> dict[Key, KappaResults]:
    """By network: its runs from validation.json, and the answers from estimates.json."""
    runs: dict[Key, list[RunRecord]] = {}
    for stored in json.loads((folder / "validation.json").read_text()):
        key = (stored["architecture"], stored["depth"])
        losses = {
            int(step): math.inf if loss is None else float(loss) for step, loss in stored["held_out_loss"].items()
        }
        curve = Curve(tuple(sorted(losses)), tuple(losses[step] for step in sorted(losses)))
        record = RunRecord(method=stored["method"], seed=stored["seed"], setting=_title(key), held_out=curve)
        runs.setdefault(key, []).append(record)
    found = {key: KappaResults(mine) for key, mine in runs.items()}
    for answer in json.loads((folder / "estimates.json").read_text()):
        results = found.get((answer["architecture"], answer["depth"]))
        if results is not None:
            for name in ("kappa", "low"):
                label = answer["method"] if name == "kappa" else f"{answer['method']} (low end)"
                results.estimates.setdefault(label, {})[answer["seed"]] = answer[name]
    return found


def pilot_pick(evidence: KappaResults, seed: int) -> float:
    """Estimator C on one seed: successive halving at 1/8 and 1/4 of the full length, decided at half of it."""
    alive = list(evidence.grid)
    *rungs, decision = range(len(evidence.curve(evidence.grid[1.0], seed)) - 1)
    for rung in rungs:
        ranked = sorted(alive, key=lambda kappa: evidence.curve(evidence.grid[kappa], seed).values[rung])
        alive = ranked[: max(2, math.ceil(len(ranked) / 2))]
    return min(alive, key=lambda kappa: evidence.curve(evidence.grid[kappa], seed).values[decision])


def choices(evidence: KappaResults) -> dict[str, Callable[[int], float]]:
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


def regret_rows(evidence: dict[Key, KappaResults]) -> list[dict[str, Any]]:
    """One row per way to choose: mean regret in % per network, with its standard error over seeds, and over all."""
    names = list(choices(next(iter(evidence.values()))))
    rows = []
    for name in names:
        row: dict[str, Any] = {"choice": name}
        overall = []
        for key, found in evidence.items():
            best = min(found.grid, key=lambda kappa: fmean([found.at(kappa, seed) for seed in found.seeds]))
            way = choices(found)[name]
            regrets = [100 * (way(seed) / found.at(best, seed) - 1) for seed in found.seeds]
            overall.append(fmean(regrets))
            row[_title(key)] = f"{fmean(regrets):+.1f} ± {_error(regrets):.1f}"
        row["mean"] = round(fmean(overall), 2)
        rows.append(row)
    return rows


def grid_rows(evidence: dict[Key, KappaResults]) -> list[dict[str, Any]]:
    """One row per network and κ or method: the final held-out loss of every seed."""
    rows = []
    for key, found in evidence.items():
        for method in found.methods():
            losses = [found.final(method, seed) for seed in found.seeds]
            row: dict[str, Any] = {"network": _title(key), "method": method, "mean": round(fmean(losses), 5)}
            rows.append(row | {f"seed {seed}": loss for seed, loss in zip(found.seeds, losses, strict=True)})
    return rows


def draw(evidence: dict[Key, KappaResults], path: Path) -> None:
    """Final loss against κ, relative to the best mean: seeds thin, their mean thick, estimators as vertical lines."""
    figure, axes = panels(len(evidence), height=3.0, width=3.2, dpi=110)
    for axis, (key, found) in zip(axes, evidence.items(), strict=True):
        kappas = list(found.grid)
        means = [fmean([found.at(kappa, seed) for seed in found.seeds]) for kappa in kappas]
        for seed in found.seeds:
            axis.plot(kappas, [found.at(kappa, seed) / min(means) for kappa in kappas], color="gray", linewidth=0.7)
        axis.plot(kappas, [value / min(means) for value in means], "o-", markersize=4)
        for color, name in (("tab:green", "data"), ("tab:red", "network")):
            axis.axvline(fmean(list(found.estimates[name].values())), color=color, linestyle="--", label=name)
        axis.set(title=_title(key), xlabel="κ of CS")
    axes[0].set_ylabel("held-out loss / best")
    legend(axes[0])
    save(figure, path)


def _title(key: Key) -> str:
    names = {("uvit", 8): "U-ViT N=4", ("uvit", 16): "U-ViT N=8", ("unet", 1): "UNet N=6", ("unet", 2): "UNet N=9"}
    return names.get(key, f"{key[0]} {key[1]}")


def _error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    return stdev(values) / math.sqrt(len(values))


# What the three estimators answer for a small U-ViT on real data

SIZE, DEPTH, IMAGES = 16, 12, 4096
PILOT: dict[str, Any] = {"steps": 120, "seeds": 1, "learning_rate": 8e-3, "batch_size": 16}


def small_uvit(channels: int) -> nn.Module:
    sizes: Any = {"image_size": SIZE, "patch_size": 4, "channels": channels, "dim": 32, "depth": DEPTH, "heads": 4}
    return widen_(UViT(**sizes, init_std=0.02, final_start="authors"))


def ask_all(specs: Sequence[str], path: Path) -> list[dict[str, Any]]:
    answers = []
    for spec in specs:
        data = load_data(spec, limit=IMAGES, size=SIZE)
        images = data.fetch(torch.arange(len(data))).images.float() / 127.5 - 1
        torch.manual_seed(0)
        for method in ("data", "network", "pilot"):
            options = PILOT if method == "pilot" else {}
            choice = choose_kappa(partial(small_uvit, images.shape[1]), images, method=method, **options)
            answers.append({"data": spec, **asdict(choice)})
            print(f"{spec}: {choice}\n", flush=True)
    write_records(path, answers)
    return answers


# The command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.kappa", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command_name", required=True)
    running = commands.add_parser("run", help="train the grid of κ; the same command continues it")
    running.add_argument(
        "--data", default="fashion-mnist", help="Fashion-MNIST: its name, or a folder of its IDX files"
    )
    running.add_argument("--results", type=Path, required=True, help="JSON file, appended to")
    regret = commands.add_parser("regret", help="table and figure from the stored results")
    regret.add_argument("folder", type=Path, help="folder with validation.json and estimates.json")
    regret.add_argument("--figure", type=Path, help="PNG or SVG file to draw")
    asking = commands.add_parser("answers", help="what the three estimators answer")
    asking.add_argument("--data", action="append", required=True, help="a data set; repeatable")
    asking.add_argument("--results", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _work(options))


def _work(options: argparse.Namespace) -> None:
    if options.command_name == "regret":
        evidence = load(options.folder)
        print(text_table(grid_rows(evidence)))
        print(
            f"\nRegret in % of the grid's best, mean ± standard error over seeds\n{text_table(regret_rows(evidence))}"
        )
        if options.figure is not None:
            draw(evidence, options.figure)
        return
    torch.set_num_threads(1)
    if options.command_name == "run":
        run_grid(options.data, options.results)
    else:
        answers = ask_all(options.data, options.results)
        shown = ("data", "method", "kappa", "low", "high")
        print(text_table([{key: answer[key] for key in shown} for answer in answers]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
