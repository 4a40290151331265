"""SIGTERM and Ctrl-C as a wish that the loop can ask for between two steps."""

import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..console import StopWatch, TrainingProgress
from ..data import Batch, ImageData, batches
from ..diffusion.inputs import DataOrder, ExampleMaker, Examples, split_batch
from ..errors import NonFiniteError, RunFolderError
from ..noise import NoiseProcess, losses
from ..runs.checkpoint import newest_good, prune, read_checkpoint, saved_steps, set_aside, write_checkpoint
from ..runs.config import TrainConfig
from ..runs.folder import RunFolder, shape_of
from ..runs.model import Network, build_model, load_images, make_conditions
from ..runs.processes import average, check_batch_size, describe, gather_objects, make_accelerator, on_main
from ..runs.recipes import default_folder
from ..stability.nonfinite import diagnose_step
from .cores import keep_freed_memory, make_cores
from .inspection import Inspector
from .state import READ_EVERY, TrainState, clip_gradient, create, make_guard, rate, restore, set_rate, snapshot
from .tracking import Recorder, Window

IMPATIENT_AFTER = 3.0
"""Seconds after which a second Ctrl-C stops at once. Launchers repeat the first one."""


class Interrupt:
    """Within a `with` block signals only set `requested`, so that the loop can save before it ends."""

    latest: ClassVar[str | None] = None
    """The signal that ended the latest block early; the command line makes its exit code of it."""

    def __init__(self) -> None:
        self.requested: str | None = None
        Interrupt.latest = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
            Interrupt.latest = self.requested
        elif number == signal.SIGINT and time.monotonic() - self._since > IMPATIENT_AFTER:
            raise KeyboardInterrupt


# After a non-finite step: say where it came from, and go back if that is asked for.


def diagnose(trainer: "Trainer", step: int) -> str:
    """The passes of the bad step again. Each process looks at its own images; the first finding is reported."""
    order = trainer.order.batches(range(step, step + 1), trainer.parts)
    source = list(batches(trainer.data, order))
    found = diagnose_step(
        trainer.state.bare,
        lambda: trainer.backward(step, iter(source), local=True),
        [
            torch.cat(
                [trainer.examples(step, part, batch).x0 for part, batch in zip(trainer.parts, source, strict=True)]
            )
        ],
        step,
        max(saved_steps(trainer.run.checkpoints), default=None),
    )
    telling = gather_objects(trainer.accelerator, (found.layer is None, str(found)))
    return sorted(telling, key=lambda finding: finding[0])[0][1]


