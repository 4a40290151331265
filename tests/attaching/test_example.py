import runpy
from pathlib import Path

import pytest


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "scale_diffusers_unet.py"))
    assert "UNet2DModel: 4 long skips" in capsys.readouterr().out
    assert (tmp_path / "scaling.safetensors").is_file()
