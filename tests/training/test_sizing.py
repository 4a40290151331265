"""What a budget buys, on machines that are made up; the timing itself; and that a run is sized once."""

from dataclasses import replace

import pytest
import torch

from scalelong.cli import main
from scalelong.cli.train import parse, settle
from scalelong.config import TrainConfig, load_config, seconds_of, with_values
from scalelong.data import load_data
from scalelong.errors import InvalidConfigError
from scalelong.runs import read_metrics
from scalelong.runs.processes import make_accelerator
from scalelong.training import sizing, train
from scalelong.training.sizing import MOST_EPOCHS, Pictures, choose, fit_held_out, lengthened, step_seconds

PHOTOGRAPHS = Pictures(count=400, channels=3, height=64, width=96)
MANY = replace(PHOTOGRAPHS, count=50_000)
HOUR = 3600.0


def machine(speed: float):
    """Seconds of a step on a machine that does so many multiplications of a token a second: a made-up speed."""

    def seconds(config: TrainConfig) -> float:
        options, side = config.model_options, config.images.size or 64
        if config.model == "unet/small":  # 26 million multiplications for an image of 16x16 with widths of 32, 64, 96
            wider = options.get("block_out_channels", [32])[0] / 32
            return config.batch_size * 26e6 * wider**2 * (side / 16) ** 2 / (12 * speed)
        tokens = (side // options.get("patch_size", 2)) ** 2
        return config.batch_size * tokens * options.get("dim", 128) ** 2 * options.get("depth", 4) / speed

    return seconds


LAPTOP, SLOW, GPU = machine(4e8), machine(1e6), machine(1e12)


def test_an_hour_on_a_cpu_is_filled_and_no_more():
    plan = choose(TrainConfig(data="x"), {"data"}, PHOTOGRAPHS, LAPTOP, HOUR)
    assert 0.6 * HOUR < plan.seconds <= HOUR
    assert plan.config.images.size in (16, 32)
    assert plan.config.steps >= 3000
    assert plan.config.images.held_out == 40
    assert plan.images == 360


def test_a_faster_machine_and_a_longer_budget_get_larger_networks():
    rungs = [each.config for each in sizing.candidates(TrainConfig(data="x"), {"data"}, MANY)]

    def place(speed, budget):
        config = choose(TrainConfig(data="x"), {"data"}, MANY, speed, budget).config
        return next(i for i, rung in enumerate(rungs) if with_sizes_of(rung, config) == rung)

    def with_sizes_of(rung, config):
        return replace(rung, model=config.model, model_options=config.model_options, images=config.images)

    assert place(SLOW, HOUR) == 0
    assert place(SLOW, HOUR) < place(LAPTOP, HOUR) < place(LAPTOP, 24 * HOUR) < place(GPU, 24 * HOUR)
    assert place(GPU, 24 * HOUR) == len(rungs) - 1
    assert rungs[-1].model_options["dim"] == 512


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (TrainConfig(data="x"), {"data", "model"}),
        (TrainConfig(data="x", model_options={"dim": 64}), {"data", "model_options"}),
        (with_values(TrainConfig(data="x"), {"diffusion.condition": "text"}), {"data", "condition"}),
    ],
    ids=["model", "options", "text"],
)
def test_whoever_asks_for_a_uvit_gets_one_at_every_size(config, given):
    assert {each.config.model for each in sizing.candidates(TrainConfig(data="x"), {"data"}, MANY)} == {
        "unet/small",
        "uvit",
    }
    assert {each.config.model for each in sizing.candidates(config, given, MANY)} == {"uvit"}


def test_a_machine_that_is_too_slow_gets_the_smallest_size_and_is_told():
    plan = choose(TrainConfig(data="x"), {"data"}, PHOTOGRAPHS, SLOW, 600.0)
    assert not plan.enough
    assert plan.seconds <= 600.0
    assert "longer --budget" in str(plan)


def test_few_images_end_a_run_before_a_day_on_a_gpu_does():
    plan = choose(TrainConfig(data="x"), {"data"}, PHOTOGRAPHS, GPU, 24 * HOUR)
    assert plan.stopped_by == "data"
    assert plan.epochs <= MOST_EPOCHS
    assert plan.config.model_options.get("dim", 0) < 512, "a large network would learn 360 images by heart"
    assert "by heart" in str(plan)


def test_what_is_larger_than_the_first_that_fails_is_not_timed():
    tried = []

    def timed(config):
        tried.append(config)
        return LAPTOP(config)

    plan = choose(TrainConfig(data="x"), {"data"}, MANY, timed, HOUR)
    assert [each.enough for each in plan.timed[1:]] == [True] * (len(plan.timed) - 2) + [False]
    assert len(tried) == len(plan.timed)
    assert plan.timed[-1].candidate.config != plan.config
    assert f"needs {plan.timed[-1].candidate.least:,}" in str(plan)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps", 123),
        ("batch_size", 7),
        ("images.size", 24),
        ("images.held_out", 5),
        ("optimizer.lr", 0.5),
        ("diffusion.prediction", "epsilon"),
        ("checkpoints.save_every", 11),
        ("logging.log_every", 3),
    ],
)
def test_flags_win(path, value):
    config = with_values(TrainConfig(data="x"), {path: value})
    plan = choose(config, {"data", path.split(".")[-1]}, PHOTOGRAPHS, LAPTOP, HOUR)
    assert with_values(plan.config, {path: value}) == plan.config


