"""What a budget buys, on machines that are made up; the timing itself; and that a run is sized once."""

import re
from dataclasses import replace

import pytest
import torch

from scalelong.cli import main
from scalelong.cli.train import parse, settle
from scalelong.config import TrainConfig, load_config, recipe, seconds_of, with_values
from scalelong.data import load_data
from scalelong.errors import InvalidConfigError
from scalelong.runs import DataShape, build_model, make_accelerator, read_metrics, save_png, shape_of
from scalelong.training import fit_held_out, held_out, sizing, step_seconds
from scalelong.training.dry_run import memory_needed
from scalelong.training.sizing import MOST_EPOCHS, Pictures, busy_hint, choose, lengthened, possible_runs

PHOTOGRAPHS = Pictures(count=400, channels=3, height=64, width=96)
MANY = replace(PHOTOGRAPHS, count=50_000)
OPEN = TrainConfig(data="x")
HOUR = 3600.0


def machine(speed: float):
    """Seconds of a step on a machine that does so many multiplications of a token a second: a made-up speed."""

    def seconds(config: TrainConfig) -> float:
        options, side = config.model_options, config.images.size or 64
        if config.model == "unet/small":  # 26 million multiplications for an image of 16x16 with widths of 32, 64, 96
            wider = options.get("block_out_channels", [32])[0] / 32
            return config.batch_size * 26e6 * wider**2 * (side / 16) ** 2 / (12 * speed)
        tokens = min(256, (side // 2) ** 2)
        return config.batch_size * tokens * options.get("dim", 128) ** 2 * options.get("depth", 4) / speed

    return seconds


LAPTOP, SLOW, GPU = machine(4e8), machine(1e6), machine(1e12)


def test_an_hour_on_a_cpu_is_filled_and_no_more():
    tried = []
    plan = choose(OPEN, {"data"}, PHOTOGRAPHS, lambda config: tried.append(config) or LAPTOP(config), HOUR)
    assert 0.6 * HOUR < plan.seconds <= HOUR
    assert plan.config.images.size in (16, 32)
    assert plan.config.steps >= 3000
    assert (plan.config.images.held_out, plan.images) == (40, 360)
    assert tried[-1].model_options != plan.config.model_options, "the next one was too large, and none after it tried"
    assert "needs 10,000" in str(plan)


def test_a_faster_machine_and_a_longer_budget_get_larger_networks():
    sizes = [(config.model_options, config.images.size) for config, _ in possible_runs(OPEN, {"data"}, MANY)]

    def place(speed, budget):
        config = choose(OPEN, {"data"}, MANY, speed, budget).config
        return sizes.index((config.model_options, config.images.size))

    assert place(SLOW, HOUR) == 0
    assert place(SLOW, HOUR) < place(LAPTOP, HOUR) < place(LAPTOP, 24 * HOUR) < place(GPU, 24 * HOUR)
    assert place(GPU, 24 * HOUR) == len(sizes) - 1


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (OPEN, {"data", "model"}),
        (TrainConfig(data="x", model_options={"dim": 64}), {"data", "model_options"}),
        (with_values(OPEN, {"diffusion.condition": "text"}), {"data", "condition"}),
    ],
    ids=["model", "options", "text"],
)
def test_a_uvit_is_taken_at_every_size_where_one_is_asked_for(config, given):
    assert {each.model for each, _ in possible_runs(OPEN, {"data"}, MANY)} == {"unet/small", "uvit"}
    assert {each.model for each, _ in possible_runs(config, given, MANY)} == {"uvit"}


def test_time_or_images_may_be_too_few():
    slow = choose(OPEN, {"data"}, PHOTOGRAPHS, SLOW, 600.0)
    assert slow.seconds <= 600.0
    assert "need about 1,000 steps, so give a longer --budget, of " in str(slow)
    enough = choose(OPEN, {"data"}, PHOTOGRAPHS, SLOW, seconds_of(str(slow).rpartition(" ")[2]))
    assert enough.config.steps >= 1000, "the budget that it names is enough"
    assert "longer --budget" not in str(enough)
    few = choose(OPEN, {"data"}, PHOTOGRAPHS, GPU, 24 * HOUR)
    assert few.epochs <= MOST_EPOCHS
    assert few.config.model_options.get("dim", 0) < 512, "a large network would learn 360 images by heart"
    assert "by heart" in str(few)


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
        ("model_options", {"depth": 10}),
    ],
)
def test_flags_win(path, value):
    config = with_values(OPEN, {path: value})
    found = choose(config, {"data", path.split(".")[-1]}, PHOTOGRAPHS, LAPTOP, HOUR).config
    if path == "model_options":
        assert found.model_options == {**found.model_options, **value}
        assert found.model_options["dim"] in (96, 128, 192)
    else:
        assert with_values(found, {path: value}) == found


