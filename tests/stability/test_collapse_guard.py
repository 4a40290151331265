"""The detector on losses that were recorded and on made-up ones, and the guard in loops that collapse."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scalelong as sl
from research.alarms import WITHIN, alarms, onset
from scalelong.errors import CollapseError, InvalidConfigError
from scalelong.stability import (
    MARGIN,
    Collapse,
    CollapseDetector,
    Spike,
    first_to_leave,
    last_good,
    lightning_guard,
    trainer_guard,
)

# The detector


LOSSES = Path(__file__).parents[2] / "docs" / "evidence" / "collapse" / "losses.npz"


def recorded_runs() -> list[dict[str, Any]]:
    """41 runs, collapsed and healthy: images, losses and losses of zero by step and noise level, as sums."""
    runs = []
    with np.load(LOSSES) as file:
        for number in [name.partition("-")[0] for name in file.files if name.endswith("-group")]:
            counts = file[f"{number}-counts"].astype(float)
            # Losses are stored as codes 1 to 255 on a logarithmic scale from 1e-3 to 1e3.
            losses, zeros = (1e-3 * 1e6 ** ((file[f"{number}-{name}"] - 1.0) / 254) for name in ("losses", "zeros"))
            parts = zip(counts, counts * losses, counts * zeros, strict=True)
            runs += [dict(zip(("counts", "losses", "zeros"), part, strict=True)) for part in parts]
    return runs


def test_recorded_runs_collapses_are_found_within_30_steps_and_there_is_no_false_alarm():
    found, missed = 0, 0
    for run in recorded_runs():
        lost = onset(run, 20)  # by the whole curve, not by the detector
        for by_level in (True, False):
            steps = [event.step for event in alarms(run, by_level=by_level)]
            if lost is None:
                assert steps == []
            elif lost:
                assert not steps or steps[0] >= lost - WITHIN
                found += bool(steps) and steps[0] <= lost + WITHIN
                missed += not steps or steps[0] > lost + WITHIN
    assert found >= 30
    assert found >= 0.95 * (found + missed)


def events(losses, **options):
    detector = CollapseDetector(**options)
    found = [detector.add(step, loss) for step, loss in enumerate(losses, start=1)]
    return [event for event in found if event is not None]


FALLING = [max(0.1, 1 - 0.05 * step) for step in range(60)]


@pytest.mark.parametrize(
    ("losses", "kinds"),
    [
        ([*FALLING, 50.0, *[0.1] * 20], []),  # one wild step
        ([*FALLING, *[3.0] * 3, *[0.1] * 20], [Spike]),
        ([*FALLING, *[1.0] * 20, *[0.1] * 40, *[1.0] * 20], [Collapse, Collapse]),
        ([*[1.0] * 50, *[5.0] * 50], []),  # it has never learned anything
        ([*FALLING, math.nan], [Collapse]),
    ],
)
def test_made_up_losses(losses, kinds):
    assert [type(event) for event in events(losses, zero_loss=1.0)] == kinds


def test_it_says_where_the_trouble_began_and_what_it_cost():
    (found,) = events([*FALLING, *[1.0] * 30], zero_loss=1.0)
    assert isinstance(found, Collapse)
    assert found.began == 60
    assert 60 < found.step <= 75
    assert (found.loss, found.zero) == (1.0, 1.0)
    assert found.level == pytest.approx(0.1, abs=0.05)
    assert "it is 1, was 0.1" in str(found)


def test_zero_loss_may_be_left_out_also_where_a_network_starts_far_above_it():
    assert len(events([*FALLING, *[1.0] * 30])) == 1
    assert len(events([*[300.0] * 5, *[1.0] * 20, *FALLING, *[1.0] * 40])) == 1


def test_batches_of_other_noise_levels_are_no_collapse():
    """At level 1 the loss is always near that of zero. A run of such batches means nothing."""
    detector, source, event = CollapseDetector(levels=2), random.Random(0), None
    for step in range(1, 2000):
        hard = source.random() < 0.5 or step % 200 > 150
        counts = [0.0, 4.0] if hard else [4.0, 0.0]
        losses = [0.0, 3.8] if hard else [4.0 if step < 10 else 0.2, 0.0]
        event = detector.add_levels(step, counts, losses, counts)
        assert event is None
    for step in range(2000, 2040):
        event = event or detector.add_levels(step, [2.0, 2.0], [2.0, 2.0], [2.0, 2.0])
    assert isinstance(event, Collapse)
    assert event.noise_level == 0


def test_a_saved_detector_decides_as_it_would_have():
    losses = [*FALLING, *[1.0] * 30]
    plain, first = CollapseDetector(zero_loss=1.0), CollapseDetector(zero_loss=1.0)
    wanted = [plain.add(step, loss) for step, loss in enumerate(losses)]
    found = [first.add(step, loss) for step, loss in enumerate(losses[:65])]
    second = CollapseDetector(zero_loss=1.0)
    second.load_state_dict(first.state_dict())
    found += [second.add(step, loss) for step, loss in enumerate(losses[65:], start=65)]
    assert found == wanted
    assert second.state_dict() == plain.state_dict()


def test_the_state_to_go_back_to_is_from_before_the_trouble():
    assert last_good([0, 20, 40, 60], 55) == 40
    assert last_good([0, 50, 60], 55) == 0
    assert last_good([0, 45, 50, 60], 55) == 45
    assert last_good([50, 54, 60], 55) == 50
    assert last_good([60], 55) is None
    assert MARGIN == 10


def test_first_to_leave_is_the_first_and_of_several_the_furthest():
    readings = [(10, {"a": 1.0, "b": 2.0}), (20, {"a": 1.5, "b": 2.0}), (30, {"a": 3.0, "b": 0.5})]
    assert first_to_leave(readings, 12) == {"where": "b", "step": 30, "factor": 0.25}
    assert first_to_leave(readings[:2], 12) is None


# The guard


class Line(nn.Module):
    """y = w x, with a state that must go back as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, labels=None):
        self.seen += 1
        y = x * self.weight
        return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


