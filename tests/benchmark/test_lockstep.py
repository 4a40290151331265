"""Contenders in lockstep: the order of slices, and that a small cost is found on a machine that changes its speed."""

import random

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from benchmarks.contenders import switched
from benchmarks.contenders.ours import TrainingStep, make_network
from benchmarks.contenders.switched import share_weights_
from benchmarks.lockstep import Lockstep
from benchmarks.profile import cost, differing, operations, peak_of_tensors, table_of
from benchmarks.record import Spread
from benchmarks.settings import TINY, TINY_UNET, BenchmarkError


class Clock:
    """Work of known length on a machine whose speed wanders."""

    def __init__(self, wander=0.0):
        self.now, self.speed, self.wander, self.random = 0.0, 1.0, wander, random.Random(1)

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.speed = min(1.3, max(0.7, self.speed + self.random.uniform(-self.wander, self.wander)))
        self.now += seconds * self.speed


def lockstep(lengths, clock, log=None):
    made = Lockstep({}, clock=clock)

    def step(name):
        def work():
            for number, length in enumerate(lengths[name]):
                if number:
                    made.cut()
                clock.work(length)
                if log is not None:
                    log.append((name, number))

        return work

    made.steps.update({name: step(name) for name in lengths})
    return made


def test_every_contender_does_a_slice_before_anyone_does_the_next():
    log = []
    found = lockstep({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}, Clock(), log).round()
    assert found == {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}
    assert [number for _, number in log] == [0, 0, 0, 1, 1, 1]
    assert [name for name, _ in log[:3]] == [name for name, _ in log[3:]]


def test_the_order_changes_from_round_to_round():
    log = []
    made = lockstep({name: [1.0] for name in "abc"}, Clock(), log)
    for _ in range(20):
        made.round()
    assert {log[i][0] for i in range(0, len(log), 3)} == set("abc")


def test_work_in_one_piece_is_not_cut():
    clock, made = Clock(), Lockstep({})

    def step():
        with made.in_one_piece():
            clock.work(1.0)
            made.cut()
            clock.work(1.0)
        made.cut()

    made.clock = clock
    made.steps.update({"a": step, "b": step})
    assert made.round() == {"a": [2.0, 0.0], "b": [2.0, 0.0]}


def test_an_error_in_a_step_ends_the_round_and_is_raised():
    made = lockstep({"a": [1.0, 1.0], "b": [1.0, 1.0]}, Clock())

    def failing():
        made.cut()
        raise ZeroDivisionError("in the step")

    made.steps["c"] = failing
    with pytest.raises(ZeroDivisionError, match="in the step"):
        made.round()
    del made.steps["c"]
    assert set(made.round()) == {"a", "b"}


def test_different_numbers_of_slices_are_refused():
    with pytest.raises(BenchmarkError, match=r"'a': 1, 'b': 2"):
        lockstep({"a": [1.0], "b": [1.0, 1.0]}, Clock()).round()


def test_half_a_percent_is_found_while_the_speed_wanders():
    lengths = {"none": [1.0] * 40, "again": [1.0] * 40, "half a percent more": [1.0] * 39 + [1.2]}
    made = lockstep(lengths, Clock(wander=0.02))
    slices = table_of([made.round() for _ in range(40)])
    none = slices["none"]
    last = torch.tensor([False] * 39 + [True])
    whole = torch.ones(40, dtype=torch.bool)
    found = cost(slices["half a percent more"], none, last)
    assert found.low <= 0.005 <= found.high
    assert found.median == pytest.approx(0.005, abs=0.0005)
    assert found.high - found.low < 0.002
    again, wide = cost(slices["again"], none, last), cost(slices["again"], none, whole)
    assert again.low <= 0.0 <= again.high
    assert wide.low <= 0.0 <= wide.high
    assert wide.high - wide.low > again.high - again.low
    # Whole steps one after another could not have shown it.
    assert none.sum(1).std() / none.sum(1).mean() > 0.02


def test_an_interruption_does_not_move_a_cost():
    none = torch.ones(21, 5, dtype=torch.float64)
    more = none.clone()
    more[:, 2] += 0.1
    more[3, 4] += 1000.0
    assert vars(cost(more, none, torch.ones(5, dtype=torch.bool))) == pytest.approx(vars(Spread(0.02, 0.02, 0.02)))


def test_slices_with_other_operations_are_found():
    made, x = Lockstep({}), torch.randn(3, 4)

    def step(middle):
        def work():
            torch.mm(x, x.t())
            made.cut()
            middle()
            made.cut()
            x.sum()

        return work

    plain = operations(step(lambda: None), made)
    assert len(plain) == 3
    assert differing(plain, operations(step(lambda: None), made)) == set()
    assert differing(plain, operations(step(lambda: x * 2), made)) == {1}
    wider = torch.randn(3, 5)
    assert differing(operations(step(lambda: x * 2), made), operations(step(lambda: wider * 2), made)) == {1}


