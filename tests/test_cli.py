"""The command line: names, help that answers at once, exit codes, errors as one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from scalelong import cli
from scalelong.cli import COMMANDS, main
from scalelong.commands import CHECKOUT, command_module
from scalelong.commands.options import names_in
from scalelong.errors import InvalidConfigError


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
    assert helped(list(COMMANDS)) == [[], []]


def test_names_in_help_are_the_real_ones():
    from research.reproduce.command import ITEM_NAMES, SCALE_NAMES
    from research.reproduce.items import ITEMS
    from research.reproduce.settings import SCALES
    from scalelong.diffusion import SAMPLERS
    from scalelong.noise import Schedule
    from scalelong.training import RECIPES

    assert list(ITEM_NAMES) == list(ITEMS)
    assert SCALE_NAMES == SCALES
    assert names_in("runs.recipes", "RECIPES") == list(RECIPES)
    assert names_in("diffusion.solvers", "SAMPLERS") == list(SAMPLERS)
    assert names_in("noise", "Schedule") == list(Schedule.__args__)
    with pytest.raises(LookupError):
        names_in("noise", "NOTHING")


OF_RESULTS = ["theory", "kappa", "find", "range", "diagnose", "eval", "stats", "models"]


@pytest.mark.parametrize("command", OF_RESULTS)
def test_json_is_spelled_alike(command):
    made = command_module(command).parser()
    assert "--json" in made.format_help()
    needed = {"find": ["net.py"], "eval": ["run"], "stats": ["data"]}.get(command, [])
    assert made.parse_args([*needed, "--json"]).json


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(CHECKOUT) - {"completion"}))
def test_quiet_is_known_everywhere(command):
    assert "--quiet" in command_module(command).parser().format_help()


def test_models_as_json_and_as_a_file(tmp_path, capsys):
    assert main(["models", "--json", "--out", str(tmp_path / "models.json")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "models.json").read_text())


COMPLETION = """
import contextlib, io, json, sys
from scalelong.cli import main
made = {}
for shell in ("bash", "zsh", "fish"):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", shell]) == 0
    made[shell] = out.getvalue()
assert "torch" not in sys.modules
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def completions() -> dict[str, str]:
    run = [sys.executable, "-c", COMPLETION]
    return json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_completion_knows_commands_flags_and_choices(completions):
    for script in completions.values():
        assert all(re.search(rf"\b{name}\b", script) for name in COMMANDS)
        assert "safetensors" in script  # export --format
        assert "digits-tiny" in script  # train --recipe
    assert "--held-out" in completions["zsh"]
    assert "-l held-out" in completions["fish"]
    assert "'--out=[" in completions["zsh"]


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        (["ev"], {"eval"}, {"train"}),
        (["train", "--rec"], {"--recipe"}, {"--out"}),
        (["train", "--recipe", "digits"], {"digits-tiny"}, {"fashion-tiny"}),
        (["export", "--format", ""], {"safetensors", "diffusers"}, {"--out"}),
        (["completion", ""], {"bash", "zsh", "fish"}, {"--help"}),
        (["reproduce", "table"], {"table4"}, {"fig1"}),
        (["find", "my_"], set(), {"--out", "find"}),  # left to the names of files
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(completions, typed, offered, not_offered):
    assert subprocess.run(["bash", "-n"], input=completions["bash"], text=True).returncode == 0
    words = " ".join(f"'{word}'" for word in ["scalelong", *typed])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _scalelong; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = completions["bash"] + ask
    answer = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True).stdout.split()
    assert offered <= set(answer)
    assert not set(answer) & not_offered


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("ev", {"eval"}, {"train"}),
        ("train --rec", {"--recipe"}, {"--out"}),
        ("train --recipe digits", {"digits-tiny"}, {"fashion-tiny"}),
        ("train --recipe=digits", {"--recipe=digits-tiny"}, {"--recipe=fashion-tiny"}),
        ("completion ", {"bash", "zsh", "fish"}, {"train"}),
    ],
)
@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(completions, typed, offered, not_offered, tmp_path):
    (tmp_path / "scalelong.fish").write_text(completions["fish"])
    script = f"source {tmp_path}/scalelong.fish; complete -C 'scalelong {typed}'"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    run = subprocess.run(["fish", "-c", script], text=True, capture_output=True, check=True, env=environment)
    assert not run.stderr
    answer = {line.split("\t")[0] for line in run.stdout.splitlines()}
    assert offered <= answer
    assert not answer & not_offered


ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
typeset text
zpty -w shell "TERM=dumb; autoload -U compinit; compinit -u -D; source $1; LISTMAX=1000; PS1=REA''DY"
zpty -r shell text '*READY*'  # the prompt: from now on it reads keys
zpty -w -n shell "scalelong $2"$'\t\t'
zpty -w -n shell $'\C-u'
zpty -w shell "print DO''NE"
zpty -r shell text '*DONE*'
print -r -- "$text"
zpty -d shell
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["eval", "train", "completion"]),
        ("train --rec", ["--recipe"]),
        ("train --recipe digits", ["digits-tiny", "digits-class-tiny"]),
        ("completion ", ["bash", "fish", "zsh"]),
    ],
)
@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(completions, typed, offered, tmp_path):
    file = tmp_path / "scalelong.zsh"
    file.write_text(completions["zsh"])
    run = subprocess.run(
        ["zsh", "-f", "-c", ZSH, "zsh", str(file), typed], text=True, capture_output=True, timeout=120, check=True
    )
    assert all(word in run.stdout for word in offered), run.stdout
    assert "not found" not in run.stdout


