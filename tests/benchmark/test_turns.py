"""The harness with a clock that the test moves."""

import pytest

from benchmarks.contender import Race, interleave, steps_per_turn, turn_of
from benchmarks.record import Spread, ratios
from benchmarks.settings import BenchmarkError


class Machine:
    """Steps of known length, on a machine whose speed changes in the course of time."""

    def __init__(self, lengths, slowness=lambda now: 1.0):
        self.lengths, self.slowness, self.now, self.log = lengths, slowness, 0.0, []

    def step(self, name):
        def work():
            self.log.append(name)
            self.now += self.lengths[name] * self.slowness(self.now)

        return work

    def turns(self):
        return {name: turn_of(self.step(name), lambda: self.now) for name in self.lengths}


def no_pause(_):
    pass


def test_seconds_per_step_are_those_of_the_clock():
    machine = Machine({"a": 0.1, "b": 0.2})
    seconds = interleave(machine.turns(), 3, turn_seconds=0.5, pause=no_pause)
    assert seconds["a"] == pytest.approx([0.1] * 3)
    assert seconds["b"] == pytest.approx([0.2] * 3)


def test_every_round_holds_every_contender_and_the_order_turns_around():
    machine = Machine({"a": 0.1, "b": 0.2, "c": 0.3})
    interleave(machine.turns(), 2, turn_seconds=0.0, warm_up=2, pause=no_pause)
    assert machine.log[:6] == ["a", "a", "b", "b", "c", "c"]  # the warm-up
    assert machine.log[6:] == ["a", "b", "c", "c", "b", "a"]


def test_contenders_of_like_speed_have_turns_of_as_many_steps():
    machine = Machine({"fast": 0.1, "like it": 0.18, "slow": 0.4, "slower": 2.0})
    interleave(machine.turns(), 1, turn_seconds=0.5, warm_up=1, pause=no_pause)
    assert {name: machine.log.count(name) - 1 for name in machine.lengths} == {
        "fast": 5,
        "like it": 5,
        "slow": 2,
        "slower": 1,
    }
    assert steps_per_turn(3.0, 0.5) == 1
    assert steps_per_turn(0.0, 0.5) >= 1


def test_the_first_step_does_not_count():
    machine = Machine({"a": 0.1}, slowness=lambda now: 100.0 if now == 0 else 1.0)
    assert interleave(machine.turns(), 2, turn_seconds=0.1, warm_up=2, pause=no_pause)["a"] == pytest.approx([0.1] * 2)


def test_a_long_step_is_warm_after_the_first():
    machine = Machine({"short": 1.0, "long": 3.0})
    interleave(machine.turns(), 1, turn_seconds=0.0, warm_up=2, pause=no_pause)
    assert machine.log == ["short", "short", "long", "short", "long"]


def test_ratios_survive_a_machine_that_slows_down():
    # Ten times slower after a while: the times mix both speeds, the ratio of a round does not.
    machine = Machine({"base": 1.0, "half": 0.5}, slowness=lambda now: 1.0 if now < 18 else 10.0)
    race = Race(interleave(machine.turns(), 9, turn_seconds=1.0, pause=no_pause))
    assert race.time("base").high > 5 * race.time("base").low
    assert race.speed("half", "base").median == pytest.approx(2.0)
    assert race.cost("half", "base").median == pytest.approx(-0.5)


def test_a_pause_comes_before_every_turn():
    pauses = []
    interleave(Machine({"a": 1.0, "b": 1.0}).turns(), 3, turn_seconds=0.0, pause=pauses.append)
    assert len(pauses) == 6


def test_memory_is_compared_as_a_ratio():
    race = Race({"a": [1.0], "b": [1.0]}, {"a": 100.0, "b": 75.0})
    assert race.memory_ratio("b", "a") == 0.75


def test_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    "wrong", [lambda: Spread.of([]), lambda: ratios([1.0], [1.0, 2.0]), lambda: interleave({"a": float}, 0)]
)
def test_nothing_to_compare_is_an_error(wrong):
    with pytest.raises(BenchmarkError):
        wrong()
