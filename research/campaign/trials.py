"""The kinds of trials, each drawn from (seed, kind, number) alone, and the table of what held.

    kills        SIGKILL or SIGTERM at the n-th operation on a file
    faults       ENOSPC, EDQUOT, EACCES, EROFS, EIO or EMFILE at the n-th operation on a file, or from it on
    inputs       damaged and hostile data sets, run folders, comparisons, exports, plans and configurations
    words        changed command lines
    environment  changed variables, closed or full outputs, limits, a current folder that is gone
    ranks        two processes that train together, one of which is killed or meets a fault
    torchrun     the same under torchrun's own agent; also SIGTERM to torchrun, and a disk that is read-only for one

A trial holds if the command ends with 0 or with one line that names the error and says what to do (1, or 2 for its
arguments), without a traceback, a crash, a hang or memory beyond measure; if the files that were there before are
still there; and, after a kill or a fault, if the same command then works, makes the same files as without, and leaves
nothing temporary behind. A "bug in scalelong" does not hold. What is refused as wrong arguments leaves nothing.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scalelong.console import text_table

from .forks import (
    ERRORS,
    ROOT,
    Command,
    Fault,
    Outcome,
    operations,
    preload,
    preloaded,
    run,
    run_together,
    run_under_torchrun,
    warm_up,
)
from .mutations import mutate_data, mutate_environment, mutate_file, mutate_words
from .world import (
    AVERAGED,
    COMPARE,
    DATA,
    RANGE,
    SAMPLER,
    SIZED,
    SMALL,
    TRAIN,
    TUNE,
    WORDY,
    contents,
    copy_world,
    lost,
    make_world,
    require_success,
)

KINDS = ("kills", "faults", "inputs", "words", "environment", "ranks", "torchrun")
SHARES = {"kills": 5, "faults": 5, "inputs": 7, "words": 6, "environment": 2}
"""Of 25 trials. Pairs of processes are for --kinds ranks: they cost as much as ten others."""


@dataclass(frozen=True)
class Job:
    """A command of which kills and faults must not take anything, and the files that it makes."""

    words: list[str]
    makes: tuple[str, ...]
    """Patterns of files that are the same however often the command was interrupted."""


JOBS = {
    "train": Job([*TRAIN, "--steps", "4", "--out", "new"], ("new/checkpoints/step-00000004/*.safetensors",)),
    "resume": Job([*TRAIN, "--steps", "4", "--out", "run"], ("run/checkpoints/step-00000004/*.safetensors",)),
    "wordy": Job([*WORDY, "--steps", "4", "--out", "wordy"], ("wordy/checkpoints/step-00000004/*.safetensors",)),
    "averaged": Job(
        [*AVERAGED, "--steps", "5", "--out", "averaged"],
        ("averaged/checkpoints/step-00000005/*.safetensors",),
    ),
    "ema": Job(["ema", "averaged", "--length", "10%", "--out", "ema.safetensors"], ("ema.safetensors",)),
    "tune": Job([*TUNE, "--out", "new"], ("new/*.json",)),
    "sample": Job(["sample", "run", "-n", "3", *SAMPLER, "--out", "images"], ("images/*.png",)),
    "eval": Job(["eval", "run", "-n", "12", *SAMPLER], ("run/images/*/*.png",)),
    "stats": Job(["stats", "data/folder", "--out", "stats.npz"], ("stats.npz",)),
    "zip": Job(["stats", "data/images.zip", "--out", "stats.npz"], ("stats.npz",)),
    "saved": Job(["stats", "data/saved", "--features", "pixels", "--out", "stats.npz"], ("stats.npz",)),
    "table": Job(["stats", "data/table", "--features", "pixels", "--out", "stats.npz"], ("stats.npz",)),
    "export": Job(["export", "run", "--out", "exported"], ("exported/unet/*", "exported/model_index.json")),
    "safetensors": Job(["export", "run", "--format", "safetensors", "--out", "weights"], ("weights/*.safetensors",)),
    "diagnose": Job(["diagnose", "run", "--out", "diagnosed"], ("diagnosed/diagnosis.json",)),
    "report": Job(["report", "run", "--out", "report.html"], ("report.html",)),
    "page": Job(["report", "compared", "ranged", "--out", "page.html"], ("page.html",)),
    "find": Job(["find", "net.py", "--out", "found.json"], ("found.json",)),
    "kappa": Job(["kappa", "--skips", "4", "--data", "data/folder", "--out", "kappa.json"], ("kappa.json",)),
    "compare": Job([*COMPARE, "--out", "new"], ("new/*/checkpoints/step-00000002/*.safetensors",)),
    "range": Job([*RANGE, "--out", "new"], ("new/range.txt",)),
    "latents": Job(
        ["train", *SMALL, "--data", "data/folder", "--autoencoder", "encoder", "--steps", "2", "--out", "new"],
        ("new/checkpoints/step-00000002/*.safetensors",),
    ),
}
MADE_BEFORE = {"export": "exported", "safetensors": "weights"}
"""Folders of the world that stand where a command writes."""
SAME_CONTENT = {"report", "page", "range"}
"""Commands whose files tell times: they must be there, and need not be the same."""

FROM = ["train", "digits", "--batch-size", "4", "--held-out", "4", "--steps", "2", "--out", "new", "--from"]
READ: list[tuple[str, list[list[str]]]] = [
    (
        "run",
        [
            ["sample", "run", "-n", "2", *SAMPLER, "--out", "images"],
            ["sample", "run", "-n", "2", *SAMPLER, "--weights", "raw", "--cache", "every=2,depth=1", "--out", "images"],
            ["eval", "run", "-n", "12", *SAMPLER],
            ["export", "run", "--out", "elsewhere"],
            ["export", "run", "--format", "safetensors", "--out", "elsewhere"],
            ["diagnose", "run"],
            ["report", "run"],
            [*TRAIN, "--steps", "4", "--out", "run"],
            ["train", "--config", "run/config.yaml", "--out", "run", "--steps", "4"],
        ],
    ),
    (
        "wordy",
        [
            ["sample", "wordy", "-n", "2", "--prompt", "a number 3", *SAMPLER, "--out", "images"],
            ["eval", "wordy", "-n", "12", *SAMPLER],
            ["export", "wordy", "--out", "elsewhere"],
            ["report", "wordy"],
            [*WORDY, "--steps", "4", "--out", "wordy"],
        ],
    ),
    (
        "averaged",
        [
            ["ema", "averaged"],
            ["ema", "averaged", "--length", "7%", "--out", "ema.safetensors"],
            ["sample", "averaged", "-n", "2", *SAMPLER, "--weights", "ema:8%", "--out", "images"],
            ["sample", "averaged", "-n", "2", *SAMPLER, "--checkpoint", "best", "--out", "images"],
            [*AVERAGED, "--steps", "5", "--out", "averaged"],
            [*FROM, "averaged"],
        ],
    ),
    (
        "tuned",
        [
            ["sample", "run", "-n", "2", *SAMPLER, "--tuned", "tuned/linear-ddim2.json", "--out", "images"],
            [*TUNE, "--out", "tuned"],
        ],
    ),
    ("scored", [["report", "scored"], ["eval", "scored", "-n", "12", *SAMPLER], ["@scores", "scored"]]),
    ("made", [["eval", "made", "--data", "digits"], ["sample", "run", "-n", "4", *SAMPLER, "--out", "made"]]),
    ("compared", [["report", "compared"], [*COMPARE, "--out", "compared"], ["report", "compared/none-seed0"]]),
    (
        "ranged",
        [
            ["report", "ranged"],
            [*RANGE, "--out", "ranged"],
            [*RANGE, "--rates", "1e-3,1e-2,1e-1", "--out", "ranged"],
            ["@rates", "ranged/range.json"],
        ],
    ),
    (
        "exported",
        [
            ["find", "exported/unet"],
            ["@pretrained", "exported"],
            ["export", "run", "--out", "exported"],
            [*FROM, "exported"],
        ],
    ),
    (
        "pretrained",
        [
            ["find", "pretrained"],
            ["@pretrained", "pretrained"],
            ["@scaling", "pretrained"],
            [*FROM, "pretrained"],
            [*FROM, "pretrained", "--lora", "2"],
            ["diagnose", "--model", "pretrained/config.json", "--data", "digits"],
            ["train", "digits", "--model", "pretrained/config.json", "--batch-size", "4", "--dry-run", "--steps", "2"],
        ],
    ),
    ("weights", [["@pretrained", "weights"], ["export", "run", "--format", "safetensors", "--out", "weights"]]),
    (
        "encoder",
        [["train", *SMALL, "--data", "data/folder", "--autoencoder", "encoder", "--dry-run", "--steps", "2"]],
    ),
    ("cache", [["stats", "data/folder"], ["eval", "run", "-n", "12", *SAMPLER]]),
]
"""Folders, and the commands that read them."""

FILES: list[tuple[str, list[list[str]]]] = [
    ("plan.json", [["@plan", "plan.json"]]),
    ("scaling.safetensors", [["@scaling", "scaling.safetensors"]]),
    ("method.json", [["@method", "method.json"]]),
    ("nnet_ema.pth", [["@official", "nnet_ema.pth"], [*FROM, "nnet_ema.pth"]]),
    ("options.json", [["find", "diffusers:UNet2DModel", "--config", "options.json"]]),
    ("net.py", [["find", "net.py"], ["diagnose", "--model", "net.py", "--data", "digits"]]),
    (
        "tiny.yaml",
        [
            ["train", "--config", "tiny.yaml", "--dry-run"],
            ["diagnose", "--config", "tiny.yaml"],
            [*COMPARE, "--out", "c"],
            [*RANGE, "--out", "r"],
        ],
    ),
]

SPOKEN = [
    *(job.words for name, job in JOBS.items() if name not in ("page",)),
    [*TRAIN, "--dry-run", "--steps", "10", "--seed", "1", "--scaling", "cs:0.7", "--lr", "1e-3"],
    [*SIZED, "--dry-run", "--budget", "5m", "--data", "data/folder"],
    [*TRAIN, "--steps", "2", "--out", "new"],
    ["train", "--recipe", "digits-tiny", "--dry-run", "--model-options", "depth=2"],
    ["stats", "data/images.npz", "--size", "8", "--channels", "1", "--split", "train", "--json"],
    ["sample", "run", "-n", "2", *SAMPLER, "--cache", "every=2,depth=1", "--out", "images"],
    ["sample", "wordy", "-n", "2", *SAMPLER, "--prompt", "a number 3", "--guidance", "2", "--out", "images"],
    [*COMPARE, "--variants", "fast: lr=1e-3", "--out", "c"],
    [*RANGE, "--set", "batch_size=4", "--variants", "fast: model_options.depth=2", "--out", "r"],
    ["kappa", "--skips", "6", "--data", "data/folder"],
    ["models", "--json"],
    ["diagnose", "--recipe", "digits-tiny", "--data", "data/folder"],
    ["find", "net.py", "--input", "1,1,8,8", "--input", "1:long", "--json"],
    ["eval", "made", "--data", "digits", "--size", "8", "-n", "4"],
    ["report", "run", "wordy", "--out", "both.html"],
    ["ema", "averaged", "--lengths", "5%,10%", "--json"],
    [*TRAIN, "--from", "run", "--lora", "2", "--steps", "2", "--out", "new"],
    ["sample", "run", "-n", "2", *SAMPLER, "--tuned", "tuned/linear-ddim2.json", "--out", "images"],
    ["completion", "bash"],
]

ENVIRONMENTS = [
    [*TRAIN, "--steps", "3", "--out", "new"],
    [*TRAIN, "--dry-run", "--steps", "3"],
    ["train", *SMALL, "--data", "data/folder", "--steps", "2", "--workers", "1", "--out", "new"],
    ["sample", "run", "-n", "2", *SAMPLER, "--out", "images"],
    ["eval", "run", "-n", "12", *SAMPLER],
    ["stats", "data/folder", "--json"],
    ["stats", "fashion-mnist"],
    ["export", "run", "--out", "elsewhere"],
    ["diagnose", "run", "--json"],
    ["report", "run"],
    ["find", "net.py"],
    ["kappa", "--skips", "4", "--data", "data/folder"],
    ["models"],
    ["completion", "zsh"],
    [*COMPARE, "--out", "c"],
    [*RANGE, "--json", "--out", "r"],
]


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
    def __init__(self, seed: int, scratch: Path, fresh: bool = False, world: Path | None = None) -> None:
        self.seed, self.scratch, self.fresh = seed, scratch, fresh
        self.world = world or scratch / "world"
        make_world(self.world)
        self.plain: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {}
        self.pairs: dict[str, dict[str, str]] = {}

    def trial(self, kind: str, number: int, seed: int | None = None) -> Trial:
        draw = random.Random(f"{self.seed if seed is None else seed}/{kind}/{number}")
        # Two levels down, so that ".." is still ours.
        place = self.scratch / "trials" / f"{kind}-{number}" / "world"
        try:
            return getattr(self, f"_{kind}")(number, draw, place)
        finally:
            shutil.rmtree(place.parent, ignore_errors=True)

    def run(self, words: list[str], world: Path, **more: Any) -> Outcome:
        return run(Command(words, str(world), **more), self.fresh and not more.get("count"))

    def _kills(self, number: int, draw: random.Random, world: Path) -> Trial:
        return self._interrupted("kills", draw.choice(["KILL", "KILL", "TERM"]), number, draw, world)

    def _faults(self, number: int, draw: random.Random, world: Path) -> Trial:
        return self._interrupted("faults", draw.choice(ERRORS), number, draw, world)

    def _interrupted(self, kind: str, code: str, number: int, draw: random.Random, world: Path) -> Trial:
        name = draw.choice(sorted(JOBS))
        job, (counts, expected) = JOBS[name], self._undisturbed(name)
        layer = draw.choice(["python", "libc"])
        layer = layer if preloaded() is not None else "python"
        fault = Fault(
            draw.randrange(1, operations(counts, code, layer) + 1),
            code,
            layer,
            kind == "faults" and draw.random() < 0.3,
        )
        self._prepare(name, world)
        before = contents(world)
        outcome = self.run(job.words, world, fault=fault)
        killed = code == "KILL" and outcome.code == -signal.SIGKILL
        found = None if killed else outcome.fault()
        again = self.run(job.words, world)
        made_already = "exists already" in again.err and "ExportError" in again.err
        if again.code != 0 and not made_already:
            found = found or f"then the plain command fails: {again.tail()}"
        after = contents(world)
        gone = lost(before, after)
        different = sorted(
            file
            for file, digest in expected.items()
            if (digest if name not in SAME_CONTENT else after.get(file, "")) != after.get(file)
        )
        if gone or different:
            found = found or f"lost: {gone[:5]}; other results: {different[:5]}"
        found = found or _left_behind(name, after)
        how = f"{code}{' for good' if fault.sticky else ''} at operation {fault.nth} in {layer}"
        return Trial(kind, number, name, f"{how} of `scalelong {' '.join(job.words)}`", found, outcome.tail())

    def _prepare(self, name: str, world: Path) -> None:
        copy_world(self.world, world, JOBS[name].words)
        if name in MADE_BEFORE:
            shutil.rmtree(world / MADE_BEFORE[name])

    def _undisturbed(self, name: str) -> tuple[tuple[int, ...], dict[str, str]]:
        """How many operations the command does, and what it makes."""
        if name not in self.plain:
            world = self.scratch / "plain" / name / "world"
            self._prepare(name, world)
            outcome = self.run(JOBS[name].words, world, count=True)
            require_success(outcome)
            found = contents(world)
            made = {file for pattern in JOBS[name].makes for file in map(str, _matching(world, pattern))}
            if not made:
                raise SystemExit(f"`scalelong {' '.join(JOBS[name].words)}` makes nothing of {JOBS[name].makes}")
            self.plain[name] = outcome.counts, {file: found[file] for file in made if file in found}
            shutil.rmtree(world.parent)
        return self.plain[name]

    def _inputs(self, number: int, draw: random.Random, world: Path) -> Trial:
        subject = draw.choice(["data", "data", "data", "folder", "folder", "folder", "file"])
        if subject == "data":
            name = draw.choice(DATA)
            words = draw.choice(
                [
                    ["stats", f"data/{name}", "--size", "8", "--features", "pixels"],
                    ["stats", f"data/{name}", "--features", "random"],
                    ["train", *SMALL, "--data", f"data/{name}", "--dry-run", "--steps", "2"],
                    ["train", *SMALL, "--data", f"data/{name}", "--condition", "class", "--steps", "2", "--out", "new"],
                    ["train", *SMALL, "--data", f"data/{name}", "--condition", "text", "--steps", "2", "--dry-run"],
                    ["train", *SMALL, "--data", f"data/{name}", "--workers", "1", "--steps", "2", "--out", "new"],
                    ["kappa", "--skips", "3", "--data", f"data/{name}"],
                ]
            )
        else:
            name, known = draw.choice(READ if subject == "folder" else FILES)
            words = draw.choice(known)
        copy_world(self.world, world, [*words, name, *(["run"] if "run" in words else [])])
        before = contents(world)
        story, what = self._damage(subject, name, world, draw)
        mutated = contents(world)
        outcome = self.run(words, world)
        gone = lost({name: value for name, value in mutated.items() if before.get(name) == value}, contents(world))
        fault = outcome.fault() or (f"lost: {gone[:5]}" if gone else None)
        if subject == "data" and "NotEnoughMemoryError" in outcome.err:
            fault = fault or "memory for data that is damaged"
        if (world / "hacked").exists():
            fault = "code was run"
        return Trial("inputs", number, what, f"{story}; `scalelong {' '.join(words)}`", fault, outcome.tail())

    def _damage(self, subject: str, name: str, world: Path, draw: random.Random) -> tuple[str, str]:
        if subject == "data":
            return mutate_data(world / "data" / name, draw), f"data: {name}"
        if subject == "file":
            return mutate_file(world / name, draw), name
        victims = sorted(path for path in (world / name).rglob("*") if path.is_file() and not path.is_symlink())
        # One of a kind has the same chance as the many: most files of a run are images and weights.
        kinds = sorted({path.suffix or path.name for path in victims})
        kind = draw.choice(kinds)
        victim = draw.choice([path for path in victims if (path.suffix or path.name) == kind])
        return f"{victim.relative_to(world).parent}/{mutate_file(victim, draw)}", f"folder: {name}"

    def _words(self, number: int, draw: random.Random, world: Path) -> Trial:
        plain = draw.choice(SPOKEN)
        words = mutate_words(plain, draw)
        copy_world(self.world, world, [*plain, "run", "made", "pretrained"])
        before = contents(world)
        outcome = self.run(words, world)
        after = contents(world)
        named = [
            place for place in ("notes.txt", "net.py", "plan.json", "tiny.yaml") if any(place in word for word in words)
        ]
        gone = [file for file in lost(before, after) if file not in named]
        fault = outcome.fault() or (f"lost: {gone[:5]}" if gone else None)
        new = sorted(file for file in set(after) - set(before) if not file.startswith("cache/"))
        if outcome.code == 2 and new:
            fault = fault or f"refused, and left {new[:4]}"
        story = f"{[word[:60] for word in words]}"
        return Trial("words", number, words[0][:12] if words else "", story, fault, outcome.tail())

    def _environment(self, number: int, draw: random.Random, world: Path) -> Trial:
        words = draw.choice(ENVIRONMENTS)
        copy_world(self.world, world, words)
        before = contents(world)
        more: dict[str, Any] = {}
        kind = draw.choice(["variables", "variables", "variables", "variables", "output", "limit"])
        if kind == "variables":
            more["environment"] = mutate_environment(draw)
        elif kind == "output":
            more["output"] = draw.choice(["closed", "full"])
        else:
            more["limit"] = draw.choice(["files", "size", "folder"])
        # Python reads some variables at its start alone, so a few begin anew.
        fresh = self.fresh or number % 40 == 20
        outcome = run(Command(words, str(world), **more), fresh)
        gone = lost(before, contents(world))
        fault = outcome.fault() or (f"lost: {gone[:5]}" if gone else None)
        story = f"{more}{' in a new process' if fresh else ''}; `scalelong {' '.join(words)}`"
        return Trial("environment", number, kind, story, fault, outcome.tail())

    def _ranks(self, number: int, draw: random.Random, world: Path) -> Trial:
        """Two processes, started and ended as torchrun does."""
        return self._two("ranks", draw.choice(["KILL", "TERM", *ERRORS]), number, draw, world)

    def _torchrun(self, number: int, draw: random.Random, world: Path) -> Trial:
        """Two processes under torchrun's own agent."""
        return self._two(
            "torchrun", draw.choice(["KILL", "KILL", "GROUP", "ENOSPC", "EROFS", "EIO"]), number, draw, world
        )

    def _two(self, kind: str, code: str, number: int, draw: random.Random, world: Path) -> Trial:
        name = draw.choice(["train", "resume", "sample", "eval", "wordy"])
        job, (counts, _) = JOBS[name], self._undisturbed(name)
        expected = self._undisturbed_pair(name)
        copy_world(self.world, world, job.words)
        before = contents(world)
        layer = draw.choice(["python", "libc"]) if preloaded() is not None else "python"
        victim = draw.choice([0, 0, 1])
        nth = draw.randrange(1, max(2, operations(counts, code, layer) // (1 if victim == 0 else 3)) + 1)
        # A disk that is read-only is so from the start and for good.
        sticky = code == "EROFS" or (draw.random() < 0.3 and code in ERRORS)
        fault = Fault(nth, code, layer, sticky)
        outcomes = self._pair(kind, job.words, world, {victim: fault})
        found = None
        for rank, outcome in enumerate(outcomes):
            ended = -outcome.code if outcome.code < 0 else 0
            killed = ended == signal.SIGKILL and code == "KILL" and rank == victim
            # The other one loses its partner in the middle of a sum; torchrun ends it.
            if outcome.hung or (not killed and not _lost_partner(outcome, outcomes[1 - rank], code)):
                problem = outcome.fault()
                found = found or (f"rank {rank}: {problem}" if problem else None)
        again = self._pair(kind, job.words, world, {})
        if any(outcome.code for outcome in again):
            found = found or f"then the plain command fails: {[outcome.tail() for outcome in again]}"
        after = contents(world)
        gone = lost(before, after)
        different = sorted(file for file, digest in expected.items() if after.get(file) != digest)
        if gone or different:
            found = found or f"lost: {gone[:5]}; other results: {different[:5]}"
        found = found or _left_behind(name, after)
        how = f"{code}{' for good' if fault.sticky else ''} at operation {nth} in {layer} of rank {victim}"
        said = " | ".join(f"{outcome.code} {outcome.tail()}" for outcome in outcomes)
        return Trial(kind, number, name, f"{how} of `scalelong {' '.join(job.words)}`", found, said)

    def _pair(self, kind: str, words: list[str], world: Path, faults: dict[int, Fault]) -> list[Outcome]:
        if kind == "torchrun":
            return run_under_torchrun([Command(words, str(world), faults.get(rank)) for rank in (0, 1)])
        return run_together(_pair(words, world, faults), self.fresh)

    def _undisturbed_pair(self, name: str) -> dict[str, str]:
        """What two processes make together: sums in another order than one makes them."""
        if name not in self.pairs:
            world = self.scratch / "pairs" / name / "world"
            copy_world(self.world, world, JOBS[name].words)
            for outcome in self._pair("ranks", JOBS[name].words, world, {}):
                require_success(outcome)
            found = contents(world)
            made = {str(file) for pattern in JOBS[name].makes for file in _matching(world, pattern)}
            self.pairs[name] = {file: found[file] for file in made}
            shutil.rmtree(world.parent)
        return self.pairs[name]


def _pair(words: list[str], world: Path, faults: dict[int, Fault]) -> list[Command]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared: dict[str, str | None] = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    shared |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        Command(words, str(world), faults.get(rank), environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]


def _left_behind(name: str, after: dict[str, str]) -> str | None:
    """Temporary files, and checkpoints beyond --keep-last 1."""
    left = [file for file in after if file.endswith(".part") and not file.startswith("cache/")]
    steps = [file for file in after if re.search(r"checkpoints/step-\d+/manifest", file)]
    surplus = name in ("train", "resume", "wordy") and len(steps) > 1
    return f"left behind: {left[:3]} {steps}" if left or surplus else None


def _lost_partner(outcome: Outcome, other: Outcome, code: str) -> bool:
    """Whether this process ended because the other one did: by torchrun's SIGTERM, or, where it waits for the other in
    torch's C++ and cannot hear that, by the SIGKILL that follows. After SIGTERM to all, nobody is to be killed."""
    if code == "GROUP":
        return outcome.code in (-signal.SIGTERM, 143)
    return other.code != 0 and outcome.code in (-signal.SIGTERM, -signal.SIGKILL, 143, 130)


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


def wanted(trials: int, kinds: Sequence[str]) -> list[tuple[str, int]]:
    """The first so many trials, the kinds mixed by their shares."""
    cycle = [kind for turn in range(max(SHARES.values())) for kind in kinds if turn < SHARES.get(kind, 1)]
    numbers = dict.fromkeys(kinds, 0)
    found = []
    for place in range(trials):
        kind = cycle[place % len(cycle)]
        found.append((kind, numbers[kind]))
        numbers[kind] += 1
    return found


def settings() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research.campaign", description="Kill, starve and deceive every command, and count what held."
    )
    parser.add_argument("--trials", type=int, default=200, help="in all, of all kinds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--kinds", default=",".join(SHARES), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, help="begin no trial after this time")
    parser.add_argument("--trial", metavar="[SEED/]KIND:NUMBER", action="append", help="one trial again; repeatable")
    parser.add_argument("--fresh", action="store_true", help="each command in a new Python instead of a fork")
    parser.add_argument("--world", type=Path, help="keep the world of the trials here, for the next campaign")
    parser.add_argument("--table", type=Path, nargs="+", help="try nothing; add up what --json wrote, list what failed")
    parser.add_argument("--verbose", action="store_true", help="print every trial, with its seconds")
    parser.add_argument("--json", type=Path, help="also write the table and the trials to this file")
    return parser


def main() -> int:
    options = settings().parse_args()
    if options.table:
        records = [json.loads(path.read_text()) for path in options.table]
        show(records)
        for record in records:
            for failed in record["failures"]:
                name = f"{failed.get('seed', record['seed'])}/{failed['kind']}:{failed['number']}"
                print(
                    f"{name} at {record.get('commit', 'an unknown commit')}: {failed['fault']}\n    {failed['story']}"
                )
        return 0
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    os.environ.pop("SCALELONG_DATA", None)
    preload()
    try:
        return fight(options)
    finally:
        if preloaded() is not None:
            shutil.rmtree(Path(os.environ["LD_PRELOAD"]).parent, ignore_errors=True)


def named(text: str, seed: int) -> tuple[str, int, int]:
    """KIND:NUMBER or SEED/KIND:NUMBER."""
    before, _, rest = text.rpartition("/")
    kind, _, number = rest.partition(":")
    return kind, int(number), int(before or seed)


def fight(options: argparse.Namespace) -> int:
    warm_up()
    trials = [(kind, number, options.seed) for kind, number in wanted(options.trials, options.kinds.split(","))]
    if options.trial:
        trials = [named(text, options.seed) for text in options.trial]
    began, done = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        campaign = Campaign(options.seed, Path(scratch), options.fresh, options.world)
        for kind, number, seed in trials:
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                break
            started, used = time.monotonic(), sum(os.times()[:4])
            trial = campaign.trial(kind, number, seed)
            if options.verbose:
                spent = f"{time.monotonic() - started:.1f} s, {sum(os.times()[:4]) - used:.2f} s of processor time"
                print(f"{kind}:{number} {trial.what}: {trial.fault or 'held'}, {spent}: {trial.story[:90]}", flush=True)
            done.append(trial)
            if trial.fault is not None or options.trial:
                print(f"{kind}:{number}  {trial.fault}\n    {trial.story}\n    {trial.said}", flush=True)
            if options.json and len(done) % 20 == 0:
                write_record(options, done, began)
    if options.json:
        write_record(options, done, began)
    show([record_of(options, done, began)])
    return 1 if any(trial.fault is not None for trial in done) else 0


def record_of(options: argparse.Namespace, done: Sequence[Trial], began: float) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "commit": commit(),
        "kinds": options.kinds,
        "fresh": options.fresh,
        "rows": rows(done),
        "seconds": round(time.monotonic() - began),
        "processor_seconds": round(sum(os.times()[:4])),
        "failures": [vars(trial) for trial in done if trial.fault is not None],
    }


