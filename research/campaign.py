"""The campaign: kill, starve and deceive every command, and count what held.

    python -m research.campaign --trials 3000 --seed 1
    python -m research.campaign --trial faults:17 --seed 1      # one trial again, with all it prints

Four kinds of trials, each drawn from (seed, kind, number) alone:

    kills      SIGKILL at the n-th operation on a file
    faults     ENOSPC, EDQUOT, EACCES, EROFS, EIO or EMFILE at the n-th operation on a file
    inputs     damaged and hostile data sets, run folders and configurations
    words      changed command lines

A trial holds if the command ends with 0 or with one line that names the error (1, or 2 for its arguments), without a
traceback, a crash or a hang; if the files that were there before are still there; and, after a kill or a fault, if the
same command then works and makes the same files as without. A "bug in scalelong" does not hold.

Everything is imported once; each command runs in a fork, in its own copy of a small world: data sets of every kind, a
trained run, a configuration and a cache.
"""

import argparse
import builtins
import errno
import gc
import hashlib
import io
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

from scalelong.cli import main as scalelong
from scalelong.console import text_table

from .mutations import mutate_data, mutate_file, mutate_words

KINDS = ("kills", "faults", "inputs", "words")
ERRORS = ("ENOSPC", "EDQUOT", "EACCES", "EROFS", "EIO", "EMFILE")
PATIENCE = 120.0
"""Seconds after which a command hangs."""

TINY = ["--model-options", "patch_size=4", "dim=16", "depth=2", "heads=2", "--batch-size", "4", "--held-out", "4"]
TINY += ["--trackers", "--samples-every", "0"]
TRAIN = ["train", "digits", *TINY, "--save-every", "2", "--keep-last", "1"]
COMPARE = ["compare", "--config", "tiny.yaml", "--seeds", "1", "--scores", "0", "--jobs", "1"]
SAMPLER = ["--sampler", "ddim", "--steps", "2"]


@dataclass(frozen=True)
class Job:
    """A command of which kills and faults must not take anything, and the files that it makes."""

    words: list[str]
    makes: tuple[str, ...]
    """Patterns of files that are the same however often the command was interrupted."""


JOBS = {
    "train": Job([*TRAIN, "--steps", "4", "--out", "new"], ("new/checkpoints/step-00000004/*.safetensors",)),
    "resume": Job([*TRAIN, "--steps", "4", "--out", "run"], ("run/checkpoints/step-00000004/*.safetensors",)),
    "sample": Job(["sample", "run", "-n", "3", *SAMPLER, "--out", "images"], ("images/*.png",)),
    "eval": Job(["eval", "run", "-n", "12", *SAMPLER], ("run/images/*/*.png",)),
    "stats": Job(["stats", "data/folder", "--out", "stats.npz"], ("stats.npz",)),
    "export": Job(["export", "run", "--out", "exported"], ("exported/unet/*", "exported/model_index.json")),
    "safetensors": Job(["export", "run", "--format", "safetensors", "--out", "weights"], ("weights/*.safetensors",)),
    "diagnose": Job(["diagnose", "run", "--out", "diagnosed"], ("diagnosed/diagnosis.json",)),
    "report": Job(["report", "run", "--out", "report.html"], ("report.html",)),
    "find": Job(["find", "net.py", "--out", "plan.json"], ("plan.json",)),
    "compare": Job(
        [*COMPARE, "--methods", "none,cs", "--steps", "2", "--out", "compared"],
        ("compared/*/checkpoints/step-00000002/*.safetensors",),
    ),
}

CHANGES = re.compile(
    r"(metrics\.jsonl|scores.*|config\.yaml|data\.json|environment\.json|README\.md|report\.html|\.lock|checkpoints/.*|\.part)$"
    r"|^cache/|events\.out"
)
"""Files that a command may write anew. All others must stay what they were."""

READERS = [
    ["sample", "run", "-n", "2", *SAMPLER, "--out", "images"],
    ["eval", "run", "-n", "12", *SAMPLER],
    ["export", "run", "--out", "exported"],
    ["export", "run", "--format", "safetensors", "--out", "weights"],
    ["diagnose", "run"],
    ["report", "run"],
    [*TRAIN, "--steps", "4", "--out", "run"],
    ["eval", "made", "--data", "digits"],
    ["sample", "run", "-n", "4", *SAMPLER, "--out", "made"],
]
"""Commands that read a run folder or a folder of samples, for damage to these."""

