"""The best checkpoint is kept, and a run that no longer becomes better ends."""

import shutil
from dataclasses import replace

import pytest
import torch

from scalelong.config import ImagesConfig
from scalelong.errors import CheckpointError, InvalidConfigError
from scalelong.runs import load_run, read_metrics, saved_steps
from scalelong.runs.checkpoint import best_step
from scalelong.training import train
from scalelong.training.recording import Inspector


@pytest.fixture
def measured(tiny, monkeypatch):
    """Held-out losses by step, made up: the best is at step 4."""
    values = {2: 0.9, 4: 0.5, 6: 0.7, 8: 0.6, 10: 0.8, 12: 0.55}
    monkeypatch.setattr(
        Inspector,
        "held_out_loss",
        lambda self: dict.fromkeys(("held_out_loss", "trained_on_loss"), values[self.state.step]),
    )
    return replace(
        tiny,
        images=ImagesConfig(held_out=8),
        checkpoints=replace(tiny.checkpoints, save_every=6, keep_last=1, keep_best="held-out"),
        logging=replace(tiny.logging, held_out_every=2),
    )


def test_the_best_checkpoint_is_kept_also_by_a_run_that_is_resumed(measured, crash_at, final_state, tmp_path):
    train(measured, tmp_path / "a", quiet=True)
    crash_at(measured, tmp_path / "b", 9)
    train(measured, tmp_path / "b", quiet=True)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert saved_steps(folder / "checkpoints") == [4, 12]
        assert best_step(folder / "checkpoints") == 4
        assert load_run(folder, step="best").step == 4
        assert load_run(folder).step == 12
    assert final_state(tmp_path / "a").training["best"] == final_state(tmp_path / "b").training["best"]
    assert final_state(tmp_path / "a").training["best"] == {"value": 0.5, "step": 4, "since": 4}


def test_a_copy_with_links_followed_has_a_best_as_well(measured, tmp_path):
    train(measured, tmp_path / "a", quiet=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=False)
    assert load_run(tmp_path / "b", step="best").step == 4
    train(replace(measured, steps=12), tmp_path / "b", quiet=True)
    assert best_step(tmp_path / "b" / "checkpoints") == 4


def test_patience_ends_a_run_and_more_of_it_goes_on(measured, final_state, tmp_path, capsys):
    def patient(count):
        return replace(measured, checkpoints=replace(measured.checkpoints, patience=count))

    result = train(patient(2), tmp_path / "a")
    assert (result.finished, result.step) == (True, 8)
    assert "no better held-out in 2 measurements; the best, 0.5 at step 4" in capsys.readouterr().err
    assert train(patient(2), tmp_path / "a", quiet=True).step == 8
    assert train(patient(9), tmp_path / "a", quiet=True).step == 12
    train(measured, tmp_path / "b", quiet=True)
    a, b = final_state(tmp_path / "a"), final_state(tmp_path / "b")
    assert all(torch.equal(value, b.ema[name]) for name, value in a.ema.items())


def test_held_out_losses_come_by_noise_level(full_tiny, tmp_path):
    train(replace(full_tiny, steps=5, logging=replace(full_tiny.logging, samples_every=0)), tmp_path / "a", quiet=True)
    (line,) = [line for line in read_metrics(tmp_path / "a") if "held_out_loss" in line]
    levels = {name: value for name, value in line.items() if name.startswith("held_out_loss/")}
    assert len(levels) == 8
    assert min(levels.values()) < line["held_out_loss"] < max(levels.values())


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_min_snr_changes_what_is_learned_and_resumes_bit_for_bit(tiny, prediction, crash_at, final_state, tmp_path):
    config = replace(tiny, diffusion=replace(tiny.diffusion, prediction=prediction, loss_weighting="min-snr"))
    train(config, tmp_path / "a", quiet=True)
    crash_at(config, tmp_path / "b", 7)
    train(config, tmp_path / "b", quiet=True)
    plain = replace(config, diffusion=replace(config.diffusion, loss_weighting="none"))
    train(plain, tmp_path / "c", quiet=True)
    a, b, c = (final_state(tmp_path / name).model for name in "abc")
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert not all(torch.equal(value, c[name]) for name, value in a.items())


def test_what_cannot_be_measured_is_refused(tiny, tmp_path):
    def with_(**options):
        return replace(tiny.checkpoints, **options)

    with pytest.raises(InvalidConfigError, match="`held_out`"):
        replace(tiny, checkpoints=with_(keep_best="held-out"))
    with pytest.raises(InvalidConfigError, match="`scores_every`"):
        replace(tiny, checkpoints=with_(keep_best="frechet"))
    with pytest.raises(InvalidConfigError, match="`keep_best` held-out or frechet"):
        with_(patience=3)
    with pytest.raises(InvalidConfigError, match="`keep_best` must be one of held-out, frechet"):
        with_(keep_best="loss")
    train(replace(tiny, steps=1), tmp_path / "a", quiet=True)
    with pytest.raises(CheckpointError, match="has no checkpoints/best"):
        load_run(tmp_path / "a", step="best")
