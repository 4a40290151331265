"""Comparisons on a network small enough to train in seconds."""

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from scalelong.cli import main
from scalelong.cli.compare import compare_config, compare_parser, default_out
from scalelong.cli.parser import split
from scalelong.config import TrainConfig, dump_config, recipe, to_dict
from scalelong.errors import CollapseError, InvalidConfigError, RunFailedError, RunFolderError
from scalelong.experiments import (
    PlannedRun,
    compare,
    plan as runs_module,
    plan_runs,
    run_all,
    status_text,
    sweep,
)
from scalelong.experiments.sweeps import make_job
from scalelong.report import collect
from scalelong.runs import build_model, load_images, saved_steps, shape_of
from scalelong.training import TrainState, train

METHODS = ("none", "cs:0.7", "ls")
SMALLEST = {"patch_size": 4, "dim": 8, "depth": 2, "heads": 2}


def small(steps: int = 6, **options: int) -> TrainConfig:
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        batch_size=8,
        model_options={**SMALLEST, **options},
        images=replace(base.images, held_out=32),
        logging=replace(base.logging, log_every=1, held_out_every=2, samples_every=0, monitor_every=1, trackers=()),
        checkpoints=replace(base.checkpoints, save_every=max(1, steps // 2)),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return compare(small(depth=4), METHODS, [0, 1], tmp_path_factory.mktemp("comparison"), jobs=1)


def digest(*tensors: torch.Tensor) -> str:
    joined = hashlib.sha256()
    for tensor in tensors:
        joined.update(tensor.detach().contiguous().numpy().tobytes())
    return joined.hexdigest()


class Spy:
    """Hashes what the network is given from the second step on; the first comes before the hook."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, state: TrainState) -> None:
        if state.step == 1:
            state.bare.register_forward_pre_hook(self.listen)

    def listen(self, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # held-out losses come in between
            self.log.append(digest(*inputs))


def test_methods_of_one_seed_share_weights_data_noise_and_times(tmp_path):
    """The proof: initial weights, and what enters the network at the training steps, have equal hashes."""
    seen: dict[str, list[str]] = {}
    for run in plan_runs(small(4), METHODS, [5], tmp_path):
        seen[run.method] = []
        train(run.config, run.folder, hooks=[Spy(seen[run.method])])
    assert len(set(seen["none"])) == 3
    assert seen["none"] == seen["cs:0.7"] == seen["ls"]
    data, _ = load_images(small())

    def weights(method: str, seed: int) -> str:
        state = build_model(replace(small(), scaling=method, seed=seed), shape_of(data)).state_dict()
        return digest(
            *[value for name, value in state.items() if not name.startswith(("skip_scaling", "scalelong_scaling"))]
        )

    assert weights("none", 0) == weights("cs:0.7", 0) == weights("ls", 0)
    assert weights("none", 0) != weights("none", 1)


def test_the_table_and_the_files_of_a_comparison(finished):
    assert [entry.method for entry in finished.summaries] == list(METHODS)
    for entry in finished.summaries:
        assert entry.step == 6
        assert all(loss is not None and loss > 0 for loss in entry.held_out_loss)
        assert len(entry.coefficients) == 2
        assert entry.seconds_per_step
    assert finished.summaries[0].steps_ratio == [1, 1]
    assert "cs:0.7" in str(finished)
    out = finished.runs[0].folder.parent
    assert (out / "table.txt").read_text() == f"{finished}\n"
    assert len(json.loads((out / "comparison.json").read_text())) == 3
    assert json.loads((out / "diagnosis.json").read_text())["rows"]


def test_readings_are_recorded_with_the_run(finished):
    lines = [json.loads(line) for line in (finished.runs[0].folder / "metrics.jsonl").read_text().splitlines()]
    readings = [line for line in lines if "kappa/1" in line]
    assert [line["step"] for line in readings] == [1, 2, 3, 4, 5, 6]
    assert {"probe_block_rms/middle", "probe_skip_rms/2"} <= set(readings[0])
    # The first step has no gradient yet: the monitor is made after it.
    assert "gradient_norm/middle" in readings[1]


def test_finished_runs_are_not_repeated(finished, caplog):
    caplog.set_level("INFO", logger="scalelong")
    before = {run.run: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in finished.runs}
    again = compare(small(depth=4), METHODS, [0, 1], finished.runs[0].folder.parent, jobs=1)
    assert str(again) == str(finished)
    assert before == {run.run: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in finished.runs}
    assert "6 of 6 runs are finished" in caplog.text


def test_a_longer_comparison_continues_the_shorter_one(tmp_path):
    compare(small(2), ["none"], [0], tmp_path, jobs=1)
    longer = compare(replace(small(4), checkpoints=small(2).checkpoints), ["none"], [0], tmp_path, jobs=1)
    assert longer is not None
    assert longer.summaries[0].step == 4


def test_runs_in_processes_of_their_own(finished, tmp_path, monkeypatch):
    """They give the same numbers, and their folders name the variant and the command that continues them."""
    monkeypatch.setattr("sys.argv", ["scalelong", "compare", "--seeds", "1"])
    comparison = compare(small(depth=4), ["none", "slow: scaling=cs:0.7"], [0], tmp_path, jobs=2)
    assert comparison is not None
    assert [entry.held_out_loss[0] for entry in comparison.summaries] == pytest.approx(
        [entry.held_out_loss[0] for entry in finished.summaries[:2]], rel=1e-5
    )
    assert (tmp_path / "logs" / "none-seed0.txt").exists()
    for run in comparison.runs:
        assert "    scalelong compare --seeds 1\n" in (tmp_path / run.run / "README.md").read_text()
    assert json.loads((tmp_path / "slow-seed0" / "variant.json").read_text()) == {
        "name": "slow",
        "changes": {"scaling": "cs:0.7"},
    }
    assert collect([tmp_path])["methods"] == ["none", "slow"]
    assert len(collect([tmp_path])["tables"]) == 1
    broken = replace(small(), data=str(tmp_path / "missing"))
    with pytest.raises(RunFailedError, match="a ended with code 1"):
        run_all([PlannedRun("none", 0, tmp_path / "a", broken)], jobs=2)


# What is refused


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        ([], [0], "at least one"),
        (["none"], [], "at least one"),
        (["none", "none"], [0], "twice"),
        (["huh"], [0], "huh"),
    ],
)
def test_plans_that_make_no_sense(tmp_path, methods, seeds, message):
    with pytest.raises(InvalidConfigError, match=message):
        plan_runs(small(), methods, seeds, tmp_path)


def test_sweeps_that_make_no_sense(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"fast sets optimizer\.lr itself"):
        sweep(small(), ["none", "fast: lr=0.1"], [0], tmp_path, rates=[1e-3, 2e-3])
    with pytest.raises(InvalidConfigError, match=r"held-out images.*`config`"):
        compare(replace(small(), images=replace(small().images, held_out=0)), ["none"], [0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_refused_comparison_leaves_nothing(tmp_path):
    for flags in (["--methods", "huh"], ["--data", str(tmp_path / "missing")], ["--variants", "a: huh=1"]):
        assert main(["compare", *flags, "--out", str(tmp_path / "out"), "--jobs", "1"]) != 0
        assert not (tmp_path / "out").exists()


def test_names_that_differ_in_a_space_have_folders_of_their_own(tmp_path):
    names = ["a b", "a-b", "a  b", "A-B", "cs-0.7"]
    runs = plan_runs(small(), ["cs:0.7", *(f"{name}: lr=1e-3" for name in names)], [0], tmp_path)
    folders = [run.folder.name.lower() for run in runs]
    assert len(set(folders)) == 6
    assert folders[0] == "cs-0.7-seed0"
    assert "a-b-seed0" in folders
    (long,) = plan_runs(small(), [f"{'v' * 400}: lr=1e-3"], [0], tmp_path)
    assert len(long.folder.name) < 150


# The command


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "small.yaml"
    path.write_text(dump_config(small(2)))
    options = ["compare", "--config", str(path), "--methods", "none", "--seeds", "1", "--jobs", "1"]
    options += ["--widths", "16", "--rates", "1e-3,5e-1", "--out", str(tmp_path / "grid")]
    monkeypatch.setattr("sys.argv", ["scalelong", *options])
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "width" in out
    assert "steps to none's loss at its best rate" in out
    assert (tmp_path / "grid" / "width-16" / "rate-0.5" / "none-seed0").is_dir()
    assert "--widths 16" in (tmp_path / "grid" / "command.txt").read_text()


def test_the_configuration_of_the_command():
    config = compare_config(compare_parser().parse_args(["--recipe", "digits-tiny", "--steps", "300"]))
    assert config.steps == 300
    assert config.held_out_every == 10
    with pytest.raises(InvalidConfigError, match="`seeds`"):
        compare_config(compare_parser().parse_args(["--seeds", "0"]))
    found = split("none,cs:kappa=0.5,reverse=true, ls:module=ie, shared=false")
    assert found == ["none", "cs:kappa=0.5,reverse=true", "ls:module=ie,shared=false"]


def test_the_default_folder_is_that_of_the_configuration(tmp_path):
    def folder(*flags):
        options = compare_parser().parse_args(list(flags))
        return str(default_out(options, compare_config(options)))

    assert folder() == folder("--recipe", "digits-tiny") == folder("--seeds", "5") == "runs/compare-digits-tiny"
    (tmp_path / "a.yaml").write_text("batch_size: 8")
    others = [
        folder("--data", "shapes"),
        folder("--steps", "300"),
        folder("--scores", "20"),
        folder("--config", str(tmp_path / "a.yaml")),
        folder("--recipe", "fashion-tiny"),
    ]
    assert len({folder(), *others}) == 6
    assert folder("--data", "shapes") == others[0]


# Finished runs stand only for what was asked for


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A finished comparison of two steps on twelve images."""
    from PIL import Image

    place = tmp_path_factory.mktemp("two-steps")
    (place / "images").mkdir()
    for number in range(12):
        Image.new("L", (8, 8), 20 * number).save(place / "images" / f"{number}.png")
    config = replace(small(2), data=str(place / "images"), images=replace(small(2).images, held_out=3))
    assert compare(config, ["none"], [0], place / "out", jobs=1) is not None
    return config, place / "out", place / "images"


@pytest.mark.parametrize(
    "change",
    [
        {"data": "digits"},
        {"steps": 1},
        {"batch_size": 4},
        {"model_options": {**SMALLEST, "dim": 16}},
        {"logging": replace(small(2).logging, scores_every=2, scores_images=20)},
    ],
)
def test_a_finished_run_with_other_settings_is_refused(two_steps, change):
    config, out, _ = two_steps
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(RunFolderError, match=f"{next(iter(change))}.* -> .*`out`"):
        compare(replace(config, **change), ["none"], [0], out, jobs=1)
    assert sorted(path.name for path in out.iterdir()) == before


def test_images_that_were_changed_in_place_are_noticed(two_steps):
    from PIL import Image

    config, out, images = two_steps
    assert compare(replace(config, checkpoints=small(4).checkpoints), ["none"], [0], out, jobs=1) is not None
    Image.new("L", (8, 8), 255).save(images / "0.png")
    with pytest.raises(RunFolderError, match="have changed since"):
        compare(config, ["none"], [0], out, jobs=1)


def test_runs_end_with_the_comparison_that_started_them(tmp_path):
    """The pipe to a run closes when the comparison is killed: the run saves what it has, and ends."""
    run = PlannedRun("none", 0, tmp_path / "run", small(100_000))
    described = {"kind": "run", "method": "none", "changes": {}, "folder": "../run"}
    make_job(tmp_path, "run", {**described, "config": to_dict(run.config)})
    child = subprocess.Popen(
        [sys.executable, "-m", "scalelong.experiments", str(tmp_path / "jobs" / "run.json"), "--tied"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert any(line.startswith("step 3/") for line in child.stdout)
    assert run.at_work
    assert "1 runs: 1 running" in status_text(tmp_path)
    child.stdin.close()
    assert "stopped by SIGTERM" in child.stdout.read()
    child.stdout.close()
    assert child.wait() == 130
    assert not run.at_work
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] >= 3
    assert "1 runs: 1 stopped" in status_text(tmp_path)


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    run = plan_runs(small(2), ["none"], [0], tmp_path)[0]
    looks = iter([True, True, False])
    monkeypatch.setattr(PlannedRun, "at_work", property(lambda _: next(looks)))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert run_all([run], jobs=1)
    assert next(looks, "all looked at") == "all looked at"


# Runs that end before their last step are results


def test_a_run_that_diverges_is_a_result(tmp_path):
    broken = replace(small(4), optimizer=replace(small(4).optimizer, lr=1e18, warmup=0, clip=None))
    comparison = compare(broken, ["none"], [0], tmp_path, jobs=1)
    assert comparison is not None
    assert comparison.summaries[0].diverged == [0]
    assert "seed 0" in str(comparison)
    assert collect([tmp_path])["runs"][0]["diverged"]


def test_a_run_that_ran_out_of_patience_is_finished(tmp_path):
    config = small(8)
    config = replace(
        config,
        optimizer=replace(config.optimizer, lr=0.0),
        checkpoints=replace(config.checkpoints, keep_best="held-out", patience=1),
    )
    found = compare(config, ["none"], [0], tmp_path, jobs=2)
    assert found is not None
    assert all(run.finished for run in found.runs)
    assert found.summaries[0].step < 8
    assert str(compare(config, ["none"], [0], tmp_path, jobs=1)) == str(found)
    assert collect([tmp_path])["runs"][0]["finished"]
    patient = replace(config, checkpoints=replace(config.checkpoints, patience=9))
    assert not plan_runs(patient, ["none"], [0], tmp_path)[0].finished


def test_a_run_that_collapses_after_its_rollbacks_is_a_result(tmp_path, monkeypatch):
    def collapse(config, folder, **_):
        if config.scaling == "none":
            (folder / "config.yaml").write_text("steps: 6")
            raise CollapseError("it went back to zero")
        return train(config, folder)

    monkeypatch.setattr(runs_module, "train", collapse)
    found = compare(small(2), ["none", "cs"], [0], tmp_path, jobs=1)
    assert found is not None
    assert found.summaries[0].collapsed == [0]
    assert found.summaries[0].diverged == []
    assert collect([tmp_path])["runs"]


def test_a_comparison_adds_no_hook_to_training(tmp_path, monkeypatch):
    """With a hook, the trainer waits for the device at every step."""
    given: list[object] = []

    def watched(config, folder, **options):
        assert json.loads((folder / "variant.json").read_text())["name"] == "none"
        given.append(options.get("hooks", ()))
        return train(config, folder, **options)

    monkeypatch.setattr(runs_module, "train", watched)
    run_all(plan_runs(small(2), ["none"], [0], tmp_path), jobs=1)
    assert given == [()]
