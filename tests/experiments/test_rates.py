"""Best rate against best rate, on made-up curves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelong.config import DIVERGED, TrainConfig
from scalelong.experiments import PlannedRun, Results, best_rate_rows, table_rows

CURVES = {
    ("none", 0.1): {50: 0.9, 100: 0.5},
    ("none", 0.2): {50: 0.5, 100: 0.4},
    ("none", 0.4): {50: 0.3, 100: 1.0},
    ("cs", 0.1): {50: 0.9, 100: 0.6},
    ("cs", 0.2): {50: 0.6, 100: 0.5},
    ("cs", 0.4): {50: 0.4, 100: 0.3},
}


def comparison(folder: Path, rate: float, *, diverged: bool = False) -> Results:
    runs = []
    for method in ("none", "cs"):
        for seed in (0, 1):
            run = PlannedRun(
                method, seed, folder / f"{rate}" / f"{method}-seed{seed}", replace(TrainConfig(), seed=seed)
            )
            run.folder.mkdir(parents=True)
            lines = [json.dumps({"step": s, "held_out_loss": v}) for s, v in CURVES[method, rate].items()]
            (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            if diverged and method == "cs":
                (run.folder / DIVERGED).write_text("{}")
            runs.append(run)
    return Results([run.read() for run in runs])


def test_each_method_has_its_own_best_rate(tmp_path):
    none, cs = best_rate_rows({(None, rate): comparison(tmp_path, rate) for rate in (0.1, 0.2, 0.4)})
    assert none["best rate"] == "0.2"
    assert none["rates at which all seeds learned"] == "0.1 0.2"
    assert cs["best rate"] == "0.4 (the largest tried)"
    assert cs["rates at which all seeds learned"] == "0.1 0.2 0.4"
    # The baseline needs 100 steps for 0.4 at its best rate, CS 50 at its own.
    assert cs["steps to none's loss at its best rate"] == "× 0.50 (0.50 to 0.50)"
    assert cs["held-out loss there"] == "0.3000 (0.3000 to 0.3000)"


def test_a_rate_that_diverged_is_never_the_best(tmp_path):
    found: dict[Any, Any] = {
        (None, 0.2): comparison(tmp_path, 0.2),
        (None, 0.4): comparison(tmp_path, 0.4, diverged=True),
    }
    assert best_rate_rows(found)[1]["best rate"] == "0.2 (the smallest tried)"


def test_the_table_of_a_comparison_names_seeds_that_collapsed(tmp_path):
    none, cs = table_rows(comparison(tmp_path, 0.4).summaries)
    assert (none["collapsed"], cs["collapsed"]) == ("seed 0, seed 1", "-")
    # CS needs 100 steps for the 0.3 that the baseline had after 50, before it collapsed.
    assert cs["steps to none's loss"] == "× 2.00 (2.00 to 2.00)"
    assert "collapsed" not in table_rows(comparison(tmp_path, 0.1).summaries)[0]
