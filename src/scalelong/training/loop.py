"""The training loop: `train(config, out)`, and the `Trainer` that carries it out.

`Trainer.fit` is the order of events, `Trainer.step` is a step, from the images to the update. What a step is made
of has files of its own: `diffusion/inputs.py` (x_0, ε, t, condition), `state.py` (weights, AdamW, average, guard),
`cores.py` (a CPU's cores), `tracking.py` (metrics), `inspection.py` (held-out loss, samples, scores) and
`monitoring.py` (the stability monitor, and a loss that collapses).
"""

import errno
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import HardwareConfig, TrainConfig, default_folder, is_snapshot, with_values
from ..console import Progress, html_lines
from ..data import Batch, batches
from ..diffusion import DataOrder, Examples, split_batch
from ..errors import CheckpointError, CollapseError, DataWorkerError, NonFiniteError, RunFolderError
from ..files import in_words, read_bytes
from ..models import Denoiser, gain_of_bfloat16, keep_freed_memory
from ..noise import LEVELS, NoiseProcess, loss_weights, mean_square, noise_levels, noisy_and_target
from ..runs import (
    RunData,
    RunFolder,
    abandon_after,
    add_adapters_,
    average,
    build_model,
    check_batch_size,
    describe_processes,
    forget_snapshots_after,
    gather_objects,
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
    with_absolute_data,
    write_checkpoint,
    write_snapshot,
)
from ..scaling import as_scaling
from ..stability import Collapse, explain_nonfinite, last_good
from .cores import make_cores
from .inspection import Inspector
from .interrupt import Interrupt
from .monitoring import RunMonitor, sums_by_level
from .precision import choose_precision
from .state import (
    READ_EVERY,
    BadSteps,
    TrainState,
    base_rate,
    clip_gradient,
    create,
    rate,
    restore,
    set_rate,
    skip_if_not_finite,
    snapshot,
)
from .tracking import Recorder, StopWatch, TrainingProgress, Window

Hook = Callable[[TrainState], dict[str, float] | None]
"""Called after every step, with the number of steps done in `state.step`; what it returns is recorded."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class TrainResult:
    """What became of a run. Print it."""

    folder: Path
    step: int
    finished: bool
    """False if a signal ended it early."""
    samples: Path | None = None
    """The newest sample grid."""

    def __str__(self) -> str:
        if not self.finished:
            return f"stopped after step {self.step}: {self.folder}. Run the same command to continue"
        lines = [f"finished at step {self.step}: {self.folder}"]
        lines += [f"samples: {self.samples}"] if self.samples is not None else []
        steps = (f"scalelong {command} {shlex.quote(str(self.folder))}" for command in ("sample", "eval", "report"))
        return "\n".join([*lines, f"next: {', '.join(steps)}"])

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
    if data is not None:
        config = replace(config, data=getattr(data, "name", None) or type(data).__name__)
    run = RunFolder(out or default_folder(config))
    config = with_absolute_data(config) if data is None else config
    accelerator = make_accelerator(config, str(run.path))
    unit = config.diffusion.prediction.replace("epsilon", "ε")
    progress = TrainingProgress(config.steps, accelerator.is_main_process and not quiet, unit=unit)
    try:
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            stack.enter_context(switches(config.hardware))
            stack.callback(progress.close)
            check_batch_size(config, accelerator.num_processes)

            def lock() -> None:
                stack.enter_context(run.locked())

            on_main(accelerator, lock)
            reading = interrupt.between(Progress("reading images", enabled=progress.enabled))
            loaded = load_run_data(config, progress.say, reading, data=data)
            if config.hardware.precision == "auto":
                config = on_main(accelerator, lambda: with_precision(config, run, loaded, accelerator.device, model))
                accelerator = make_accelerator(config, str(run.path))
            start = on_main(accelerator, lambda: run.check(config, loaded, progress.say))
            trainer = Trainer(config, run, accelerator, loaded, progress, hooks, new=start is None, model=model)
            stack.callback(trainer.close)
            # Not before there is a network: what refuses must leave nothing.
            on_main(accelerator, lambda: run.open(config, loaded, describe_processes(accelerator)))
            finished = trainer.fit(interrupt, start)
            return TrainResult(run.path, trainer.state.step, finished, max(run.samples.glob("*.png"), default=None))
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RunFolderError(
            f"{run.path} cannot be written: {in_words(error)}. Its checkpoints are intact; make room, then "
            f"run the same command "
            f"to continue"
        ) from error


@contextmanager
def switches(hardware: HardwareConfig) -> Iterator[None]:
    """torch's switches for speed on NVIDIA GPUs, which hold for the whole process: afterwards they are as before."""
    wanted = [(torch.backends.cuda.matmul, "allow_tf32", hardware.tf32)]
    wanted += [(torch.backends.cudnn, "allow_tf32", hardware.tf32)]
    wanted += [(torch.backends.cudnn, "benchmark", hardware.cudnn_benchmark)]
    before = [(place, name, getattr(place, name)) for place, name, on in wanted if on]
    for place, name, _ in before:
        setattr(place, name, True)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def with_precision(
    config: TrainConfig, run: RunFolder, data: RunData, device: torch.device, model: nn.Module | None
) -> TrainConfig:
    """The configuration with a precision instead of "auto": that of the run that has begun, or the faster one."""
    before = run.begun_with()
    chosen = choose_precision(config, data.shape, device, model) if before is None else before.hardware.precision
    return with_values(config, {"hardware.precision": chosen})