@cache
def commit() -> str:
    """Of the code that is tried; "changed" if its files are not those of the commit."""
    try:
        told = [["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
        name, changes = (subprocess.check_output(["git", "-C", str(ROOT), *words], text=True).strip() for words in told)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, changed" if changes else name


def write_record(options: argparse.Namespace, done: Sequence[Trial], began: float) -> None:
    """One line per row and per failure."""
    record = record_of(options, done, began)
    lists = {
        name: "[\n" + ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in record[name]) + "\n ]"
        for name in ("rows", "failures")
    }
    fields = [f' "{name}": {lists.get(name) or json.dumps(value)}' for name, value in record.items()]
    options.json.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8", errors="backslashreplace")


def show(records: Sequence[dict[str, Any]]) -> None:
    """One table of several campaigns."""
    counts: dict[tuple[str, str], list[int]] = {}
    for row in (row for record in records for row in record["rows"]):
        group = counts.setdefault((row["kind"], row["what"]), [0, 0])
        group[0] += row["tried"]
        group[1] += row["held"]
    order = sorted(counts, key=lambda key: (KINDS.index(key[0]), key[1] != "all", key[1]))
    table = [
        {"kind": kind, "what": what, "tried": counts[kind, what][0], "held": counts[kind, what][1]}
        for kind, what in order
    ]
    print(f"\n{text_table(table, left=('kind', 'what'))}\n")
    tried, held = (sum(counts[key][place] for key in order if key[1] == "all") for place in (0, 1))
    seeds = ", ".join(str(record["seed"]) for record in records)
    used = sum(record["processor_seconds"] for record in records)
    print(f"{tried} trials, {held} held; seeds {seeds}; {used} s of processor time")


if __name__ == "__main__":
    sys.exit(main())
