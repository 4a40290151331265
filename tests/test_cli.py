"""The command line: names, help that answers at once, exit codes, errors as one line."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalelong import cli
from scalelong.cli import ALL, COMMANDS, LAB, find_command, main
from scalelong.cli.parser import Parser
from scalelong.config import TrainConfig
from scalelong.errors import InvalidConfigError

OURS = [name for name in ALL if name not in ("lab reproduce", "lab bench")]


def help_of(command: str, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), flag])
    assert not ended.value.code
    return capsys.readouterr().out


def test_help_lists_the_commands_in_their_order(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    found = re.findall(r"^  ([a-z]+)  +\S", printed, re.MULTILINE)
    assert found == [
        *("demo", "train", "sample", "eval", "report", "export", "models"),
        *("find", "diagnose", "range", "compare"),
        "lab",
    ]
    assert main(["lab"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in LAB)
    assert printed.count("needs a clone") == 2


def test_version(capsys):
    import scalelong

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"scalelong {scalelong.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["theory"], "unknown command 'theory'; did you mean lab theory?"),
        (["lab", "thoery"], "unknown command 'lab thoery'; did you mean lab theory?"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_misspelt_flag_is_answered_with_the_nearest(capsys):
    for arguments, near in ((["train", "photos", "--bugdet=4m"], "--budget"), (["range", "--stpes", "3"], "--steps")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert f"did you mean {near}?" in capsys.readouterr().err


HELP = """
import contextlib, io, json, sys
from scalelong.cli import main
for command in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    assert f"usage: scalelong {command}" in out.getvalue(), command
    assert "torch" not in sys.modules, command
