"""Contenders take turns, each in a process of its own."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import Spread, ratios
from .settings import BenchmarkError, Settings

# How far a measurement is: on a terminal one line that changes, elsewhere a line now and then.

EVERY = 15.0
"""Seconds between two lines in a log."""


class Progress:
    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.terminal = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self.terminal:
            end = "\n" if done == self.total else ""
            print(f"\r  {self.text(done, now)}\033[K", end=end, file=sys.stderr, flush=True)
        elif now - self.shown >= EVERY:
            self.shown = now
            print(f"  {self.text(done, now)}", file=sys.stderr, flush=True)

    def text(self, done: int, now: float) -> str:
        return f"{self.what}: {done} of {self.total}, {now - self.began:.0f} s"


# Interleaved rounds: in each round every contender has one turn.

Turn = Callable[[int], float]
"""Does so many steps and returns the seconds that they took together."""

PAUSE = 0.02
"""Seconds between two turns: threads of the last one that still wait actively for work should have gone to sleep."""
LONG = 2.0
"""Seconds of a step that is warm after the first time."""


@dataclass
class Race:
    """Seconds per step, of each contender in each round."""

    seconds: dict[str, list[float]]
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by which the process has grown at its peak, since before it built anything."""
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that could not take part, and why."""

    def __contains__(self, name: str) -> bool:
        return name in self.seconds

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def speed(self, name: str, baseline: str) -> Spread:
        """How many times as fast as the baseline."""
        return Spread.of(ratios(self.seconds[baseline], self.seconds[name]))

    def cost(self, name: str, baseline: str) -> Spread:
        """Time beyond the baseline's, as a share of it."""
        return Spread.of([ratio - 1 for ratio in ratios(self.seconds[name], self.seconds[baseline])])

    def memory_ratio(self, name: str, baseline: str) -> float:
        return self.memory[name] / self.memory[baseline]


def interleave(
    turns: Mapping[str, Turn],
    rounds: int,
    *,
    turn_seconds: float = 0.5,
    warm_up: int = 2,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, list[float]]:
    """Warm up, choose how many steps make a turn of at least `turn_seconds`, then measure seconds per step."""
    if rounds < 1:
        raise BenchmarkError(f"there must be at least one round, got {rounds}")
    if not turns:
        return {}
    warm = {name: _warm_up(turn, warm_up) for name, turn in turns.items()}
    steps = {name: steps_per_turn(_like(warm, name), turn_seconds) for name in turns}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    progress = Progress("rounds", rounds)
    for number in range(rounds):
        # To and fro, so that a drift of the machine's speed falls on all alike.
        for name in list(turns) if number % 2 == 0 else reversed(list(turns)):
            pause(PAUSE)
            seconds[name].append(turns[name](steps[name]) / steps[name])
        progress(number + 1)
    return seconds


def _warm_up(turn: Turn, most: int) -> float:
    shortest = turn(1)
    for _ in range(1, most):
        if shortest > LONG:
            break
        shortest = min(shortest, turn(1))
    return shortest


def _like(warm: Mapping[str, float], name: str) -> float:
    """The shortest step of contenders about as fast as this one: they get as many steps, so as many cold starts."""
    return min(seconds for seconds in warm.values() if seconds >= warm[name] / 2)


def steps_per_turn(step_seconds: float, turn_seconds: float) -> int:
    return max(1, math.ceil(turn_seconds / max(step_seconds, 1e-7)))


def turn_of(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Turn:
    """A turn in this process."""

    def turn(steps: int) -> float:
        start = clock()
        for _ in range(steps):
            step()
        return clock() - start

    return turn


# Contenders, each in a process of its own, and the race between them.

LOG_LINES = 8
END_SECONDS = 10.0


@dataclass(frozen=True)
class Contender:
    """`factory` is "package.module:function"; called with `arguments` it returns a function that does one step."""

    name: str
    factory: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """What its user would set, such as another allocator."""
    imports: tuple[str, ...] = ("accelerate",)
    """Packages that its step uses: they are loaded before its memory is looked at for the first time."""
    optional: bool = False
    """The race goes on without it if it cannot be built."""


class Worker:
    """The parent's end of a contender's process."""

    def __init__(self, contender: Contender, threads: int) -> None:
        self.contender = contender
        self.memory = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=package_environment(threads) | contender.environment,
        )
        self._send(
            {
                "factory": contender.factory,
                "arguments": contender.arguments,
                "imports": contender.imports,
                "threads": threads,
            }
        )

    def wait_until_built(self) -> None:
        self._receive()

    def turn(self, steps: int) -> float:
        self.begin(steps)
        return self.end()

    def begin(self, steps: int) -> None:
        self._send({"steps": steps})

    def end(self) -> float:
        """The seconds of the steps that were begun."""
        reply = self._receive()
        self.memory = reply["memory"]
        return reply["seconds"]

    def ask(self, question: str) -> Any:
        """The result of a method of the step."""
        self._send({"ask": question})
        return self._receive()["answer"]

    def tensors(self) -> int:
        """Bytes of tensors at the peak of one step, by one thread, of a second contender like this."""
        self._send({"tensors": True})
        return self._receive()["answer"]

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # the end of its input is its end
            self._process.wait(END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        reply = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"{self.contender.name}: {reply['error']}")
        return reply

    def _died(self) -> BenchmarkError:
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return BenchmarkError("\n".join([f"{self.contender.name}: its process ended with code {code}", *tail]))


def race(
    contenders: Sequence[Contender], settings: Settings, rounds: int, *, turn_seconds: float | None = None
) -> Race:
    """Build all contenders, then let them take turns."""
    with ExitStack() as stack:
        workers, missing = start(contenders, settings, stack)
        seconds = interleave(
            {worker.contender.name: worker.turn for worker in workers},
            settings.rounds_or(rounds),
            turn_seconds=settings.turn_seconds if turn_seconds is None else turn_seconds,
        )
        return Race(seconds, {worker.contender.name: worker.memory for worker in workers}, missing)


def start(contenders: Sequence[Contender], settings: Settings, stack: ExitStack) -> tuple[list[Worker], dict[str, str]]:
    """The workers that could be built, and why the others could not. They end with the stack."""
    started = []
    for contender in contenders:  # all at once: nothing is measured yet
        worker = Worker(contender, settings.threads)
        stack.callback(worker.close)
        started.append(worker)
    ready, missing = [], {}
    for worker in started:
        try:
            worker.wait_until_built()
            worker.turn(1)  # what is made at the first step, a compiled network for example, belongs to building
            ready.append(worker)
        except BenchmarkError as error:
            if not worker.contender.optional:
                raise
            missing[worker.contender.name] = str(error)
    return ready, missing


def ask_one(contender: Contender, question: str, settings: Settings) -> Any:
    """One question to a contender that takes part in nothing else."""
    with ExitStack() as stack:
        worker = Worker(contender, settings.threads)
        stack.callback(worker.close)
        worker.wait_until_built()
        return worker.ask(question)


def package_environment(threads: int) -> dict[str, str]:
    """For processes that import this package, with so many threads."""
    # `benchmarks` stands at the root of the checkout; the library may not be installed.
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": path}
