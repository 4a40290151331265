"""Contenders in lockstep: their steps are cut into slices, and after each slice the next contender goes on.

A machine that is shared with strangers changes its speed by several percent within a tenth of a second. Whole steps
that follow each other cannot show a difference of half a percent there; slices of a few milliseconds can.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from .errors import BenchmarkError

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
        """What `cut` does outside of a round."""
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
