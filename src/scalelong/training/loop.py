"""The training loop, in one sitting: `Trainer.fit`. The parts it uses have files of their own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import Progress, StopWatch
from ..data import Batch, ImageData, batches
from ..errors import NonFiniteError
from ..noise import NoiseProcess, losses
from ..runs.checkpoint import newest_good, prune, read_checkpoint, set_aside, write_checkpoint
from ..runs.config import TrainConfig
from ..runs.folder import RunFolder, shape_of
from ..runs.model import Network, build_model, make_conditions
from ..runs.processes import average, on_main
from .allocator import keep_freed_memory
from .cores import make_cores
from .examples import ExampleMaker, Examples
from .guard import READ_EVERY, make_guard
from .inspection import Inspector
from .interrupt import Interrupt
from .metrics import Window
from .optimizer import clip_gradient, rate, set_rate
from .order import DataOrder, split_batch
from .recovery import diagnose, roll_back
from .state import TrainState, create, restore, snapshot
from .tracking import Recorder

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
        progress: Progress,
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
