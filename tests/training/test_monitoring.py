"""Every run watches itself: readings that change nothing, alarms, and a collapse that is said loudly."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelong.errors import NonFiniteError
from scalelong.runs import read_metrics
from scalelong.stability import CollapseRule
from scalelong.training import train
from scalelong.training.monitoring import Collapse, CollapseWatch


def watched(config, every):
    return replace(config, logging=replace(config.logging, monitor_every=every))


def readings(folder):
    return {line["step"]: line for line in read_metrics(folder) if "kappa/1" in line}


def test_readings_change_nothing_and_a_resumed_run_records_the_same(tiny, final_state, tmp_path):
    config = replace(tiny, scaling="cs:0.5", model_options={**tiny.model_options, "depth": 4})
    train(watched(config, 0), tmp_path / "alone")
    train(watched(config, 2), tmp_path / "watched")
    train(watched(replace(config, steps=4), 2), tmp_path / "resumed")
    train(watched(config, 2), tmp_path / "resumed")
    states = [final_state(tmp_path / name) for name in ("alone", "watched", "resumed")]
    for name, value in states[0].ema.items():
        assert all(torch.equal(value, state.ema[name]) for state in states[1:])
    assert readings(tmp_path / "alone") == {}
    found = readings(tmp_path / "watched")
    assert list(found) == [2, 4, 6, 8, 10, 12]
    assert found[12]["kappa/2"] == 0.5
    assert any(name.startswith("probe_block_rms/") for name in found[2])
    assert any(name.startswith("update_ratio/") for name in found[2])
    assert readings(tmp_path / "resumed") == found


def test_it_is_on_by_default_and_a_flag_turns_it_off(tiny):
    assert tiny.monitor_every == 50
    assert replace(tiny, steps=500_000).monitor_every == 500
    assert watched(tiny, 0).monitor_every == 0


class NoSkips(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, t):
        return self.layer(x) + t.view(-1, 1, 1, 1) / 1000


def test_a_network_without_long_skips_is_trained_all_the_same(tiny, tmp_path, capsys):
    config = replace(watched(tiny, 2), model=f"{__name__}:NoSkips", model_options={})
    assert train(config, tmp_path / "a").finished
    assert "no stability monitor for this network: NoLongSkipsError" in capsys.readouterr().err


def lines(losses, every=10):
    return [{"step": (i + 1) * every, "loss": loss, "learning_rate": 0.01} for i, loss in enumerate(losses)]


def collapses(losses, **about):
    watch = CollapseWatch(CollapseRule())
    return [line["step"] for line in lines(losses, **about) if watch.add(line)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 0.5, 0.2, 0.1, 0.1], []),
        ([1.0, 0.5, 0.2, 0.1, 0.9, 0.95, 0.95], [50]),
        ([1.0, 0.2, 0.1, 0.12, 0.15, 0.12], []),
        ([1.0, 0.2, 0.1, 0.9, 0.9, 0.1, 0.1, 0.1, 0.9], [40, 90]),
        ([1.0, 1.0, 1.0], []),
    ],
)
def test_a_loss_that_goes_far_back_up_has_collapsed(losses, expected):
    assert collapses(losses) == expected


def test_one_bad_step_is_no_collapse():
    assert collapses([1.0, *[0.1] * 20, 2.0, *[0.1] * 20], every=1) == []


def test_lines_of_other_things_are_left_alone():
    watch = CollapseWatch(CollapseRule())
    assert watch.add({"step": 1, "held_out_loss": 3.0}) is None
    assert watch.reference is None


def test_the_advice_names_the_rate_and_does_not_scale_what_is_scaled():
    found = Collapse(0.9, 0.1, 40)
    assert "--lr 0.002" in found.advice(0.008, scaled=False)
    assert "--scaling cs" in found.advice(0.008, scaled=False)
    assert "--scaling" not in found.advice(0.008, scaled=True)
    assert "start_skips_" in found.advice(0.008, scaled=True)


def test_a_collapse_is_said_and_written_down(tiny, tmp_path, capsys):
    """A hook breaks the weights, as a high rate would."""

    def break_weights(state):
        if state.step == 8:
            with torch.no_grad():
                for parameter in state.bare.parameters():
                    parameter.mul_(3.0)

    logging = replace(tiny.logging, log_every=4)
    config = replace(tiny, steps=16, logging=logging, optimizer=replace(tiny.optimizer, lr=1e-3))
    train(config, tmp_path / "a", hooks=[break_weights])
    assert "COLLAPSED at step" in capsys.readouterr().err
    (entry,) = [json.loads(line) for line in (tmp_path / "a" / "alarms.jsonl").read_text().splitlines()]
    assert (entry["kind"], entry["step"]) == ("collapse", 12)
    assert "learning rate is 0.001" in entry["message"]


def test_a_rate_of_a_thousand_is_named(tiny, tmp_path):
    config = replace(tiny, steps=200, optimizer=replace(tiny.optimizer, lr=1e3, warmup=0, clip=None))
    with pytest.raises(NonFiniteError, match="learning rate was 1000") as caught:
        train(config, tmp_path / "a")
    assert "hardware" not in str(caught.value)
