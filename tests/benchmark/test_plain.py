"""The U-ViT of stock modules that ours is raced against."""

import pytest

from benchmarks.cases.network import GRID, LARGEST, grid_result, operations, size_of
from benchmarks.contenders.plain import OURS, PLAIN, PlainRaces

SIZE = {"image_size": 8, "patch_size": 2, "channels": 3, "dim": 32, "depth": 4, "heads": 2, "batch": 2}


def test_both_networks_compute_the_same_and_take_turns():
    races = PlainRaces(sizes=[SIZE], rounds=2, seconds=0.0)
    races()
    races()
    for race in races.found():
        assert race["difference"] < 1e-5
        for name, seconds in race["seconds"].items():
            assert 0 < race["groups"][name]["matrix products"] < 3 * max(seconds)
        assert {name: len(values) for name, values in race["seconds"].items()} == {PLAIN: 2, OURS: 2}
    with pytest.raises(IndexError):
        races()


def test_the_grid_spans_the_sizes_that_are_spoken_of():
    measured = [size for size in GRID if operations(size) <= LARGEST]
    assert {size.dim for size in measured} == {32, 64, 128, 256, 512}
    assert {size.tokens for size in measured} == {17, 65, 257}
    assert {size.batch for size in measured} == {1, 8, 32, 128}
    assert {size.depth for size in measured} == {4, 12, 40}


def test_the_grid_names_the_sizes_at_which_ours_is_slower():
    def race(plain: float, ours: float) -> dict:
        return {"seconds": {PLAIN: [plain] * 3, OURS: [ours] * 3}, "difference": 0.0}

    sizes = [size_of(32, 4, 17, 1), size_of(32, 12, 17, 1), size_of(64, 4, 17, 1)]
    races = [race(2, 1), race(1, 1), race(1, 2), race(1, 1), race(3, 1), race(1, 1)]
    summary, slower = grid_result(sizes, {1: races}, 5).tables
    assert [(row[0], row[2], row[3].median) for row in summary.rows] == [
        ("dim 32, 17 tokens", 2, 1.25),
        ("dim 64, 17 tokens", 1, 3.0),
    ]
    assert "1 of 6 ratios" in " ".join(summary.notes)
    assert [row[:3] for row in slower.rows] == [[sizes[1].describe(), 1, "training"]]
