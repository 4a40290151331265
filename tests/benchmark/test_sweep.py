"""Runs one by one against runs together: the race of the benchmark."""

from benchmarks.contenders import ALONE, TOGETHER
from benchmarks.contenders.sweep import SweepRaces

SIZE = {"image_size": 8, "patch_size": 2, "channels": 3, "dim": 16, "depth": 2, "heads": 2, "batch": 2, "runs": 3}


def test_both_ways_train_the_same_and_take_turns():
    races = SweepRaces(races=[SIZE], rounds=2, seconds=0.0, steps=2)
    races()
    (race,) = races.found()
    assert race["difference"] < 1e-4
    assert {name: len(values) for name, values in race["seconds"].items()} == {ALONE: 2, TOGETHER: 2}
