"""The coordinate check: slopes that are known, rows of networks, and the command."""

import json
import math

import pytest
import torch
from torch import nn

from scalelong import InvalidConfigError, UViT
from scalelong.cli import main
from scalelong.mup import Coordinates, coordinates, width_options


def mlp(width: int) -> nn.Module:
    """One layer of each kind, linear: Adam's first step moves the hidden one by η ‖h‖₁, which grows as n."""
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Linear(width, width), nn.Linear(width, 3))


X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def table() -> Coordinates:
    names = ("standard", "mup", "mup:unit")
    # A rate so small that what layers do to each other is of the second order.
    return coordinates(mlp, (64, 128, 256), lr=1e-6, steps=1, seeds=3, inputs=(X,), parametrisations=names)


def test_slopes_with_a_known_answer(table):
    assert table.slope("standard", "0", 1).mean == pytest.approx(0, abs=0.02)
    assert table.slope("standard", "1", 1).mean == pytest.approx(1, abs=0.1)
    assert table.slope("mup", "1", 1).mean == pytest.approx(0, abs=0.1)
    assert table.slope("mup", "0", 1).mean == pytest.approx(0, abs=0.02)


def test_the_output_moves_by_root_n_under_unit_start_and_stays_under_strict(table):
    """W₀ Δh: Δh came through W₀, so that the two are aligned."""
    unit, strict = table.slope("mup:unit", "output", 1).mean, table.slope("mup", "output", 1).mean
    assert unit - strict == pytest.approx(0.5, abs=0.15)
    sizes = [table.slope(name, "output", 0).mean for name in ("mup:unit", "mup")]
    assert sizes[0] - sizes[1] == pytest.approx(0.5, abs=0.1)  # the bias stays


def test_verdict_and_table(table):
    assert not table.holds("standard")
    assert table.holds("mup")
    assert table.names("input") == ["0"]
    assert table.names("block") == ["1"]
    text = str(table)
    assert "standard: blocks do not move alike" in text
    assert "mup: every block moves alike" in text
    assert text.index("output") > text.index("\n1 ")


def test_a_row_that_starts_at_nothing_is_still_json():
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3, bias=False))

    found = coordinates(make, (8, 16), steps=1, seeds=1, inputs=(X,), parametrisations=("mup:zero",))
    assert math.isnan(found.slope("mup:zero", "output", 0).mean)
    assert "NaN" not in found.to_json()


def test_rows_of_a_uvit_are_its_blocks_and_merges():
    def make(width: int) -> nn.Module:
        return UViT(image_size=4, patch_size=2, channels=1, dim=width, depth=2, heads=width // 8, scaling="ls")

    found = coordinates(make, (16, 32), steps=1, seeds=1)
    assert found.names("block") == ["encoder.0", "middle", "decoder.0.merge", "decoder.0"]
    assert found.names("output") == ["output"]
    assert all(record.changes[0] > 0 for record in found.records)


def test_refusals():
    with pytest.raises(InvalidConfigError, match="at least 2 widths"):
        coordinates(mlp, (64,), inputs=(X,))
    with pytest.raises(InvalidConfigError, match="a parametrisation is standard, mup or mup:OUTPUT_START"):
        coordinates(mlp, (64, 128), inputs=(X,), parametrisations=("sp",))
    with pytest.raises(InvalidConfigError, match="no module 'nothing'"):
        coordinates(mlp, (8, 16), inputs=(X,), rows=["nothing"], seeds=1)


NETWORK = """
import torch
from torch import nn

def model(width):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

def example_inputs():
    return torch.linspace(-1, 1, 24).view(4, 6)
"""


def test_the_command_for_any_model(tmp_path, capsys):
    file = tmp_path / "small_network.py"
    file.write_text(NETWORK)
    options = ["--widths", "16,32,64", "--seeds", "1", "--steps", "1", "--quiet", "--out", str(tmp_path / "out")]
    assert main(["lab", "coords", str(file), *options]) == 0
    assert "slope of log change over log width" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "coords.json").read_text())["holds"].keys() == {"standard", "mup"}
    assert main(["lab", "coords", str(file), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["widths"] == [16, 32, 64]


def test_the_command_for_recipes(capsys):
    sizes = ["model_options.depth=2", "model_options.dim=16", "model_options.heads=2", "images.held_out=8"]
    options = ["--seeds", "1", "--steps", "1", "--quiet", "--batch-size", "4", "--set", *sizes]
    assert main(["lab", "coords", "digits-tiny", "--widths", "16,32", *options]) == 0
    assert "decoder.0.merge" in capsys.readouterr().out
    assert main(["lab", "coords", *options]) == 0
    assert "8, 16, 32" in capsys.readouterr().out


def test_the_command_refuses_what_is_no_model(capsys):
    assert main(["lab", "coords", "nothing", "--quiet"]) == 1
    assert "neither a recipe" in capsys.readouterr().err
    with pytest.raises(InvalidConfigError, match="the width of Linear is not known"):
        width_options(nn.Linear, {"in_features": 3}, 16)
