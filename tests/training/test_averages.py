"""Averages of several lengths: against their definition, and made after training from snapshots."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file as load_tensors, save_file
from torch import nn

from scalelong.cli import main
from scalelong.config import AverageLength, OptimizerConfig, is_snapshot, power, relative_length
from scalelong.errors import CheckpointError, InvalidConfigError
from scalelong.runs import load_run, read_checkpoint, saved_steps
from scalelong.runs.averages import (
    OLDEST,
    combine,
    profile,
    shares,
)
from scalelong.training import Ema, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with two tracks, and all its weights."""
    from tests.training.conftest import TINY

    config = replace(
        TINY,
        steps=150,
        images=replace(TINY.images, held_out=100),
        optimizer=replace(TINY.optimizer, ema_lengths=("5%", "0.1", "30steps")),
        checkpoints=replace(TINY.checkpoints, save_every=70),
        logging=replace(TINY.logging, monitor_every=0, held_out_every=150, log_every=50),
    )
    folder, weights = tmp_path_factory.mktemp("averages") / "run", []

    def keep(state):
        weights.append({name: w.detach().clone() for name, w in zip(state.ema.names, state.ema.weights, strict=True)})

    train(config, folder, hooks=[keep])
    return config, folder, weights


def test_lengths_are_read_and_written():
    read = {"10%": "10%", "0.1": "10%", "7.5 %": "7.5%", "5000steps": "5000steps", "200k images": "200000images"}
    assert {text: str(AverageLength.parse(text)) for text in read} == read
    for wrong in ("", "10", "abc", "-5%", "0%", "40%", "0.1%", "1e400%", "0steps", "5k%", "nan", "10%%"):
        with pytest.raises(InvalidConfigError, match="`ema_length`"):
            AverageLength.parse(wrong)
    with pytest.raises(InvalidConfigError, match="twice"):
        OptimizerConfig(ema_lengths=("10%", "0.1"))


def test_powers_are_those_of_the_paper():
    # Karras et al. (2024), section 3: γ = 16.97 and 6.94 for 5 % and 10 %.
    assert power(0.05) == pytest.approx(16.97, abs=0.01)
    assert power(0.10) == pytest.approx(6.94, abs=0.01)
    for length in (0.005, 0.02, 0.15, 0.28):
        assert relative_length(power(length)) == pytest.approx(length, rel=1e-9)


@pytest.mark.parametrize("length", [0.03, 0.1, 0.25])
def test_the_recursion_has_the_profile_and_the_profile_the_length(length):
    steps, track = 400, AverageLength("share", length)
    weights = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        beta = track.rate(step, 32, warmup=True)
        weights *= beta
        weights[step] += 1 - beta
    torch.testing.assert_close(weights, profile(power(length), steps, steps), rtol=1e-9, atol=1e-12)
    times = torch.arange(1, steps + 1, dtype=torch.float64)
    mean = (weights * times).sum()
    assert float(((weights * (times - mean) ** 2).sum()).sqrt() / steps) == pytest.approx(length, rel=0.01)


def test_steps_and_images_are_exponential_averages_of_that_deviation():
    assert AverageLength.parse("1000steps").rate(10**6, 7, warmup=True) == pytest.approx(0.999)
    assert AverageLength.parse("32kimages").rate(10**6, 32, warmup=True) == pytest.approx(0.999)
    assert AverageLength.parse("1000steps").rate(0, 7, warmup=True) == pytest.approx(0.1)
    ema = Ema(nn.Linear(1, 1), OptimizerConfig(ema_length="32kimages"), batch_size=32)
    assert ema.rate(10**6) == pytest.approx(0.999)


@pytest.mark.parametrize("length", [0.04, 0.07, 0.13, 0.2])
def test_a_combination_is_the_average_of_a_closed_form(length):
    """Of θ(τ) = (τ/T)^a with a loss curve's falling part: each average has a closed form."""
    steps, tracks = 5000, (0.05, 0.1)
    points = [
        (at, track)
        for at in [s for s in range(1, steps) if is_snapshot(s) and s >= OLDEST * steps] + [steps]
        for track in tracks
    ]
    coefficients, _ = combine(points, steps, length)
    assert sum(coefficients) == pytest.approx(1, abs=1e-9)
    for exponent in (-0.3, 0.5, 1.0, 3.0):
        # ∫ (γ+1) τ^γ / t^(γ+1) (τ/T)^a dτ = (γ+1) / (γ+a+1) (t/T)^a
        def average(at, track, a=exponent):
            return (power(track) + 1) / (power(track) + a + 1) * (at / steps) ** a

        made = sum(c * average(*point) for c, point in zip(coefficients, points, strict=True))
        assert made == pytest.approx(average(steps, length), rel=1e-3)


