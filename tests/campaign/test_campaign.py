"""A seeded part of `python -m research.campaign`: kills, faults of the disk, hostile inputs and command lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

for package in ("accelerate", "datasets", "diffusers", "matplotlib", "tyro"):
    pytest.importorskip(package)
if not hasattr(os, "fork"):
    pytest.skip("the campaign forks", allow_module_level=True)


def test_what_is_tried_holds(tmp_path):
    """In a process of its own: it forks, which must happen before there are threads."""
    record = tmp_path / "campaign.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "research.campaign", "--trials", "32", "--seed", "2", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert record.exists(), done.stderr
    found = json.loads(record.read_text())
    assert not found["failures"], done.stdout
    assert sum(row["tried"] for row in found["rows"] if row["what"] == "all") == 32
    assert {row["kind"] for row in found["rows"]} == {"kills", "faults", "inputs", "words"}


def test_the_campaign_notices_what_does_not_hold():
    from research.campaign import Outcome, lost

    assert Outcome(0, "", "").fault() is None
    assert Outcome(1, "", "scalelong sample: RunFolderError: no run; do this\n").fault() is None
    assert Outcome(2, "", "usage: ...").fault() is None
    assert Outcome(1, "", "scalelong sample: a bug in scalelong, please report it: KeyError").fault()
    assert Outcome(1, "", "Traceback (most recent call last):\nKeyError").fault()
    assert Outcome(1, "", "").fault()
    assert Outcome(-11, "", "").fault()
    assert Outcome(-9, "", "", hung=True).fault()
    before = {"data/a.png": "1", "run/metrics.jsonl": "2", "data/b.png": "3"}
    assert lost(before, {"data/a.png": "1", "run/metrics.jsonl": "x"}) == ["data/b.png"]
    assert lost(before, {**before, "data/a.png": "x"}) == ["data/a.png"]