def loop(guard_options, steps=160, break_at=(105,)):
    """Learn w = 1, which costs 1 at w = 0; at some steps the weights are thrown far away by hand."""
    torch.manual_seed(0)
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    guard = sl.CollapseGuard(model, optimizer, **guard_options)
    for step in range(1, steps + 1):
        x = torch.randn(8, 4)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step in break_at:
            with torch.no_grad():
                model.weight.fill_(-3.0)
        guard.step(loss)
    return model, optimizer, guard


def test_two_lines_in_a_plain_loop_bring_it_back(tmp_path):
    for folder in (None, tmp_path / "good"):
        model, optimizer, guard = loop({"zero_loss": 1.0, "folder": folder, "every": 20})
        (entry,) = guard.rollbacks
        assert entry["to_step"] == 100
        assert 105 < entry["bad_step"] <= 130
        assert guard.rate_factor == 0.5
        assert optimizer.param_groups[0]["lr"] == 0.05  # what the schedule planned
        assert torch.allclose(model.weight, torch.ones(4), atol=0.2)
        assert [type(event) for event in guard.events] == [Collapse]
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["good-0.pt"]


def test_weights_buffers_and_moments_go_back_together_and_a_copy_takes_the_memory_of_the_last():
    model, optimizer, guard = loop({"zero_loss": 1.0, "every": 20}, steps=115)
    kept = guard._good
    assert kept is not None
    guard._restore()
    assert guard.good_step == float(model.seen) == float(optimizer.state[model.weight]["step"]) == 100
    guard._save()
    assert guard._good is not None
    assert guard._good["model"]["weight"].data_ptr() == kept["model"]["weight"].data_ptr()


def test_a_step_after_a_rollback_is_made_with_the_lower_rate():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = sl.CollapseGuard(model, optimizer)
    guard.rate_factor = 0.25
    model.weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((4,), -0.25))
    assert optimizer.param_groups[0]["lr"] == 1.0
    guard.close()
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.full((4,), -1.25))


def test_it_gives_up_after_the_given_number_and_stop_raises_at_once_and_ignore_reports():
    with pytest.raises(CollapseError, match="2 rollbacks with lower rates did not help"):
        loop({"zero_loss": 1.0, "every": 20, "max_rollbacks": 2}, 400, break_at=range(100, 400))
    with pytest.raises(CollapseError, match=r"learning rate was 0\.05"):
        loop({"zero_loss": 1.0, "mode": "stop"})
    heard = []
    _, _, guard = loop({"zero_loss": 1.0, "mode": "ignore", "on_event": heard.append}, steps=130)
    assert [type(event) for event in heard] == [Collapse]
    assert guard.rollbacks == []


