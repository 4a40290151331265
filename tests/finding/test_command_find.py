import json
import sys

import pytest

from scalelong.cli import main
from scalelong.finding import SkipPlan

pytest.importorskip("diffusers")

TINY = {
    "sample_size": 16,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}
NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 2, 2)
        self.c = nn.Conv2d(width, width, 2, 2)
        self.d, self.e = nn.Conv2d(2 * width, width, 1), nn.Conv2d(2 * width, 3, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        x = F.interpolate(self.c(b), scale_factor=2)
        x = F.interpolate(self.d(torch.cat([x, b], 1)), scale_factor=2)
        return self.e(torch.cat([x, a], 1))

def model(**config):
    return Net(**config)
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_class_with_config(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for config in (json.dumps(TINY), str(tmp_path / "config.json")):
        assert main(["find", "diffusers:UNet2DModel", "--config", config, "--out", str(tmp_path / "plan.json")]) == 0
        assert "UNet2DModel: 4 long skips" in capsys.readouterr().out
    assert len(SkipPlan.load(tmp_path / "plan.json")) == 4


def test_pretrained_folder(capsys, tmp_path):
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    UNet2DModel(**TINY).save_pretrained(tmp_path / "unet")
    assert main(["find", str(tmp_path / "unet")]) == 0
    assert "UNet2DModel: 4 long skips" in capsys.readouterr().out


def test_python_file(capsys, tmp_path):
    file = tmp_path / "mynet.py"
    file.write_text(NETWORK)
    assert main(["find", str(file)]) == 1
    assert "ExampleInputsError" in capsys.readouterr().err
    assert main(["find", str(file), "--input", "1,3,16,16", "--config", '{"width": 6}', "--exclude", "b"]) == 0
    printed = capsys.readouterr().out
    assert "Net: 1 long skip," in printed
    assert "1x6x16x16" in printed
    file.write_text(NETWORK + "\ndef example_inputs():\n    return (torch.zeros(1, 3, 8, 8),)\n")
    assert main(["find", str(file), "--real"]) == 0
    assert "Net: 2 long skips" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "neither a folder"),
        (["absent.py"], "no file"),
        (["no_such_module:Class"], "cannot be imported"),
        (["diffusers:google/ddpm-cifar10-32"], "cannot be imported"),
        (["diffusers:UNet2DModel", "--config", "{"], "not valid JSON"),
        (["diffusers:UNet2DModel", "--config", '{"wings": 2}'], "cannot be run with wings=2"),
        (["torch.nn:Identity", "--input", "x"], "takes a shape"),
        (["torch.nn:Identity", "--input", "1,3,8"], "no long skip"),
        (["."], "config.json"),
    ],
)
def test_mistakes_are_explained(arguments, says, capsys):
    assert main(["find", *arguments]) == 1
    assert says in capsys.readouterr().err