@dataclass(frozen=True)
class StepResult:
    """The numbers of one step, over all processes, on the device."""

    loss: Tensor
    grad_norm: Tensor
    """Before clipping."""
    by_level: Tensor
    """(3, LEVELS): images, losses and zero losses of each noise level."""


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
            if accelerator.mixed_precision == "bf16" and (gain := gain_of_bfloat16()) < 1:
                progress.say(f"bf16: this processor has no fast products for it ({gain:.2g} times float32's speed)")
        self.state = create(config, accelerator, self.network(new, model), data)
        self.cores = make_cores(config, self.state.bare, accelerator)
        self.order = DataOrder(len(data.train), config.batch_size, config.seed)
        self.parts = split_batch(
            config.batch_size, accelerator.num_processes, config.hardware.accumulation, accelerator.process_index
        )
        inputs = data.inputs(accelerator.device)
        self.examples = inputs.for_step
        self.bad_steps = BadSteps(accelerator.device)
        self.inspector = Inspector(config, run, self.state, data, inputs)
        self.recorder = Recorder(config, run, accelerator, progress)
        readings = config.monitor_every if config.monitor_every <= config.steps else 0
        self.monitor = RunMonitor(run, self.state, readings, progress.say, self.recorder.alert)
        self.window = Window(accelerator.device)
        self.watch = StopWatch()
        self.saved_step = -1
        self.metrics_length: int | None = None
        """How long metrics.jsonl was when the checkpoint was written from which the run goes on."""

    def network(self, new: bool, model: nn.Module | None) -> nn.Module:
        """With the weights that a new run starts from, if it starts from some."""
        if self.config.start_from is None or not new:
            return build_model(self.config, self.data.shape, model=model)
        model = build_model(self.config, self.data.shape, adapters=False, model=model)
        load_start_(model, self.config, self.data.shape, self.progress.say)
        if self.config.lora:
            add_adapters_(model, self.config.lora, self.config.seed)
        return model

    # The order of events

    def fit(self, interrupt: Interrupt, start: Path | None = None) -> bool:
        """The loop, from a checkpoint or from the beginning. True when all steps are done, False when it was
        interrupted; both ways the state is saved."""
        self.resume(start)
        while self.state.step < self.config.steps and not self.out_of_patience():
            stop_requested = self.any_process(interrupt.requested is not None)
            try:
                # All images before the first forward: if a data worker is gone, the state is that of a whole step.
                images = [next(self.source) for _ in self.parts]
            except DataWorkerError:
                self.save_alone()
                if interrupt.requested is None:
                    raise
                return self.stopped(interrupt)
            done = self.step(images)
            self.window.add(done.loss, done.grad_norm)
            self.monitor.losses.add(self.state.step, done.by_level)
            # Reading a number from an accelerator means waiting for it, so this is not done at every step.
            if not self.should_read_device():
                continue
            bad = self.bad_steps.first()
            if bad is not None:
                self.recover(bad)
                continue
            collapse = self.monitor.collapse()
            if collapse is not None and self.gave_up(collapse):
                continue
            self.after_step()
            if stop_requested:
                self.save()
                return self.stopped(interrupt)
        self.save()
        return True

    def any_process(self, flag: bool) -> Tensor:
        """Whether the flag is set in any process, as a number on the device."""
        return average(self.accelerator, torch.tensor(float(flag), device=self.accelerator.device))

    def stopped(self, interrupt: Interrupt) -> bool:
        by = interrupt.requested or "another process"
        self.progress.say(f"stopped by {by} after step {self.state.step}; run the same command to continue")
        return False

    def save_alone(self) -> None:
        """Save before an error that no other process knows of: with several, they cannot take part."""
        if self.accelerator.num_processes == 1 and self.bad_steps.first() is None:
            self.save()

    def resume(self, path: Path | None) -> None:
        """Go on from a checkpoint; a new run begins with one, so that a full disk shows now."""
        if path is None:
            self.save()
        else:
            self.load(path)
            self.progress.say(f"continuing after step {self.state.step}")
            # A kill between saving and pruning left one more than there should be.
            on_main(self.accelerator, self.prune)
        on_main(self.accelerator, lambda: self.run.cut_metrics(self.state.step, self.metrics_length))
        self.recorder.start(self.state.step)
        self.begin_at(self.state.step)

    def begin_at(self, step: int) -> None:
        """Point the data at a step. Nothing before it is read."""
        order = self.order.batches(range(step, self.config.steps), self.parts)
        workers, pin = self.config.images.workers, self.accelerator.device.type == "cuda"
        self.source: Iterator[Batch] = batches(self.data.train, order, workers, pin=pin)
        self.rate_factor = self.run.rate_factor()
        self.modules = list(self.state.model.modules())
        self.bad_steps.reset()
        self.monitor.begin_at(step, act=self.config.guard.on_collapse != "ignore")
        self.watch.start(step)
        self.progress.start(step)

    # A step

    def step(self, images: Sequence[Batch]) -> StepResult:
        """One step of all processes: from the images of this process's parts of the batch to the update."""
        state, step = self.state, self.state.step
        set_rate(state.optimizer, self.rate_factor * rate(self.config.optimizer, step, self.config.steps))
        if not all(module.training for module in self.modules):  # setting it costs much more than looking
            state.model.train()
        share = 1 / len(self.parts)
        # The mean loss, then the sums of images, losses and zero losses of each noise level.
        loss = torch.zeros((), device=self.accelerator.device)
        by_level = torch.zeros(3, LEVELS, device=self.accelerator.device)
        for positions, batch in zip(self.parts, images, strict=True):
            examples = self.examples(step, positions, batch)
            x_t, target = self.question(examples)
            # Processes exchange their gradients once per step: with the last part.
            mean, errors = self.backward(examples, x_t, target, share, exchange=positions == self.parts[-1])
            loss += mean * share
            levels = noise_levels(self.process, examples.t)
            by_level += sums_by_level(levels, errors, mean_square(target))  # an output of zero would cost the target
        self.accelerator.unscale_gradients()
        norm = clip_gradient(state.parameters, self.config.optimizer.clip)
        means = average(self.accelerator, torch.cat([loss[None], by_level.flatten()]))
        loss = means[0]
        skip_if_not_finite(self.bad_steps, state.optimizer, self.accelerator.scaler, step, loss, norm)
        state.prepared_optimizer.step()
        state.prepared_optimizer.zero_grad()
        state.ema.update(step)
        state.step = step + 1
        return StepResult(loss, norm, self.accelerator.num_processes * means[1:].view_as(by_level))

    def question(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """x_t, and what the network is to answer."""
        x0, noise, t, _ = examples
        if self.state.channels_last:
            x0, noise = (value.to(memory_format=torch.channels_last) for value in (x0, noise))
        return noisy_and_target(self.process, self.config.diffusion.prediction, x0, noise, t)

    def backward(
        self, examples: Examples, x_t: Tensor, target: Tensor, share: float, *, exchange: bool
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward over some images; their gradient is multiplied by `share`. Their mean loss, and the
        error of each before it is weighted."""
        errors = torch.zeros(len(target), device=target.device)
        weights = self.loss_weights(examples.t)

        def losses(network: Denoiser, part: slice = slice(None)) -> Tensor:
            condition = None if examples.condition is None else examples.condition[part]
            found = mean_square(target[part] - network.given(condition)(x_t[part], examples.t[part]))
            errors[part] = found.detach()  # each core has images of its own
            return found if weights is None else found * weights[part]

        if self.cores is not None:
            return self.cores.backward(losses, len(target), share), errors
        with nullcontext() if exchange else self.accelerator.no_sync(self.state.model):
            loss = losses(self.state.network).mean()
            self.accelerator.backward(loss * share)
        return loss.detach(), errors

    def loss_weights(self, t: Tensor) -> Tensor | None:
        """How much each image counts; None if all count alike."""
        settings = self.config.diffusion
        if settings.loss_weighting == "none":
            return None
        return loss_weights(self.process, settings.prediction, settings.loss_weighting, t, settings.min_snr_gamma)

    # Between steps

    def should_read_device(self) -> bool:
        due = self.config.something_is_due(self.state.step) or self.state.step % READ_EVERY == 0
        return due or bool(self.hooks) or self.accelerator.device.type == "cpu"

    def after_step(self) -> None:
        """Whatever is due: hooks, metrics, held-out loss, samples, scores, a checkpoint."""
        step, final = self.state.step, self.state.step == self.config.steps
        for hook in self.hooks:
            self.recorder.write(step, hook(self.state))
        self.recorder.write(step, self.monitor.after_step())
        self.progress.tick(step)
        recorded = None
        if step % self.config.logging.log_every == 0 or final:
            recorded = self.recorder.record(self.state, self.window, self.watch, self.order.epoch(step))
        with self.watch.paused():
            if step % self.config.held_out_every == 0 or final:
                held_out = self.inspector.held_out_loss()
                self.recorder.held_out(step, held_out)
                self.measured("held-out", (held_out or {}).get("held_out_loss"), step % self.config.held_out_every == 0)
            if recorded is not None:  # only now, because the line shows the held-out loss of its step
                self.progress.record(recorded)
            if self.config.samples_every and (step % self.config.samples_every == 0 or final):
                self.recorder.images(step, self.inspector.sample_grid())
            if self.config.logging.scores_every and (step % self.config.logging.scores_every == 0 or final):
                scores = self.inspector.scores()
                self.recorder.write(step, scores)
                self.measured("frechet", scores.get("frechet"), step % self.config.logging.scores_every == 0)
            if shares(self.config.optimizer.ema_lengths) and is_snapshot(step):
                self.keep_averages()
            if step % self.config.checkpoints.save_every == 0:
                self.save()

    def keep_averages(self) -> None:
        """A snapshot of the averages, from which other lengths are made after training."""
        wanted = set(map(str, shares(self.config.optimizer.ema_lengths)))
        tracks = {length: track for length, track in self.state.ema.full_tracks().items() if length in wanted}
        on_main(self.accelerator, lambda: write_snapshot(self.run.averages, self.state.step, tracks, self.run.id))

    def measured(self, what: str, value: float | None, regular: bool) -> None:
        """A measurement that may be the best so far: its checkpoint is kept. Lower is better.

        One at the end of a run that is not `regular` does not count for the patience: a longer run has none there.
        """
        if self.config.checkpoints.keep_best != what or value is None:
            return
        best = self.state.best
        # One process decides: the values of others may differ in the last bit, and all must save or none.
        is_better = on_main(self.accelerator, lambda: not best or value < best["value"])
        if not is_better:
            best["since"] += regular
            return
        self.state.best = {"value": value, "step": self.state.step, "since": 0}
        self.save()

    def out_of_patience(self) -> bool:
        """Whether nothing has become better for long enough."""
        patience, best = self.config.checkpoints.patience, self.state.best
        if not patience or not best or best["since"] < patience:
            return False
        self.progress.say(
            f"stopped at step {self.state.step}: no better {self.config.checkpoints.keep_best} in {patience} "
            f"measurements; the best, {best['value']:.4g} at step {best['step']}, is in checkpoints/best. To go on, "
            f"give a larger --patience"
        )
        return True

    def save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.state.window, self.state.collapse = self.window.save(), self.monitor.state_dict()
        saved = snapshot(self.state)

        def write() -> None:
            # The metrics first: after a power loss a checkpoint must not be newer than its curve.
            length = self.run.sync_metrics()
            write_checkpoint(self.run.checkpoints, replace(saved, run=self.run.id, metrics=length))
            self.prune()

        on_main(self.accelerator, write)
        self.saved_step = self.state.step

    def prune(self) -> None:
        """What goes back needs a checkpoint from before the trouble: the one that has begun, or any that may come."""
        known = self.state.collapse
        calm = self.state.step if self.config.guard.on_collapse == "rollback" else None
        trouble = known["began"] if known.get("evidence") else calm
        best = self.state.best.get("step")
        prune(self.run.checkpoints, self.config.checkpoints, trouble, best)
        if best is not None:
            point_best(self.run.checkpoints, best)

    def load(self, path: Path) -> None:
        saved = read_checkpoint(path)
        if saved.step != _step(path):
            name = step_folder(path.parent, saved.step).name
            raise CheckpointError(f"{path} holds the checkpoint of step {saved.step}; rename it to {name}")
        restore(self.state, saved, self.config.seed)
        self.metrics_length = saved.metrics
        self.window.load(self.state.window)
        self.saved_step = self.state.step
        on_main(self.accelerator, lambda: abandon_after(self.run.checkpoints, self.state.step))
        on_main(self.accelerator, lambda: forget_snapshots_after(self.run.averages, self.state.step))
        on_main(self.accelerator, lambda: point_best(self.run.checkpoints, self.state.best.get("step")))

    # After a collapse, or a step whose numbers were not finite

    def gave_up(self, collapse: Collapse) -> bool:
        """Whether the steps since the trouble are given up: back to a checkpoint from before it, with a lower rate.
        False if the run goes on regardless; a run that is to stop raises."""
        mode, used = self.config.guard.on_collapse, base_rate(self.state.optimizer)
        report = self.monitor.tell(collapse, used)
        if mode == "ignore":
            return False
        about = {"cause": "collapse", "began": collapse.began, "loss": collapse.loss, "level": collapse.level}
        about |= {"rate": used, "left_first": collapse.left_first}
        if mode == "rollback" and self.go_back(collapse.step, collapse.began, about):
            return True
        raise CollapseError(f"step {collapse.step}: {report} {self.ways_on(collapse)}")

    def ways_on(self, collapse: Collapse) -> str:
        """What can be done with this run."""
        good = last_good(saved_steps(self.run.checkpoints), collapse.began)
        tried = len(self.run.rollbacks())
        regardless = "to go on regardless, add --on-collapse ignore"
        if good is None:
            return f"No checkpoint from before the trouble is left (--save-every is more than that); {regardless}."
        last = f"Last checkpoint from before the trouble: step {good}."
        if self.config.guard.on_collapse == "rollback":
            return f"{last} {tried} rollbacks with lower rates did not help (rollbacks.json); {regardless}."
        factor = self.config.guard.rollback_factor
        return (
            f"{last} To go on from there with {factor:g} times the rate, give the same command with --on-collapse "
            f"rollback; {regardless}."
        )

    def recover(self, bad: int) -> None:
        """Stop with a report of where the numbers came from, or go back to a good checkpoint with a lower rate."""
        report = self.explain(bad)
        self.recorder.alert(bad, "non-finite", report)
        trouble = self.monitor.trouble_before(bad)  # then the newest checkpoint is finite, and no longer good
        about = {"cause": "not finite", "rate": self.rate_factor * rate(self.config.optimizer, bad, self.config.steps)}
        if self.config.guard.on_nan == "stop" or not self.go_back(bad, trouble, about):
            raise NonFiniteError(report)

    def go_back(self, bad: int, began: int | None, about: dict[str, Any]) -> bool:
        """Go on from a checkpoint from before step `began`; False if there is none, or it was done often enough."""
        path = on_main(self.accelerator, lambda: roll_back(self.run, self.config, bad, began, about, self.progress.say))
        if path is None:
            return False
        self.load(path)
        on_main(self.accelerator, lambda: self.run.cut_metrics(self.state.step, self.metrics_length))
        self.begin_at(self.state.step)
        counted = {"rollbacks": float(len(self.run.rollbacks())), "rate_factor": self.rate_factor}
        self.recorder.write(self.state.step, counted)
        return True

    def explain(self, bad: int) -> str:
        """The passes of the bad step again. Each process looks at its own images; the first finding is reported."""
        order = self.order.batches(range(bad, bad + 1), self.parts)
        found = [
            self.examples(bad, part, batch)
            for part, batch in zip(self.parts, batches(self.data.train, order), strict=True)
        ]

        def passes() -> None:
            # On the network itself, without the other processes and with all images of a part at once.
            for examples in found:
                x_t, target = self.question(examples)
                output = self.state.bare_network.given(examples.condition)(x_t, examples.t)
                errors, weights = mean_square(target - output), self.loss_weights(examples.t)
                loss = (errors if weights is None else errors * weights).mean()
                self.accelerator.backward(loss / len(found))

        clean = torch.cat([examples.x0 for examples in found])
        last_good = max(saved_steps(self.run.checkpoints), default=None)
        used = self.rate_factor * rate(self.config.optimizer, bad, self.config.steps)
        report = explain_nonfinite(self.state.bare, passes, [clean], bad, last_good, rate=used)
        report.rollbacks = len(self.run.rollbacks())
        findings = gather_objects(self.accelerator, (report.layer is None, str(report)))
        return min(findings, key=lambda finding: finding[0])[1]

    def close(self) -> None:
        self.monitor.close()
        self.recorder.close()
        if self.cores is not None:
            self.cores.close()


def roll_back(
    run: RunFolder,
    config: TrainConfig,
    bad_step: int,
    began: int | None,
    about: dict[str, Any],
    log: Callable[[str], None],
) -> Path | None:
    """The checkpoint to go on from with a lower rate, from before the trouble began; None to stop. If one did not help,
    the one before it."""
    history, factor = run.rollbacks(), config.guard.rollback_factor
    if len(history) >= config.guard.max_rollbacks:
        return None
    good = None if began is None else last_good(saved_steps(run.checkpoints), began)
    if began is not None and good is None:
        return None
    path = newest_good(run.checkpoints, log, before=None if good is None else good + 1)
    if path is not None and history and _step(path) <= history[-1]["to_step"]:
        path = newest_good(run.checkpoints, log, before=history[-1]["to_step"]) or path
    if path is None:
        return None
    # In this order: a kill in between leaves a run that comes to the same step and the same decision again.
    abandon_after(run.checkpoints, _step(path))
    run.record_rollback({"bad_step": bad_step, "to_step": _step(path), "factor": factor, **about})
    what = "the loss had collapsed at step" if about.get("cause") == "collapse" else "not finite: step"
    log(
        f"{what} {bad_step}: back to step {_step(path)}, rate now {run.rate_factor():g} of the planned "
        f"(rollback {len(history) + 1} of {config.guard.max_rollbacks})"
    )
    return path


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
