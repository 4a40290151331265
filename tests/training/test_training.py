"""Whole runs: what they leave behind, how they go on, and what they must not depend on."""

import json
import random
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from scalelong.config import GuardConfig, HardwareConfig
from scalelong.errors import InvalidConfigError, NonFiniteError, RunFolderError
from scalelong.runs import load_run, read_metrics, saved_steps
from scalelong.training import train


class Dropout(nn.Module):
    """Draws from the global generator, which therefore has to be part of a checkpoint."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x, t):
        x = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        return self.second(x * self.frozen + t.view(-1, 1, 1, 1) / 1000)


class Explosive(nn.Module):
    """Turns non-finite at a given weight."""

    def __init__(self, channels: int, limit: float = 1.02) -> None:
        super().__init__()
        self.limit = limit
        self.layer = nn.Conv2d(channels, channels, 1)
        self.log = nn.Identity()
        nn.init.ones_(self.layer.weight)

    def forward(self, x, t):
        x = self.layer(x)
        moved = (self.layer.weight.detach() - 1).abs().max()
        return self.log(x / (moved < self.limit - 1).float())


def same(first, second):
    assert first.step == second.step
    for name in ("model", "ema"):
        assert all(torch.equal(value, getattr(second, name)[key]) for key, value in getattr(first, name).items())
    states = [saved.training["optimizer"]["state"] for saved in (first, second)]
    for name, entry in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in entry.items())


def without_times(lines):
    timed = ("seconds", "seconds_per_step", "images_per_second")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.fixture(scope="module")
def finished(full_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "a"
    config = replace(full_tiny, logging=replace(full_tiny.logging, trackers=("tensorboard",)))
    result = train(config, folder)
    assert (result.folder, result.step, result.finished) == (folder, 12, True)
    return folder


def test_the_run_folder_explains_itself(finished):
    names = {path.name for path in finished.iterdir() if not path.name.startswith(".")}
    assert names == {
        "README.md", "checkpoints", "config.yaml", "data.json", "environment.json", "metrics.jsonl", "run.json",
        "samples", "tensorboard",
    }  # fmt: skip
    assert saved_steps(finished / "checkpoints") == [8, 12]
    assert (finished / "checkpoints" / "latest").resolve().name == "step-00000012"
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    assert [path.name for path in sorted((finished / "samples").iterdir())] == [
        "step-00000006.png",
        "step-00000012.png",
    ]
    with Image.open(finished / "samples" / "step-00000012.png") as image:
        assert image.mode == "L"
    assert any((finished / "tensorboard").iterdir())


def test_metrics(finished):
    lines = read_metrics(finished)
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6, 8, 10, 12]
    assert all(line["gradient_norm"] > 0 and line["ema_distance"] > 0 for line in logged)
    assert logged[0]["learning_rate"] == pytest.approx(1e-2 * 2 / 3)
    held_out = [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]
    assert [step for step, _ in held_out] == [5, 10, 12]
    assert 0 < held_out[-1][1] < 2


@pytest.mark.parametrize("step", [1, 3, 4, 7, 11])
def test_a_crash_and_the_same_command_end_bit_identically(full_tiny, finished, crash_at, final_state, tmp_path, step):
    crash_at(full_tiny, tmp_path / "b", step)
    random.seed(step)
    torch.manual_seed(step)
    train(full_tiny, tmp_path / "b")
    same(final_state(finished), final_state(tmp_path / "b"))
    assert without_times(read_metrics(finished)) == without_times(read_metrics(tmp_path / "b"))


@pytest.mark.parametrize("split", [True, False])
def test_mixed_precision_resumes_bit_identically(tiny, crash_at, final_state, tmp_path, split):
    config = replace(tiny, scaling="ls", hardware=HardwareConfig(precision="bf16", cpu=True, split_cores=split))
    train(config, tmp_path / "whole", quiet=True)
    crash_at(config, tmp_path / "crashed", 7)
    train(config, tmp_path / "crashed", quiet=True)
    same(final_state(tmp_path / "crashed"), final_state(tmp_path / "whole"))


def test_global_generators_buffers_and_frozen_weights_resume(tiny, crash_at, final_state, tmp_path):
    config = replace(tiny, model=f"{__name__}:Dropout", model_options={})
    train(config, tmp_path / "a")
    crash_at(config, tmp_path / "b", 6)
    torch.rand(3)
    train(config, tmp_path / "b")
    same(final_state(tmp_path / "a"), final_state(tmp_path / "b"))
    assert final_state(tmp_path / "a").model["norm.num_batches_tracked"] == 12


def test_looking_does_not_change_the_training(tiny, full_tiny, final_state, tmp_path):
    quiet = replace(full_tiny, logging=tiny.logging)
    train(quiet, tmp_path / "quiet", hooks=[lambda state: {"mine": 1.0}])
    train(full_tiny, tmp_path / "watched")
    same(final_state(tmp_path / "quiet"), final_state(tmp_path / "watched"))
    assert [line["step"] for line in read_metrics(tmp_path / "quiet") if "mine" in line] == list(range(1, 13))


def test_accumulation_is_the_same_step_up_to_rounding(full_tiny, finished, final_state, tmp_path):
    train(replace(full_tiny, hardware=HardwareConfig(accumulation=4)), tmp_path / "b")
    for key, value in final_state(finished).model.items():
        torch.testing.assert_close(final_state(tmp_path / "b").model[key], value, rtol=1e-3, atol=1e-5)


def test_more_steps_continue_and_a_finished_run_does_nothing(tiny, final_state, tmp_path):
    train(replace(tiny, steps=6), tmp_path / "a")
    train(tiny, tmp_path / "a")
    train(tiny, tmp_path / "b")
    same(final_state(tmp_path / "a"), final_state(tmp_path / "b"))
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert train(tiny, tmp_path / "a").step == 12
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == before


def test_a_damaged_checkpoint_costs_steps_not_the_run(tiny, final_state, tmp_path, capsys):
    train(tiny, tmp_path / "a")
    train(replace(tiny, steps=8), tmp_path / "b")
    damaged = tmp_path / "b" / "checkpoints" / "step-00000008" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    train(tiny, tmp_path / "b")
    output = capsys.readouterr().err
    assert "damaged checkpoint" in output
    assert "continuing after step 4" in output
    same(final_state(tmp_path / "a"), final_state(tmp_path / "b"))


def test_another_configuration_is_refused_with_the_difference(tiny, tmp_path):
    train(replace(tiny, steps=2), tmp_path / "a")
    changed = replace(tiny, batch_size=4, optimizer=replace(tiny.optimizer, lr=3e-3))
    with pytest.raises(RunFolderError, match=r"(?s)batch_size: 8 -> 4.*optimizer.lr: 0.01 -> 0.003"):
        train(changed, tmp_path / "a")


def test_changed_data_are_refused(tiny, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for i in range(12):
        Image.new("L", (8, 8), i * 20).save(images / f"{i}.png")
    config = replace(tiny, data=str(images), steps=2)
    train(config, tmp_path / "a")
    Image.new("L", (8, 8), 99).save(images / "0.png")
    with pytest.raises(RunFolderError, match="have changed since"):
        train(config, tmp_path / "a")


def test_a_non_finite_step_stops_with_a_diagnosis(tiny, tmp_path):
    config = replace(tiny, model=f"{__name__}:Explosive", model_options={})
    with pytest.raises(NonFiniteError) as caught:
        train(config, tmp_path / "a")
    message = str(caught.value)
    assert "First module with a non-finite output: log (Identity)" in message
    assert "Last good checkpoint: step" in message
    steps = saved_steps(tmp_path / "a" / "checkpoints")
    weights = load_file(tmp_path / "a" / "checkpoints" / f"step-{steps[-1]:08d}" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_rollback_lowers_the_rate_and_comes_through(tiny, crash_at, final_state, tmp_path, capsys):
    config = replace(
        tiny,
        model=f"{__name__}:Explosive",
        model_options={"limit": 1.05},
        guard=GuardConfig(on_nan="rollback", rollback_factor=0.1, max_rollbacks=4),
        checkpoints=replace(tiny.checkpoints, save_every=2, keep_last=9),
    )
    assert train(config, tmp_path / "a").finished
    assert "back to step" in capsys.readouterr().err
    history = json.loads((tmp_path / "a" / "rollbacks.json").read_text())
    assert 1 <= len(history) <= 4
    assert [entry["factor"] for entry in history] == [0.1] * len(history)
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "a") if "learning_rate" in line]
    assert rates[-1] == pytest.approx(1e-2 * 0.1 ** len(history))
    crash_at(config, tmp_path / "b", 11)
    train(config, tmp_path / "b")
    same(final_state(tmp_path / "a"), final_state(tmp_path / "b"))


def test_rollback_gives_up_after_the_given_number(tiny, tmp_path):
    config = replace(
        tiny,
        model=f"{__name__}:Explosive",
        model_options={"limit": 1.0},
        guard=GuardConfig(on_nan="rollback", max_rollbacks=2),
    )
    with pytest.raises(NonFiniteError) as caught:
        train(config, tmp_path / "a")
    assert len(json.loads((tmp_path / "a" / "rollbacks.json").read_text())) == 2
    assert "Rollbacks with lower rates that did not help: 2" in str(caught.value)
    assert "--on-nan rollback" not in str(caught.value)


def test_load_run_gives_the_averaged_weights(finished):
    run = load_run(finished)
    averaged = load_file(finished / "checkpoints" / "latest" / "ema.safetensors")
    assert run.step == 12
    assert not run.model.training
    assert all(torch.equal(value, averaged[name]) for name, value in run.model.state_dict().items())
    labels = torch.tensor([3, 10])
    assert run.network(torch.zeros(2, 1, 8, 8), torch.tensor([5.0, 900.0]), labels).shape == (2, 1, 8, 8)
    raw = load_run(finished, weights="raw", step=8)
    assert raw.step == 8
    assert not torch.equal(raw.model.state_dict()["norm.weight"], averaged["norm.weight"])
    with pytest.raises(RunFolderError, match="is not a run folder"):
        load_run(finished / "samples")


def test_it_learns(tiny, tmp_path):
    """Far better than the zero predictor, which has loss 1, on images it has not seen."""
    config = replace(
        tiny,
        model_options={"patch_size": 2, "dim": 32, "depth": 2, "heads": 2},
        steps=250,
        batch_size=32,
        images=replace(tiny.images, held_out=200),
        optimizer=replace(tiny.optimizer, lr=3e-3, warmup=20),
        logging=replace(tiny.logging, log_every=50, held_out_every=250),
        checkpoints=replace(tiny.checkpoints, save_every=250),
    )
    train(config, tmp_path / "a")
    (held_out,) = (line["held_out_loss"] for line in read_metrics(tmp_path / "a") if "held_out_loss" in line)
    assert held_out < 0.35


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": HardwareConfig(accumulation=3)}, "use a multiple of 3, for example 9"),
        ({"model": "nowhere.to.be:found"}, "cannot be imported"),
        ({"model": "torch.nn:Nothing"}, "Nothing"),
        ({"model": "resnet"}, "unknown model 'resnet'"),
        ({"model": "math:floor", "model_options": {}}, "cannot be built"),
        ({"model_options": {"dimension": 3}}, "cannot be built"),
        ({"model": "uvit/cifar99"}, "unknown U-ViT preset"),
    ],
)
def test_mistakes_are_named(tiny, tmp_path, changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        train(replace(tiny, **changes), tmp_path / "a")
