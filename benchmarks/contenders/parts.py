"""Our trainer with a stopwatch at each of its parts beside the network."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scalelong.data import Batch
from scalelong.stability import StabilityMonitor
from scalelong.training import loop

from .trainer import TrainingStep, configuration, make_trainer

LINES = 20
"""Lines of the log that are written to see what one costs."""


class WatchedStep(TrainingStep):
    """The seconds of each part, summed up over all steps since the last question."""

    def __init__(self, trainer: loop.Trainer) -> None:
        super().__init__(trainer)
        self.seconds: dict[str, float] = {}
        self.steps = 0
        state, guard = trainer.state, trainer.guard
        trainer.source = self._watched_source(trainer.source)
        trainer.examples = self._watched("data", trainer.examples)  # pyright: ignore[reportAttributeAccessIssue]
        state.prepared_optimizer.step = self._watched("optimiser", state.prepared_optimizer.step)
        state.prepared_optimizer.zero_grad = self._watched("optimiser", state.prepared_optimizer.zero_grad)
        loop.clip_gradient = self._watched("optimiser", loop.clip_gradient)  # in this process alone
        guard.protect = self._watched("optimiser", guard.protect)
        guard.bad_step = self._watched("optimiser", guard.bad_step)
        state.ema.update = self._watched("moving average", state.ema.update)
        trainer.window.add = self._watched("logging", trainer.window.add)

    def __call__(self) -> None:
        super().__call__()
        self.steps += 1

    def forget(self) -> None:
        self.seconds, self.steps = {}, 0

    def parts(self) -> dict[str, float]:
        """Seconds per step."""
        found = {name: value / self.steps for name, value in self.seconds.items()}
        return found | {"logging": found["logging"] + self._line() / self.trainer.config.logging.log_every}

    def _line(self) -> float:
        """Seconds that one line of the log takes."""
        trainer = self.trainer
        trainer.run.path.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        for _ in range(LINES):
            trainer.window.values[0] += 1
            trainer.watch.start(trainer.state.step - 1)
            trainer.recorder.record(trainer.state, trainer.window, trainer.watch, 0.0)
        return (time.perf_counter() - start) / LINES

    def _watched(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **keywords)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

        return call

    def _watched_source(self, source: Iterator[Batch]) -> Iterator[Batch]:
        following = self._watched("data", lambda: next(source))
        while True:
            yield following()


def watched_step(**arguments: Any) -> WatchedStep:
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    return WatchedStep(trainer)


def monitor_of(trainer: loop.Trainer, every: int, shape: list[int]) -> StabilityMonitor:
    """A monitor that reads a probe batch as well, as `docs/stability.md` shows it."""
    probe = (torch.randn(4, *shape), torch.full((4,), 500.0))
    return StabilityMonitor(trainer.state.bare, every=every, probe_batch=probe)


def monitored_step(*, every: int, **arguments: Any) -> Callable[[], object]:
    """Steps with a stability monitor."""
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    monitor = monitor_of(trainer, every, arguments["shape"])
    step = TrainingStep(trainer)

    def monitored() -> None:
        step()
        monitor.step(trainer.window.values[1])

    return monitored
