"""Records of runs: curves, intervals, verdicts, and metrics of a million lines."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from scipy import stats

from scalelong.experiments import (
    Curve,
    Results,
    RunRecord,
    fisher_p,
    interval,
    ratio_text,
    read_curves,
    read_run,
    spread,
    steps_ratio,
    steps_to,
    verdict,
)


def curve(*values: float) -> Curve:
    return Curve(tuple(range(10, 10 * len(values) + 1, 10)), values)


def test_the_first_crossing_is_interpolated():
    assert steps_to(curve(1.0, 0.6, 0.2), 0.5) == pytest.approx(22.5)
    assert steps_to(curve(1.0, 0.6, 0.2), 0.2) == 30
    assert steps_to(curve(0.1, 0.6), 0.2) == 10
    assert steps_to(curve(1.0, 0.2, 0.9, 0.1), 0.2) == 20
    assert steps_to(curve(1.0, 0.6, 0.3), 0.2) is None
    assert steps_to(Curve((), ()), 0.2) is None


def test_the_ratio_is_against_the_baselines_last_loss():
    baseline = curve(1.0, 0.8, 0.6, 0.4)
    assert steps_ratio(baseline, baseline) == 1
    assert steps_ratio(curve(0.8, 0.4, 0.3, 0.2), baseline) == pytest.approx(0.5)
    assert steps_ratio(curve(1.0, 0.9, 0.8, 0.7), baseline) is None
    assert steps_ratio(Curve((), ()), baseline) is None
    # A baseline that got worse at the end was there before.
    ratio = steps_ratio(curve(1.0, 0.5, 0.3, 0.3), curve(1.0, 0.4, 0.3, 0.5))
    assert ratio == pytest.approx(20 / (10 + 10 * 0.5 / 0.6))


def test_values_between_records():
    assert curve(1.0, 0.5).at(15) == pytest.approx(0.75)
    assert curve(1.0, 0.5).at(25) is None
    # Recorded values are given back to the last bit, or else a curve would not reach its own last value.
    found = Curve((250, 300), (0.32813, 0.22883))
    assert found.at(300) == 0.22883
    assert steps_to(found, found.at(300) or 0) == 300


def test_texts_show_the_spread_and_what_is_missing():
    assert spread([0.1, 0.3, None], "{:.1f}") == "0.2 (0.1 to 0.3)"
    assert spread([None], "{:.1f}") == "-"
    assert ratio_text([0.5, None]) == "× 0.50, not reached by 1 of 2 seeds"
    assert ratio_text([None]) == "not reached"


# Reading


def write_metrics(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_short_run_is_read_whole_and_foreign_lines_are_left_out(tmp_path):
    folder = write_metrics(tmp_path / "run", [{"step": step, "loss": 1 / step} for step in range(1, 1001)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1, 2]\n"text"\n{"loss": 3}\n{"step": "x", "loss": 3}\n{"step": 1001, "lo')
    found = read_curves(folder)
    assert found["loss"].steps == tuple(range(1, 1001))
    assert found["loss"].values[-1] == 1e-3


def test_a_long_run_is_thinned_and_rare_lines_are_kept(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in range(1, 20_001)]
    lines += [{"step": step, "held_out_loss": 1 / step} for step in range(3000, 20_001, 3000)]
    found = read_curves(write_metrics(tmp_path / "run", lines))
    assert found["held_out_loss"].steps == tuple(range(3000, 20_001, 3000))
    steps = found["loss"].steps
    assert 4096 <= len(steps) <= 8193
    assert (steps[0], steps[-1]) == (1, 20_000)
    distances = {after - before for before, after in pairwise(steps[:-1])}
    assert len(distances) == 1, "scores of oscillation need equal distances"


def test_a_record_knows_the_name_of_its_variant(tmp_path):
    folder = write_metrics(tmp_path / "fast-seed3", [{"step": 1, "held_out_loss": 0.5, "kappa/1": 1.0, "kappa/2": 0.7}])
    (folder / "config.yaml").write_text("scaling: cs\nseed: 3\nsteps: 10\noptimizer: {lr: 0.1}\n")
    assert read_run(folder).method == "cs"
    (folder / "variant.json").write_text('{"name": "fast", "changes": {"optimizer.lr": 0.1}}')
    record = read_run(folder)
    assert (record.method, record.seed, record.kappas, record.finished) == ("fast", 3, (1.0, 0.7), False)
    assert record.config["optimizer.lr"] == 0.1


# What is said of them


@pytest.mark.parametrize("count", [2, 8, 18, 24, 64])
def test_intervals_are_those_of_scipy(count):
    values = [math.sin(7 * i) for i in range(count)]
    expected = stats.t.interval(0.9, count - 1, loc=stats.tmean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("table", [(7, 8, 1, 8), (8, 8, 8, 8), (0, 3, 3, 3), (5, 9, 2, 4)])
def test_fishers_test_is_that_of_scipy(table):
    alive, count, other, others = table
    _, expected = stats.fisher_exact([[alive, count - alive], [other, others - other]])
    assert fisher_p(*table) == pytest.approx(expected)


def records(method: str, losses: list[float], *, collapsed: int = 0) -> list[RunRecord]:
    found = [RunRecord(method=method, seed=seed, held_out=curve(1.0, loss)) for seed, loss in enumerate(losses)]
    return [
        RunRecord(method=run.method, seed=run.seed, held_out=curve(0.1, 1.0)) if run.seed < collapsed else run
        for run in found
    ]


def test_the_verdict_names_a_difference_over_paired_seeds():
    # Seeds differ by more than methods do: only pairs show it.
    runs = [*records("none", [0.1, 0.2, 0.4]), *records("cs", [0.09, 0.181, 0.359])]
    first, second = verdict(Results(runs))
    assert first == "All 6 runs survived: none diverged and none collapsed."
    assert second.startswith("cs ends 9.9 % below none in held-out loss (90 % interval -1")
    assert second.endswith("3 seeds).")


def test_the_verdict_says_when_there_is_no_difference_and_when_one_seed_is_too_few():
    equal = [*records("none", [0.1, 0.2, 0.4]), *records("cs", [0.11, 0.18, 0.41])]
    assert verdict(Results(equal))[1].startswith("No difference can be seen between cs and none")
    alone = [*records("none", [0.1]), *records("cs", [0.05])]
    assert verdict(Results(alone))[1].startswith("One seed cannot be judged: there cs ends 50.0 % below none")


def test_the_verdict_counts_survivors():
    runs = [*records("none", [0.1] * 8, collapsed=7), *records("cs", [0.1] * 8, collapsed=1)]
    said = verdict(Results(runs))
    assert said[0] == "Survivors: none 1 of 8, cs 7 of 8."
    assert said[1].startswith("cs survives more often than none: 7 of 8 against 1 of 8 (Fisher's exact test, p = 0.0")
    few = [*records("none", [0.1] * 2, collapsed=1), *records("cs", [0.1] * 2)]
    assert "cannot be decided" in verdict(Results(few))[1]


def test_the_verdict_of_a_single_run():
    assert verdict(Results(records("cs", [0.25]))) == [
        "Your run did not collapse and ends with a held-out loss of 0.25."
    ]
    going_on = [replace(record, finished=False) for record in records("cs", [0.25])]
    assert verdict(Results(going_on)) == [
        "Your run is not finished. It has not collapsed so far; its held-out loss is 0.25."
    ]
    assert verdict(Results([RunRecord(method="cs", seed=0, diverged="NaN")])) == [
        "Your run diverged: its numbers stopped being finite."
    ]
