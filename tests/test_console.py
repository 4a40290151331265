"""Tables, messages and progress: a bar of rich in a terminal, plain lines elsewhere."""

import io
import logging
import os
import pty
import subprocess
import sys

import pytest

from scalelong import console
from scalelong.console import Progress, listed, text_table

ROWS = [{"name": "cs", "value": 0.123456, "n": 3}, {"name": "longer", "value": 12.0, "n": 1200}]
PLAIN = """\
  name   value     n
--------------------
    cs  0.1235     3
longer      12  1200"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_in_a_sentence():
    assert [listed("abcd"[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert [listed("abcde"[:count], 3) for count in (3, 4, 5)] == [
        "a, b and c",
        "a, b, c and 1 other",
        "a, b, c and 2 others",
    ]


def test_a_plain_table():
    assert text_table(ROWS) == PLAIN
    assert text_table([]) == "(nothing)"


def test_alignment_and_rule():
    assert text_table(ROWS, left=True, rule=False).splitlines()[1] == "cs      0.1235  3"
    assert text_table(ROWS, left=["name"], rule=False).splitlines()[1] == "cs      0.1235     3"


def terminal_output(code: str, **environment: str) -> str:
    """What a program writes into a terminal of its own."""
    primary, secondary = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    known |= {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=secondary, stderr=secondary, env=known)
    os.close(secondary)
    parts = []
    while True:
        try:
            part = os.read(primary, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        parts.append(part)
    assert process.wait() == 0
    os.close(primary)
    return b"".join(parts).decode()


BAR = """
import logging
from scalelong import console
console.PATIENCE = 0
progress = console.Progress("reading images", 3)
with console.show_logs():
    for done in (1, 2, 3):
        progress(done)
        if done == 2: logging.getLogger("scalelong").info("halfway [1, 2]")
"""


def test_a_bar_in_a_terminal():
    pytest.importorskip("rich")
    drawn = terminal_output(BAR)
    assert "━" in drawn
    assert "3/3" in drawn
    assert "halfway [1, 2]" in drawn
    assert drawn.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_bar_where_none_is_wanted(environment):
    assert terminal_output(BAR, **environment) == "halfway [1, 2]\r\n"


def test_lines_now_and_then_in_a_pipe(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    progress = Progress("reading images", stream=out)
    for done in range(1, 41):
        now[0] += 1.0
        progress(done, 40)
    assert out.getvalue() == "reading images: 15 of 40  15 s\nreading images: 30 of 40  30 s\n"


def test_short_work_shows_nothing():
    out = Terminal()
    progress = Progress("reading", 2, stream=out)
    progress(1)
    progress(2)
    assert out.getvalue() == ""


def test_one_of_several_processes_speaks(monkeypatch, capsys):
    logger = logging.getLogger("scalelong.data")
    monkeypatch.setenv("RANK", "1")
    with console.show_logs():
        Progress("reading").show(1)
        logger.info("100 images")
    assert capsys.readouterr() == ("", "")


def test_a_quiet_command_shows_warnings_alone(capsys):
    logger = logging.getLogger("scalelong.data")
    with console.show_logs(quiet=True), console.show_logs():
        Progress("reading").show(1)
        logger.info("100 images")
        logger.warning("a damaged file")
    assert tuple(capsys.readouterr()) == ("", "a damaged file\n")


def test_log_lines_go_to_the_standard_error_and_the_handler_leaves(capsys):
    logger = logging.getLogger("scalelong.data")
    with console.show_logs(), console.show_logs():
        logger.info("100 images")
        logger.debug("not shown")
    logger.info("after")
    assert tuple(capsys.readouterr()) == ("", "100 images\n")
