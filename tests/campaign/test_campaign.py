"""A seeded part of `python -m research.campaign`: kills, faults of the disk, hostile inputs, words and variables."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

for package in ("accelerate", "datasets", "diffusers", "matplotlib", "tyro"):
    pytest.importorskip(package)
if not hasattr(os, "fork"):
    pytest.skip("the campaign forks", allow_module_level=True)


SAMPLE = {
    "61/words": range(15),
    "61/inputs": (*range(8), *range(11, 17)),
    "62/kills": (0, 3, 4, 5),
    "62/faults": (0, 2, 3, 4),
    "62/environment": (1, 2),
}
"""By seed and kind, the numbers of cheap trials."""


def test_what_is_tried_holds(tmp_path):
    """In a process of its own: it forks, which must happen before there are threads."""
    record = tmp_path / "campaign.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    trials = [f"--trial={kind}:{number}" for kind, numbers in SAMPLE.items() for number in numbers]
    command = [sys.executable, "-m", "research.campaign", *trials, "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert record.exists(), done.stderr
    found = json.loads(record.read_text())
    assert not found["failures"], done.stdout
    assert sum(row["tried"] for row in found["rows"] if row["what"] == "all") == len(trials)
    assert {row["kind"] for row in found["rows"]} == {"kills", "faults", "inputs", "words", "environment"}


def test_every_defect_has_its_test():
    page = (ROOT / "docs" / "evidence" / "reliability" / "README.md").read_text()
    rows = [
        line
        for line in page.partition("## Every defect")[2].partition("\n## ")[0].splitlines()
        if line.startswith("|") and "::" in line
    ]
    numbers = {int(found[1]) for row in rows if (found := re.match(r"\| (\d+)\. ", row))}
    assert numbers == set(range(1, 35))
    for row in rows:
        file = ""
        named = re.findall(r"`([\w/]*(?:\.py)?)::(\w+)`", row)
        assert named, row
        for path, name in named:
            file = path or file
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"tests/{file}::{name}"


def test_the_table_of_the_page_is_that_of_its_files():
    folder = ROOT / "docs" / "evidence" / "reliability"
    counts: dict[str, list[int]] = {}
    for path in sorted((folder / "third").glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["what"] == "all":
                for kind in (row["kind"], "all"):
                    tried, held = counts.get(kind, [0, 0])
                    counts[kind] = [tried + row["tried"], held + row["held"]]
    page = (folder / "README.md").read_text()
    for kind, (tried, held) in counts.items():
        assert re.search(rf"^\| {kind} \|.*\| {tried:,} \| {held:,} \|$", page, re.MULTILINE), (kind, tried, held)
    assert counts["all"][0] >= 3000


def test_the_campaign_notices_what_does_not_hold():
    from research.campaign.forks import Outcome
    from research.campaign.world import lost

    assert Outcome(0, "", "").fault() is None
    assert Outcome(1, "", "scalelong sample: RunFolderError: no run here; train it first\n").fault() is None
    assert Outcome(2, "", "usage: ...").fault() is None
    assert Outcome(2, "", "").fault()
    assert Outcome(1, "", "scalelong sample: a bug in scalelong, please report it: KeyError").fault()
    assert Outcome(1, "", "Traceback (most recent call last):\nKeyError").fault()
    assert Outcome(1, "", "").fault()
    assert Outcome(-11, "", "").fault()
    assert Outcome(-9, "", "", hung="nothing for 40 s").fault()
    assert Outcome(0, "", "", memory=10**10).fault()
    before = {"data/a.png": "1", "run/metrics.jsonl": "2", "data/b.png": "3"}
    assert lost(before, {"data/a.png": "1", "run/metrics.jsonl": "x"}) == ["data/b.png"]
    assert lost(before, {**before, "data/a.png": "x"}) == ["data/a.png"]


@pytest.mark.parametrize(
    ("message", "holds"),
    [
        ("RunFolderError: run/data.json is damaged; restore it from a copy", True),
        ("CannotReadError: x.yaml is not valid YAML (line 3): correct it", True),
        ("InvalidConfigError: --rates must be numbers, got 'x'", True),
        ("InvalidConfigError: net.py cannot be run, its code raises TypeError: 'NoneType' object: correct it", True),
        ("RunFolderError: run/data.json is damaged", False),
        ("RunFolderError: run/run.json cannot be read: [Errno 5] Input/output error; restore it", False),
        ("RunFolderError: 'NoneType' object is not subscriptable; choose another folder", False),
        ("CannotReadError: x.npz: invalid literal for int() with base 10; write it anew", False),
        ("ScaleLongError: choose another folder", False),
    ],
)
def test_an_error_must_say_what_to_do_in_its_own_words(message, holds):
    from research.campaign.forks import Outcome

    assert (Outcome(1, "", f"scalelong sample: {message}\n").fault() is None) == holds