def test_a_loss_that_is_not_finite_goes_back_as_well():
    model, _, guard = loop({"zero_loss": 1.0, "every": 20}, break_at=())
    with torch.no_grad():
        model.weight.fill_(math.nan)
    guard._stepped = True
    assert guard.step(torch.tensor(math.nan)) is not None
    assert torch.isfinite(model.weight).all()


def test_parts_of_a_step_count_as_one_step():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = sl.CollapseGuard(model, optimizer, zero_loss=1.0)
    for part in range(6):
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        if part % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        guard.step(loss)
    assert guard.steps == 2


def test_a_resumed_guard_keeps_its_rate():
    model, optimizer, guard = loop({"zero_loss": 1.0, "every": 20})
    again = sl.CollapseGuard(model, optimizer, zero_loss=1.0)
    again.load_state_dict(guard.state_dict())
    assert (again.steps, again.rate_factor, again.rollbacks) == (160, 0.5, guard.rollbacks)
    assert again.good_step == 160


@pytest.mark.parametrize(("processes", "backend"), [(2, "gloo"), (64, "cpu:gloo,cuda:nccl")])
def test_processes_decide_together_also_where_one_of_many_is_lost(processes, backend, monkeypatch):
    """Another process, made up, collapses at step 60; the others do not. The mean of 64 hardly shows that."""

    def all_reduce(values, op=None):
        other = 4.0 if 60 <= guard.steps < 65 else 0.1
        if op == "max":
            values.clamp_(min=other)
        else:
            values.mul_(processes - 1).add_(other)

    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = sl.CollapseGuard(model, optimizer, zero_loss=1.0, every=10)
    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: processes,
        get_backend=lambda: backend,
        all_reduce=all_reduce,
        ReduceOp=SimpleNamespace(MAX="max"),
    )
    monkeypatch.setattr("scalelong.stability.guard.dist", fake)
    for step in range(80):
        model.weight.grad = torch.zeros(4)
        optimizer.step()
        guard.step(1.0 if step < 5 else 0.1)
    (found,) = [event for event in guard.events if isinstance(event, Collapse)]
    assert 60 <= found.step <= 75
    assert guard.rollbacks[0]["to_step"] == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "save"}, "mode must be one of rollback, stop, ignore"),
        ({"every": 0}, "every must be a whole number"),
        ({"factor": 2.0}, "factor must be above 0"),
        ({"zero_loss": -1.0}, "zero_loss"),
    ],
)
def test_bad_options_are_named(options, message):
    model = Line()
    with pytest.raises(InvalidConfigError, match=message):
        sl.CollapseGuard(model, torch.optim.SGD(model.parameters()), **options)
    with pytest.raises(InvalidConfigError, match="must be a torch optimiser"):
        sl.CollapseGuard(model, object())


# In other people's loops


def broken_data(count, broken):
    """Inputs and labels; at some steps the labels are far off, as if the weights were."""
    source = torch.Generator().manual_seed(0)
    for step in range(count):
        x = torch.randn(8, 4, generator=source)
        yield x, -4 * x if step in broken else x


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Line()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    guard = sl.CollapseGuard(model, optimizer, zero_loss=1.0, every=10)
    for x, labels in broken_data(180, range(120, 130)):
        with accelerator.accumulate(model):
            loss = model(x, labels)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            guard.step(loss)
    assert guard.steps == 90
    assert guard.rollbacks[0]["to_step"] == 60


def test_lightning():
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = SimpleNamespace(optimizers=[optimizer], accumulate_grad_batches=1)
    callback = lightning_guard(zero_loss=1.0, every=10)
    callback.on_train_start(trainer, model)
    for x, labels in broken_data(90, range(60, 65)):
        loss = model(x, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_train_batch_end(trainer, model, {"loss": loss.detach()}, None, 0)
    callback.on_train_end(trainer, model)
    assert callback.guard.rollbacks[0]["to_step"] == 60
    with pytest.raises(InvalidConfigError, match="this module has 2"):
        callback.on_train_start(SimpleNamespace(optimizers=[optimizer, optimizer]), model)


def test_a_model_that_returns_no_loss_is_named():
    model = Line()
    callback = trainer_guard()
    callback.on_train_begin(None, None, None, model=model, optimizer=torch.optim.SGD(model.parameters()))
    model(torch.randn(2, 4))
    with pytest.raises(InvalidConfigError, match="found no loss"):
        callback.on_step_end(None, None, None)
