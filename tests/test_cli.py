"""The command line: names, help that answers at once, exit codes, errors as one line."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from scalelong import cli
from scalelong.cli import COMMANDS, main
from scalelong.commands.options import names_in


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_version(capsys):
    import scalelong

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"scalelong {scalelong.__version__}\n"


def test_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


# Commands whose help still imports torch; the list may only shrink.
SLOW_HELP = {"reproduce"}

HELP = """
import contextlib, io, json, sys
from scalelong.cli import COMMANDS, main
slow, silent = [], []
for command in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([command, "--help"])
    if f"scalelong {command}" not in out.getvalue():
        silent.append(command)
    if "torch" in sys.modules:
        slow.append(command)
        break
print(json.dumps([slow, silent]))
"""


def helped(commands: list[str]) -> tuple[list[str], list[str]]:
    run = [sys.executable, "-c", HELP, json.dumps(commands)]
    return json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_help_of_every_command_answers_without_torch():
    """All in one process: the first one that imports torch ends it and is named."""
    assert helped([command for command in COMMANDS if command not in SLOW_HELP]) == [[], []]


@pytest.mark.parametrize("command", sorted(SLOW_HELP))
def test_the_exceptions_are_still_needed(command):
    slow, silent = helped([command])
    assert slow == [command], f"{command} --help is quick now: remove it from SLOW_HELP"
    assert not silent


def test_names_in_help_are_the_real_ones():
    from scalelong.diffusion import SAMPLERS
    from scalelong.noise import Schedule
    from scalelong.training import RECIPES

    assert names_in("runs.recipes", "RECIPES") == list(RECIPES)
    assert names_in("diffusion.solvers", "SAMPLERS") == list(SAMPLERS)
    assert names_in("noise", "Schedule") == list(Schedule.__args__)
    with pytest.raises(LookupError):
        names_in("noise", "NOTHING")


def flags(text: str) -> set[str]:
    return {flag for flag in re.findall(r"--[a-z][a-z0-9-]*", text) if not flag.startswith("--no-")}


def test_the_quick_help_of_train_has_all_flags(capsys):
    for arguments in (["--help"], ["--recipe", "digits-tiny", "--help"]):
        with pytest.raises(SystemExit):
            main(["train", *arguments])
    # The second one is tyro's, of the configuration itself; it folds long lines inside of boxes.
    quick, whole = capsys.readouterr().out.split("usage: scalelong train")[1:]
    mentioned = {"--debug"}
    assert flags(quick) - mentioned == flags(whole) - {"--help"} - mentioned
    assert "(default: 0.0002)" in quick


def test_train_without_the_extra_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "--recipe", "digits-tiny"]) == 1
    assert "pip install 'scalelong[train]'" in capsys.readouterr().err
    monkeypatch.setattr("scalelong.commands.train.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "pip install 'scalelong[train]'" in capsys.readouterr().out


# Errors and exit codes


class Fake:
    """A command that does what a test says."""

    def __init__(self, work):
        self.work = work

    def parser(self):
        import argparse

        return argparse.ArgumentParser(prog="scalelong models")

    def run(self, options):
        return self.work()


def command_that(work, monkeypatch):
    monkeypatch.setattr(cli, "_module", lambda _: Fake(work))


def test_an_unforeseen_error_is_one_line_and_a_file(monkeypatch, capsys):
    def fail():
        raise RuntimeError("two\nlines")

    command_that(fail, monkeypatch)
    assert main(["models"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("scalelong models: unexpected RuntimeError: two lines (traceback: ")
    assert said.count("\n") == 1
    file = re.search(r"traceback: (.*?);", said)
    assert file is not None
    with open(file[1], encoding="utf-8") as written:
        assert "Traceback (most recent call last)" in written.read()
    os.unlink(file[1])
    with pytest.raises(RuntimeError, match="two"):
        main(["models", "--debug"])


def test_an_error_of_ours_is_one_line(monkeypatch, capsys):
    from scalelong import InvalidConfigError

    def fail():
        raise InvalidConfigError("say --that")

    command_that(fail, monkeypatch)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == "scalelong models: InvalidConfigError: say --that\n"
    assert main(["--debug", "models"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c(monkeypatch, capsys):
    def fail():
        raise KeyboardInterrupt

    command_that(fail, monkeypatch)
    assert main(["models"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_sigterm_ends_in_order_with_143(monkeypatch):
    def fail():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    command_that(fail, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted_training_says_which_signal(name, code, monkeypatch):
    from scalelong.training.loop import Interrupt

    def interrupted_work():
        with Interrupt() as interrupt:
            os.kill(os.getpid(), getattr(signal, name))
            assert interrupt.requested == name
        return 130

    command_that(interrupted_work, monkeypatch)
    assert main(["models"]) == code


def test_a_closed_pipe_is_no_traceback():
    code = textwrap.dedent("""
        import argparse, sys
        from scalelong import cli
        class Fake:
            def parser(self): return argparse.ArgumentParser()
            def run(self, options):
                for _ in range(100_000): print("a line that nobody reads")
        cli._module = lambda _: Fake()
        sys.exit(cli.main(["models"]))
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_models_lists_sizes(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "cifar10-s2" in printed
    assert "260M" in printed
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["preset"] == "cifar10-s2"
    assert abs(listed[0]["difference"]) < 0.02
