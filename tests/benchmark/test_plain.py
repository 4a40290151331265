"""The U-ViT of stock modules that ours is raced against."""

import pytest

from benchmarks.cases.network import GRID, LARGEST, operations
from benchmarks.contenders.plain import OURS, PLAIN, PlainRaces

SIZE = {"image_size": 8, "patch_size": 2, "channels": 3, "dim": 32, "depth": 4, "heads": 2, "batch": 2}


def test_both_networks_compute_the_same_and_take_turns():
    races = PlainRaces(sizes=[SIZE], rounds=2, seconds=0.0)
    races()
    races()
    for race in races.found():
        assert race["difference"] < 1e-5
        assert 0 < race["kernels"] < 3 * max(race["seconds"][PLAIN])
        assert {name: len(values) for name, values in race["seconds"].items()} == {PLAIN: 2, OURS: 2}
    with pytest.raises(IndexError):
        races()


def test_the_grid_spans_the_sizes_that_are_spoken_of():
    measured = [size for size in GRID if operations(size) <= LARGEST]
    assert {size.dim for size in measured} == {32, 64, 128, 256, 512}
    assert {size.tokens for size in measured} == {17, 65, 257}
    assert {size.batch for size in measured} == {1, 8, 32, 128}
    assert {size.depth for size in measured} == {4, 12, 40}
