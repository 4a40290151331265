"""A loss that collapses and stays finite: stop with a diagnosis, go back with a lower rate, or say so and go on."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from scalelong.config import GuardConfig
from scalelong.errors import CollapseError
from scalelong.files import read_json_lines
from scalelong.report import collect
from scalelong.runs import read_metrics, saved_steps
from scalelong.training import train

BROKEN_AT = 60


def broken(folder, times=1):
    """A hook that breaks the weights of a run, as a high rate would, until it has gone back `times` times."""

    def hook(state):
        path = folder / "rollbacks.json"
        gone_back = len(json.loads(path.read_text())) if path.exists() else 0
        if state.step == BROKEN_AT and gone_back < times:
            with torch.no_grad():
                for parameter in state.bare.parameters():
                    parameter.mul_(3.0)

    return hook


@pytest.fixture
def learner(tiny):
    """Has learned something after 60 steps."""
    return replace(
        tiny,
        steps=75,
        batch_size=16,
        optimizer=replace(tiny.optimizer, lr=1e-2),
        checkpoints=replace(tiny.checkpoints, save_every=10),
        logging=replace(tiny.logging, log_every=5, monitor_every=10),
    )


def guarded(config, mode, **options):
    return replace(config, guard=GuardConfig(on_collapse=mode, **options))


def run(config, folder, times=1):
    return train(config, folder, hooks=[broken(folder, times)], quiet=True)


def rollbacks(folder):
    return json.loads((folder / "rollbacks.json").read_text())


def test_it_stops_with_a_diagnosis_and_can_be_taken_back_afterwards(learner, final_state, tmp_path):
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with pytest.raises(CollapseError, match="the loss has collapsed") as caught:
        run(learner, a)
    message = str(caught.value)
    assert "What left first: block" in message or "What left first: skip" in message
    assert "The learning rate was 0.01" in message
    assert "`on_collapse` rollback" in message
    assert "attach" not in message
    (entry,) = [line for line in read_json_lines(a / "alarms.jsonl") if line["kind"] == "collapse"]
    assert BROKEN_AT < entry["step"] <= BROKEN_AT + 30
    # Before the trouble, and not the newest checkpoint, which is finite and broken.
    shutil.copytree(a, b, symlinks=True)
    assert run(guarded(learner, "rollback"), b).finished
    (gone_back,) = rollbacks(b)
    assert gone_back["cause"] == "collapse"
    assert gone_back["to_step"] <= BROKEN_AT - 10
    assert gone_back["left_first"]["where"].split()[0] in ("block", "skip")
    assert (b / "checkpoints" / f"abandoned-step-{BROKEN_AT:08d}").exists()
    lines = read_metrics(b)
    assert [line["rollbacks"] for line in lines if "rollbacks" in line] == [1.0]
    later = [line for line in lines if "learning_rate" in line and line["step"] > gone_back["to_step"]]
    assert {line["learning_rate"] for line in later} == {5e-3}
    assert later[-1]["loss"] < 0.8
    (row,) = [row for row in collect([b])["alarms"] if row["kind"] == "rollback"]
    assert f"back to step {gone_back['to_step']}, with the rate 0.005" in row["message"]
    # A run that had the mode from the beginning comes to the same weights.
    assert run(guarded(learner, "rollback"), c).finished
    assert all(torch.equal(value, final_state(c).ema[name]) for name, value in final_state(b).ema.items())


def test_a_run_that_went_back_resumes_bit_for_bit(learner, crash_at, final_state, tmp_path):
    config = guarded(learner, "rollback")
    run(config, tmp_path / "a")
    for name, step in (("b", BROKEN_AT + 2), ("c", BROKEN_AT + 7)):
        folder = tmp_path / name
        hook = broken(folder)

        def crash(state, step=step, folder=folder):
            if state.step == step and (step < BROKEN_AT + 5 or (folder / "rollbacks.json").exists()):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(config, folder, hooks=[hook, crash], quiet=True)
        train(config, folder, hooks=[hook], quiet=True)
        a, b = final_state(tmp_path / "a"), final_state(folder)
        assert all(torch.equal(value, b.ema[key]) for key, value in a.ema.items())
        assert a.training["collapse"] == b.training["collapse"]
        assert [r["to_step"] for r in rollbacks(folder)] == [r["to_step"] for r in rollbacks(tmp_path / "a")]
        losses = [
            [(line["step"], line["loss"]) for line in read_metrics(path) if "learning_rate" in line]
            for path in (tmp_path / "a", folder)
        ]
        assert losses[0] == losses[1]


def test_it_gives_up_after_the_given_number_and_goes_further_back_each_time(learner, tmp_path):
    config = guarded(learner, "rollback", max_rollbacks=2)
    config = replace(config, checkpoints=replace(config.checkpoints, keep_every=10))
    with pytest.raises(CollapseError, match="2 rollbacks with lower rates did not help"):
        run(config, tmp_path / "a", times=9)
    first, second = rollbacks(tmp_path / "a")
    assert second["to_step"] < first["to_step"]


def test_ignored_it_goes_on_and_keeps_the_checkpoint_from_before(learner, tmp_path, capsys):
    assert train(guarded(learner, "ignore"), tmp_path / "a", hooks=[broken(tmp_path / "a")]).finished
    assert "COLLAPSED at step" in capsys.readouterr().err
    steps = saved_steps(tmp_path / "a" / "checkpoints")
    assert len(steps) == 3
    assert steps[0] <= BROKEN_AT - 10
    weights = load_file(tmp_path / "a" / "checkpoints" / f"step-{steps[0]:08d}" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_a_healthy_run_is_left_alone(learner, final_state, tmp_path):
    for mode in ("stop", "ignore"):
        train(guarded(learner, mode), tmp_path / mode, quiet=True)
    a, b = final_state(tmp_path / "stop"), final_state(tmp_path / "ignore")
    assert all(torch.equal(value, b.ema[name]) for name, value in a.ema.items())
    assert not (tmp_path / "stop" / "rollbacks.json").exists()
