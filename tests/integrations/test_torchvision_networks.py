"""segmentation_models.pytorch and lucidrains' Trainer, with a stand-in where torchvision does not import."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import json, sys
sys.path[:0] = sys.argv[2:4]
try:
    import torchvision
except Exception:  # of another build than torch, or absent
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    import torchvision_stub
    torchvision_stub.install()
import warnings
warnings.simplefilter("ignore")
import torchvision_networks as example
print("RESULT", json.dumps(getattr(example, sys.argv[4])(example.Path(sys.argv[1]))))
"""


def run(function: str, folder: Path, *needed: str) -> dict[str, float]:
    for package in needed:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install --no-deps, see docs/integrations/segmentation_models.md")
    places = [str(ROOT / "tests" / "integrations"), str(ROOT / "examples" / "integrations")]
    command = [sys.executable, "-c", CODE, str(folder), *places, function]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_segmentation_models_pytorch(tmp_path):
    found = run("segmentation", tmp_path, "segmentation_models_pytorch", "timm")
    assert found["smp: long skips"] == 4
    assert found["smp: scaling changes the output by"] > 1e-4
    assert found["smp: read back, difference"] == 0
    assert found["smp: folded"] == 4
    assert found["smp: folded, difference"] < 1e-6


def test_lucidrains_trainer(tmp_path):
    found = run("diffusion", tmp_path, "denoising_diffusion_pytorch", "ema_pytorch")
    assert found["lucidrains: long skips"] > 2
    assert found["lucidrains: readings"] == 3
    assert found["lucidrains: read back, difference"] == 0
    assert found["lucidrains: average is scaled"] == 1
