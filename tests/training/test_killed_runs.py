"""Real processes, really killed. Slow to start, so few of them; the many crash points are in test_training.py."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from scalelong.runs import read_metrics, saved_steps

FLAGS = {
    "--recipe": "digits-tiny",
    "--model-options": "patch_size=4 dim=16 depth=2",
    "--batch-size": "8",
    "--steps": "40",
    "--save-every": "3",
    "--log-every": "1",
    "--samples-every": "0",
    "--held-out": "20",
    "--held-out-every": "20",
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
        [*launcher, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def start(folder, processes=1):
    flags = [part for name, values in FLAGS.items() for part in (name, *values.split())]
    module = ["scalelong"] if processes == 1 else ["-m", "scalelong"]
    return launch([*module, "train", *flags, "--out", str(folder)], processes)


def wait_for_steps(process, count):
    """Read its lines until it has done so many steps. False if it ended first."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            count -= 1
            if count <= 0:
                return True
    return False


def kill_tree(process):
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.communicate()


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def kill_often(folder, kills, processes, seed):
    """Kill after a random number of steps and a random moment more, then finish."""
    dice = random.Random(seed)
    for _ in range(kills):
        process = start(folder, processes)
        if wait_for_steps(process, dice.randint(1, 12)):
            time.sleep(dice.uniform(0, 0.05))
        kill_tree(process)
    finish(start(folder, processes))


def assert_same_files(first, second):
    for name in ("model.safetensors", "ema.safetensors"):
        contents = [(folder / "checkpoints" / "latest" / name).read_bytes() for folder in (first, second)]
        assert contents[0] == contents[1]
    for folder in (first, second):
        assert saved_steps(folder / "checkpoints")[-1] == 40
        assert [line["step"] for line in read_metrics(folder) if "loss" in line] == list(range(1, 41))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(folder))
    return folder


def test_killed_at_five_random_moments(undisturbed, tmp_path):
    kill_often(tmp_path / "run", kills=5, processes=1, seed=0)
    assert_same_files(undisturbed, tmp_path / "run")


def test_two_processes_killed_and_equal_to_one(undisturbed, tmp_path):
    finish(start(tmp_path / "calm", processes=2))
    kill_often(tmp_path / "killed", kills=2, processes=2, seed=1)
    assert_same_files(tmp_path / "calm", tmp_path / "killed")
    one, two = (
        load_file(folder / "checkpoints" / "latest" / "model.safetensors")
        for folder in (undisturbed, tmp_path / "calm")
    )
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_exit_cleanly(undisturbed, tmp_path, number):
    process = start(tmp_path / "run")
    assert wait_for_steps(process, 5)
    process.send_signal(number)
    output = finish(process, 128 + number)
    assert f"stopped by {number.name} after step" in output
    stopped = saved_steps(tmp_path / "run" / "checkpoints")[-1]
    assert 5 <= stopped < 40
    assert f"continuing after step {stopped}" in finish(start(tmp_path / "run"))
    assert_same_files(undisturbed, tmp_path / "run")


def test_sharded_parameters_train_and_resume(tmp_path):
    finish(launch(["tests/training/sharded_run.py", str(tmp_path)], processes=2))
    for name in ("model.safetensors", "ema.safetensors"):
        files = [tmp_path / run / "checkpoints" / "latest" / name for run in ("straight", "twice")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert saved_steps(tmp_path / "twice" / "checkpoints") == [3, 6]


# Data workers


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for number in range(40):
        Image.new("L", (8, 8), 6 * number).save(folder / f"{number:02d}.png")
    return folder


def start_streamed(pictures, folder, steps="100000"):
    flags = {**FLAGS, "--data": str(pictures), "--steps": steps, "--workers": "2", "--held-out": "0"}
    flags |= {"--held-out-every": "50000", "--save-every": "50000"}
    flags |= {"--memory-limit": "0", "--image-cache": "none"}  # too large for the memory
    given = [part for name, values in flags.items() for part in (name, *values.split())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(["src", environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "scalelong", "train", *given, "--out", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def test_sigterm_to_all_processes_of_a_group_saves(pictures, tmp_path):
    process = start_streamed(pictures, tmp_path / "run")
    assert wait_for_steps(process, 5)
    os.killpg(process.pid, signal.SIGTERM)
    output = finish(process, 128 + signal.SIGTERM)
    assert "stopped by SIGTERM after step" in output
    assert "Traceback" not in output
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] >= 5


def test_a_killed_data_worker_is_named_and_nothing_is_lost(pictures, tmp_path):
    process = start_streamed(pictures, tmp_path / "run")
    assert wait_for_steps(process, 5)
    psutil.Process(process.pid).children()[0].kill()
    output = finish(process, 1)
    assert "DataWorkerError: a process that reads images ended by SIGKILL" in output
    assert "--workers" in output
    assert "Traceback" not in output
    stopped = saved_steps(tmp_path / "run" / "checkpoints")[-1]
    assert stopped >= 5
    again = finish(start_streamed(pictures, tmp_path / "run", steps=str(stopped + 2)))
    assert f"continuing after step {stopped}" in again
