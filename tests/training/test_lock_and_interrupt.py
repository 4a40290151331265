"""One process per run folder, and signals that wait for the end of a step."""

import os
import signal
import subprocess
import sys
import time

import pytest

from scalelong.errors import RunLockedError
from scalelong.files import FolderLock
from scalelong.training import loop as interrupt_module
from scalelong.training.loop import Interrupt

HOLD = """
import sys, time, pathlib
sys.path.insert(0, "src")
from scalelong.files import FolderLock
with FolderLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_twice_in_one_process(tmp_path):
    with FolderLock(tmp_path), pytest.raises(RunLockedError, match="in use by this process"), FolderLock(tmp_path):
        pass
    with FolderLock(tmp_path):
        pass


def test_another_process_is_refused_until_it_dies(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on .* --out"), FolderLock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
