"""What kills, full disks, links and damaged files do to commands, and what holds.

    python -m research.campaign --trials 200 --seed 1     # a table of what was tried and what held
    python -m research.campaign --trial kills:17 --seed 1     # one trial again, with all that it prints

A trial is one command in a small world of its own: a trained run, a folder of images, a note of the user's. It is drawn
from (seed, kind, number) alone. The kinds:

    kills      a signal at the n-th operation on a file: SIGKILL, and those of terminals and schedulers
    disk       ENOSPC, EACCES, EROFS or EIO at the n-th operation on a file and all later ones
    links      a file of the run folder is a link to the user's note, or to nothing
    mutations  a file of the run folder is cut, emptied, overwritten or changed in some bytes

A trial holds if the command ends with 0, or with one line that names the error and says what to do (1, or 2 for its
arguments), without a traceback and without hanging; if the user's own files are as they were; and, after a kill or a
full disk, if the same command then works and makes the same files, bit for bit.

Everything is imported once; a command runs in a fork of this process, which costs a tenth of a second.
"""

import argparse
import builtins
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = {
    "data": "digits",
    "model_options": {"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
    "batch_size": 4,
    "images": {"held_out": 4},
    "checkpoints": {"save_every": 2, "keep_last": 1},
    "logging": {"trackers": [], "samples_every": 0},
}
TRAIN = ["train", "--config", "tiny.yaml"]
SAMPLER = ["-n", "2", "--sampler", "ddim", "--steps", "2"]
STEP = "checkpoints/step-00000004/*.safetensors"


@dataclass(frozen=True)
class Job:
    """A command, and patterns of files that are the same however often it was interrupted."""

    words: list[str]
    makes: tuple[str, ...] = ()


JOBS = {
    "train": Job([*TRAIN, "--steps", "4", "--out", "new"], (f"new/{STEP}",)),
    "resume": Job([*TRAIN, "--steps", "4", "--out", "run"], (f"run/{STEP}",)),
    "sample": Job(["sample", "run", *SAMPLER, "--out", "made"], ("made/*.png",)),
    "export": Job(["export", "run", "--format", "safetensors", "--out", "weights"], ("weights/*.safetensors",)),
    "report": Job(["report", "run", "--out", "report.html"]),
}
READERS = ("resume", "sample", "export", "report")
"""The commands that read a run folder of somebody else."""
KINDS = ("kills", "disk", "links", "mutations")
ERRORS = ("ENOSPC", "EACCES", "EROFS", "EIO")
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "HUP", "USR1", "USR2", "XCPU")}
NOTE = "not ours\n"
SECONDS = 120
"""After which a command hangs."""


# One command in a fork, perhaps with a fault


@dataclass(frozen=True)
class Fault:
    """The n-th operation on a file fails with this error, as do all later ones, or the process gets a signal there."""

    nth: int
    code: str

    def strike(self) -> None:
        if self.code in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.code])
        else:
            number = getattr(errno, self.code)
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class Outcome:
    code: int
    """The exit code; minus the signal if one ended it."""
    text: str
    operations: int = 0

    def fault(self) -> str | None:
        """Why this is neither a success nor an error that is named and says what to do; None if it is one."""
        if self.code == -signal.SIGALRM:
            return f"hung for {SECONDS} s"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent call last)" in self.text:
            return "a traceback"
        if "a bug in scalelong" in self.text:
            return "an error without a name"
        if self.code in (0, 2, *(128 + number for number in SIGNALS.values())):
            return None
        lines = [line for line in self.text.splitlines() if re.match(r"scalelong[\w ]*: [A-Z]\w+Error: ", line)]
        if self.code != 1 or len(lines) != 1:
            return f"exit code {self.code} with {len(lines)} lines that name an error"
        return None if "[Errno" not in lines[0] else "an error in the system's words"


