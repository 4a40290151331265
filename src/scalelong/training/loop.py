"""The training loop: `train(config, out)`, and the `Trainer` that carries it out.

`Trainer.fit` is the order of events, `Trainer.step` is a step, from the images to the update. What a step is made of
stands in `diffusion/inputs.py` (x_0, ε, t, condition) and `state.py` (weights, average, bad steps); what happens
between steps in `recording.py` (metrics, held-out loss, samples, scores) and `monitoring.py` (a loss that collapses).
"""

import logging
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TrainConfig, default_folder, is_snapshot, with_values
from ..console import Progress, html_lines, show_logs
from ..data import Batch, ImageData, batches
from ..diffusion import DataOrder, Examples, split_batch
from ..errors import CheckpointError, CollapseError, NonFiniteError
from ..files import read_bytes
from ..models import Denoiser, keep_freed_memory
from ..noise import LEVELS, NoiseProcess, flat_losses, loss_weights, mean_square, noise_levels, noisy_and_target
from ..runs import (
    RunData,
    RunFolder,
    abandon_after,
    average,
    build_model,
    check_batch_size,
    describe_processes,
    forget_snapshots_after,
    gather_objects,
    in_any_process,
    load_run_data,
    load_start_,
    make_accelerator,
    newest_good,
    on_main,
    point_best,
    prune,
    read_checkpoint,
    saved_steps,
    shares,
    step_folder,
    step_of,
    with_absolute_data,
    write_checkpoint,
    write_snapshot,
)
from ..scaling import as_scaling
from ..stability import Collapse, explain_nonfinite, last_good
from .hardware import Interrupt, choose_precision, make_cores, switches
from .monitoring import RunMonitor
from .optimizers import base_rate, rate, set_rate
from .recording import Inspector, MetricsRecorder, TrainingProgress
from .state import BadSteps, TrainState, clip_gradient, create, release, restore, snapshot

logger = logging.getLogger(__name__)

Hook = Callable[[TrainState], dict[str, float] | None]
"""Called after every step, with the number of steps done in `state.step`; what it returns is recorded."""

READ_EVERY = 10
"""Most steps between two readings of an accelerator, which wait for it."""


@dataclass(frozen=True)
class TrainResult:
    """The end of a run. Print it."""

    folder: Path
    step: int
    finished: bool
    """False if a signal ended it early."""
    samples: Path | None = None
    """The newest sample grid."""

    def __str__(self) -> str:
        if not self.finished:
            return f"stopped after step {self.step}: {self.folder}. Run the same command to continue"
        samples = f"\nsamples: {self.samples}" if self.samples is not None else ""
        next_ = ", ".join(f"scalelong {name} {shlex.quote(str(self.folder))}" for name in ("sample", "eval", "report"))
        return f"finished at step {self.step}: {self.folder}{samples}\nnext: {next_}"

    def _repr_html_(self) -> str:
        """For notebooks: the same, and the newest grid."""
        text = html_lines(str(self).splitlines())
        if self.samples is None or not self.samples.exists():
            return text
        return f"{text}<img src='data:image/png;base64,{b64encode(read_bytes(self.samples)).decode()}'>"


