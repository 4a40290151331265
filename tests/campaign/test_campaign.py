"""One trial of `python -m research.campaign`, and that it notices what does not hold."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from research.campaign import Outcome, mutate

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the campaign forks")
def test_a_command_that_was_killed_works_again(tmp_path):
    """In a process of its own: it forks, which must happen before there are threads."""
    record = tmp_path / "campaign.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [
        sys.executable,
        "-m",
        "research.campaign",
        "--trial",
        "kills:4",
        "--trial",
        "links:1",
        "--json",
        str(record),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert record.exists(), done.stderr
    found = json.loads(record.read_text())
    assert not found["failures"], done.stdout
    assert [row["tried"] for row in found["rows"]] == [1, 1]


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        (Outcome(0, ""), True),
        (Outcome(1, "scalelong sample: RunFolderError: no run here; train it first\n"), True),
        (Outcome(2, "usage: ..."), True),
        (Outcome(1, "scalelong sample: a bug in scalelong, please report it: KeyError"), False),
        (Outcome(1, "Traceback (most recent call last):\nKeyError"), False),
        (Outcome(1, "scalelong sample: RunFolderError: [Errno 5] Input/output error\n"), False),
        (Outcome(1, ""), False),
        (Outcome(-11, ""), False),
    ],
)
def test_what_does_not_hold_is_noticed(outcome, holds):
    assert (outcome.fault() is None) == holds


def test_a_mutation_changes_the_file(tmp_path):
    path = tmp_path / "file"
    for seed in range(20):
        path.write_bytes(b"content " * 10)
        mutate(path, random.Random(seed))
        assert path.read_bytes() != b"content " * 10