def inject(fault: Fault | None) -> Callable[[], int]:
    """Count the operations on files of this process, and let the n-th of them fail. Returns the count so far."""
    count = 0

    def counted(work: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if writes(*arguments, **keywords):
                count += 1
                if fault and (count == fault.nth or (count > fault.nth and fault.code in ERRORS)):
                    fault.strike()
            return work(*arguments, **keywords)

        return call

    def opens(_: Any, mode: str = "r", *__: Any, **___: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    def writes(_: Any, flags: int = 0, *__: Any, **___: Any) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    builtins.open = counted(builtins.open, opens)
    os.open = counted(os.open, writes)
    for name in ("replace", "rename", "fsync", "unlink", "mkdir", "link"):
        setattr(os, name, counted(getattr(os, name), lambda *_, **__: True))
    return lambda: count


def run(words: Sequence[str], world: Path, fault: Fault | None = None) -> Outcome:
    """`scalelong WORDS` in a fork of this process, with the world as its folder."""
    place = tempfile.mkdtemp(prefix="campaign-")
    output, counts = os.path.join(place, "output"), os.path.join(place, "count")
    child = os.fork()
    if child == 0:
        code = 70
        try:
            file = os.open(output, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(file, stream)
            os.chdir(world)
            os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = str(world / "home")
            signal.alarm(SECONDS)
            record = os.open(counts, os.O_CREAT | os.O_WRONLY)
            done = inject(fault)
            from scalelong.cli import main

            code = main(list(words)) or 0
            os.write(record, str(done()).encode())
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    text = Path(output).read_text(errors="replace") if os.path.exists(output) else ""
    number = Path(counts).read_text() if os.path.exists(counts) else ""
    shutil.rmtree(place)
    return Outcome(os.waitstatus_to_exitcode(status), text, int(number or 0))


# The world


def make_world(place: Path) -> None:
    """A trained run, which is resumed, sampled, exported and reported."""
    import yaml

    place.mkdir(parents=True)
    (place / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (place / "note.txt").write_text(NOTE)
    done = run([*TRAIN, "--steps", "2", "--out", "run"], place)
    if done.code:
        raise SystemExit(f"the world of the campaign could not be made:\n{done.text}")


def digests(world: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Of the files that a job makes."""
    paths = [path for pattern in patterns for path in sorted(world.glob(pattern))]
    return {str(path.relative_to(world)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class Campaign:
    def __init__(self, seed: int, place: Path) -> None:
        self.seed, self.place = seed, place
        self.undisturbed: dict[str, tuple[int, dict[str, str]]] = {}
        make_world(place / "world")

    def copy(self, name: str) -> Path:
        world = self.place / name
        shutil.rmtree(world, ignore_errors=True)
        shutil.copytree(self.place / "world", world, symlinks=True)
        return world

    def reference(self, job: str) -> tuple[int, dict[str, str]]:
        """How many operations on files a job takes without faults, and what it makes."""
        if job not in self.undisturbed:
            world = self.copy(f"whole-{job}")
            done = run(JOBS[job].words, world)
            if done.code:
                raise SystemExit(f"{job} fails without any fault:\n{done.text}")
            self.undisturbed[job] = done.operations, digests(world, JOBS[job].makes)
        return self.undisturbed[job]

    def trial(self, kind: str, number: int) -> tuple[str, str | None, str]:
        """(what was done, why it does not hold or None, what the command printed)."""
        draw = random.Random(f"{self.seed}/{kind}/{number}")
        world = self.copy("trial")
        if kind in ("kills", "disk"):
            about, why, text = self.interrupted(kind, draw, world)
        else:
            about, why, text = self.deceived(kind, draw, world)
        if (world / "note.txt").read_text() != NOTE:
            why = why or "a file of the user's was changed"
        return about, why, text

    def interrupted(self, kind: str, draw: random.Random, world: Path) -> tuple[str, str | None, str]:
        name = draw.choice(list(JOBS))
        operations, wanted = self.reference(name)
        code = draw.choice(("KILL", *SIGNALS) if kind == "kills" else ERRORS)
        fault = Fault(draw.randint(1, max(operations, 1)), code)
        first = run(JOBS[name].words, world, fault)
        about = f"{name}, {code} at operation {fault.nth} of {operations}"
        ended = -first.code in SIGNALS.values()
        if (why := first.fault()) and not (kind == "kills" and ended):
            return about, why, first.text
        again = run(JOBS[name].words, world)
        if again.code:
            return about, "the same command does not work afterwards", first.text + again.text
        if digests(world, JOBS[name].makes) != wanted:
            return about, "the same command makes other files afterwards", first.text + again.text
        return about, None, first.text

    def deceived(self, kind: str, draw: random.Random, world: Path) -> tuple[str, str | None, str]:
        files = sorted(path for path in (world / "run").rglob("*") if path.is_file() and not path.is_symlink())
        path, name = draw.choice(files), draw.choice(READERS)
        if kind == "links":
            target = draw.choice((world / "note.txt", world / "nothing", world / "run"))
            path.unlink()
            path.symlink_to(target)
            how = f"a link to {target.name}"
        else:
            how = mutate(path, draw)
        done = run(JOBS[name].words, world)
        about = f"{name}, {path.relative_to(world)} is {how}"
        why = done.fault()
        report = world / "report.html"
        if kind == "links" and report.exists() and NOTE.strip() in report.read_text(errors="replace"):
            why = why or "the report shows a file from outside the run folder"
        return about, why, done.text


def mutate(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    how = draw.choice(("empty", "cut", "changed in some bytes", "null", "text"))
    if how == "empty":
        content = bytearray()
    elif how == "cut":
        content = content[: draw.randint(0, max(len(content) - 1, 0))]
    elif how == "null":
        content = bytearray(b"null\n")
    elif how == "text":
        content = bytearray(b"\xff\xfe neither JSON nor tensors \x00\n" * draw.choice((1, 1000)))
    elif content:
        for _ in range(draw.randint(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    return how


# The command


def warm_up() -> None:
    """Import what commands use, in one thread, so that forks have it."""
    import accelerate  # noqa: F401
    import matplotlib
    import torch

    from scalelong.cli import main  # noqa: F401

    matplotlib.use("Agg")
    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=40, help="trials of each kind (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--trial", action="append", default=[], metavar="KIND:NUMBER", help="this trial alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write counts and failures to this file")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [(kind, number) for kind in options.kinds.split(",") for number in range(options.trials)]
    if options.trial:
        chosen = [(text.partition(":")[0], int(text.partition(":")[2])) for text in options.trial]
    if unknown := {kind for kind, _ in chosen} - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    warm_up()
    began, failures = time.monotonic(), []
    tried = dict.fromkeys((kind for kind, _ in chosen), 0)
    with tempfile.TemporaryDirectory() as place:
        campaign = Campaign(options.seed, Path(place))
        for kind, number in chosen:
            about, why, text = campaign.trial(kind, number)
            tried[kind] += 1
            if why:
                failures.append({"trial": f"{kind}:{number}", "what": about, "why": why, "printed": text[-2000:]})
                print(f"{kind}:{number}: {about}: {why}", flush=True)
            if options.trial:
                print(f"{kind}:{number}: {about}\n{text}", flush=True)
    rows = []
    for kind, count in tried.items():
        held = count - sum(failure["trial"].startswith(kind) for failure in failures)
        rows.append({"kind": kind, "tried": count, "held": held})
        print(f"{kind:<10} tried {count:>5}, held {held:>5}")
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows, "failures": failures}, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
