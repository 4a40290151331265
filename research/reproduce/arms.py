"""Arms of an experiment, a method in a setting, and the runs that they need. Equal configurations are one run."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scalelong.experiments.runs import PlannedRun, slug
from scalelong.runs.config import TrainConfig, differences

from .methods import Method
from .settings import Setting


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
        return PlannedRun(self.method.label, seed, folder / run_name(config), config)


def arms(settings: Iterable[Setting], methods: Sequence[Method]) -> list[Arm]:
    return [Arm(setting, method) for setting in settings for method in methods]


def run_name(config: TrainConfig) -> str:
    """The configuration as the name of a folder: arms of different items that agree share the run."""
    # What differs from the defaults, so that a new option with a default does not rename old runs.
    essence = {name: value for name, (_, value) in sorted(differences(TrainConfig(), config).items())}
    digest = hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:8]
    model = config.model.partition(":")[2] or config.model
    return f"{slug(config.data)}-{slug(model)}-{slug(config.scaling)}-seed{config.seed}-{digest}"


def planned(wanted: Sequence[Arm], seeds: int, folder: Path) -> list[PlannedRun]:
    """Each run once. Seed by seed, so that what an interrupted command leaves holds complete seeds."""
    found = {run.folder: run for seed in range(seeds) for run in (arm.run(seed, folder) for arm in wanted)}
    return list(found.values())
