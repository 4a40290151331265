"""The table and figure of the κ validation, from its stored results.

    python -m research.kappa_regret docs/evidence/kappa --figure docs/figures/kappa.png

Regret: by how many percent the final held-out loss of a choice exceeds that of the grid's best κ, both as means over
seeds. A κ between two values of the grid gets the loss on the line between theirs. Estimator C is replayed from the
stored losses: a pilot of half the length on one seed picks, the other seeds judge.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scalelong.console import text_table

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


def main(arguments: list[str] | None = None) -> int:
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
    raise SystemExit(main())