def roll_back(run: RunFolder, config: TrainConfig, bad_step: int, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from with a lower rate, or None to stop. If one did not help, the one before it."""
    history = run.rollbacks()
    if config.guard.on_nan == "stop" or len(history) >= config.guard.max_rollbacks:
        return None
    path = newest_good(run.checkpoints, say)
    if path is not None and history and _step(path) <= history[-1]["to_step"]:
        path = newest_good(run.checkpoints, say, before=history[-1]["to_step"]) or path
    if path is None:
        return None
    run.record_rollback({"bad_step": bad_step, "to_step": _step(path), "factor": config.guard.rollback_factor})
    say(
        f"step {bad_step} was not finite: back to step {_step(path)}, rate now {run.rate_factor():g} of the planned "
        f"(rollback {len(history) + 1} of {config.guard.max_rollbacks})"
    )
    return path


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# The training loop, in one sitting: `Trainer.fit`. The parts it uses have files of their own.

Hook = Callable[[TrainState], dict[str, float] | None]
"""Called after every step, with the number of steps done in `state.step`; what it returns is recorded."""


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        accelerator: Any,
        data: ImageData,
        held_out: ImageData | None,
        progress: TrainingProgress,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.config, self.run, self.accelerator, self.data = config, run, accelerator, data
        self.progress, self.hooks = progress, hooks
        self.process = NoiseProcess(config.diffusion.schedule)
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        self.state = create(config, accelerator, build_model(config, shape_of(data)))
        self.cores = make_cores(config, self.state.bare, accelerator)
        self.order = DataOrder(len(data), config.batch_size, config.seed)
        self.parts = split_batch(
            config.batch_size, accelerator.num_processes, config.hardware.accumulation, accelerator.process_index
        )
        conditions = make_conditions(config, data.classes, data.annotations.captions, say=progress.say)
        self.examples = ExampleMaker(config, self.process, shape_of(data), conditions, accelerator.device)
        self.guard = make_guard(self.state.optimizer, accelerator.device, accelerator.scaler)
        self.inspector = Inspector(
            config, run, self.state, self.process, shape_of(data), conditions, data.annotations.captions, held_out
        )
        self.recorder = Recorder(config, run, accelerator, progress)
        self.window = Window(accelerator.device)
        self.watch = StopWatch()
        self.saved_step = -1

    def fit(self, interrupt: Interrupt) -> bool:
        """The loop. True when all steps are done, False when it was interrupted; both ways the state is saved."""
        self.resume()
        while self.state.step < self.config.steps:
            wish = self.optimise(interrupt.requested is not None)
            # Reading a number from an accelerator means waiting for it, so this is not done at every step.
            if not self.time_to_look():
                continue
            bad = self.guard.bad_step()
            if bad is not None:
                self.recover(bad)
                continue
            self.after_step()
            if wish > 0:
                self.save()
                by = interrupt.requested or "another process"
                self.progress.say(f"stopped by {by} after step {self.state.step}; run the same command to continue")
                return False
        self.save()
        self.progress.say(f"finished at step {self.state.step}: {self.run.path}")
        return True

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole; a new run begins with one, so that a full disk shows now."""
        path = on_main(self.accelerator, lambda: newest_good(self.run.checkpoints, self.progress.say))
        if path is None:
            on_main(self.accelerator, lambda: set_aside(self.run.checkpoints, -1))
            self.save()
        else:
            self.load(path)
            self.progress.say(f"continuing after step {self.state.step}")
        on_main(self.accelerator, lambda: self.run.cut_metrics(self.state.step))
        self.recorder.start(self.state.step)
        self.begin_at(self.state.step)

    def load(self, path: Path) -> None:
        saved = read_checkpoint(path)
        restore(self.state, saved, self.config.seed)
        self.window.load(self.state.window)
        self.saved_step = self.state.step
        on_main(self.accelerator, lambda: set_aside(self.run.checkpoints, self.state.step))

    def begin_at(self, step: int) -> None:
        """Point the data at a step. Nothing before it is read."""
        steps = range(step, self.config.steps)
        order = self.order.batches(steps, self.parts)
        self.source: Iterator[Batch] = batches(self.data, order, workers=self.config.images.workers)
        self.rate_factor = self.run.rate_factor()
        self.guard.reset()
        self.watch.start(step)

    def optimise(self, wish_to_stop: bool) -> Tensor:
        """One step of all processes. The result is above 0 if any of them wishes to stop."""
        state, step = self.state, self.state.step
        set_rate(state.optimizer, self.rate_factor * rate(self.config.optimizer, step, self.config.steps))
        state.model.train()
        loss = self.backward(step, self.source)
        self.accelerator.unscale_gradients()
        norm = clip_gradient(state.parameters, self.config.optimizer.clip)
        wish = torch.tensor(float(wish_to_stop), device=loss.device)
        loss, wish = average(self.accelerator, torch.stack([loss, wish])).unbind()
        self.guard.protect(step, loss, norm)
        state.prepared_optimizer.step()
        state.prepared_optimizer.zero_grad()
        state.ema.update(step)
        self.window.add(loss, norm)
        state.step = step + 1
        return wish

    def time_to_look(self) -> bool:
        due = self.config.something_is_due(self.state.step) or self.state.step % READ_EVERY == 0
        return due or bool(self.hooks) or self.accelerator.device.type == "cpu"

    def backward(self, step: int, source: Iterator[Batch], local: bool = False) -> Tensor:
        """Forward and backward over this process's parts of a batch.

        `local` leaves other processes out, and takes each part through the model in one piece.
        """
        network = self.state.bare_network if local else self.state.network
        total = torch.zeros((), device=self.accelerator.device)
        share = 1 / len(self.parts)
        for i, positions in enumerate(self.parts):
            examples = self.examples(step, positions, next(source))
            if self.cores is not None and not local:
                loss = self.cores.backward(partial(self._summed_loss, examples), len(positions), share)
            else:
                last = i == len(self.parts) - 1
                with nullcontext() if last or local else self.accelerator.no_sync(self.state.model):
                    loss = self._loss(examples, network)
                    self.accelerator.backward(loss * share)
            total += loss.detach() * share
        return total

    def _loss(self, examples: Examples, network: Network) -> Tensor:
        return self._losses(examples, network).mean()

    def _summed_loss(self, examples: Examples, network: Network, part: slice) -> Tensor:
        return self._losses(examples.part(part), network).sum()

    def _losses(self, examples: Examples, network: Network) -> Tensor:
        x0, noise, t, condition = examples
        if self.state.channels_last:
            x0, noise = (value.to(memory_format=torch.channels_last) for value in (x0, noise))
        return losses(network.given(condition), self.process, self.config.diffusion.prediction, x0, noise, t)

    def after_step(self) -> None:
        step, final = self.state.step, self.state.step == self.config.steps
        for hook in self.hooks:
            self.recorder.write(step, hook(self.state))
        if step % self.config.logging.log_every == 0 or final:
            self.recorder.record(self.state, self.window, self.watch, self.order.epoch(step))
        with self.watch.paused():
            if step % self.config.held_out_every == 0 or final:
                self.recorder.write(step, self.inspector.held_out_loss())
            if self.config.samples_every and (step % self.config.samples_every == 0 or final):
                self.recorder.images(step, self.inspector.sample_grid())
            if self.config.logging.scores_every and (step % self.config.logging.scores_every == 0 or final):
                self.recorder.write(step, self.inspector.scores())
            if step % self.config.checkpoints.save_every == 0:
                self.save()

    def save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.state.window = self.window.save()
        saved = snapshot(self.state)
        on_main(self.accelerator, lambda: write_checkpoint(self.run.checkpoints, saved) and None)
        on_main(self.accelerator, lambda: prune(self.run.checkpoints, self.config.checkpoints))
        self.saved_step = self.state.step

    def recover(self, bad: int) -> None:
        """Stop with a diagnosis, or go back to a good checkpoint."""
        diagnosis = diagnose(self, bad)
        path = on_main(self.accelerator, lambda: roll_back(self.run, self.config, bad, self.progress.say))
        if path is None:
            raise NonFiniteError(diagnosis)
        self.load(path)
        on_main(self.accelerator, lambda: self.run.cut_metrics(self.state.step))
        self.begin_at(self.state.step)

    def close(self) -> None:
        self.recorder.close()
        if self.cores is not None:
            self.cores.close()


# `train`: prepare a run and hand it to the loop.

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    step: int
    finished: bool
    """False if a signal ended it early."""


def train(config: TrainConfig, out: str | PathLike[str] | None = None, *, hooks: Sequence[Hook] = ()) -> TrainResult:
    """Train as the configuration says, in a run folder. A run that is there already is continued."""
    run = RunFolder(out or default_folder(config))
    accelerator = make_accelerator(config, str(run.path))
    progress = TrainingProgress(config.steps, accelerator.is_main_process)
    try:
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            stack.callback(progress.close)
            check_batch_size(config, accelerator.num_processes)
            on_main(accelerator, lambda: stack.enter_context(run.locked()) and None)
            data, held_out = load_images(config, progress.say)
            on_main(accelerator, lambda: run.open(config, data, describe(accelerator), progress.say))
            trainer = Trainer(config, run, accelerator, data, held_out, progress, hooks)
            stack.callback(trainer.close)
            finished = trainer.fit(interrupt)
            return TrainResult(run.path, trainer.state.step, finished)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RunFolderError(
            f"{run.path} cannot be written: {error}. Its checkpoints are intact; make room, then run the same command "
            f"to continue"
        ) from error
