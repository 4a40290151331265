"""Every run watches itself: readings that change nothing, and alarms."""

from dataclasses import replace

import torch
from torch import nn

from scalelong.runs import read_metrics
from scalelong.training import train


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