CONFIGURED = [
    ["train", "--config", "tiny.yaml", "--dry-run"],
    ["diagnose", "--config", "tiny.yaml"],
    [
        "compare",
        "--config",
        "tiny.yaml",
        "--methods",
        "none",
        "--seeds",
        "1",
        "--scores",
        "0",
        "--jobs",
        "1",
        "--out",
        "c",
    ],
]

SPOKEN = [
    *(job.words for job in JOBS.values()),
    ["train", "data/folder", "--dry-run", "--steps", "10", "--seed", "1", "--scaling", "cs:0.7", "--lr", "1e-3"],
    ["train", "--recipe", "digits-tiny", "--dry-run", "--model-options", "depth=2"],
    ["stats", "data/images.npz", "--size", "8", "--channels", "1", "--split", "train", "--json"],
    ["kappa", "--skips", "6", "--data", "data/folder"],
    ["models", "--json"],
    ["diagnose", "--recipe", "digits-tiny", "--data", "data/folder"],
    ["find", "net.py", "--input", "1,3,16,16", "--json"],
    ["eval", "made", "--data", "digits", "--size", "8", "-n", "4"],
]


# One command in a fork of this process


@dataclass(frozen=True)
class Outcome:
    code: int
    """The exit code; minus the signal if one ended it."""
    out: str
    err: str
    hung: bool = False

    def fault(self) -> str | None:
        """Why this is neither a success nor a named error; None if it is one."""
        if self.hung:
            return f"hung for {PATIENCE:.0f} s"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent call last)" in self.err:
            return "a traceback"
        if self.code in (0, 2):
            return None
        said = [line for line in self.err.splitlines() if line.startswith("scalelong")]
        if self.code != 1 or len(said) != 1:
            return f"exit code {self.code} with {len(said)} lines about it"
        return None if re.match(r"scalelong( \w+)?: [A-Z]\w+Error: ", said[0]) else "an error without a name"

    def tail(self) -> str:
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")[:300]


