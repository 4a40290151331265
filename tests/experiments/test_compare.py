"""Comparisons on a network small enough to train in seconds."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from scalelong.cli import main
from scalelong.commands.compare import configuration, parser
from scalelong.commands.options import split
from scalelong.errors import InvalidConfigError
from scalelong.experiments.compare import at, compare, noise_rows, summarise, sweep
from scalelong.experiments.runs import PlannedRun, plan_runs
from scalelong.report import collect
from scalelong.runs.config import TrainConfig
from scalelong.runs.recipes import recipe
from scalelong.training import TrainState, train

METHODS = ("none", "cs:0.7", "ls")


def small(steps: int = 6) -> TrainConfig:
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        batch_size=8,
        model_options={"patch_size": 4, "dim": 16, "depth": 4, "heads": 2},
        images=replace(base.images, held_out=32),
        logging=replace(
            base.logging, log_every=1, held_out_every=2, samples_every=steps, samples=4, sampler_steps=2, trackers=()
        ),
        checkpoints=replace(base.checkpoints, save_every=max(1, steps // 2)),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return compare(small(), METHODS, [0, 1], tmp_path_factory.mktemp("comparison"), every=1, jobs=1)


def test_methods_of_one_seed_share_data_noise_and_times(tmp_path):
    """The proof: what enters the network at the training steps has equal hashes."""
    seen: dict[str, list[str]] = {}
    for run in plan_runs(small(5), METHODS, [5], tmp_path):
        seen[run.method] = []
        train(run.config, run.folder, hooks=[Spy(seen[run.method])])
    assert len(set(seen["none"])) == 4
    assert seen["none"] == seen["cs:0.7"] == seen["ls"]


class Spy:
    """Hashes what the network is given from the second step on; the first comes before the hook."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, state: TrainState) -> None:
        if state.step == 1:
            state.bare.register_forward_pre_hook(self.listen)

    def listen(self, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # held-out losses and samples come in between
            self.log.append(digest(*inputs))


def digest(*tensors: torch.Tensor) -> str:
    joined = hashlib.sha256()
    for tensor in tensors:
        joined.update(tensor.detach().contiguous().numpy().tobytes())
    return joined.hexdigest()


def test_initial_weights_are_equal_and_other_seeds_differ():
    from scalelong.runs.folder import shape_of
    from scalelong.runs.model import build_model, load_images

    data, _ = load_images(small(), lambda _: None)

    def weights(method: str, seed: int) -> str:
        state = build_model(replace(small(), scaling=method, seed=seed), shape_of(data)).state_dict()
        return digest(*[value for name, value in state.items() if not name.startswith("skip_scaling")])

    assert weights("none", 0) == weights("cs:0.7", 0) == weights("ls", 0)
    assert weights("none", 0) != weights("none", 1)


def test_the_table_has_a_row_per_method(finished):
    assert [entry.method for entry in finished.summaries] == list(METHODS)
    for entry in finished.summaries:
        assert entry.step == 6
        assert all(loss is not None and loss > 0 for loss in entry.held_out_loss)
        assert len(entry.coefficients) == 2
        assert entry.seconds_per_step
    assert finished.summaries[0].steps_ratio == [1, 1]
    assert "cs:0.7" in str(finished)


def test_files_of_a_comparison(finished):
    assert (finished.out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out loss" in (finished.out / "table.txt").read_text()
    assert len(json.loads((finished.out / "comparison.json").read_text())) == 3
    assert json.loads((finished.out / "diagnosis.json").read_text())["rows"]


def test_finished_runs_are_not_repeated(finished, capsys):
    before = {run.name: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in finished.runs}
    again = compare(small(), METHODS, [0, 1], finished.out, every=1, jobs=1)
    assert again is not None
    assert str(again) == str(finished)
    assert before == {run.name: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in finished.runs}
    assert "6 of 6 runs are finished" in capsys.readouterr().out


def test_readings_are_recorded_with_the_run(finished):
    lines = [json.loads(line) for line in (finished.runs[0].folder / "metrics.jsonl").read_text().splitlines()]
    readings = [line for line in lines if "kappa/1" in line]
    assert [line["step"] for line in readings] == [1, 2, 3, 4, 5, 6]
    assert {"probe_block_rms/middle", "probe_skip_rms/2"} <= set(readings[0])
    # The first step has no gradient yet: the monitor is made after it.
    assert "gradient_norm/middle" in readings[1]


def test_a_longer_comparison_continues_the_shorter_one(tmp_path):
    compare(small(2), ["none"], [0], tmp_path, every=1, jobs=1)
    longer = compare(replace(small(4), checkpoints=small(2).checkpoints), ["none"], [0], tmp_path, every=1, jobs=1)
    assert longer is not None
    assert longer.summaries[0].step == 4


def test_a_run_that_diverges_is_a_result(tmp_path):
    config = small(4)
    broken = replace(config, optimizer=replace(config.optimizer, lr=1e30, warmup=0, clip=None))
    comparison = compare(broken, ["none"], [0], tmp_path, every=1, jobs=1)
    assert comparison is not None
    assert comparison.summaries[0].diverged == [0]
    assert "seed 0" in str(comparison)
    assert collect([tmp_path])["runs"][0]["diverged"]


def test_runs_in_processes_of_their_own_give_the_same_numbers(finished, tmp_path):
    comparison = compare(small(), ["none", "cs:0.7"], [0], tmp_path, every=1, jobs=2)
    assert comparison is not None
    assert [entry.held_out_loss[0] for entry in comparison.summaries] == pytest.approx(
        [entry.held_out_loss[0] for entry in finished.summaries[:2]], rel=1e-5
    )
    assert (tmp_path / "logs" / "none-seed0.txt").exists()


def test_run_folders_name_the_variant_and_the_command_that_continues_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scalelong", "compare", "--seeds", "1"])
    variants = ["none", "slow: lr=1e-5"]
    comparison = compare(small(2), variants, [0], tmp_path, every=1, jobs=2)
    assert comparison is not None
    for run in comparison.runs:
        # The runs were trained by processes of their own, whose commands would continue nothing.
        assert "    scalelong compare --seeds 1\n" in (run.folder / "README.md").read_text()
    assert json.loads((tmp_path / "slow-seed0" / "variant.json").read_text()) == {
        "name": "slow",
        "changes": {"optimizer.lr": 1e-5},
    }
    assert collect([tmp_path])["methods"] == ["none", "slow"]
    assert len(collect([tmp_path])["tables"]) == 1


def test_a_run_that_fails_is_named_with_its_log(tmp_path):
    from scalelong.experiments.runs import RunFailedError, run_all

    config = replace(small(), data=str(tmp_path / "missing"))
    with pytest.raises(RunFailedError, match="a ended with code 1"):
        run_all([PlannedRun("none", 0, tmp_path / "a", config)], 1, jobs=2)


def test_input_noise(finished):
    rows = noise_rows(finished.runs, [0.1])
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(float(row["gain at σ = 0.1"]) >= 0 for row in rows)


def test_axes_of_sweeps():
    assert at(small(), "depth", 8).model_options["depth"] == 8
    assert at(small(), "batch", 3).batch_size == 3
    assert at(small(), "width", 32).model_options["dim"] == 32
    assert at(small(), "rate", 0.5).optimizer.lr == 0.5
    with pytest.raises(InvalidConfigError, match="depth, width, batch, rate"):
        at(small(), "heads", 3)


def test_a_variant_cannot_fix_what_is_swept(tmp_path):
    with pytest.raises(InvalidConfigError, match="fast has a rate of its own"):
        sweep(small(), ["none", "fast: lr=0.1"], [0], tmp_path, "rate", [1e-3, 2e-3])


def test_the_command(tmp_path, capsys):
    from scalelong.runs.config import dump_config

    path = tmp_path / "small.yaml"
    path.write_text(dump_config(small(2)))
    options = ["compare", "--config", str(path), "--methods", "none,cs:0.5", "--seeds", "1", "--jobs", "1"]
    assert main([*options, "--depths", "2,4", "--out", str(tmp_path / "sweep")]) == 0
    out = capsys.readouterr().out
    assert "depth" in out
    assert (tmp_path / "sweep" / "depth-4" / "none-seed0").is_dir()
    assert main([*options, "--rates", "1e-3,5e-1", "--out", str(tmp_path / "rates")]) == 0
    out = capsys.readouterr().out
    assert "best rate" in out
    assert "steps to none's loss at its best rate" in out
    assert (tmp_path / "rates" / "rate-0.5" / "cs-0.5-seed0").is_dir()
    assert main([*options, "--control", "--out", str(tmp_path / "plain")]) == 0
    assert "O1 of the features is 0 (must be 0)" in capsys.readouterr().out


def test_the_configuration_of_the_command():
    config = configuration(parser().parse_args(["--recipe", "digits-tiny", "--steps", "300"]))
    assert config.steps == 300
    assert config.held_out_every == 10
    with pytest.raises(InvalidConfigError, match="--seeds"):
        configuration(parser().parse_args(["--seeds", "0"]))


def test_methods_are_divided_at_commas():
    assert split("none, cs:0.7,ls") == ["none", "cs:0.7", "ls"]
    found = split("none,cs:kappa=0.5,reverse=true,ls:module=ie, shared=false")
    assert found == ["none", "cs:kappa=0.5,reverse=true", "ls:module=ie,shared=false"]


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


def test_a_comparison_needs_held_out_images(tmp_path):
    config = replace(small(), images=replace(small().images, held_out=0))
    with pytest.raises(InvalidConfigError, match=r"held-out images.*--config"):
        compare(config, ["none"], [0], tmp_path)


def test_a_comparison_can_be_made_of_runs_that_are_there(finished):
    assert str(summarise(finished.runs, finished.out)) == str(finished)
