"""Carry out items: train what is missing, measure, keep the raw results, and make pages of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from scalelong._version import __version__
from scalelong.config import TrainConfig, differences, with_values
from scalelong.errors import InvalidConfigError
from scalelong.experiments import Engine, PlannedRun, make_engine, run_all

from .claims import RESULTS, Study, StudyResults, record
from .items import ITEMS
from .pages import write_index, write_item
from .settings import Scale, planned

READINGS = 75
"""How often features and gradients of Figure 1 are read: one and a half windows of the oscillation scores."""


def reproduce(
    names: Sequence[str],
    scale: Scale,
    seeds: int,
    out: Path,
    jobs: int | None = None,
    *,
    engine: Engine | None = None,
) -> list[StudyResults] | None:
    """Results and pages of the items in `out`, one after the other; their runs in `out/runs`. None if not all runs are
    finished now: it was interrupted.

    On this machine the runs of an item come before those of the next one. A cluster gets all of them at once.
    """
    items = [_item(name) for name in names]
    engine = make_engine("local", jobs=jobs) if engine is None else engine
    if engine.name != "local":
        engine.check()
        arms = [arm for item in items for arm in item.arms(scale)]
        if not train_all(planned(arms, seeds, out / "runs"), scale, out, engine):
            return None
    found = []
    for item in items:
        print(item.title, flush=True)
        if not train_all(planned(item.arms(scale), seeds, out / "runs"), scale, out, engine):
            return None
        results = collect(item, scale, seeds, out)
        results.write(out / item.name)
        write_item(item, results, out)
        write_index(out, ITEMS.values())
        found.append(results)
    return found


def train_all(runs: Sequence[PlannedRun], scale: Scale, out: Path, engine: Engine) -> bool:
    """Train what is not finished. Figure 1 needs dense readings; of other runs one reading at the end says enough.

    Which of the two a run gets is a matter of the run, not of who asks for it first: items share runs.
    """
    watched = {
        run.folder for run in planned(ITEMS["fig1"].arms(scale), max(run.seed for run in runs) + 1, out / "runs")
    }

    def with_readings(run: PlannedRun) -> PlannedRun:
        every = max(1, run.config.steps // READINGS) if run.folder in watched else run.config.steps
        return replace(run, config=with_values(run.config, {"logging.monitor_every": every}))

    return run_all([with_readings(run) for run in runs], engine=engine)


def collect(item: Study, scale: Scale, seeds: int, out: Path) -> StudyResults:
    """What the finished runs of an item say."""
    arms = item.arms(scale)
    records = []
    for arm in arms:
        for seed in range(seeds):
            run = arm.run(seed, out / "runs")
            measured = {} if item.measure is None or run.diverged else item.measure(run)
            records.append(record(arm, run, traces=item.traces and seed == 0, measured=measured))
    settings = {
        arm.setting.name: {name: value for name, (_, value) in differences(TrainConfig(), arm.setting.config).items()}
        for arm in arms
    }
    survey = item.survey(scale, seeds) if item.survey else {}
    versions = {"scalelong": __version__, "torch": torch.__version__}
    return StudyResults(
        records, item=item.name, scale=scale, seeds=seeds, settings=settings, versions=versions, survey=survey
    )


def redraw(folder: Path) -> list[str]:
    """Figures and pages from the raw results alone. The names of the items that were found."""
    found = [item for item in ITEMS.values() if (folder / item.name / RESULTS).exists()]
    if not found:
        raise InvalidConfigError(
            f"{folder} holds no results: looked for {', '.join(f'{name}/{RESULTS}' for name in ITEMS)}"
        )
    for item in found:
        write_item(item, StudyResults.read(folder / item.name), folder)
    write_index(folder, ITEMS.values())
    return [item.name for item in found]


def describe(names: Sequence[str], scale: Scale, seeds: int, out: Path) -> str:
    """What `reproduce` would do."""
    lines, everything = [], []
    for name in names:
        item = _item(name)
        arms = item.arms(scale)
        everything += arms
        lines += [f"{item.name}: {item.title}", f"  {len(arms)} arms with {seeds} seed(s) each"]
        for setting in dict.fromkeys(arm.setting.name for arm in arms):
            mine = [arm for arm in arms if arm.setting.name == setting]
            config, followed = mine[0].setting.config, mine[0].setting.recipe
            lines.append(
                f"  {setting}: {config.data}, {config.model}, {config.steps} steps, batch {config.batch_size}: "
                f"{'; '.join(arm.method.label for arm in mine)}" + (f" (recipe {followed})" if followed else "")
            )
    runs = planned(everything, seeds, out / "runs")
    done = sum(run.finished for run in runs)
    steps = sum(run.config.steps for run in runs if not run.finished)
    lines.append(f"{len(runs)} different runs, {done} of them finished; {steps} steps to go; in {out / 'runs'}")
    return "\n".join(lines)


def _item(name: str) -> Study:
    if name not in ITEMS:
        raise InvalidConfigError(f"unknown figure or table {name!r}; known: {', '.join(ITEMS)}, all")
    return ITEMS[name]