@pytest.mark.parametrize("length", ["4%", "7%", "13%", "16%", "20%"])
def test_any_length_of_a_real_run(trained, length):
    _, folder, weights = trained
    run = load_run(folder, weights=f"ema:{length}")
    assert run.weights == f"ema:{length}"
    shape = profile(power(AverageLength.parse(length).value), len(weights), len(weights))
    difference = norm = 0.0
    for name, value in run.model.named_parameters():
        direct = torch.stack([share * w[name].double() for share, w in zip(shape, weights, strict=True)]).sum(0)
        difference += float((value.detach().double() - direct).square().sum())
        norm += float(direct.square().sum())
    assert (difference / norm) ** 0.5 < 1e-3


def test_kept_lengths_are_read_as_they_are(trained):
    _, folder, _ = trained
    saved = read_checkpoint((folder / "checkpoints" / "latest").resolve())
    for length in ("5%", "10%", "30steps"):
        model = load_run(folder, weights=f"ema:{length}").model
        assert all(torch.equal(value, saved.averages[f"{length}/{name}"]) for name, value in model.named_parameters())
    with pytest.raises(CheckpointError, match="--ema-lengths 5% 10%"):
        load_run(folder, weights="ema:40steps")
    with pytest.raises(InvalidConfigError, match="ema:LENGTH"):
        load_run(folder, weights="average")


def test_snapshots_are_few_and_resumed_bit_for_bit(trained, tmp_path, crash_at, final_state):
    config, folder, _ = trained
    kept = sorted((folder / "averages").glob("*.safetensors"))
    wanted = [step for step in range(1, 151) if is_snapshot(step) and step >= OLDEST * 145]
    assert len(kept) <= 25
    assert [int(path.stem[5:]) for path in kept] == wanted
    crash_at(config, tmp_path / "run", 120)  # after the checkpoint of 70 and snapshots beyond it
    train(config, tmp_path / "run")
    for path in kept:  # but for the id of the run, in the header
        again = load_tensors(tmp_path / "run" / "averages" / path.name)
        assert all(torch.equal(value, again[name]) for name, value in load_tensors(path).items())
    first, second = final_state(folder), final_state(tmp_path / "run")
    assert first.averages.keys() == second.averages.keys() != set()
    assert all(torch.equal(value, second.averages[name]) for name, value in first.averages.items())
    assert all(torch.equal(value, second.ema[name]) for name, value in first.ema.items())


def test_damage_and_other_runs_are_refused(trained, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(trained[1], folder, symlinks=True)
    victim = sorted((folder / "averages").glob("*.safetensors"))[-2]
    tensors = {name: value.clone() for name, value in load_tensors(victim).items()}  # they are a map of the file
    victim.write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_run(folder, weights="ema:7%")
    save_file(tensors, victim, metadata={"scalelong": json.dumps({"run": "other"})})
    with pytest.raises(CheckpointError, match="another run"):
        load_run(folder, weights="ema:7%")
    victim.unlink()
    load_run(folder, weights="ema:7%")


def test_the_command_compares_and_writes(trained, tmp_path, capsys):
    _, folder, _ = trained
    assert main(["eval", str(folder), "--ema-lengths", "7%,10%", "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["held_out_loss"]
    assert list(losses) == ["raw", "ema", "ema:7%", "ema:10%"]
    out = tmp_path / "w.safetensors"
    assert main(["export", str(folder), "--ema", "0.07", "--format", "safetensors", "--out", str(out)]) == 0
    assert "EMA:7% weights of step 150" in capsys.readouterr().out
    expected = load_run(folder, weights="ema:7%").model.state_dict()
    written = load_tensors(out)
    assert all(torch.equal(value, expected[name]) for name, value in written.items() if value.dtype == torch.float32)
    assert main(["sample", str(folder), "-n", "2", "--steps", "2", "--weights", "ema:7%"]) == 0
    assert (folder / "images" / "step150-ema7pct-dpm++2" / "samples.json").exists()
    assert main(["export", str(folder), "--ema", "50%"]) == 1
    assert "--ema must be from" in capsys.readouterr().err


def test_a_run_without_tracks_says_how_to_get_them(tiny, tmp_path, capsys):
    train(replace(tiny, steps=4), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--ema", "10%"]) == 1
    assert "--ema-lengths 5% 10%" in capsys.readouterr().err
    assert not (tmp_path / "run" / "averages").exists()
    assert saved_steps(tmp_path / "run" / "checkpoints") == [0, 4]
    assert shares(("5%", "100steps")) == []
