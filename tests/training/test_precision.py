"""`precision` auto: chosen by measurement for a new run, recorded, and kept."""

from dataclasses import replace

import pytest
import torch

from scalelong.config import HardwareConfig, load_config
from scalelong.data import load_data
from scalelong.runs import build_model, shape_of
from scalelong.training import hardware as precision, train

AUTO = HardwareConfig(cpu=True)


@pytest.fixture
def gain(monkeypatch):
    """Sets how much faster bfloat16 is on a made-up machine."""
    monkeypatch.delenv("SCALELONG_PRECISION")
    return lambda value: monkeypatch.setattr(precision, "gain_of_bf16", lambda *_: value)


def test_the_environment_decides_without_measuring(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "gain_of_bf16", None)  # a call would fail
    monkeypatch.setenv("SCALELONG_PRECISION", "bf16")
    train(replace(tiny, hardware=AUTO), tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.yaml").hardware.precision == "bf16"


@pytest.mark.parametrize(("measured", "chosen"), [(2.0, "bf16"), (0.5, "fp32")])
def test_what_is_faster_is_taken_and_kept(tiny, tmp_path, final_state, gain, measured, chosen):
    gain(measured)
    auto = replace(tiny, hardware=AUTO)
    train(replace(auto, steps=4), tmp_path / "auto")
    assert load_config(tmp_path / "auto" / "config.yaml").hardware.precision == chosen
    gain(1 / measured)  # a run that has begun is not measured again
    train(auto, tmp_path / "auto")
    assert load_config(tmp_path / "auto" / "config.yaml").hardware.precision == chosen
    train(replace(tiny, hardware=replace(AUTO, precision=chosen)), tmp_path / "told")
    found, told = final_state(tmp_path / "auto").model, final_state(tmp_path / "told").model
    assert all(torch.equal(value, told[name]) for name, value in found.items())


def test_what_the_launcher_was_told_is_recorded(tiny, tmp_path, gain, monkeypatch):
    gain(0.5)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(replace(tiny, hardware=AUTO, steps=1), tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.yaml").hardware.precision == "bf16"


def test_measuring_leaves_the_network_and_random_numbers_alone(tiny, monkeypatch):
    monkeypatch.delenv("SCALELONG_PRECISION")
    shape = shape_of(load_data("digits"))
    model = build_model(tiny, shape).train()
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert precision.choose_precision(tiny, shape, torch.device("cpu"), model) in ("bf16", "fp32")
    assert precision.choose_precision(tiny, shape, torch.device("cpu")) in ("bf16", "fp32")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_switches_of_nvidia_gpus_hold_while_a_run_trains(tiny, tmp_path):
    def switches():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark

    seen, before = [], switches()
    fast = replace(tiny.hardware, tf32=True, cudnn_benchmark=True)
    train(replace(tiny, steps=1, hardware=fast), tmp_path / "run", hooks=[lambda _: seen.append(switches())])
    assert seen == [(True, True)]
    assert switches() == before == (False, False)
    train(replace(tiny, steps=2), tmp_path / "run")  # a run may go on without them