def test_a_network_of_the_users_keeps_its_own_objective():
    config = TrainConfig(data="x", model="unet/cifar10")
    plan = choose(config, {"data", "model"}, PHOTOGRAPHS, lambda _: 0.5, HOUR)
    assert (plan.config.model, plan.config.model_options) == ("unet/cifar10", {})
    assert (plan.config.diffusion, plan.config.optimizer) == (config.diffusion, config.optimizer)


@pytest.mark.parametrize("side", [8, 15, 31, 50, 97])
def test_every_image_size_can_be_divided(side):
    for config, _ in possible_runs(OPEN, {"data"}, replace(PHOTOGRAPHS, height=side, width=side + 3)):
        assert config.images.size is not None
        assert config.images.size <= side
        assert config.images.size % 4 == 0


@pytest.mark.parametrize("seconds", [0.002, 0.05, 0.5, 10.0])
def test_progress_within_seconds_and_samples_within_minutes(seconds):
    for budget in (600.0, HOUR, 24 * HOUR):
        plan = lengthened(TrainConfig(data="x", batch_size=32), (), seconds, budget, images=10_000)
        assert plan.config.logging.log_every * seconds <= max(5.0, seconds)
        assert plan.seconds / plan.config.steps / seconds - 1 < 0.3, "samples must not take over"
        if seconds <= 0.5:
            assert plan.config.samples_every * seconds <= 400
        assert plan.seconds <= budget


def test_the_plan_of_a_handful_of_images():
    plan = str(choose(OPEN, {"data"}, replace(PHOTOGRAPHS, count=1), SLOW, 60.0))
    assert "samples   and checkpoints at the end" in plan, "not after more steps than there are"
    assert "batch     1 image (" in plan
    assert "held out" not in plan


def test_every_tenth_image_is_held_out(tmp_path, caplog):
    assert [held_out(count) for count in (5, 19, 20, 400, 10**6)] == [0, 0, 2, 40, 1000]
    caplog.set_level("INFO")
    config = replace(parse(["--recipe", "fashion-tiny"]).train, data=str(pictures(tmp_path / "pictures", 50)))
    assert fit_held_out(config).images.held_out == 5
    assert "5 are held out, not 1000" in caplog.text


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("0.5d", 43200), ("2H", 7200)]
)
def test_budgets(text, seconds):
    assert seconds_of(text) == seconds
    assert TrainConfig(budget=text).budget == text


@pytest.mark.parametrize("text", ["", "30", "an hour", "30mm", "0m"])
def test_bad_budgets_name_the_flag(text):
    with pytest.raises(InvalidConfigError, match="`budget`"):
        TrainConfig(budget=text)


# The timing, and the command