def run(words: Sequence[str], world: Path, prepare: Callable[[], None] | None = None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = os.fork()
        if child == 0:
            _become(words, world, out, err, prepare)
        deadline, status, hung = time.monotonic() + PATIENCE, None, False
        while status is None:
            done, found = os.waitpid(child, os.WNOHANG)
            if done:
                status = found
            elif time.monotonic() > deadline and not hung:
                os.killpg(child, signal.SIGKILL)
                hung = True
            else:
                time.sleep(0.005)
        said, complained = (path.read_text(errors="replace") if path.exists() else "" for path in (out, err))
        return Outcome(os.waitstatus_to_exitcode(status), said, complained, hung)


def _become(words: Sequence[str], world: Path, out: Path, err: Path, prepare: Callable[[], None] | None) -> None:
    """The child: runs the command and ends, whatever happens."""
    code = 1
    try:
        os.setsid()
        for number, place, mode in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
            os.dup2(os.open(place, mode | os.O_CREAT), number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
        os.chdir(world)
        os.environ["SCALELONG_CACHE"] = str(world / "cache")
        tempfile.tempdir = str(out.parent)
        sys.argv[:] = ["scalelong", *words]
        if prepare is not None:
            prepare()
        code = scalelong(list(words))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


# Faults at the n-th operation on a file of the world


class Faults:
    """Counts the operations of this process on files below `root`, and lets the n-th fail or kill.

    `code` is the name of an error, "KILL", or None to count only; then the count goes to the file `total`.
    """

    def __init__(self, root: Path, nth: int, code: str | None, total: Path | None = None) -> None:
        self.root, self.nth, self.code, self.total = str(root), nth, code, total
        self.count = 0
        self._open, self._io_open = os.open, io.open

    def install(self) -> None:
        for name in (
            "open",
            "mkdir",
            "rmdir",
            "unlink",
            "remove",
            "rename",
            "replace",
            "symlink",
            "scandir",
            "listdir",
        ):
            setattr(os, name, self._watched(getattr(os, name)))
        os.fsync = self._watched(os.fsync, always=True)
        builtins.open = io.open = self._opened  # pyright: ignore[reportAttributeAccessIssue]

    def step(self) -> None:
        self.count += 1
        if self.total is not None:
            descriptor = self._open(self.total, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, str(self.count).encode())
            os.close(descriptor)
        if self.count == self.nth and self.code == "KILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.nth and self.code is not None:
            number = getattr(errno, self.code)
            raise OSError(number, os.strerror(number))

    def _inside(self, path: Any) -> bool:
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(self.root)
        except TypeError:
            return False

    def _watched(self, function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            if always or (arguments and self._inside(arguments[0])):
                self.step()
            return function(*arguments, **keywords)

        return watched

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **keywords: Any) -> Any:
        if not self._inside(file):
            return self._io_open(file, mode, buffering, *rest, **keywords)
        self.step()
        if not set(mode) & set("wax+") or buffering != -1:
            return self._io_open(file, mode, buffering, *rest, **keywords)
        raw = _Watched(self, file, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **keywords)


class _Watched(io.FileIO):
    """A file whose writing is an operation too."""

    def __init__(self, faults: Faults, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self.faults = faults

    def write(self, content: Any, /) -> int:
        self.faults.step()
        return super().write(content)


# The world


def make_world(place: Path) -> None:
    """Data sets of every kind, a network, a configuration, a trained run, samples, and a filled cache."""
    (place / "data").mkdir(parents=True)
    (place / "notes.txt").write_text("not ours\n")
    (place / "net.py").write_text(
        "from diffusers import UNet2DModel\n\n\ndef model():\n    return UNet2DModel(\n        sample_size=8, "
        "in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,\n        "
        "down_block_types=('DownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'UpBlock2D'),\n    )\n"
    )
    _must(run(["train", *TRAIN[1:], "--steps", "2", "--out", "run"], place))
    shutil.copy(place / "run" / "config.yaml", place / "tiny.yaml")
    _must(run(["sample", "run", "-n", "4", *SAMPLER, "--out", "made"], place))
    child = os.fork()  # so that this process starts no threads of pyarrow
    if child == 0:
        code = 1
        try:
            make_data(place / "data")
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the data of the campaign could not be made")
    for job in (JOBS["stats"], JOBS["eval"]):  # fills the cache
        _must(run(job.words, place))
    (place / "stats.npz").unlink()
    shutil.rmtree(place / "run" / "images")
    (place / "run" / "scores.jsonl").unlink()


def make_data(folder: Path) -> None:
    import pickle

    import datasets
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = [i % 3 for i in range(12)]
    encoded = []
    for number, image in enumerate(pixels):
        content = io.BytesIO()
        Image.fromarray(image).save(content, "PNG")
        encoded.append(content.getvalue())
        place = folder / "folder" / f"class{labels[number]}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.getvalue())
    shutil.make_archive(str(folder / "images"), "zip", folder / "folder")
    np.savez(folder / "images.npz", images=pixels, labels=np.array(labels))
    (folder / "idx").mkdir()
    (folder / "idx" / "train-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + b"".join(side.to_bytes(4, "big") for side in pixels.shape) + pixels.tobytes()
    )
    (folder / "idx" / "train-labels-idx1-ubyte").write_bytes(
        b"\0\0\x08\x01" + len(labels).to_bytes(4, "big") + bytes(labels)
    )
    (folder / "cifar").mkdir()
    for number in range(1, 6):
        batch = {b"data": draw.integers(0, 256, (2, 3072), dtype=np.uint8), b"labels": [0, number]}
        (folder / "cifar" / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    names = {"label_names": [f"name {number}" for number in range(10)]}
    (folder / "cifar" / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    rows = [{"bytes": content, "path": None} for content in encoded]
    (folder / "table").mkdir()
    pq.write_table(pa.table({"image": rows, "label": labels}), folder / "table" / "images.parquet")
    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features).save_to_disk(folder / "saved")


DATA = ["folder", "images.zip", "images.npz", "idx", "cifar", "table/images.parquet", "saved"]


def _must(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise SystemExit(f"the world of the campaign could not be made:\n{outcome.out}\n{outcome.err}")


def contents(world: Path) -> dict[str, str]:
    """Digests of all regular files."""
    found = {}
    for folder, _, names in os.walk(world):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and path.stat().st_size < 10**8:
                relative = os.path.relpath(path, world)
                found[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def lost(before: dict[str, str], after: dict[str, str], touched: str = "") -> list[str]:
    """Files that are gone or changed, and should not be."""
    checked = {name: value for name, value in before.items() if not CHANGES.search(name) and name != touched}
    return sorted(name for name, value in checked.items() if after.get(name) != value)


# Trials


@dataclass(frozen=True)
class Trial:
    kind: str
    number: int
    what: str
    """The command, for the table."""
    story: str
    fault: str | None
    said: str


class Campaign:
    def __init__(self, seed: int, scratch: Path, say: Callable[[str], None]) -> None:
        self.seed, self.scratch, self.say = seed, scratch, say
        self.world = scratch / "world"
        make_world(self.world)
        self.plain: dict[str, tuple[int, dict[str, str]]] = {}

    def trial(self, kind: str, number: int) -> Trial:
        draw = random.Random(f"{self.seed}/{kind}/{number}")
        # Two levels down, so that ".." is still ours.
        place = self.scratch / "trials" / f"{kind}-{number}" / "world"
        shutil.copytree(self.world, place, symlinks=True)
        try:
            return getattr(self, f"_{kind}")(number, draw, place)
        finally:
            shutil.rmtree(place.parent, ignore_errors=True)

    def _kills(self, number: int, draw: random.Random, world: Path) -> Trial:
        return self._interrupted("kills", "KILL", number, draw, world)

    def _faults(self, number: int, draw: random.Random, world: Path) -> Trial:
        return self._interrupted("faults", draw.choice(ERRORS), number, draw, world)

    def _interrupted(self, kind: str, code: str, number: int, draw: random.Random, world: Path) -> Trial:
        name = draw.choice(sorted(JOBS))
        job, (operations, expected) = JOBS[name], self._undisturbed(name)
        nth = draw.randrange(1, operations + 1)
        before = contents(world)
        outcome = run(job.words, world, Faults(world, nth, code).install)
        killed = code == "KILL" and outcome.code == -signal.SIGKILL
        fault = None if killed else outcome.fault()
        again = run(job.words, world)
        made_already = "exists already" in again.err and "ExportError" in again.err
        if again.code != 0 and not made_already:
            fault = fault or f"then the plain command fails: {again.tail()}"
        after = contents(world)
        gone = lost(before, after)
        different = sorted(file for file, digest in expected.items() if after.get(file) != digest)
        if gone or different:
            fault = fault or f"lost: {gone[:5]}; other results: {different[:5]}"
        story = f"{code} at operation {nth} of {operations} of `scalelong {' '.join(job.words)}`"
        return Trial(kind, number, name, story, fault, outcome.tail())

    def _undisturbed(self, name: str) -> tuple[int, dict[str, str]]:
        """How many operations the command does, and what it makes."""
        if name not in self.plain:
            world, total = self.scratch / "plain" / name / "world", self.scratch / f"{name}.count"
            shutil.copytree(self.world, world, symlinks=True)
            _must(run(JOBS[name].words, world, Faults(world, 0, None, total).install))
            found = contents(world)
            made = {file for pattern in JOBS[name].makes for file in map(str, _matching(world, pattern))}
            if not made:
                raise SystemExit(f"`scalelong {' '.join(JOBS[name].words)}` makes nothing of {JOBS[name].makes}")
            # The report tells the time of its making; it must be there, and need not be the same.
            self.plain[name] = int(total.read_text()), {file: found[file] for file in made if file in found}
            shutil.rmtree(world.parent)
        return self.plain[name]

    def _inputs(self, number: int, draw: random.Random, world: Path) -> Trial:
        before = contents(world)
        subject = draw.choice(["data", "data", "run", "run", "config"])
        if subject == "data":
            name = draw.choice(DATA)
            words = draw.choice(
                [["stats", f"data/{name}", "--size", "8"], ["train", f"data/{name}", *TINY, "--size", "8", "--dry-run"]]
            )
            story, what = mutate_data(world / "data" / name, draw), f"data: {name}"
        elif subject == "run":
            words = draw.choice(READERS)
            folder = world / ("made" if "made" in words else "run")
            victims = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
            story, what = mutate_file(draw.choice(victims), draw), f"run: {words[0]}"
        else:
            words = draw.choice(CONFIGURED)
            story, what = mutate_file(world / "tiny.yaml", draw), f"config: {words[0]}"
        mutated = contents(world)
        outcome = run(words, world)
        gone = lost({name: value for name, value in mutated.items() if before.get(name) == value}, contents(world))
        fault = outcome.fault() or (f"lost: {gone[:5]}" if gone else None)
        if (world / "hacked").exists():
            fault = "code was run"
        return Trial("inputs", number, what, f"{story}; `scalelong {' '.join(words)}`", fault, outcome.tail())

    def _words(self, number: int, draw: random.Random, world: Path) -> Trial:
        words = mutate_words(draw.choice(SPOKEN), draw)
        before = contents(world)
        outcome = run(words, world)
        gone = lost(before, contents(world), touched="notes.txt" if "notes.txt" in words else "")
        fault = outcome.fault() or (f"lost: {gone[:5]}" if gone else None)
        story = f"{[word[:60] for word in words]}"
        return Trial("words", number, words[0][:12] if words else "", story, fault, outcome.tail())


def _matching(world: Path, pattern: str) -> list[Path]:
    return sorted(path.relative_to(world) for path in world.glob(pattern) if path.is_file())


# The table


def rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: (KINDS.index(trial.kind), trial.what)):
        groups.setdefault((trial.kind, "all"), []).append(trial)
        groups.setdefault((trial.kind, trial.what), []).append(trial)
    return [
        {"kind": kind, "what": what, "tried": len(group), "held": sum(trial.fault is None for trial in group)}
        for (kind, what), group in groups.items()
    ]


def warm_up() -> None:
    """Import what the commands use, in one thread: a fork takes over modules, not threads."""
    import torch

    torch.set_num_threads(1)
    from importlib import import_module

    import scalelong.evaluation.features as features

    features.STEPS = 20  # a classifier for the tests of files need not know anything
    for name in (
        "accelerate",
        "datasets",
        "diffusers",
        "matplotlib.pyplot",
        "PIL.Image",
        "pyarrow.parquet",
        "tyro",
        "yaml",
    ):
        import_module(name)
    commands = "train compare sample eval export report stats find diagnose kappa models"
    for name in commands.split():
        import_module(f"scalelong.commands.{name}")
    for name in ("training", "experiments.compare", "report", "export", "kappa"):
        import_module(f"scalelong.{name}")
    # The first tensor without memory brings seconds of imports.
    torch.nn.Conv2d(1, 1, 1, device="meta")(torch.empty(1, 1, 2, 2, device="meta"))
    gc.collect()
    gc.freeze()  # or every fork would copy the memory that its collector looks at


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.campaign", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="in all, a quarter of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, help="begin no trial after this time")
    parser.add_argument("--trial", metavar="KIND:NUMBER", help="one trial again")
    parser.add_argument("--json", type=Path, help="also write the table and the failures to this file")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    warm_up()
    kinds = options.kinds.split(",")
    wanted = [(kind, number) for number in range(-(-options.trials // len(kinds))) for kind in kinds]
    if options.trial:
        kind, _, number = options.trial.partition(":")
        wanted = [(kind, int(number))]
    began, done = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        campaign = Campaign(options.seed, Path(scratch), print)
        for kind, number in wanted[: max(options.trials, 1)]:
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                break
            done.append(campaign.trial(kind, number))
            if done[-1].fault is not None or options.trial:
                trial = done[-1]
                print(f"{kind}:{number}  {trial.fault}\n    {trial.story}\n    {trial.said}", flush=True)
    failures = [trial for trial in done if trial.fault is not None]
    table = rows(done)
    print(f"\n{text_table(table, left=('kind', 'what'))}\n")
    print(
        f"{len(done)} trials, {len(done) - len(failures)} held, seed {options.seed}, {time.monotonic() - began:.0f} s"
    )
    if options.json:
        record = {"seed": options.seed, "rows": table, "failures": [vars(trial) for trial in failures]}
        options.json.write_text(json.dumps(record, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
