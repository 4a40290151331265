"""Real processes, really killed. Slow to start, so few of them; the many crash points are in test_training.py.

What is not killed runs in this process.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong.cli import main
from scalelong.runs import read_metrics, saved_steps
from scalelong.training import train
from tests.training.two_processes import CONFIG

STEPS = 16
FLAGS = {
    "--recipe": "digits-tiny",
    "--model-options": "patch_size=4 dim=16 depth=2",
    "--batch-size": "8",
    "--steps": str(STEPS),
    "--save-every": "3",
    "--log-every": "1",
    "--samples-every": "0",
    "--held-out": "20",
    "--held-out-every": "8",
    "--trackers": "",
    "--precision": "fp32",
}


def launch(arguments, processes=1):
    launcher = [sys.executable, *(["-m"] if processes == 1 else [])]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(["src", environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*launcher, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def flags_of(folder, **changes):
    values = {**FLAGS, **changes}
    return ["train", *(part for name, given in values.items() for part in (name, *given.split())), "--out", str(folder)]


def start(folder, processes: Any = 1, **changes):
    return launch([*(["-m"] if processes > 1 else []), "scalelong", *flags_of(folder, **changes)], processes)


def finish_here(folder, **changes):
    """The same command in this process, with as many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(flags_of(folder, **changes)) == 0
    finally:
        torch.set_num_threads(threads)
    return folder


def wait_for_steps(process, count):
    """Read its lines until it has done so many steps. False if it ended first."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            count -= 1
            if count <= 0:
                return True
    return False


def wait_for_half_a_checkpoint(folder):
    """Until a checkpoint is being written."""
    end = time.monotonic() + 60
    while not list((folder / "checkpoints").glob(".step-*.part")):
        assert time.monotonic() < end


def kill_tree(process):
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.communicate()


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def assert_same_files(first, second):
    for name in ("model.safetensors", "ema.safetensors"):
        contents = [(folder / "checkpoints" / "latest" / name).read_bytes() for folder in (first, second)]
        assert contents[0] == contents[1]
    for folder in (first, second):
        assert saved_steps(folder / "checkpoints")[-1] == STEPS
        assert [line["step"] for line in read_metrics(folder) if "loss" in line] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finish_here(tmp_path_factory.mktemp("undisturbed") / "run")


def test_killed_between_two_checkpoints_and_while_one_is_written(undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start(run)
    assert wait_for_steps(process, 5)
    kill_tree(process)
    process = start(run)
    assert wait_for_steps(process, 1)
    wait_for_half_a_checkpoint(run)
    kill_tree(process)
    assert_same_files(undisturbed, finish_here(run))


def test_two_processes_killed_and_equal_to_one(undisturbed, tmp_path):
    """The script trains two runs, with whole and with sharded parameters (FSDP2), each straight and in two goes."""
    process = start(tmp_path / "killed", processes=2)
    assert wait_for_steps(process, 4)
    kill_tree(process)
    finish(start(tmp_path / "killed", processes=2))
    finish(launch(["tests/training/two_processes.py", str(tmp_path), *flags_of(tmp_path / "calm")[1:]], processes=2))
    assert_same_files(tmp_path / "calm", tmp_path / "killed")
    train(CONFIG, tmp_path / "unsharded", quiet=True)
    for alone, together in ((undisturbed, tmp_path / "calm"), (tmp_path / "unsharded", tmp_path / "straight")):
        one, two = (load_file(each / "checkpoints" / "latest" / "model.safetensors") for each in (alone, together))
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    for name in ("model.safetensors", "ema.safetensors"):
        files = [tmp_path / run / "checkpoints" / "latest" / name for run in ("straight", "twice")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert saved_steps(tmp_path / "twice" / "checkpoints") == [3, 6]


def test_an_error_of_two_processes_is_told_once_and_ends_with_code_one(tmp_path):
    output = finish(start(tmp_path / "run", processes=2, **{"--lr": "1e18"}), 1)
    assert output.count("NonFiniteError") == 1
    assert "exitcode  : 1 " in output
    assert "SIGABRT" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_exit_cleanly(undisturbed, tmp_path, number):
    process = start(tmp_path / "run")
    assert wait_for_steps(process, 3)
    process.send_signal(number)
    output = finish(process, 128 + number)
    assert f"stopped by {number.name} after step" in output
    stopped = saved_steps(tmp_path / "run" / "checkpoints")[-1]
    assert 3 <= stopped < STEPS
    assert_same_files(undisturbed, finish_here(tmp_path / "run"))


# Images that are read ahead


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for number in range(40):
        Image.new("L", (8, 8), 6 * number).save(folder / f"{number:02d}.png")
    return folder


def streamed(pictures):
    """Flags of a long run whose images are too many for the memory."""
    return {
        "--data": str(pictures),
        "--steps": "100000",
        "--workers": "2",
        "--held-out": "0",
        "--held-out-every": "50000",
        "--save-every": "50000",
        "--memory-limit": "0",
        "--image-cache": "none",
    }


def test_sigterm_to_all_processes_of_a_group_saves(pictures, tmp_path):
    process = start(tmp_path / "run", **streamed(pictures))
    assert wait_for_steps(process, 5)
    os.killpg(process.pid, signal.SIGTERM)
    output = finish(process, 128 + signal.SIGTERM)
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] >= 5
