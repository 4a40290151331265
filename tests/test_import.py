"""Importing the package is light, and its public names are real."""

import json
import subprocess
import sys

import scalelong

# Everything optional that is installed beside the package.
HEAVY = ["accelerate", "datasets", "diffusers", "matplotlib", "monai", "pandas", "PIL", "rich", "safetensors"]
HEAVY += ["scipy", "tensorboard", "transformers", "tyro", "yaml"]

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()  # of this process alone, so that a busy machine does not matter
import scalelong
for name in scalelong.__all__:
    getattr(scalelong, name)
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted({m.partition(".")[0] for m in set(sys.modules) - before})}))
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_needs_torch_alone_and_is_quick():
    runs = [json.loads(run(PROBE)) for _ in range(3)]
    assert not set(runs[0]["modules"]) & set(HEAVY)
    assert min(probe["seconds"] for probe in runs) < 0.3


def test_command_line_help_does_not_import_torch():
    code = "import sys; from scalelong.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    assert "usage: scalelong" in run(code)


def test_public_names_agree():
    homes = {name for names in scalelong._HOMES.values() for name in names}
    assert homes | {"__version__"} == set(scalelong.__all__)
    assert dir(scalelong) == scalelong.__all__
