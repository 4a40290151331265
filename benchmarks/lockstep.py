"""Contenders in lockstep: their steps are cut into slices, and after each slice the next contender goes on.

A machine that is shared with strangers changes its speed by several percent within a tenth of a second. Whole steps
that follow each other cannot show a difference of half a percent there; slices of a few milliseconds can.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from scalelong.console import Progress

from .contender import Contender, Worker
from .record import Spread
from .settings import BenchmarkError, Settings, cores

# Contenders in lockstep: their steps are cut into slices, and after each slice the next contender goes on.
#
# A machine that is shared with strangers changes its speed by several percent within a tenth of a second. Whole steps
# that follow each other cannot show a difference of half a percent there; slices of a few milliseconds can.

Cut = Callable[[], None]


@dataclass(eq=False)
class _Runner:
    name: str
    step: Callable[[], object]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    slices: list[float] = field(default_factory=list)
    error: BaseException | None = None


class Lockstep:
    """Runs one step of each contender at the same time, one slice at a time. The steps call `cut` between slices.

    Each has a thread, and one thread at a time goes on. The clock is that of the thread's own processor time, which
    stands still while another process has the core.
    """

    def __init__(
        self, steps: Mapping[str, Callable[[], object]], *, seed: int = 0, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.steps, self.clock = dict(steps), clock
        self.on_cut: Cut | None = None
        """What `cut` does outside a round."""
        self._random = random.Random(seed)
        self._ring: list[_Runner] = []
        self._running: _Runner | None = None
        self._began = 0.0
        self._in_one_piece = False

    def round(self) -> dict[str, list[float]]:
        """One step of each, in an order of chance: the seconds of all slices."""
        runners = [_Runner(name, step) for name, step in self.steps.items()]
        self._ring = self._random.sample(runners, len(runners))
        threads = [threading.Thread(target=self._run, args=[runner], name=runner.name) for runner in runners]
        for thread in threads:
            thread.start()
        self._give_turn(self._ring[0])
        for thread in threads:
            thread.join()
        self._running = None
        for runner in runners:
            if runner.error is not None:
                raise runner.error
        counts = {runner.name: len(runner.slices) for runner in runners}
        if len(set(counts.values())) > 1:
            raise BenchmarkError(f"contenders in lockstep must have as many slices each, got {counts}")
        return {runner.name: runner.slices for runner in runners}

    def cut(self) -> None:
        """The end of a slice: others go on until it is this contender's turn again."""
        if self._in_one_piece:
            return
        runner = self._running
        if runner is None:
            if self.on_cut is not None:
                self.on_cut()
            return
        runner.slices.append(self.clock() - self._began)
        self._give_turn(self._after(runner))
        runner.turn.acquire()
        self._began = self.clock()

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """For work that only some contenders do: cuts do not count within."""
        self._in_one_piece = True
        try:
            yield
        finally:
            self._in_one_piece = False

    def _run(self, runner: _Runner) -> None:
        runner.turn.acquire()
        self._began = self.clock()
        try:
            runner.step()
        except BaseException as error:
            runner.error = error
            self._in_one_piece = False
        runner.slices.append(self.clock() - self._began)
        following = self._after(runner)
        self._ring.remove(runner)
        if following is not runner:
            self._give_turn(following)

    def _after(self, runner: _Runner) -> _Runner:
        return self._ring[(self._ring.index(runner) + 1) % len(self._ring)]

    def _give_turn(self, runner: _Runner) -> None:
        self._running = runner
        runner.turn.release()


# Differences of less than a percent: contenders that share a process and go in lockstep, and their memory.

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""All threads of the process get their memory from the same place."""
STEPS = 2
"""Until the memory of a process has its peak."""


@dataclass(frozen=True)
class Lockstepped:
    """What was found about contenders in lockstep; the first is the baseline."""

    seconds: dict[str, list[float]]
    """The seconds of each contender's step, in each round."""
    whole: dict[str, Spread]
    """Time over the baseline's, as a share of it, with its 95 % interval."""
    parts: dict[str, Spread]
    """The same, of the slices in which any of them calls other operations than the baseline."""
    share: float
    """The share of the baseline's time that these slices take."""
    same: list[str]
    """Contenders that call the same operations as the baseline, everywhere."""

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def notes(self, baseline: str, again: str, besides: str = "") -> list[str]:
        """What the two columns of costs are. `besides` says where else the first one compares."""
        same = ", ".join(name for name in self.same if name not in (baseline, again))
        return [
            f"Costs over {baseline!r} with 95 % intervals. First where any of them calls other operations than it"
            f"{besides} ({100 * self.share:.0f} % of the time): the rest is the same calls on the same sizes. Then by "
            f"the whole. {again!r} is the noise.",
            *([f"The same operations as {baseline!r} everywhere: {same}."] if same else []),
        ]


def lockstep(
    factory: str, arguments: dict[str, Any], rounds: int, settings: Settings, *, imports: tuple[str, ...]
) -> Lockstepped:
    """Rounds of the contenders that the factory makes, on one core."""
    contender = Contender("contenders in lockstep", factory, arguments, ONE_ARENA, imports)
    with ExitStack() as stack:
        worker = Worker(contender, threads=1)
        stack.callback(worker.close)
        worker.wait_until_built()
        worker.turn(1)
        same = worker.ask("compare_operations")
        worker.ask("forget")
        total = settings.rounds_or(rounds)
        progress = Progress("rounds in lockstep", total, stream=sys.stderr)
        for number in range(total):
            worker.turn(1)
            progress(number + 1)
        found = worker.ask("found")
    whole, parts = ({name: Spread(**value) for name, value in found[key].items()} for key in ("whole", "parts"))
    return Lockstepped(found["seconds"], whole, parts, found["share"], same)


@dataclass(frozen=True)
class Memory:
    process: float
    """Bytes by which a process of its own has grown at its peak, with all threads."""
    tensors: float
    """Bytes of tensors at the peak of a step on one core, the same in every run."""


def memory_of(contenders: Sequence[Contender], settings: Settings) -> dict[str, Memory]:
    """Each in a process of its own."""
    progress = Progress("memory of contenders", len(contenders), stream=sys.stderr)
    found: dict[str, Memory] = {}

    def measure(contender: Contender) -> Memory:
        with ExitStack() as stack:
            worker = Worker(contender, settings.threads)
            stack.callback(worker.close)
            worker.wait_until_built()
            worker.turn(STEPS)
            return Memory(worker.memory, worker.tensors())

    with ThreadPoolExecutor(max(1, cores() // settings.threads)) as pool:
        for contender, memory in zip(contenders, pool.map(measure, contenders), strict=True):
            found[contender.name] = memory
            progress(len(found))
    return found