def test_model_options_win_one_by_one():
    config = TrainConfig(data="x", model_options={"depth": 10})
    options = choose(config, {"data", "model_options"}, PHOTOGRAPHS, LAPTOP, HOUR).config.model_options
    assert options["depth"] == 10
    assert options["dim"] in (96, 128, 192)


def test_another_network_keeps_its_own_objective():
    config = TrainConfig(data="x", model="unet/cifar10")
    plan = choose(config, {"data", "model"}, PHOTOGRAPHS, lambda _: 0.5, HOUR)
    assert plan.config.model == "unet/cifar10"
    assert plan.config.model_options == {}
    assert (plan.config.diffusion, plan.config.optimizer) == (config.diffusion, config.optimizer)


@pytest.mark.parametrize("side", [8, 15, 28, 31, 50, 97])
@pytest.mark.parametrize("given", [{"data"}, {"data", "model"}], ids=["open", "uvit"])
def test_every_image_size_can_be_divided(side, given):
    pictures = replace(PHOTOGRAPHS, height=side, width=side + 3)
    for candidate in sizing.candidates(TrainConfig(data="x"), given, pictures):
        size, patch = candidate.config.images.size, candidate.config.model_options.get("patch_size", 4)
        assert size is not None
        assert size <= side
        assert size % patch == 0


@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.5, 10.0])
def test_progress_within_seconds_and_samples_within_minutes(seconds):
    for budget in (600.0, HOUR, 24 * HOUR):
        plan = lengthened(TrainConfig(data="x", batch_size=32), (), seconds, budget, images=10_000)
        assert plan.config.logging.log_every * seconds <= max(5.0, seconds)
        samples_take = plan.seconds / plan.config.steps / seconds - 1
        assert samples_take < 0.3, "samples must not take over"
        if seconds <= 0.5:
            assert plan.config.samples_every * seconds <= 400
        assert plan.seconds <= budget


@pytest.mark.parametrize(("count", "expected"), [(5, 0), (19, 0), (20, 2), (400, 40), (10**6, 1000)])
def test_every_tenth_image_is_held_out(count, expected):
    assert sizing.held_out(count) == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("0.5d", 43200), ("2H", 7200)]
)
def test_budgets(text, seconds):
    assert seconds_of(text) == seconds
    assert TrainConfig(budget=text).budget == text


@pytest.mark.parametrize("text", ["", "30", "m", "an hour", "30mm", "1h later", "0m", "-5m"])
def test_bad_budgets_name_the_flag(text):
    with pytest.raises(InvalidConfigError, match="`budget`"):
        TrainConfig(budget=text)


# The timing, and the command


TINY_OPTIONS = {"patch_size": 4, "dim": 16, "depth": 2, "heads": 2}


def test_the_timing_leaves_no_trace(tiny):
    from scalelong.runs import shape_of

    accelerator, shape = make_accelerator(tiny, "."), shape_of(load_data("digits"))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert 0 < step_seconds(tiny, shape, accelerator, patience=0.0) < 60
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def slow_clock(monkeypatch):
    """A machine on which every step takes a second, so that nothing depends on this one."""
    calls = []
    monkeypatch.setattr(sizing, "step_seconds", lambda config, *_: calls.append(config) or 1.0)
    return calls


FLAGS = ["--model-options", "patch_size=4", "dim=16", "depth=2", "heads=2", "--batch-size", "4", "--samples-every", "0"]


def test_a_run_is_sized_once_and_its_folder_says_how(slow_clock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "digits", "--budget", "20s", "--trackers", *FLAGS]
    assert main(command) == 0
    out, err = capsys.readouterr()
    (folder,) = (tmp_path / "runs").iterdir()
    for word in ("sized to this machine", "--budget", "--size", "--steps", "--batch-size", "--held-out", "why"):
        assert word in err
    assert out.startswith(f"finished at step 18: runs/{folder.name}\n")
    assert f"scalelong report runs/{folder.name}" in out
    config = load_config(folder / "config.yaml")
    assert (config.steps, config.budget, config.images.held_out) == (18, "20s", 179)
    assert "held_out_loss" in {name for line in read_metrics(folder) for name in line}
    timed = len(slow_clock)
    assert main(command) == 0
    assert len(slow_clock) == timed, "a run that has begun is never sized again"
    assert load_config(folder / "config.yaml") == config
    assert main([*command[:3], "40s", *command[4:]]) == 0
    assert load_config(folder / "config.yaml") == replace(config, steps=36, budget="40s")