def flags(text: str) -> set[str]:
    return {flag for flag in re.findall(r"--[a-z][a-z0-9-]*", text) if not flag.startswith("--no-")}


def test_the_quick_help_of_train_has_all_flags(capsys):
    for arguments in (["--help"], ["--recipe", "digits-tiny", "--help"]):
        with pytest.raises(SystemExit):
            main(["train", *arguments])
    # The second one is tyro's, of the configuration itself; it folds long lines inside boxes.
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
    assert said.startswith(
        "scalelong models: a bug in scalelong, please report it: RuntimeError: two lines (traceback: "
    )
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(28, "No space left on device", "/some/where"),
            "FileAccessError: /some/where cannot be used: no",
        ),
        (OSError(24, "Too many open files"), "FileAccessError: a file or the output cannot be used: too many"),
        (MemoryError(), "NotEnoughMemoryError: the memory of the machine does not suffice"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "NotEnoughMemoryError"),
        (KeyError("x"), "a bug in scalelong, please report it: KeyError: 'x' (traceback: "),
    ],
)
def test_what_the_machine_refuses_has_a_name_and_a_bug_is_called_one(error, said, monkeypatch, capsys, tmp_path):
    def fail():
        raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command_that(fail, monkeypatch)
    assert main(["models"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"scalelong models: {said}")
    assert printed.count("\n") == 1


def test_a_message_of_many_lines_becomes_one(monkeypatch, capsys):
    from scalelong import InvalidConfigError

    def fail():
        raise InvalidConfigError("three\n  lines\nlong" + "x" * 100_000)

    command_that(fail, monkeypatch)
    assert main(["models"]) == 1
    printed = capsys.readouterr().err
    assert "three lines long" in printed
    assert printed.count("\n") == 1
    assert len(printed) < 5000


def test_the_environment_asks_for_tracebacks_too(monkeypatch):
    def fail():
        raise KeyError("x")

    command_that(fail, monkeypatch)
    monkeypatch.setenv("SCALELONG_DEBUG", "1")
    with pytest.raises(KeyError):
        main(["models"])


def test_an_argument_with_a_zero_byte(capsys):
    assert main(["report", "run", "--out", "a\0b"]) == 1
    assert "InvalidConfigError: an argument holds a zero byte" in capsys.readouterr().err


def test_a_mistyped_command_is_answered_with_the_nearest(capsys):
    assert main(["repport"]) == 2
    assert "did you mean report?" in capsys.readouterr().err


PRINTS = """
import argparse, sys
from scalelong import cli
from scalelong.console import show_table
class Fake:
    def parser(self): return argparse.ArgumentParser()
    def run(self, options): print("Fréchet κ × \\udcff"); show_table([])
cli._module = lambda _: Fake()
sys.exit(cli.main(["models"]))
"""


def test_a_terminal_that_knows_ascii_only():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "Frechet kappa x \\udcff\n(nothing)\n"


def test_output_to_a_full_disk_or_to_nowhere():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.match("scalelong models: .*output cannot be (written|used): no space is left", done.stderr)
    assert done.stderr.count("\n") == 1
    closed = f"import os; os.close(1); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {PRINTS!r}])"
    done = subprocess.run([sys.executable, "-c", closed], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
    from scalelong.training import Interrupt

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


@pytest.mark.parametrize("alone", [True, False])
def test_a_process_that_lost_the_others_says_so(alone, monkeypatch, capsys):
    def lost(_: list[str]) -> int:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:7559. Check the logs of the worker")

    monkeypatch.setenv("WORLD_SIZE", "1" if alone else "2")
    monkeypatch.setattr(cli, "_answer", lost)
    assert cli.main(["models"]) == 1
    said = capsys.readouterr().err
    assert ("a bug in scalelong" in said) == alone
    assert ("RunFailedError: another process of this command has ended" in said) == (not alone)


def test_a_process_that_got_half_a_message_from_another_says_so(monkeypatch, capsys):
    """broadcast_object_list unpickles whatever has arrived when the other process ends."""
    import torch.distributed

    def lost(_: list[str]) -> int:
        sizes = torch.distributed.distributed_c10d._tensor_to_object
        sizes(torch.zeros(3, dtype=torch.uint8), 3, None)
        return 0

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "_answer", lost)
    assert cli.main(["models"]) == 1
    assert "RunFailedError: another process of this command has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "2.5"), ("LOCAL_RANK", ""), ("RANK", "9" * 30)]
)
def test_what_a_launcher_says_must_make_sense(name, value, monkeypatch):
    from scalelong.runs.processes import check_launcher

    for other in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(other, "1" if other != "WORLD_SIZE" else "2")
    check_launcher()
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfigError, match=f"{name} must be a whole number"):
        check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK")
    with pytest.raises(InvalidConfigError, match="WORLD_SIZE is 2 and RANK is not set: start all"):
        check_launcher()
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InvalidConfigError, match="torchrun"):
        check_launcher()
