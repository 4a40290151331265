"""`scalelong tune` on a run that was trained for a moment, and what becomes of its files."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import scalelong as sl
from scalelong.cli import main
from scalelong.evaluation import Score
from scalelong.experiments.caching import CacheCurve, Point
from scalelong.runs import ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.runs.load import load_run
from scalelong.skips import scaling_of
from scalelong.training import train


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    config = TrainConfig(
        data="digits",
        model="uvit",
        model_options={"patch_size": 4, "dim": 16, "depth": 4, "heads": 2},
        scaling="cs:0.5",
        steps=4,
        batch_size=8,
        images=ImagesConfig(size=8, channels=1),
        optimizer=OptimizerConfig(lr=1e-3),
        logging=LoggingConfig(trackers=(), samples_every=0),
    )
    train(config, folder)
    return folder


FAST = ["--steps", "3", "--features", "pixels", "--batch-size", "16", "--quiet"]


def test_coefficients_are_found_and_used(run, tmp_path, capsys):
    assert main(["tune", str(run), "-n", "32", "--trials", "4", "--out", str(tmp_path), *FAST]) == 0
    assert "4 trials of 32 images" in capsys.readouterr().out
    file = tmp_path / "linear-dpm++3.json"
    found = sl.TunedSkips.load(file)
    assert found.about["settings"]["steps"] == 3
    assert found.about["run"] == "digits"
    assert (tmp_path / "linear-dpm++3.png").read_bytes()[:4] == b"\x89PNG"
    # Another coefficient, so that the images must differ.
    values = json.loads(file.read_text()) | {"tuned": {"method": "custom", "kappas": [1.0, 0.1]}}
    file.write_text(json.dumps(values))
    for flags, folder in (([], "plain"), (["--tuned", str(file)], "tuned")):
        out = ["--out", str(tmp_path / folder), "-n", "8", "--steps", "3", *flags]
        assert main(["sample", str(run), *out]) == 0
    note = json.loads((tmp_path / "tuned" / "samples.json").read_text())
    assert note["scaling"] == "custom:1.0,0.1"
    assert "scaling" not in json.loads((tmp_path / "plain" / "samples.json").read_text())
    first = "000000000000.png"
    assert (tmp_path / "plain" / first).read_bytes() != (tmp_path / "tuned" / first).read_bytes()
    # A folder of plain images is not continued with tuned ones.
    again = ["--out", str(tmp_path / "plain"), "-n", "9", "--steps", "3", "--tuned", str(file)]
    assert main(["sample", str(run), *again]) == 1
    assert "made in a different way" in capsys.readouterr().err
    assert (
        main(["export", str(run), "--format", "safetensors", "--tuned", str(file), "--out", str(tmp_path / "e")]) == 0
    )
    loaded = load_run(run, scaling="custom:1.0,0.1")
    assert scaling_of(loaded.model).config == sl.CustomScaling((1.0, 0.1))


def test_caches_are_measured_against_fewer_steps(run, tmp_path, capsys):
    flags = ["--cache", "-n", "48", "--every", "2", "--depths", "1", "--fewer", "2", "--json"]
    assert main(["tune", str(run), *FAST[2:], "--steps", "4", *flags, "--out", str(tmp_path)]) == 0
    found = CacheCurve.from_json(capsys.readouterr().out)
    assert [(p.steps, p.cache) for p in found.points] == [(4, ""), (2, ""), (4, "every=2,depth=1")]
    assert all(point.seconds > 0 and point.frechet.value > 0 for point in found.points)
    assert found == CacheCurve.from_json((tmp_path / "cache-dpm++4.json").read_text())
    assert (tmp_path / "cache-dpm++4.png").exists()


def test_a_run_is_sampled_with_any_cache(run):
    loaded = load_run(run)
    plain = loaded.sample(4, steps=6)
    assert torch.equal(loaded.sample(4, steps=6, cache="every=1,depth=1"), plain)
    placed = loaded.sample(4, steps=6, cache="every=2,depth=1,centre=2,power=1.4")
    assert not torch.equal(placed, plain)
    # The third batch is as the first: the cache is checked once, and begins anew with each batch.
    apart = loaded.sample(4, steps=6, cache="every=2,depth=1,centre=2,power=1.4", batch_size=1)
    assert torch.equal(apart, placed)
    heun = loaded.sample(2, steps=3, sampler="heun", cache="every=2,depth=1")
    assert not torch.equal(heun, loaded.sample(2, steps=3, sampler="heun"))
    assert torch.equal(loaded.sample(4, steps=6), plain)


def test_the_verdict_is_about_fewer_steps_in_the_same_time():
    def point(steps: int, seconds: float, value: float, cache: str = "") -> Point:
        return Point(steps, cache, seconds, Score(value, value - 0.5, value + 0.5))

    plain = [point(20, 2.0, 4.0), point(10, 1.0, 6.0), point(5, 0.5, 12.0)]
    caches = [point(20, 1.5, 4.2, "every=2,depth=1"), point(20, 0.75, 9.2, "every=3,depth=1")]
    caches += [point(20, 0.4, 20.0, "every=5,depth=1")]
    curve = CacheCurve("x", "dpm++", 100, "pixels", (*plain, *caches))
    assert [curve.fewer_steps(p.seconds) for p in caches] == [5.0, 9.0, 12.0]
    assert [curve.verdict(p) for p in caches] == ["better", "no difference", "worse"]
    assert curve.best(1.3) == caches[0]
    assert curve.best(1.9) == plain[1]
    assert curve.best(9) is None
    assert "better 1, no difference 1, worse 1" in str(curve)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kind", "freeu"], "FreeU is tuned on a model that is not scaled"),
        (["--cache", "-n", "10"], "at least 32, two batches"),
        (["--cache", "--depths", "7"], "from 1 to 2"),
        (["--cache", "--every", "x"], "--every must be numbers"),
        (["--tuned", "absent.json"], "missing"),
        (["--budget", "soon"], "--budget must be a time"),
    ],
)
def test_what_is_refused(run, flags, words, capsys):
    assert main(["tune", str(run), "-n", "64", *FAST, *flags]) == 1
    assert words in capsys.readouterr().err


def test_learned_coefficients_are_not_replaced(run, tmp_path):
    folder = tmp_path / "learned"
    shutil.copytree(run, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("cs:0.5", "ls"))
    with pytest.raises(sl.InvalidConfigError, match="only constant ones"):
        load_run(folder, scaling="custom:1.0,0.1")