def test_flags_change_a_run_that_goes_on_as_ever(slow_clock, tmp_path, capsys):
    common = ["digits", "--budget", "20s", "--trackers", *FLAGS, "--out", str(tmp_path / "run")]
    assert main(["train", *common]) == 0
    config = load_config(tmp_path / "run" / "config.yaml")
    assert main(["train", *common, "--steps", "21"]) == 0
    assert load_config(tmp_path / "run" / "config.yaml") == replace(config, steps=21)
    assert main(["train", *common, "--lr", "0.125"]) == 1
    assert "optimizer.lr: 0.002 -> 0.125" in capsys.readouterr().err


def test_a_recipe_keeps_its_sizes_and_gets_the_steps_of_a_budget(slow_clock, tmp_path):
    arguments = ["--recipe", "digits-tiny", "--budget", "10m", "--out", str(tmp_path / "a")]
    config, _, plan = settle(parse(arguments), print)
    base = parse(["--recipe", "digits-tiny"]).train
    assert plan is not None
    assert 300 < config.steps <= 570
    assert (config.model_options, config.batch_size, config.images) == (
        base.model_options,
        base.batch_size,
        base.images,
    )
    assert config.optimizer == base.optimizer


def test_without_a_budget_a_recipe_is_what_it_was(slow_clock, tmp_path):
    config, _, plan = settle(parse(["--recipe", "digits-tiny", "--out", str(tmp_path / "a")]), print)
    assert (config, plan, slow_clock) == (parse(["--recipe", "digits-tiny"]).train, None, [])


def test_a_recipes_held_out_images_fit_a_smaller_folder(tmp_path, capsys):
    data = load_data("digits")
    torch.save({}, tmp_path / "unrelated.bin")
    folder = picture_folder(tmp_path / "pictures", data, 50)
    said: list[str] = []
    config = replace(parse(["--recipe", "fashion-tiny"]).train, data=str(folder))
    assert fit_held_out(config, said.append).images.held_out == 5
    assert "5 are held out, not 1000" in said[0]
    assert (
        main(["train", str(folder), "--recipe", "fashion-tiny", "--held-out", "50", "--out", str(tmp_path / "r")]) == 1
    )
    assert "--held-out 5" in capsys.readouterr().err


def picture_folder(path, data, count, sizes=(8,)):
    from scalelong.runs import save_png

    path.mkdir()
    images = data.fetch(range(count)).images
    for i, image in enumerate(images):
        save_png(path / f"{i}.png", image[:, : sizes[i % len(sizes)]])
    return path


def test_images_of_several_sizes_need_no_flag_and_unread_files_are_named(slow_clock, tmp_path, capsys):
    folder = picture_folder(tmp_path / "pictures", load_data("digits"), 24, sizes=(8, 6))
    for name in ("a.HEIC", "b.heic", "notes.txt"):
        (folder / name).write_bytes(b"x")
    flags = ["--trackers", "--steps", "1", "--model-options", "dim=16", "depth=2", "heads=2"]
    assert main(["train", str(folder), *flags, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "2 files were not read: a.HEIC, b.heic" in said
    assert "24 images of 2 different sizes, 8×6 to 8×8" in said
    assert load_config(tmp_path / "run" / "config.yaml").images.size == 6


def test_the_dry_run_says_how_long_it_takes(slow_clock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--budget", "1h", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "sized to this machine, for 1:00:00" in out
    assert "epochs" in out
    assert main(["train", "--recipe", "digits-tiny", "--dry-run"]) == 0
    assert "time         about 1:2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_quiet_prints_the_result_alone(slow_clock, tmp_path, capsys):
    assert (
        main(["train", "digits", "--quiet", "--budget", "3s", "--trackers", *FLAGS, "--out", str(tmp_path / "r")]) == 0
    )
    out, err = capsys.readouterr()
    assert out.startswith("finished at step 2")
    assert err == ""


def test_a_sized_run_ends_with_the_same_weights_when_interrupted(slow_clock, tmp_path, final_state):
    arguments = ["digits", "--budget", "12s", "--trackers", *FLAGS]
    config, _, _ = settle(parse([*arguments, "--out", str(tmp_path / "none")]), print)
    train(config, tmp_path / "whole")
    train(replace(config, steps=5), tmp_path / "halves")
    train(config, tmp_path / "halves")
    whole, halves = final_state(tmp_path / "whole"), final_state(tmp_path / "halves")
    assert all(torch.equal(value, halves.ema[name]) for name, value in whole.ema.items())


def test_a_handful_of_images_is_warned_of(slow_clock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    picture_folder(tmp_path / "one", load_data("digits"), 1)
    assert main(["train", "one", "--budget", "1m", "--held-out", "0", "--dry-run"]) == 0
    assert "1 image: a network learns so few by heart" in capsys.readouterr().err
