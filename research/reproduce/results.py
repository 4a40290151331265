"""The raw results of an item: small JSON that pages and figures are made of, without the runs."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidConfigError
from scalelong.experiments.results import Curve, block_oscillation, read_curves
from scalelong.experiments.runs import PlannedRun
from scalelong.files import write_text
from scalelong.stability import oscillation

from .arms import Arm
from .settings import Scale

RESULTS = "results.json"
TRACES = {
    "features": ("probe_block_rms/middle", "probe_block_rms/mid_block"),
    "gradient": ("gradient_norm/all",),
}
"""What is drawn of single runs, with the names that U-ViT and diffusers' UNets give it."""


@dataclass(frozen=True)
class RunRecord:
    """What a run became. The same run may appear in several items, under the names that it has there."""

    setting: str
    method: str
    seed: int
    run: str
    """Name of the run folder, which is a function of the configuration."""
    held_out: list[tuple[int, float]]
    """Steps and held-out losses of the averaged weights."""
    kappas: list[float]
    """Coefficients of the last step."""
    o1_features: float | None
    """Mean over all blocks."""
    o1_gradient: float | None
    gate: str = ""
    """Why the oscillation does not count, if it does not."""
    frechet: float | None = None
    diverged: bool = False
    seconds: float | None = None
    """That training took, on whatever machine that was; without held-out losses and scores."""
    traces: dict[str, list[float]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def curve(self) -> Curve:
        return Curve(tuple(step for step, _ in self.held_out), tuple(value for _, value in self.held_out))


@dataclass(frozen=True)
class Results:
    item: str
    scale: Scale
    seeds: int
    settings: dict[str, dict[str, Any]]
    """By name: what defines the setting, as far as it differs from the defaults of a configuration."""
    runs: list[RunRecord]
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that made them."""
    survey: dict[str, Any] = field(default_factory=dict)

    def of(self, setting: str, method: str) -> list[RunRecord]:
        """The runs of an arm, in the order of their seeds."""
        found = [run for run in self.runs if (run.setting, run.method) == (setting, method)]
        return sorted(found, key=lambda run: run.seed)

    def methods(self, setting: str) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs if run.setting == setting))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        records = ",\n".join(f"  {json.dumps(record, ensure_ascii=False)}" for record in values.pop("runs"))
        head = json.dumps(values, ensure_ascii=False, indent=1)[:-2]
        write_text(folder / RESULTS, f'{head},\n "runs": [\n{records}\n ]\n}}\n')

    @classmethod
    def read(cls, folder: Path) -> "Results":
        path = folder / RESULTS
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            runs = [
                RunRecord(**{**run, "held_out": [(step, value) for step, value in run["held_out"]]})
                for run in values.pop("runs")
            ]
            return cls(**values, runs=runs)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidConfigError(f"{path} cannot be read as results of `scalelong reproduce`: {error}") from error


def record(arm: Arm, run: PlannedRun, *, traces: bool, measured: dict[str, Any]) -> RunRecord:
    """Read a finished run, rounded: four digits say all there is to say."""
    curves = read_curves(run.folder)
    held_out = curves.get("held_out_loss", Curve((), ()))
    features, gradient = block_oscillation(curves), curves.get(*TRACES["gradient"])
    kappas = [curves[name].values[-1] for name in (f"kappa/{i}" for i in range(1, len(curves) + 1)) if name in curves]
    scores = curves.get("frechet")
    return RunRecord(
        setting=arm.setting.name,
        method=arm.method.label,
        seed=run.seed,
        run=run.name,
        held_out=[(step, rounded(value)) for step, value in held_out.points],
        kappas=[rounded(value) for value in kappas],
        o1_features=_finite(features.o1),
        o1_gradient=_finite(oscillation(gradient.values).o1) if gradient else None,
        gate=features.gate,
        frechet=rounded(scores.values[-1]) if scores else None,
        diverged=run.divergence() is not None,
        seconds=rounded(curves["seconds"].values[-1]) if "seconds" in curves else None,
        traces=_traces(curves) if traces else {},
        measured=measured,
    )


def _traces(curves: dict[str, Curve]) -> dict[str, list[float]]:
    found = ((name, curves[key]) for name, keys in TRACES.items() for key in keys if key in curves)
    return {name: [rounded(value) for value in curve.values] for name, curve in found}


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return rounded(value) if math.isfinite(value) else None


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
