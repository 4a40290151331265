"""The command line: recipe, file, flags, and what --dry-run says."""

import pytest

from scalelong.cli import main
from scalelong.cli.train import parse, settle
from scalelong.config import dump_config, flatten, recipe, to_dict
from scalelong.errors import ScaleLongError

TINY = [
    *("--recipe", "digits-tiny", "--model-options", "dim=16", "depth=2", "--steps", "3", "--batch-size", "4"),
    *("--samples-every", "0", "--trackers"),
]


def test_recipe_file_and_flags_in_this_order(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 5\nsteps: 6\n")
    command = parse(["--recipe", "fashion-tiny", "--config", str(tmp_path / "c.yaml"), "--steps", "7", "--lr", "0.5"])
    assert command.train.data == "fashion-mnist"
    assert command.train.seed == 5
    assert command.train.steps == 7
    assert command.train.optimizer.lr == 0.5
    assert command.train.optimizer.clip == recipe("fashion-tiny").optimizer.clip


@pytest.mark.parametrize("words", ["cats --steps 3", "--steps 3 --data cats", "--steps 3 cats", "--steps=3 cats --cpu"])
def test_data_may_stand_anywhere(words):
    config = parse(words.split()).train
    assert (config.data, config.steps) == ("cats", 3)


@pytest.mark.parametrize(
    ("flag", "value", "path"),
    [
        ("--learning-rate", "0.5", "optimizer.lr"),
        ("--max_train_steps", "7", "steps"),
        ("--resolution", "16", "images.size"),
        ("--mixed_precision", "bf16", "hardware.precision"),
        ("--gradient-accumulation-steps", "2", "hardware.accumulation"),
        ("--max-grad-norm", "0.5", "optimizer.clip"),
        ("--checkpointing_steps", "9", "checkpoints.save_every"),
        ("--checkpoints-total-limit", "3", "checkpoints.keep_last"),
        ("--report-to", "wandb", "logging.trackers"),
        ("--dataloader-num-workers", "2", "images.workers"),
        ("--lr-warmup-steps", "5", "optimizer.warmup"),
        ("--lr-scheduler", "cosine", "optimizer.decay"),
        ("--random-flip", "", "images.flip"),
        ("--init-from", "runs/a", "start_from"),
        ("--output-dir", "runs/b", ""),
    ],
)
def test_the_names_of_other_scripts_are_known(flag, value, path):
    command = parse(["cats", flag, *value.split()])
    found = str(flatten(to_dict(command.train))[path]) if path else str(command.options.out)
    assert found.strip("[]'") == (value or "True")


def test_folders_of_classes_are_mentioned(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in ("rose", "tulip"):
        (tmp_path / "flowers" / name).mkdir(parents=True)
    for condition in ("none", "class"):
        with pytest.raises(ScaleLongError):  # there are no images
            settle(parse([str(tmp_path / "flowers"), "--condition", condition]))
    assert [line for line in caplog.messages if "--condition class" in line] == [
        f"{tmp_path / 'flowers'} has 2 folders (rose, tulip): --condition class trains on them as classes"
    ]


def test_model_options_add_to_those_of_the_recipe_but_not_for_another_model():
    base = recipe("digits-tiny").model_options
    assert parse(["--recipe", "digits-tiny", "--model-options", "depth=9"]).train.model_options == {**base, "depth": 9}
    assert parse(["--recipe", "digits-tiny"]).train.model_options == base
    other = parse(["--recipe", "digits-tiny", "--model", "a.b:c", "--model-options", "x=[1,2]", "name=text", "n=null"])
    assert other.train.model_options == {"x": [1, 2], "name": "text", "n": None}
    assert parse(["--recipe", "digits-tiny", "--model", "a.b:c"]).train.model_options == {}


@pytest.mark.parametrize(
    "arguments", [["--stepz", "3"], ["--steps", "many"], ["--model-options", "depth"], ["--precision", "fp8"]]
)
def test_wrong_flags_end_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "digits", *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nothing"], "unknown recipe 'nothing'"),
        (["digits", "--steps", "0"], "--steps must be at least 1"),
        ([], "nothing to train on"),
        (["--steps", "3"], "nothing to train on"),
        (["--config", "nothing.yaml"], "no configuration file"),
        (["/no/such/folder"], "/no/such/folder"),
    ],
)
def test_mistakes_are_one_clear_line_with_code_1(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_dry_run_tells_all_and_writes_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--scaling", "cs:0.5", "--dry-run"]) == 0
    output = capsys.readouterr().out
    for part in ("digits", "UViT", "parameters", "1; coefficients", "adamw, lr 0.002", "memory", "MB", "run folder"):
        assert part in output
    assert list(tmp_path.iterdir()) == []


def test_training_without_a_name_for_the_folder_continues(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert main(["train", *TINY]) == 0
    assert "continuing after step 3" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]


def test_the_config_of_a_run_repeats_it(tmp_path):
    command = parse([*TINY, "--scaling", "ls"])
    (tmp_path / "config.yaml").write_text(dump_config(command.train))
    assert parse(["--config", str(tmp_path / "config.yaml")]).train == command.train


@pytest.mark.parametrize("command", ["train", "sample"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr("scalelong.training.size_run", lambda *_: pytest.fail("images were read"))
    monkeypatch.setattr("scalelong.cli.shared.trained_run", lambda *_: pytest.fail("a model was loaded"))
    given = {"train": ["digits"], "sample": ["--model", "digits-class"]}[command]
    assert main([command, *given, "--out", str(tmp_path / "file" / "run")]) == 1
    assert "run cannot be written" in capsys.readouterr().err
