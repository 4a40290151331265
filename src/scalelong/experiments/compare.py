"""Methods side by side: the same recipe, the same seeds, another scaling."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from ..runs.config import TrainConfig
from .diagnosing import DIAGNOSIS, diagnose_config, write_diagnosis
from .figures import draw_comparison
from .pool import run_all
from .runs import PlannedRun, plan_runs
from .summary import MethodSummary, summarise, table_rows
from .variants import Variant

COMMANDS = "commands.txt"
"""The command lines that made the runs of a folder."""
RECORDS = 250
"""Roughly how many readings of features and coefficients a run keeps."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison and what became of them."""

    out: Path
    runs: list[PlannedRun]
    summaries: list[MethodSummary]

    def __str__(self) -> str:
        return text_table(table_rows(self.summaries))


def compare(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: str | PathLike[str],
    *,
    every: int | None = None,
    jobs: int | None = None,
) -> Comparison | None:
    """Train every method with every seed; runs that are finished are not repeated. None if it was interrupted.

    A method is a scaling, or a variant such as "fast: scaling=cs:0.7 lr=2e-3". The baseline is the one named "none", or
    else the first.

    `every` is the number of steps between two readings of features and coefficients, `jobs` how many runs go at once.
    """
    if not config.images.held_out:
        raise InvalidConfigError(
            "a comparison needs held-out images: set held_out in the configuration (--held-out 500)"
        )
    runs = plan_runs(config, methods, seeds, Path(out))
    if not (Path(out) / DIAGNOSIS).exists():
        write_diagnosis(diagnose_config(runs[0].config), Path(out))
    if not run_all(runs, every or max(1, config.steps // RECORDS), jobs):
        return None
    return conclude(runs, Path(out))


def conclude(runs: list[PlannedRun], out: Path) -> Comparison:
    """The table and the figure of runs that are there: table.txt, comparison.json, comparison.png."""
    comparison = Comparison(out, runs, summarise(runs))
    write_text(out / "table.txt", f"{comparison}\n")
    write_text(out / "comparison.json", json.dumps([asdict(entry) for entry in comparison.summaries], indent=1))
    draw_comparison(runs, out / "comparison.png")
    return comparison
