"""Alarms on readings that were made up."""

import math

import pytest

from scalelong.stability import AlarmDetector

HEALTHY = {
    "loss": 0.2,
    "loss_max": 0.3,
    "gradient_norm/all": 1.0,
    "probe_block_rms/middle": 2.0,
    "probe_similarity/middle": 0.2,
    "probe_skip_rms/1": 1.0,
    "probe_skip_rms/2": 3.0,
    "kappa/1": 1.0,
    "kappa/2": 0.7,
    "headroom": 1e4,
    "activation_max": 6.0,
}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"loss_max": 0.7}, ["spike"]),
        ({"gradient_norm/all": 11.0}, ["spike"]),
        ({"probe_block_rms/middle": 9.0}, ["spike"]),
        ({"probe_block_rms/middle": 1e-3}, ["collapse"]),
        ({"probe_similarity/middle": 0.99}, ["collapse"]),
        ({"loss": 1.0, "loss_max": 1.0}, ["collapse"]),
        ({"headroom": 4.0}, ["overflow margin"]),
        ({"probe_skip_rms/2": 0.0}, ["dead skip"]),
        ({"kappa/2": 0.0}, ["dead skip"]),
        ({"loss": math.nan, "headroom": 0.0, "gradient_norm/all": math.inf}, ["non-finite"]),
        ({"loss_max": 0.7, "gradient_norm/all": 99.0, "headroom": 2.0, "probe_similarity/middle": 1.0}, ["collapse"]),
    ],
)
def test_what_is_wrong_at_a_step_is_one_alarm_of_the_worst_kind(changes, kinds):
    detector = AlarmDetector(1.0 if changes.get("loss") == 1.0 else None)
    for step in range(10):
        assert detector.check(step, HEALTHY) == []
    assert [alarm.kind for alarm in detector.check(10, {**HEALTHY, **changes})] == kinds


def test_one_alarm_names_three_things_and_counts_the_rest():
    detector = AlarmDetector()
    blocks = {f"block_rms/{number}": 1.0 for number in range(10)}
    for step in range(10):
        detector.check(step, blocks)
    (alarm,) = detector.check(10, dict.fromkeys(blocks, 50.0), lr=0.02, bare=True)
    assert "And 7 more." in str(alarm)
    assert str(alarm).count("merge_norm") == 1


def test_nothing_is_compared_before_there_is_a_past_or_anything_learned():
    detector = AlarmDetector()
    detector.check(0, HEALTHY)
    assert detector.check(1, {**HEALTHY, "gradient_norm/all": 100.0}) == []
    detector = AlarmDetector(1.0)
    assert all(detector.check(step, {"loss": 1.0, "loss_max": 1.0}) == [] for step in range(30))


def test_a_standing_condition_is_reported_once_and_again_after_it_was_gone():
    detector = AlarmDetector()
    bad = {**HEALTHY, "headroom": 2.0}
    assert [len(detector.check(step, reading)) for step, reading in enumerate([bad, bad, HEALTHY, bad])] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("bare", "lr", "words"),
    [
        (True, 0.01, 'scale_skips_(model, "merge_norm", inputs)'),
        (False, 0.01, "a learning rate of 0.0025 instead of 0.01"),
        (True, 3.0, "a learning rate of 0.001 instead of 3"),
    ],
)
def test_an_alarm_names_the_rate_what_left_first_and_one_thing_to_do(bare, lr, words):
    detector = AlarmDetector()
    for step, size in enumerate((1.0, 1.1, 50.0)):
        reading = {"kappa/1": 1.0, "block_rms/a": 1.0, "block_rms/b": size, "update_ratio/b": 0.6}
        assert detector.check(step, reading, lr=lr, bare=bare) == []
    broken = {"kappa/1": math.nan, "block_rms/a": math.nan, "block_rms/b": math.nan}
    shown = str(detector.check(4, broken, lr=lr, bare=bare)[0])
    assert f"The learning rate is {lr:g}, and a step changes weights by 60%" in shown
    assert "block_rms/b left first: it had grown 50 times" in shown
    assert words in shown
    assert ("merge_norm" in shown) == ("merge_norm" in words)
    assert "clip" not in shown
    assert "warm-up" not in shown
