"""What the stand-in cannot show, on a real GPU: bytes of a resumed run, pinned memory, bf16 and TF32."""

from dataclasses import replace

import pytest
import torch

from scalelong.cli import main
from scalelong.config import HardwareConfig
from scalelong.data import batches, load_data
from scalelong.runs import load_run
from scalelong.training import train
from tests.training import test_killed_runs as killed_runs
from tests.training.conftest import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")


@pytest.mark.parametrize(
    "hardware", [HardwareConfig(precision="fp32", tf32=True), HardwareConfig(precision="bf16")], ids=["tf32", "bf16"]
)
def test_a_resumed_run_has_the_same_bytes_and_is_used(hardware, tmp_path):
    config = replace(TINY, hardware=hardware, scaling="ls")
    train(config, tmp_path / "whole", quiet=True)
    train(replace(config, steps=6), tmp_path / "parts", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    files = [tmp_path / name / "checkpoints" / "latest" / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    run = load_run(tmp_path / "whole")
    here, there = (run.sample(4, steps=4, device=device).float() for device in ("cpu", "cuda"))
    assert (here - there).abs().mean() < 4, "a seed is the same image on every device"
    for command in (["eval", "-n", "32", "--steps", "2", "--features", "random"], ["diagnose"]):
        assert main([command[0], str(tmp_path / "whole"), *command[1:]]) == 0


def test_batches_are_pinned():
    (batch,) = batches(load_data("digits", limit=8), [torch.arange(4)], pin=True)
    assert batch.images.is_pinned()
    assert batch.labels is not None
    assert batch.labels.is_pinned()


def test_a_step_allocates_nothing_that_stays(tmp_path):
    """After some steps the memory of the device no longer grows."""
    used: list[int] = []
    train(replace(TINY, steps=40), tmp_path / "run", hooks=[lambda _: used.append(torch.cuda.memory_allocated())])
    assert used[-1] <= used[10] * 1.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_shards_on_two_gpus_are_those_of_accelerate(tmp_path):
    """The script that shows it on the CPU; each process takes a GPU of its own."""
    flags = killed_runs.flags_of(tmp_path / "calm")[1:]
    killed_runs.finish(killed_runs.launch(["tests/training/two_processes.py", str(tmp_path), *flags], processes=2))
    files = [tmp_path / name / "checkpoints" / "latest" / "ema.safetensors" for name in ("straight", "twice")]
    assert files[0].read_bytes() == files[1].read_bytes()
