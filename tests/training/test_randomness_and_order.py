"""Random numbers and the order of the data as functions of the step."""

import random

import numpy
import torch
from hypothesis import given, strategies as st

from scalelong.diffusion import DataOrder
from scalelong.diffusion.inputs import split_batch
from scalelong.randomness import global_state, noise, restore_global_state, seed_global


def test_noise_of_a_part_is_a_part_of_the_noise():
    whole = noise(3, 5, range(50), (1, 2, 2), "cpu")
    for part in (range(7), range(7, 31), range(16, 32), range(49, 50)):
        assert torch.equal(noise(3, 5, part, (1, 2, 2), "cpu"), whole[part.start : part.stop])


def test_global_state_survives_a_file(tmp_path):
    seed_global(5, "x")
    random.gauss(0, 1)
    torch.save(global_state(), tmp_path / "s.pt")
    expected = random.random(), numpy.random.rand(), torch.rand(1)
    seed_global(6, "y")
    restore_global_state(torch.load(tmp_path / "s.pt", weights_only=True))
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == expected


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_every_epoch_shows_every_image_once(count, batch_size, seed):
    order = DataOrder(count, batch_size, seed)
    steps = -(-3 * count // batch_size)
    row = torch.cat([order.indices(step, range(batch_size)) for step in range(steps)]).tolist()
    for epoch in range(3):
        assert sorted(row[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_step_in_the_far_future_costs_nothing():
    order = DataOrder(1000, 128, 0)
    assert order.indices(10**9, range(128)).shape == (128,)
    assert order.epoch(500) == 64.0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_processes_and_parts_make_up_the_batch(processes, accumulation, part):
    size = processes * accumulation * part
    parts = [p for process in range(processes) for p in split_batch(size, processes, accumulation, process)]
    assert [position for p in parts for position in p] == list(range(size))
    assert {len(p) for p in parts} == {part}
