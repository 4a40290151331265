"""One comparison, read back from its file, and the questions that the page asks of it."""

import json
import math
from pathlib import Path
from typing import Any

from scalelong.experiments.results import Curve, baseline_of, mean, spread, steps_to


class Evidence:
    """Curves by variant and seed."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text(encoding="utf-8"))
        self.name, self.title, self.command = path.stem, found["title"], found["command"]
        self.common: dict[str, Any] = found["common"]
        self.differs = {run["name"]: run["differs"] for run in found["runs"]}
        self.diverged = {(run["name"], run["seed"]) for run in found["runs"] if run["diverged"]}
        self.frechet = {(run["name"], run["seed"]): run["frechet"][-1] for run in found["runs"] if "frechet" in run}
        self.curves: dict[str, dict[int, Curve]] = {}
        for run in found["runs"]:
            curve = Curve(tuple(run["steps"]), tuple(run["held_out_loss"]))
            self.curves.setdefault(run["name"], {})[run["seed"]] = curve
        self.baseline = baseline_of(list(self.curves))

    def last(self, name: str) -> list[float]:
        return [curve.values[-1] for curve in self.curves[name].values() if len(curve)]

    def collapsed(self, name: str) -> int:
        return sum(curve.collapsed for curve in self.curves[name].values())

    def speedups(self, name: str, share: float = 1.0) -> dict[int, float | None]:
        """By seed: the steps that the baseline needed for its best loss, divided by those that the variant needs.

        The best within this share of the baseline's run: what it reached before it collapsed counts. None: the variant
        does not get there within the steps that were run.
        """
        found: dict[int, float | None] = {}
        for seed, curve in self.curves[name].items():
            base = self.curves[self.baseline].get(seed)
            target = base.best(round(share * base.steps[-1])) if base is not None and len(base) else None
            if base is None or target is None:
                continue
            mine, theirs = steps_to(curve, target), steps_to(base, target)
            found[seed] = theirs / mine if mine and theirs else None
        return found

    def _ratios(self, name: str, share: float) -> str:
        if name == self.baseline:
            return "baseline"
        found = self.speedups(name, share).values()
        return " ".join("not reached" if ratio is None else f"{ratio:.2f}" for ratio in found) or "-"

    def _scores(self, name: str) -> str:
        return " ".join(f"{score:.2f}" for (mine, _), score in self.frechet.items() if mine == name) or "-"

    def rows(self) -> list[dict[str, str]]:
        order = sorted(self.curves, key=lambda name: mean(self.last(name) or [math.inf]))
        fragile = any(self.collapsed(name) for name in order)
        return [
            {
                "variant": name,
                "held-out loss, mean (range)": spread(self.last(name), "{:.4f}"),
                "of seeds": " ".join(f"{value:.4f}" for value in self.last(name)),
                **{
                    f"baseline's steps / own, {when}": self._ratios(name, share)
                    for when, share in (("at half of the run", 0.5), ("at its end", 1.0))
                },
                **({"Fréchet distance": self._scores(name)} if self.frechet else {}),
                **({"collapsed": f"{self.collapsed(name)} of {len(self.curves[name])}"} if fragile else {}),
                **({"diverged": str(sum(entry[0] == name for entry in self.diverged))} if self.diverged else {}),
            }
            for name in order
        ]
