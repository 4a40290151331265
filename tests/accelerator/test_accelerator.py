"""Everything that computes, on the stand-in accelerator of `standin.py`: placed there, and without waiting for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What each use counted. One process for all: the device stays registered until its end."""
    paths = os.pathsep.join(map(str, (ROOT / "src", HERE)))
    made = subprocess.run(
        [sys.executable, str(HERE / "uses.py"), str(tmp_path_factory.mktemp("accelerator"))],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


USES = (
    *("train 20", "train 40", "hooked 40", "monitored 40", "resume 40", "resume with dropout", "sample", "eval"),
    *("eval of averages", "diagnose", "tune", "attach", "own loop", "range 20", "without float64"),
)


@pytest.mark.parametrize("use", USES)
def test_nothing_is_multiplied_on_the_cpu(counted, use):
    assert counted[use]["on_cpu"] == 0
    assert counted[use]["to_device"] > 0


@pytest.mark.parametrize("use", ["train", "hooked", "range"])
def test_a_step_waits_for_nothing(counted, use):
    """Twenty steps more: their images and times are copied, and the device is read once in ten steps.

    docs/training.md has these numbers.
    """
    names = ("to_device", "to_cpu", "reads")
    more = {name: (counted[f"{use} 40"][name] - counted[f"{use} 20"][name]) / 20 for name in names}
    print(f"{use}, for each step: {more}")
    assert more["to_device"] <= 2
    assert more["to_cpu"] + more["reads"] <= 0.3


def test_a_resumed_run_has_the_same_bytes(counted):
    assert counted["same"]
    assert counted["same with dropout"], "the state of the device's generator is part of a checkpoint"
