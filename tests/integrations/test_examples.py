"""The examples of docs/integrations run, and say what the pages say. Each skips where its library is not installed."""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Run an example of the folder, in one where it may leave files."""

    def run(name: str, *needed: str, function: str = "main", **options: Any) -> dict[str, Any]:
        for package in needed:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}, which is not among the development packages")
        monkeypatch.syspath_prepend(str(ROOT / "examples" / "integrations"))
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's packages, which change with their versions
            return getattr(import_module(name), function)(tmp_path, **options)

    yield run
    sys.modules.pop("trackers", None)


def test_diffusers_unconditional(example):
    found = example("diffusers_unconditional", "diffusers")
    for way in ("start", "ls"):
        assert found[f"{way}: largest difference after a resume"] == 0
        assert found[f"{way}: difference of the pipeline's images"] < 1e-4
    assert found["ls: tensors of gates in the checkpoint"] > 0


def test_diffusers_text_to_image_and_lora(example):
    found = example("diffusers_text_to_image", "diffusers", "peft", "transformers")
    assert found.pop("LoRA on a base that nobody scaled: wrong by") > 1e-2
    assert all(value < 1e-4 for value in found.values()), found


def test_peft(example):
    found = example("peft_adapters", "peft")
    assert found["ls: gates moved by"] > 1e-4
    assert found["ls: still scaled after the merge"] == 1
    for name in ("ls: read back", "ls: merged", "cs: read back", "cs: merged and folded"):
        assert found[name] < 1e-4, name


def test_lightning(example):
    found = example("lightning_module", "lightning")
    assert found["largest difference after a resume"] == 0
    assert found["first reading after the resume at step"] == 6
    assert found["difference of the module that was read back"] == 0
    assert found["tensors of gates in the checkpoint"] > 0


def test_the_trainer_of_transformers(example):
    found = example("transformers_trainer", "transformers")
    assert found == {
        "largest difference after a resume": 0,
        "first reading after the resume at step": 6,
        "readings in the Trainer's log": 4,
    }


def test_accelerate_in_two_processes(example):
    found = example("accelerate_processes", "accelerate")
    assert found["largest difference after a resume"] == 0
    assert found["processes agree"] == 1
    assert found["gates"] > 0


def test_segmentation_models_pytorch(example):
    found = example("torchvision_networks", "torchvision", "segmentation_models_pytorch", function="segmentation")
    assert found["smp: long skips"] == 4
    assert found["smp: scaling changes the output by"] > 1e-4
    assert found["smp: read back, difference"] == 0
    assert found["smp: folded"] == 4
    assert found["smp: folded, difference"] < 1e-6


def test_lucidrains_trainer(example):
    needed = ("torchvision", "denoising_diffusion_pytorch", "ema_pytorch")
    found = example("torchvision_networks", *needed, function="diffusion")
    assert found["lucidrains: long skips"] > 2
    assert found["lucidrains: readings"] == 3
    assert found["lucidrains: read back, difference"] == 0
    assert found["lucidrains: average is scaled"] == 1


def test_monai(example):
    found = example("monai_segmentation", "monai")
    assert found["long skips"] == 2
    assert found["bundle is scaled"] == 1
    assert found["folded and scripted, difference"] < 1e-4
    assert found["readings, ls"] == 3
    assert "no difference" in str(found["range"]) or "Cannot be judged" in str(found["range"])


def test_deploying(example):
    table = example("deploy", "diffusers", names=("U-ViT, ls", "diffusers UNet, cs behind norms"))
    cells = [(name, way, cell) for name, row in table.items() for way, cell in row.items()]
    works = [entry for entry in cells if not entry[2].startswith("needs ")]
    assert len(works) >= 3 * len(table)
    for name, way, cell in works:
        assert float(cell) < (0.05 if way == "torchao int8" else 1e-4), (name, way, cell)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_trackers_get_readings_alerts_and_pictures(example, kind, tmp_path):
    found = example("trackers", kind, kinds=(kind,))
    (alarm,) = found[kind]
    assert "non-finite" in alarm
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        tags = events.Tags()
        assert "kappa/1" in tags["scalars"]
        assert "samples" in tags["images"]
        assert any("alarms" in tag for tag in tags["tensors"])
    elif kind == "wandb":
        assert list((tmp_path / "wandb").glob("offline-run-*-watched/run-watched.wandb"))
    elif kind == "mlflow":
        assert [path.read_text() for path in (tmp_path / "mlflow").rglob("tags/alarm")] == ["step 3: non-finite"]
        assert list((tmp_path / "mlflow").rglob("alarms/*non-finite.txt"))
    else:
        assert list((tmp_path / "trackio").glob("mine*.db"))
