"""One process per run folder, and signals that wait for the end of a step."""

import os
import signal
import subprocess
import sys
import time

import pytest

from scalelong.errors import RunLockedError
from scalelong.files import locked
from scalelong.runs import saved_steps
from scalelong.training import Interrupt, hardware as interrupt_module, train

HOLD = """
import sys, time, pathlib
sys.path.insert(0, "src")
from scalelong.files import locked
with locked(pathlib.Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_twice_in_one_process(tmp_path):
    with (
        locked(tmp_path, wait=False),
        pytest.raises(RunLockedError, match="in use by this process"),
        locked(tmp_path, wait=False),
    ):
        pass
    with locked(tmp_path, wait=False):
        pass


def test_another_process_is_refused_until_it_dies(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on "), locked(tmp_path, wait=False):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path, wait=False):
        pass


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc here")
def test_a_holder_whose_lock_file_was_deleted_is_noticed(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / ".lock").unlink()
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on .*deleted"), locked(tmp_path, wait=False):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path, wait=False):  # a process that is gone holds nothing
        pass


FORK = """
import os, pathlib, sys, time
from scalelong.files import locked
with locked(pathlib.Path(sys.argv[1]), wait=False):
    if os.fork() == 0:
        time.sleep(60)
    print("forked", flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"forked\n"
        assert holder.wait() == 0
        with locked(tmp_path, wait=False):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_every_signal_saves_and_ends_a_run(number, tiny, tmp_path):
    def send(state):
        if state.step == 2:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # launchers repeat it

    before = signal.getsignal(number)
    result = train(tiny, tmp_path / "run", hooks=[send], quiet=True)
    assert not result.finished
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == result.step == 2
    assert Interrupt.latest == number.name
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_after_a_while_stops_at_once(monkeypatch):
    monkeypatch.setattr(interrupt_module, "IMPATIENT_AFTER", -1.0)

    def press_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with Interrupt(), pytest.raises(KeyboardInterrupt):
        press_twice()