"""


def test_help_of_every_command_answers_without_torch():
    subprocess.run([sys.executable, "-c", HELP, json.dumps(["", *ALL])], check=True)


EVERYWHERE = {
    "--quiet": OURS,
    "--json": ["find", "range", "diagnose", "eval", "models", "lab theory", "lab probe", "lab tune", "lab coords"],
    "--device": ["train", "sample", "eval", "diagnose", "range", "demo", "compare", "lab probe", "lab tune"],
    "--out, --output-dir": ["train", "sample", "export", "diagnose", "range", "demo", "compare", "lab tune"],
    "--steps, --max-train-steps": ["train", "range", "compare"],
    "--steps, --num-inference-steps": ["sample", "eval", "lab tune"],
}


@pytest.mark.parametrize("flag", EVERYWHERE)
def test_flags_are_spelled_alike(flag, capsys):
    for command in EVERYWHERE[flag]:
        printed = help_of(command, capsys, "--help-all")
        assert flag in printed, command
        assert "%%" not in printed
        assert "(default: [])" not in printed


def test_help_says_what_the_readme_says_and_promises_no_more(capsys):
    assert main(["--help"]) == 0
    purpose = capsys.readouterr().out.split("\n\n")[1]
    assert f"**{purpose}**" in (Path(__file__).parents[1] / "README.md").read_text()
    assert "faster" not in purpose


def test_the_help_of_train_says_what_is_chosen_where_sizes_are_open(capsys):
    printed = help_of("train", capsys)
    for flag in ("--model", "--steps", "--batch-size", "--lr"):
        text = re.split(r"\n  --|\n\n", printed.split(f"\n  {flag}")[1])[0]
        assert "(default: chosen for the machine)" in " ".join(text.split()), flag
    assert "seedN" not in printed


def test_no_command_speaks_of_another_kappa(capsys):
    """What commands do by themselves or show is what the recipe says: 0.7, and merge_norm to last."""
    from scalelong.stability import METHODS

    shown = " ".join([*METHODS, *(help_of(command, capsys, "--help-all") for command in OURS)])
    assert set(re.findall(r"\bcs:(?:kappa=)?([\d.]+)", shown)) == {"0.7"}
    compared = find_command("compare").parser().parse_args([]).methods
    assert "merge_norm" in METHODS
    assert "merge_norm" in compared


def test_the_help_of_train_is_short_and_help_all_has_every_field(capsys):
    import dataclasses

    short, whole = help_of("train", capsys), help_of("train", capsys, "--help-all")
    assert len(re.findall(r"^  --", short, re.MULTILINE)) <= 15
    assert "scalelong train --help-all" in short
    assert "examples" in short
    for field in dataclasses.fields(TrainConfig().optimizer):
        assert f"--{field.name.replace('_', '-')}" in whole


def test_names_in_help_are_the_real_ones():
    from research.reproduce.command import ITEM_NAMES, SCALE_NAMES
    from research.reproduce.items import ITEMS
    from research.reproduce.settings import SCALES
    from scalelong.cli.shared import ENGINES, SHIPPED
    from scalelong.experiments import demo, engines
    from scalelong.runs.load import NETWORKS

    assert (list(ITEM_NAMES), SCALE_NAMES) == (list(ITEMS), SCALES)
    assert tuple(NETWORKS) == SHIPPED
    assert tuple(engines.ENGINES) == ENGINES
    shown = find_command("demo").parser().parse_args([])
    assert (shown.seeds, shown.steps) == (demo.SEEDS, demo.STEPS)


def test_models_are_listed_and_written_as_json(capsys):
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["preset"] == "cifar10-s2"
    assert abs(listed[0]["difference"]) < 0.02
    assert main(["models"]) == 0
    assert "260M" in capsys.readouterr().out


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def test_models_are_listed_without_diffusers(monkeypatch, capsys):
    from scalelong.errors import MissingDependencyError

    def lacking(_: str) -> None:
        raise MissingDependencyError("diffusers", "train", "building a UNet")

    without(monkeypatch, "yaml", "accelerate", "PIL")
    monkeypatch.setattr("scalelong.models.unet", lacking)
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "cifar10-s2" in printed
    assert "digits-class" in printed
    assert "needs scalelong[train]" in printed


@pytest.mark.parametrize("command", ["sample", "eval", "export"])
def test_a_core_installation_says_which_extra_is_missing(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    without(monkeypatch, "accelerate")
    assert main([command, "--model", "digits-class"]) == 1
    assert "pip install 'scalelong[train]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_completion_asks_for_shtab_and_uses_it(monkeypatch, capsys):
    without(monkeypatch, "shtab")
    assert main(["--print-completion", "bash"]) == 1
    assert "pip install 'scalelong[completion]'" in capsys.readouterr().err

    class Shtab:
        SUPPORTED_SHELLS = ("bash", "zsh")

        @staticmethod
        def complete(parser, shell):
            return f"{shell}: {sorted(parser._subparsers._group_actions[0].choices)}"

    monkeypatch.setitem(sys.modules, "shtab", Shtab())
    assert main(["--print-completion=zsh"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("zsh: ")
    assert all(f"'{name}'" in printed for name in COMMANDS)
    assert main(["--print-completion", "powershell"]) == 1


# Before anything long begins


class Found:
    """The result of a range, for tests of what the command says around it."""

    methods, rates, runs = ("none", "cs", "ls"), (2e-3, 4e-3, 8e-3), ()

    def survivors(self, method, rate):
        return (0 if method == "none" else 4, 4)

    def __str__(self):
        return "the whole range"


@pytest.mark.parametrize(
    ("seconds", "flags", "code", "runs"),
    [
        (0.001, [], 0, [(0, 1, 1), (1, 3, 4), (3, 3, 8)]),
        (0.1, [], 1, [(0, 1, 1), (1, 3, 2)]),
        (0.1, ["--yes"], 0, [(0, 1, 1), (1, 3, 2), (3, 3, 8)]),
        (10.0, [], 1, []),
    ],
)
def test_a_range_finds_rates_gives_a_verdict_first_and_asks_before_it_takes_long(
    seconds, flags, code, runs, monkeypatch, capsys, tmp_path
):
    asked: list[tuple[int, int, int]] = []

    def ranged(config, rates, methods, seeds, device, **_):
        assert device == "cpu"
        asked.append((len(rates or ()), len(methods), len(seeds)))
        return Found()

    monkeypatch.setattr("scalelong.experiments.rates.config_range", ranged)
    monkeypatch.setattr("scalelong.cli.range.seconds_of_a_step", lambda *_: seconds)
    command = ["range", "--recipe", "digits-tiny", "--methods", "none,cs,ls", "--out", str(tmp_path)]
    assert main([*command, *flags, "--device", "cpu"]) == code
    printed = capsys.readouterr().err
    assert asked == runs
    assert ("0 of 4 survive 100 steps; with cs 4 of 4" in printed) == bool(runs)
    assert ("give --yes" in printed) == bool(code)


def test_a_first_verdict_says_where_runs_were_too_short_to_learn(monkeypatch, caplog):
    from scalelong.cli.range import first_verdict

    caplog.set_level("INFO")
    slow: Any = Found()
    slow.runs = tuple(SimpleNamespace(outcome=outcome) for outcome in ("not learned", "not learned", "survived"))
    options = argparse.Namespace(steps=30, yes=True)
    first_verdict(partial(lambda **_: slow, rates=[4e-3], methods=None), 1.0, 60.0, options, range(8), 24)
    assert "2 of 3 learned next to nothing: give more --steps" in caplog.text


def test_a_range_on_an_engine_is_not_trained_here(monkeypatch, tmp_path, capsys):
    from scalelong.experiments import engines

    given: list[str] = []

    def ranged(config, engine, **_):
        given.append(engine.name)
        return Found()

    monkeypatch.setattr("scalelong.experiments.rates.config_range", ranged)
    monkeypatch.setattr(engines.SubmititEngine, "check", lambda _: None)
    command = ["range", "--recipe", "digits-tiny", "--methods", "none", "--engine", "submitit", "--out", str(tmp_path)]
    assert main(command) == 0
    assert given == ["submitit"]
    assert main([*command, "--gpus-per-run", "2"]) == 1
    assert "leave out --gpus-per-run" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["range", "diagnose"])
def test_a_folder_means_the_network_that_train_would_take(command, monkeypatch, capsys, tmp_path):
    from scalelong.config import with_values
    from scalelong.errors import UnfinishedError

    sized = with_values(TrainConfig(data="photos"), {"model": "unet/small", "batch_size": 32, "images.size": 16})
    monkeypatch.setattr("scalelong.cli.shared.sized_config", lambda *_: sized)

    def stop(*_, **__):
        raise UnfinishedError("far enough")

    for place in ("rates.config_range", "plan.diagnose_config"):
        monkeypatch.setattr(f"scalelong.experiments.{place}", stop)
    methods = ["--methods", "none", "--steps", "2"] if command == "range" else []
    assert main([command, "photos", *methods, "--out", str(tmp_path)]) != 0
    printed = capsys.readouterr()
    first = (printed.out + printed.err).splitlines()[0]
    assert first.startswith("photos: unet/small, batch 32, on 16x16 pixels")


# Errors and exit codes


class Fake:
    """A command that does what a test says."""

    def __init__(self, work):
        self.work = work

    def parser(self):
        made = Parser("models", "A command for tests.")
        made.add_argument("--warmup")
        made.add_argument("--from", "--init-from", dest="start_from")
        return made

    def run(self, options):
        return self.work()


def command_that(work, monkeypatch):
    monkeypatch.setattr(cli, "find_command", lambda _: Fake(work))


@pytest.mark.parametrize(("processes", "said"), [("1", "a bug in scalelong"), ("2", "messages of all processes")])
def test_an_unforeseen_error_shows_where_it_comes_from(processes, said, monkeypatch, capsys):
    def fail():
        raise RuntimeError("Connection closed by peer")

    command_that(fail, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert main(["models"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert said in printed.splitlines()[-1]


def test_an_error_of_ours_is_one_line_that_names_flags(monkeypatch, capsys):
    def fail():
        raise InvalidConfigError("`warmup` and `start_from`\n do not go together, as `elsewhere` says" + "x" * 100_000)

    command_that(fail, monkeypatch)
    assert main(["models"]) == 1
    said = capsys.readouterr().err
    named = "scalelong models: InvalidConfigError: --warmup and --from do not go together, as `elsewhere` says"
    assert said.startswith(named)
    assert said.count("\n") == 1
    assert len(said) < 5000
    assert main(["--debug", "models"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/some/where"), "FileAccessError: /some/where cannot be used: No"),
        (OSError(24, "Too many open files"), "FileAccessError: a file or the output cannot be used: Too many"),
        (MemoryError(), "NotEnoughMemoryError: the memory of the machine does not suffice"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "NotEnoughMemoryError"),
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


@pytest.mark.parametrize(("error", "printed"), [(InvalidConfigError("no"), False), (MemoryError(), True)])
def test_of_several_processes_the_first_prints_what_is_alike_in_all(error, printed, monkeypatch, capsys):
    def fail():
        raise error

    command_that(fail, monkeypatch)
    monkeypatch.setenv("RANK", "1")
    assert main(["models"]) == 1
    assert bool(capsys.readouterr().err) == printed


SCRIPT = """
import os, signal, sys, time
from scalelong import cli
from scalelong.cli.parser import Parser
class Fake:
    def parser(self): return Parser("models", "")
    def run(self, options):
{body}
cli.find_command = lambda _: Fake()
sys.exit(cli.main(["models"]))
"""


def script(body: str) -> list[str]:
    """A process whose command does what a test says."""
    return [sys.executable, "-c", SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))]


def test_an_error_leaves_the_process_group(tmp_path):
    """A group that is still open at exit aborts the process: code -6 instead of 1."""
    body = f"""
        import torch.distributed as dist
        from scalelong.errors import InvalidConfigError
        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        raise InvalidConfigError("refused")
    """
    done = subprocess.run(script(body), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "scalelong models: InvalidConfigError: refused\n")


def test_a_fork_ends_silently():
    """Processes of a pool are terminated when they are not needed any more."""
    body = """
        child = os.fork()
        if child == 0:
            print("begun", flush=True)
            time.sleep(60)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    """
    done = subprocess.run(script(body), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")


PRINTS = """
from scalelong.console import show_table
print("Fréchet κ × \\udcff"); show_table([])
"""


def test_a_terminal_that_knows_ascii_only():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(script(PRINTS), capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "Fr\\xe9chet \\u03ba \\xd7 \\udcff\n(nothing)\n"


def test_output_to_a_full_disk_or_to_nowhere():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(script(PRINTS), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.match("scalelong models: .*output cannot be (written|used): No space left", done.stderr)
    assert done.stderr.count("\n") == 1
    closed = f"import os; os.close(1); os.execv({sys.executable!r}, {script(PRINTS)!r})"
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
    body = 'for _ in range(100_000): print("a line that is not read")'
    process = subprocess.Popen(script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# The first hour


OUT = {
    "demo": [],
    "train": ["digits"],
    "sample": ["--model", "digits-class"],
    "report": ["runs/absent"],
    "eval": ["--model", "digits-class"],
    "export": ["--model", "digits-class"],
    "find": ["torch.nn:Identity"],
    "diagnose": [],
    "range": [],
    "compare": [],
    "lab coords": [],
    "lab probe": ["runs/absent"],
    "lab tune": ["runs/absent"],
}


@pytest.mark.parametrize("command", OUT)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    flag = "--statistics" if command == "eval" else "--out"
    assert main([*command.split(), *OUT[command], flag, "file/inside"]) == 1
    said = capsys.readouterr().err
    assert "file/inside" in said or "/file " in said or " file " in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("model", "steps", "budget", "said"),
    [
        ("unet/small", 280, "6m", "280 steps; images like these need about 1,000: the same command with --budget 22m"),
        ("unet/small", 1000, "6m", ""),
        ("a.b:c", 10, "6m", ""),
        ("unet/small", 280, None, ""),
    ],
)
def test_the_end_of_a_run_says_what_it_is_worth(model, steps, budget, said):
    from scalelong.cli.train import worth
    from scalelong.config import with_values

    values = {"model": model, "steps": steps, "budget": budget, "images.size": 16}
    config = with_values(TrainConfig(data="x"), values)
    assert worth(config, ()).startswith(said)
    assert bool(worth(config, ())) == bool(said)
    assert ("with --steps" in worth(config, {"steps"})) == bool(said), "a longer budget would not change given steps"