def test_a_busy_machine_is_said(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, threads, busy in ((8.0, 2, True), (8.0, 1, False), (1.0, 2, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        assert ("OMP_NUM_THREADS=1" in busy_hint()) == busy


def test_the_timing_leaves_no_trace(tiny):
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
    config = load_config(folder / "config.yaml")
    assert (config.steps, config.budget, config.images.held_out) == (18, "20s", 179)
    assert "held_out_loss" in {name for line in read_metrics(folder) for name in line}
    timed = len(slow_clock)
    assert main(command) == 0
    assert len(slow_clock) == timed, "a run that has begun is never sized again"
    assert load_config(folder / "config.yaml") == config
    assert main([*command[:3], "40s", *command[4:]]) == 0
    assert load_config(folder / "config.yaml") == replace(config, steps=36, budget="40s")
    assert main([*command, "--lr", "0.125", "--out", str(folder)]) == 1
    assert "optimizer.lr: 0.008 -> 0.125" in capsys.readouterr().err


def test_a_recipe_keeps_its_sizes_and_gets_the_steps_of_a_budget(slow_clock, tmp_path):
    base = parse(["--recipe", "digits-tiny"]).train
    config, _, plan = settle(parse(["--recipe", "digits-tiny", "--out", str(tmp_path / "a")]))
    assert (config, plan, slow_clock) == (base, None, [])
    arguments = ["--recipe", "digits-tiny", "--budget", "10m", "--out", str(tmp_path / "a")]
    config, _, plan = settle(parse(arguments))
    assert plan is not None
    assert 300 < config.steps <= 570
    kept = ("model_options", "batch_size", "images", "optimizer")
    assert all(getattr(config, name) == getattr(base, name) for name in kept)


def pictures(path, count, sizes=(8,)):
    path.mkdir()
    for i, image in enumerate(load_data("digits").fetch(range(count)).images):
        save_png(path / f"{i}.png", image[:, : sizes[i % len(sizes)]])
    return path


def test_images_of_several_sizes_need_no_flag_and_unread_files_are_named(slow_clock, tmp_path, capsys):
    folder = pictures(tmp_path / "pictures", 24, sizes=(8, 4))
    for name in ("a.HEIC", "b.heic", "notes.txt"):
        (folder / name).write_bytes(b"x")
    flags = ["--trackers", "--steps", "1", "--model-options", "dim=16", "depth=2", "heads=2"]
    assert main(["train", str(folder), *flags, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "2 files were not read: a.HEIC, b.heic" in said
    assert "24 images of 2 different sizes, 8×4 to 8×8" in said
    assert load_config(tmp_path / "run" / "config.yaml").images.size == 4


def test_the_dry_run_says_how_long_it_takes(slow_clock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--budget", "1h", "--dry-run"]) == 0
    assert "sized to this machine, for 1:00:00" in capsys.readouterr().out
    assert main(["train", "--recipe", "digits-tiny", "--dry-run"]) == 0
    assert "time         about 1:2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    pictures(tmp_path / "one", 1)
    assert main(["train", "one", "--budget", "1m", "--held-out", "0", "--dry-run"]) == 0
    assert "1 image: a network learns so few by heart" in capsys.readouterr().err


def test_quiet_prints_the_result_alone(slow_clock, tmp_path, capsys):
    flags = ["--quiet", "--budget", "3s", "--trackers", *FLAGS, "--out", str(tmp_path / "r")]
    assert main(["train", "digits", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("finished at step 2")
    assert err == ""


def test_what_a_run_needs_on_accelerators_is_counted(capsys):
    """44,255,238 parameters; a linear layer of n weights does 6 n operations for each token, forward and backward."""
    command = ["train", "--recipe", "cifar10-uvit-s2", "--dry-run", "--for", "4", "--device-memory", "40"]
    assert main(command) == 0
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["accelerators"] == "4, 32 images of a batch of 128 each, 32 at once"
    assert rows["network"].startswith("44.3M parameters, ")
    operations = float(rows["network"].split("parameters, ")[1].split()[0])
    assert 6 * 44.3e6 * 257 <= operations * 1e9 <= 1.3 * 6 * 44.3e6 * 257
    assert rows["state"] == "weights 177.0 MB, gradients 177.0 MB, optimiser and averages 531.1 MB"
    assert "fits into 40 GB" in rows["data parallel"]
    assert "265.5 MB data parallel" in rows["exchanged"], "2 · 3/4 of the gradients"
    assert "398.3 MB with FSDP2" in rows["exchanged"], "3 · 3/4 of the weights"
    # What an image keeps on the meta device is what it keeps on the CPU.
    config = recipe("cifar10-uvit-s2")
    shape = DataShape(3, 32, 32)
    _, kept = memory_needed(config, build_model(config, shape), shape)
    shown = float(re.search(r"keeps ([\d.]+) MB", rows["network"])[1])  # type: ignore[index]
    assert shown * 1e6 == pytest.approx(kept, rel=0.1)
    assert main(["train", "digits", "--dry-run", "--for", "2"]) == 1
    assert "--for counts a network that is known: give --recipe, --config or --model" in capsys.readouterr().err
    assert main([*command[:-1], "0.5", "--optimizer", "muon"]) == 0
    out = capsys.readouterr().out
    assert "does NOT fit into 0.5 GB" in out
    assert "only with the optimiser adamw" in out