def test_the_peak_of_tensors_is_that_of_those_that_exist_together():
    def build():
        torch.empty(9000)  # what building needs for a moment does not count
        kept = torch.empty(1000)

        def step():
            for _ in range(5):
                torch.empty(500)
            return kept

        return step

    peak = peak_of_tensors(build)
    assert peak == 4 * 1500
    assert peak_of_tensors(build) == peak


def test_weights_are_shared_where_they_are_the_same():
    base, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight.data.copy_(base.weight)
    share_weights_(other, base)
    assert other.weight.data_ptr() == base.weight.data_ptr()
    assert other.bias.data_ptr() != base.bias.data_ptr()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LS = "ls:module=se,gate=channel"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")
@pytest.mark.parametrize("size", [TINY, TINY_UNET])
def test_trainers_share_memory_and_differ_where_the_skips_are_scaled(size):
    found = switched.training(**size.ours(), methods={"none": "none", "again": "none", "CS": "cs", "LS": LS})
    found()
    assert found.compare_operations() == ["none", "again"]
    trainers = {name: step.trainer for name, step in found.steps.items() if isinstance(step, TrainingStep)}
    assert set(trainers) == {"none", "again", "CS", "LS"}
    weights = {name: dict(trainer.state.bare.named_parameters()) for name, trainer in trainers.items()}
    common = [name for name in weights["none"] if not name.startswith("skip_scaling")]
    assert all(weights["LS"][name].data_ptr() == weights["none"][name].data_ptr() for name in common)
    # The gates are trained as well.
    gates = [name for name in weights["LS"] if name not in weights["none"]]
    assert gates
    averages = dict(zip(trainers["LS"].state.ema.names, trainers["LS"].state.ema.averages, strict=True))
    assert any(not torch.equal(averages[name], weights["LS"][name]) for name in gates)
    assert {int(each["step"]) for each in trainers["LS"].state.optimizer.state.values()} > {3}
    slices = len(found.rounds[0]["none"])
    assert {slices - 3, slices - 2, slices - 1} < found.parts
    assert len(found.parts) < slices / 2
    found.forget()
    found()
    answer = found.found()
    assert answer["parts"]["none"] == {"median": 0.0, "low": 0.0, "high": 0.0}
    assert set(answer["whole"]) == {"none", "again", "CS", "LS"}
    assert 0 < answer["share"] < 1


@pytest.mark.usefixtures("one_thread")
def test_folded_constants_leave_the_operations_of_none():
    methods = {"none": {"scaling": "none"}, "CS": {"scaling": "cs"}, "folded": {"scaling": "cs", "folded": True}}
    found = switched.inference(**TINY.ours(), methods=methods)
    assert found.compare_operations() == ["none", "folded"]
    assert found.parts


@pytest.mark.usefixtures("one_thread")
def test_a_network_scaled_from_outside_by_one_or_folded_is_left_as_it_is():
    methods = {
        "as it is": {"scaling": None},
        "κ = 1": {"scaling": "uniform:1.0"},
        "CS, folded": {"scaling": "cs", "folded": True},
        "LS": {"scaling": "ls"},
    }
    found = switched.attached(network="concatenating", methods=methods, batch=1)
    assert found.compare_operations() == ["as it is", "κ = 1", "CS, folded"]


@pytest.mark.filterwarnings("ignore:GroupNorm")
def test_constants_that_cannot_be_folded_are_not_measured_as_if_they_were():
    with pytest.raises(BenchmarkError, match="cannot be folded"):
        make_network("unet/cifar10, narrow", "cs", 1, folded=True)


@pytest.mark.usefixtures("one_thread")
def test_a_monitor_reads_without_being_cut():
    found = switched.monitored(**TINY.ours(), readings={"without": None, "waiting": 10**9, "reading": 1})
    # A monitor that waits adds up the loss at the end of the step, and does nothing else.
    assert found.compare_operations() == ["without"]
    without, waiting, reading = (operations(step, found.lockstep) for step in found.steps.values())
    assert differing(without, waiting) == {len(without) - 1}
    assert len(differing(without, reading)) > 1
    for _ in range(3):
        found()
    assert {name: len(rounds) for name, rounds in found.found()["seconds"].items()} == dict.fromkeys(found.steps, 3)
    found.close()
    assert not _global_optimizer_pre_hooks
