"""`scalelong theory`, `scalelong kappa`, and the table of the validation."""

import gzip
import json
import math
import struct
from pathlib import Path

import pytest
import torch

from research import kappa as kappa_study
from scalelong.cli import main


def test_theory_prints_every_check_and_draws(tmp_path, capsys) -> None:
    assert main(["theory", "--seeds", "3", "--output", str(tmp_path / "figures")]) == 0
    printed = capsys.readouterr().out
    for words in ("Theorem 3.1", "Lemma 3.2", "Theorem 3.3", "Theorem 3.4", "true norm 100.01", "w_6/w_1"):
        assert words in printed
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == ["features.png", "gradients.png", "inputs.png", "noise.png", "robustness.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "figures").iterdir())


def test_kappa_by_number_of_skips(capsys) -> None:
    assert main(["kappa", "--skips", "3"]) == 0
    assert "κ = " in capsys.readouterr().out
    assert main(["kappa", "--skips", "6", "--schedule", "cosine", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["skips"] == 6
    assert answer["low"] <= answer["kappa"] <= answer["high"]


def test_kappa_by_model_name(capsys) -> None:
    assert main(["kappa", "--model", "cifar10-s2"]) == 0
    assert "6 long skips" in capsys.readouterr().out


def test_kappa_of_embedded_data(capsys) -> None:
    pytest.importorskip("scalelong.data")
    assert main(["kappa", "--data", "digits", "--skips", "6"]) == 0
    assert "images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kappa"], "--skips N"),
        (["kappa", "--model", "resnet"], "unknown network 'resnet'"),
        (["kappa", "--skips", "0"], "at least 1"),
        (["kappa", "--skips", "4", "--method", "pilot"], "needs both a model and data"),
        (["theory", "--seeds", "1"], "at least 2"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, message, capsys) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def evidence(folder: Path) -> Path:
    """Two networks whose best κ is known: loss = 1 + (κ - best)², the same at all steps."""
    runs, estimates = [], []
    for architecture, depth, best in (("uvit", 8, 0.7), ("unet", 1, 1.0)):
        for seed in (0, 1):
            for kappa in (1.0, 0.7, 0.5):
                loss = (1 + seed) * (1 + (kappa - best) ** 2)
                losses = {str(step): loss for step in (10, 20, 40, 80)}
                runs.append(_run(architecture, depth, f"cs:{kappa}", seed, losses))
            for method in ("uniform", "balanced"):
                runs.append(_run(architecture, depth, method, seed, {"80": 1.5 * (1 + seed)}))
            for method, kappa in (("data", 0.6), ("network", 1.0)):
                answer = {"architecture": architecture, "depth": depth, "seed": seed, "method": method}
                estimates.append({**answer, "kappa": kappa, "low": 0.5})
    (folder / "validation.json").write_text(json.dumps(runs))
    (folder / "estimates.json").write_text(json.dumps(estimates))
    return folder


def _run(architecture: str, depth: int, method: str, seed: int, losses: dict[str, float]) -> dict[str, object]:
    return {"architecture": architecture, "depth": depth, "method": method, "seed": seed, "held_out_loss": losses}


def test_regret_is_counted_from_the_grids_best(tmp_path, capsys) -> None:
    rows = {row["choice"]: row for row in kappa_study.regret_rows(kappa_study.load(evidence(tmp_path)))}
    assert rows["κ = 0.7"]["U-ViT N=4"] == "+0.0 ± 0.0"
    assert rows["κ = 0.7"]["UNet N=6"] == "+9.0 ± 0.0"
    assert rows["no scaling"]["UNet N=6"] == "+0.0 ± 0.0"
    assert rows["1/√2 uniform"]["U-ViT N=4"] == "+50.0 ± 0.0"
    # κ = 0.6 is half-way between 0.5 (1.04) and 0.7 (1.00).
    assert rows["A, data"]["U-ViT N=4"] == "+2.0 ± 0.0"
    assert rows["C, pilot"]["mean"] == 0
    assert rows["B, network"]["mean"] == pytest.approx(4.5)
    assert kappa_study.main(["regret", str(tmp_path), "--figure", str(tmp_path / "kappa.png")]) == 0
    assert "Regret" in capsys.readouterr().out
    assert (tmp_path / "kappa.png").stat().st_size > 1000


def test_stored_evidence_is_whole() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "kappa"
    networks = kappa_study.load(folder)
    assert {architecture for architecture, _ in networks} == {"uvit", "unet"}
    assert len(networks) >= 4
    for found in networks.values():
        assert len(found.seeds) >= 3
        assert len(found.grid) >= 6
        assert all(math.isfinite(found.final(method, seed)) for method in found.methods() for seed in found.seeds)


def test_fashion_mnist_is_read_as_its_idx_files_say(tmp_path) -> None:
    """Padded to 32x32 and averaged over 4x4, computed here from the bytes."""
    pixels = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    header = struct.pack(">IIII", 0x803, 5, 28, 28)
    with gzip.GzipFile(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(header + pixels.numpy().tobytes())
    with gzip.GzipFile(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">II", 0x801, 5) + bytes(5))
    padded = torch.full((5, 1, 32, 32), -1.0)
    padded[:, 0, 2:30, 2:30] = pixels.float() / 127.5 - 1
    expected = padded.view(5, 1, 8, 4, 8, 4).mean((3, 5))
    assert torch.allclose(kappa_study.fashion_mnist(str(tmp_path)), expected, atol=1e-6)
    assert kappa_study.main(["run", "--data", "digits", "--results", str(tmp_path / "x.json")]) == 1