def train(
    config: TrainConfig,
    out: str | PathLike[str] | None = None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    hooks: Sequence[Hook] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train as the configuration says, in a run folder. A run that is there already is continued.

    A `model` takes the place of `config.model`: its long skips are scaled as the configuration says, and the run
    starts from its weights. `data`, an ImageData or anything that `load_data` takes, takes the place of `config.data`.
    """
    as_scaling(config.scaling)  # a name that is unknown is refused before anything is written
    if model is not None:
        config = replace(config, model=f"{type(model).__module__}:{type(model).__qualname__}")
    if isinstance(data, str | PathLike):
        config, data = replace(config, data=str(data)), None
    if data is not None:
        config = replace(config, data=data.name if isinstance(data, ImageData) else type(data).__name__)
    run = RunFolder(out or default_folder(config))
    config = with_absolute_data(config) if data is None else config
    accelerator = make_accelerator(config, str(run.path))
    unit = config.diffusion.prediction.replace("epsilon", "ε")
    progress = TrainingProgress(config.steps, accelerator.is_main_process and not quiet, unit=unit)
    with ExitStack() as stack:
        stack.enter_context(show_logs(quiet))
        stack.enter_context(switches(config.hardware))
        stack.callback(progress.close)
        check_batch_size(config, accelerator.num_processes)
        on_main(accelerator, lambda: stack.enter_context(run.locked()))
        loaded = load_run_data(config, Progress("reading images"), data=data)
        if config.hardware.precision == "auto":

            def precision() -> str:
                before = run.begun_with()
                return before.hardware.precision if before else choose_precision(config, loaded.shape, device, model)

            device = accelerator.device
            config = with_values(config, {"hardware.precision": on_main(accelerator, precision)})
            accelerator = make_accelerator(config, str(run.path))
        start = on_main(accelerator, lambda: run.check(config, loaded))
        trainer = Trainer(config, run, accelerator, loaded, progress, hooks, new=start is None, model=model)
        stack.callback(trainer.close)
        # Not before there is a network: a run that is refused must leave nothing.
        on_main(accelerator, lambda: run.open(config, loaded, describe_processes(accelerator)))
        # Before there is something to save, a signal ends the process as usual.
        finished = trainer.fit(stack.enter_context(Interrupt()), start)
        return TrainResult(run.path, trainer.state.step, finished, max(run.samples.glob("*.png"), default=None))


class StepResult(NamedTuple):
    """The numbers of one step, over all processes, on the device."""

    loss: Tensor
    grad_norm: Tensor
    """Before clipping."""
    by_level: Tensor
    """(3, LEVELS): images, losses and zero losses of each noise level."""


class Question(NamedTuple):
    """The inputs of the network for some images, and its right answer."""

    x_t: Tensor
    t: Tensor
    condition: Any
    target: Tensor
    weights: Tensor | None
    """How much each image counts; None if all count alike."""

    def errors(self, network: Denoiser, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The errors of some images, one for each: weighted for the loss, and as they are."""
        condition = None if self.condition is None else self.condition[part]
        errors = mean_square(self.target[part] - network.given(condition)(self.x_t[part], self.t[part]))
        return errors if self.weights is None else errors * self.weights[part], errors.detach().float()


class Trainer:
    """One process of a run."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        accelerator: Any,
        data: RunData,
        progress: TrainingProgress,
        hooks: Sequence[Hook] = (),
        new: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.config, self.run, self.accelerator, self.data = config, run, accelerator, data
        self.progress, self.hooks = progress, hooks
        self.process = NoiseProcess(config.diffusion.schedule)
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        network = build_model(config, data.shape, model=model)
        if config.start_from is not None and new:
            load_start_(network, config, data.shape)
        self.state = create(config, accelerator, network, data)
        self.cores = make_cores(config, self.state.bare, accelerator)
        self.order = DataOrder(len(data.train), config.batch_size, config.seed)
        self.parts = split_batch(
            config.batch_size, accelerator.num_processes, config.hardware.accumulation, accelerator.process_index
        )
        self.inputs = data.inputs(accelerator.device)
        self.inspector = Inspector(config, run, self.state, data, self.inputs)
        self.recorder = MetricsRecorder(config, run, accelerator, progress)
        readings = config.monitor_every if config.monitor_every <= config.steps else 0
        self.monitor = RunMonitor(run, self.state, readings, self.recorder.alert)
        self.saved_step = -1

    # The order of events

    def fit(self, interrupt: Interrupt, start: Path | None = None) -> bool:
        """The loop, from a checkpoint or from the beginning. True when all steps are done, False when it was
        interrupted; both ways the state is saved."""
        if start is None:
            self.save()  # so that a full disk shows now
            on_main(self.accelerator, lambda: self.run.cut_metrics(0))
        else:
            self.load(start)
            logger.info(f"continuing after step {self.state.step}")
            # A kill between saving and pruning left one more than there should be.
            on_main(self.accelerator, self.prune)
        self.recorder.open_trackers(self.state.step)
        self.begin_at(self.state.step)
        on_cpu = self.accelerator.device.type == "cpu"
        while self.state.step < self.config.steps and not self.out_of_patience():
            # All images before the first forward: if one cannot be read, the state is that of a whole step.
            images = [next(self.source) for _ in self.parts]
            done = self.step(images)
            self.recorder.add(done.loss, done.grad_norm)
            self.monitor.add(self.state.step, done.by_level)
            # Reading a number from an accelerator means waiting for it, so this is not done at every step.
            step = self.state.step
            reads = on_cpu or step % READ_EVERY == 0 or self.config.something_is_due(step)
            if reads and self.went_back():
                continue
            for hook in self.hooks:
                self.recorder.write(step, hook(self.state))
            if reads:
                self.after_step()
                if in_any_process(self.accelerator, interrupt.requested is not None):
                    self.save()
                    break
        else:
            self.save()
            return True
        by = interrupt.requested or "another process"
        logger.info(f"stopped by {by} after step {self.state.step}")
        return False

    def begin_at(self, step: int) -> None:
        """Point the data at a step. Nothing before it is read."""
        order = self.order.batches(range(step, self.config.steps), self.parts)
        workers, pin = self.config.images.workers, self.accelerator.device.type in ("cuda", "xpu")
        self.source: Iterator[Batch] = batches(self.data.train, order, workers, pin=pin)
        self.rate_factor = self.run.rate_factor()
        self.modules = list(self.state.model.modules())
        self.bad_steps = BadSteps(self.accelerator.device)
        self.monitor.begin_at(step, act=self.config.guard.on_collapse != "ignore")
        self.recorder.begin_at(step)
        self.progress.begin_at(step)

    # A step

    def step(self, images: Sequence[Batch]) -> StepResult:
        """One step of all processes: from the images of this process's parts of the batch to the update."""
        state, step = self.state, self.state.step
        set_rate(state.optimizer, self.rate_at(step))
        if not all(module.training for module in self.modules):  # setting it costs much more than looking
            state.model.train()
        share, loss = 1 / len(self.parts), torch.zeros((), device=self.accelerator.device)
        by_level = torch.zeros(3, LEVELS, device=self.accelerator.device)
        for positions, batch in zip(self.parts, images, strict=True):
            question = self.question(self.inputs.for_step(step, positions, batch))
            # Processes exchange their gradients once per step: with the last part.
            mean, errors = self.backward(question, share, exchange=positions == self.parts[-1])
            loss += mean * share
            levels = noise_levels(self.process, question.t)
            by_level += sums_by_level(levels, errors, flat_losses(question.target))
        self.accelerator.unscale_gradients()
        norm = clip_gradient(state.parameters, self.config.optimizer.clip)
        means = average(self.accelerator, torch.cat([loss[None], by_level.flatten()]))
        self.bad_steps.skip_if_bad(state.optimizer, self.accelerator.scaler, step, means[0], norm)
        state.prepared_optimizer.step()
        state.prepared_optimizer.zero_grad()
        state.ema.update(step)
        state.step = step + 1
        return StepResult(means[0], norm, self.accelerator.num_processes * means[1:].view_as(by_level))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step; rollbacks have lowered it."""
        return self.rate_factor * rate(self.config.optimizer, step, self.config.steps)

    def question(self, examples: Examples) -> Question:
        x0, noise, t, condition = examples
        if self.state.channels_last:
            x0, noise = (value.to(memory_format=torch.channels_last) for value in (x0, noise))
        own, weights = self.config.diffusion, None
        x_t, target = noisy_and_target(self.process, own.prediction, x0, noise, t)
        if own.loss_weighting != "none":
            weights = loss_weights(self.process, own.prediction, own.loss_weighting, t, own.min_snr_gamma)
        return Question(x_t, t, condition, target, weights)

    def backward(self, question: Question, share: float, *, exchange: bool) -> tuple[Tensor, Tensor]:
        """Forward and backward over some images; their gradient is multiplied by `share`. Their mean loss, and the
        error of each before it is weighted."""
        if self.cores is not None:
            return self.cores.backward(question, share)
        with nullcontext() if exchange else self.accelerator.no_sync(self.state.model):
            weighted, errors = question.errors(self.state.network)
            loss = weighted.mean()
            self.accelerator.backward(loss * share)
        return loss.detach(), errors

    # Between steps

    def after_step(self) -> None:
        """Whatever is due: metrics, held-out loss, samples, scores, a snapshot of the averages, a checkpoint."""
        config, step, recorder = self.config, self.state.step, self.recorder
        recorder.write(step, self.monitor.after_step())
        self.progress.tick(step)
        due = config.is_due(config.logging.log_every, step)
        recorded = recorder.record(self.state, self.order.epoch(step)) if due else None
        with recorder.paused():
            if config.is_due(config.held_out_every, step):
                measured = self.inspector.held_out_loss()
                self.progress.errors = measured or {}
                self.measured("held-out", "held_out_loss", measured, config.held_out_every)
            if recorded is not None:  # only now, because the line shows the held-out loss of its step
                self.progress.record(recorded)
            if config.is_due(config.samples_every, step):
                recorder.images(step, self.inspector.sample_grid())
            if config.is_due(config.logging.scores_every, step):
                self.measured("frechet", "frechet", self.inspector.scores(), config.logging.scores_every)
            lengths = shares(config.optimizer.ema_lengths)
            if lengths and is_snapshot(step):
                # From which other lengths are made after training.
                wanted = set(map(str, lengths))
                kept = {length: track for length, track in self.state.ema.full_tracks().items() if length in wanted}
                on_main(self.accelerator, lambda: write_snapshot(self.run.averages, step, kept, self.run.id))
            if step % config.checkpoints.save_every == 0:
                self.save()

    def measured(self, what: str, name: str, values: dict[str, float] | None, every: int) -> None:
        """Record a measurement. The checkpoint of the best so far is kept; lower is better."""
        self.recorder.write(self.state.step, values)
        if self.config.checkpoints.keep_best != what or not values:
            return
        best, value = self.state.best, values[name]
        # One process decides: the values of others may differ in the last bit, and all must save or none.
        if on_main(self.accelerator, lambda: not best or value < best["value"]):
            self.state.best = {"value": value, "step": self.state.step, "since": 0}
            self.save()
        else:
            # The last one of a run does not count for the patience unless a longer run has it too.
            best["since"] += self.state.step % every == 0

    def out_of_patience(self) -> bool:
        """True if nothing has become better for long enough."""
        patience, best = self.config.checkpoints.patience, self.state.best
        if not patience or not best or best["since"] < patience:
            return False
        logger.info(
            f"stopped at step {self.state.step}: no better {self.config.checkpoints.keep_best} in {patience} "
            f"measurements; the best, {best['value']:.4g} at step {best['step']}, is in checkpoints/best. To go on, "
            f"give a larger `patience`"
        )
        return True

    def save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.state.window, self.state.collapse = self.recorder.sums.tolist(), self.monitor.state_dict()
        saved = snapshot(self.state)

        def write() -> None:
            # The metrics first: after a power loss a checkpoint must not be newer than its curve.
            length = self.run.sync_metrics()
            write_checkpoint(self.run.checkpoints, replace(saved, run=self.run.id, metrics=length))
            self.prune()

        on_main(self.accelerator, write)
        self.saved_step = self.state.step

    def prune(self) -> None:
        """Keep, besides the usual ones, a checkpoint to go back to: from before a trouble that has begun, or may."""
        known = self.state.collapse
        calm = self.state.step if self.config.guard.on_collapse == "rollback" else None
        best = self.state.best.get("step")
        trouble = known["began"] if known.get("evidence") else calm
        prune(self.run.checkpoints, self.config.checkpoints, trouble, best)
        if best is not None:
            point_best(self.run.checkpoints, best)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. All that the run wrote after it is forgotten: it will be written again."""
        saved = read_checkpoint(path)
        if saved.step != step_of(path):
            name = step_folder(path.parent, saved.step).name
            raise CheckpointError(f"{path} holds the checkpoint of step {saved.step}; rename it to {name}")
        restore(self.state, saved, self.config.seed)
        self.recorder.sums = self.recorder.sums.new_tensor(self.state.window)
        self.saved_step = self.state.step

        def forget() -> None:
            abandon_after(self.run.checkpoints, self.state.step)
            forget_snapshots_after(self.run.averages, self.state.step)
            point_best(self.run.checkpoints, self.state.best.get("step"))
            self.run.cut_metrics(self.state.step, saved.metrics)

        on_main(self.accelerator, forget)

    def close(self) -> None:
        self.monitor.close()
        self.recorder.close()
        release(self.state)
        if self.cores is not None:
            self.cores.close()

    # After a collapse, or a step whose numbers were not finite

    def went_back(self) -> bool:
        """Look at the numbers since the last look. If they are bad, go back to a checkpoint from before the trouble
        with a lower rate (True), or raise; False if all is well, or the run is to go on regardless."""
        guard, bad = self.config.guard, self.bad_steps.first()
        if bad is not None:
            report = self.explain(bad)
            self.recorder.alert(bad, "non-finite", report)
            # Where the loss had left its level before, the newest checkpoint is finite, and no longer good.
            began, about = self.monitor.trouble_before(bad), {"cause": "not finite", "rate": self.rate_at(bad)}
            if guard.on_nan == "stop" or not self.go_back(bad, began, about):
                raise NonFiniteError(report)
            return True
        collapse = self.monitor.collapse()
        if collapse is None:
            return False
        used = base_rate(self.state.optimizer)
        report = self.monitor.explain(collapse, used)
        if guard.on_collapse == "ignore":
            return False
        about = {"cause": "collapse", "began": collapse.began, "loss": collapse.loss, "level": collapse.level}
        about |= {"rate": used, "left_first": collapse.left_first}
        if guard.on_collapse == "rollback" and self.go_back(collapse.step, collapse.began, about):
            return True
        raise CollapseError(f"step {collapse.step}: {report} {self.ways_on(collapse)}")

    def ways_on(self, collapse: Collapse) -> str:
        """The ways to go on with this run, for the error."""
        guard, good = self.config.guard, last_good(saved_steps(self.run.checkpoints), collapse.began)
        if good is None:
            back = "No checkpoint from before the trouble is left: give a smaller `save_every`"
        elif guard.on_collapse == "rollback":
            tried = len(self.run.rollbacks())
            back = f"Step {good} was before the trouble, but {tried} rollbacks with lower rates did not help"
        else:
            back = f"`on_collapse` rollback goes back to step {good} and on with {guard.rollback_factor:g} of the rate"
        return f"{back}; `on_collapse` ignore goes on regardless."

    def go_back(self, bad: int, began: int | None, about: dict[str, Any]) -> bool:
        """Go on with a lower rate from a checkpoint from before step `began`; False if there is none, or it was done
        often enough. If one did not help, the one before it is taken."""
        run, guard = self.run, self.config.guard

        def choose() -> Path | None:
            history = run.rollbacks()
            good = None if began is None else last_good(saved_steps(run.checkpoints), began)
            if len(history) >= guard.max_rollbacks or (began is not None and good is None):
                return None
            path = newest_good(run.checkpoints, before=None if good is None else good + 1)
            if path is not None and history and step_of(path) <= history[-1]["to_step"]:
                path = newest_good(run.checkpoints, before=history[-1]["to_step"]) or path
            if path is None:
                return None
            # In this order: a kill in between leaves a run that comes to the same step and the same decision again.
            abandon_after(run.checkpoints, step_of(path))
            run.record_rollback({"bad_step": bad, "to_step": step_of(path), "factor": guard.rollback_factor, **about})
            what = "the loss had collapsed at step" if about["cause"] == "collapse" else "not finite: step"
            logger.info(
                f"{what} {bad}: back to step {step_of(path)}, rate now {run.rate_factor():g} of the planned "
                f"(rollback {len(history) + 1} of {guard.max_rollbacks})"
            )
            return path

        path = on_main(self.accelerator, choose)
        if path is None:
            return False
        self.load(path)
        self.begin_at(self.state.step)
        counted = {"rollbacks": float(len(run.rollbacks())), "rate_factor": self.rate_factor}
        self.recorder.write(self.state.step, counted)
        return True

    def explain(self, bad: int) -> str:
        """The passes of the bad step again. Each process looks at its own images; the first finding is reported."""
        order = self.order.batches(range(bad, bad + 1), self.parts)
        again = zip(self.parts, batches(self.data.train, order), strict=True)
        found = [self.inputs.for_step(bad, part, batch) for part, batch in again]

        def passes() -> None:
            # On the network itself, without the other processes and with all images of a part at once.
            for question in map(self.question, found):
                self.accelerator.backward(question.errors(self.state.bare_network)[0].mean() / len(found))

        clean = torch.cat([examples.x0 for examples in found])
        last = max(saved_steps(self.run.checkpoints), default=None)
        report = explain_nonfinite(self.state.bare, passes, [clean], bad, last, rate=self.rate_at(bad))
        report.rollbacks = len(self.run.rollbacks())
        findings = gather_objects(self.accelerator, (report.layer is None, str(report)))
        return min(findings, key=lambda finding: finding[0])[1]


def sums_by_level(levels: Tensor, losses: Tensor, zeros: Tensor) -> Tensor:
    """(3, LEVELS): images, losses and zero losses of each noise level. A product, because it is deterministic."""
    places = F.one_hot(levels, LEVELS).to(losses.dtype)
    return torch.stack([torch.ones_like(losses), losses, zeros.to(losses.dtype)]) @ places
