"""What a run needs on many accelerators, against counts by hand."""

import re

import pytest

from research.needs import main
from scalelong.config import recipe
from scalelong.runs import DataShape, build_model
from scalelong.training.dry_run import memory_needed


def test_what_a_run_needs_on_accelerators_is_counted(capsys):
    """44,255,238 parameters; a linear layer of n weights does 6 n operations for each token, forward and backward."""
    command = ["--recipe", "cifar10-uvit-s2", "--for", "4", "--device-memory", "40"]
    assert main(command) == 0
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["accelerators"] == "4, 32 images of a batch of 128 each, 32 at once"
    assert rows["network"].startswith("44.3M parameters, ")
    operations = float(rows["network"].split("parameters, ")[1].split()[0])
    assert 6 * 44.3e6 * 257 <= operations * 1e9 <= 1.3 * 6 * 44.3e6 * 257
    assert rows["state"] == "weights 177.0 MB, gradients 177.0 MB, optimiser and average 531.1 MB"
    assert "fits into 40 GB" in rows["data parallel"]
    assert "265.5 MB data parallel" in rows["exchanged"], "2 · 3/4 of the gradients"
    assert "398.3 MB with FSDP2" in rows["exchanged"], "3 · 3/4 of the weights"
    # What an image keeps on the meta device is what it keeps on the CPU.
    config = recipe("cifar10-uvit-s2")
    shape = DataShape(3, 32, 32)
    _, kept = memory_needed(config, build_model(config, shape), shape)
    shown = float(re.search(r"keeps ([\d.]+) MB", rows["network"])[1])  # type: ignore[index]
    assert shown * 1e6 == pytest.approx(kept, rel=0.1)
    assert main([*command[:-1], "0.5", "--optimizer", "muon"]) == 0
    out = capsys.readouterr().out
    assert "does NOT fit into 0.5 GB" in out
    assert "only with the optimiser adamw" in out
