"""The runs of a comparison: one per method and seed, each in a run folder of its own.

Runs of one seed differ in what the method says alone, mostly the scaling: they share initial weights, order of data,
noise and times, because the trainer draws all of them as functions of (seed, step).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import InvalidConfigError, NonFiniteError
from ..files import write_text
from ..runs.checkpoint import saved_steps
from ..runs.config import TrainConfig
from ..training import train
from .recording import Recording
from .variants import Variant, as_variant

DIVERGED = "diverged.json"


@dataclass(frozen=True)
class PlannedRun:
    method: str
    seed: int
    folder: Path
    config: TrainConfig

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        """All steps are done, or the numbers stopped being finite: there is nothing left to do."""
        if (self.folder / DIVERGED).exists():
            return True
        steps = saved_steps(self.folder / "checkpoints")
        return bool(steps) and steps[-1] >= self.config.steps

    def divergence(self) -> dict[str, object] | None:
        path = self.folder / DIVERGED
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def plan_runs(
    config: TrainConfig, methods: Sequence[str | Variant], seeds: Sequence[int], out: Path, prefix: str = ""
) -> list[PlannedRun]:
    """Seed by seed, so that an interrupted comparison holds complete seeds."""
    if not methods or not seeds:
        raise InvalidConfigError("a comparison needs at least one method and one seed")
    variants = [as_variant(method) for method in methods]
    for given, kind in (([variant.name for variant in variants], "method"), (seeds, "seed")):
        twice = sorted({str(entry) for entry in given if list(given).count(entry) > 1})
        if twice:
            raise InvalidConfigError(f"{kind} {', '.join(twice)} is given twice")
    configs = {variant.name: variant.apply(config) for variant in variants}
    return [
        PlannedRun(name, seed, out / f"{prefix}{slug(name)}-seed{seed}", replace(changed, seed=seed))
        for seed in seeds
        for name, changed in configs.items()
    ]


def carry_out(run: PlannedRun, every: int) -> bool:
    """Train, or continue to train, with a reading `every` so many steps. False if it was interrupted.

    A run that diverges is a result, not a failure.
    """
    try:
        with Recording(every, run.config) as recording:
            return train(run.config, run.folder, hooks=[recording]).finished
    except NonFiniteError as error:
        write_text(run.folder / DIVERGED, json.dumps({"message": str(error)}))
        return True


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"
