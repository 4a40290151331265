"""One process per run folder, and signals that wait for the end of a step."""

import os
import signal
import subprocess
import sys
import time

import pytest

from scalelong.errors import RunLockedError
from scalelong.files import locked
from scalelong.training import Interrupt, interrupt as interrupt_module

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
        (tmp_path / ".lock").unlink()
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on "), locked(tmp_path, wait=False):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path, wait=False):
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
def test_signals_become_a_wish_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.requested is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # launchers repeat it
        time.sleep(0.01)
        assert interrupt.requested == number.name
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_after_a_while_stops_at_once(monkeypatch):
    monkeypatch.setattr(interrupt_module, "IMPATIENT_AFTER", -1.0)

    def press_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with Interrupt(), pytest.raises(KeyboardInterrupt):
        press_twice()
