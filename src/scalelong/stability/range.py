"""The range of learning rates in which a network trains, with and without each fix.

    def build(seed):                      # a new network; torch is seeded
        return UViT(image_size=16, patch_size=4, dim=64, depth=24, heads=4)

    def step(model, i, generator):        # the loss of training step i; draw data and noise from the generator
        ...
        return loss

    print(rate_range(build, step))

Every method is trained at every constant rate with every seed, and the survivors are counted: a ramp of the rate is
a much noisier instrument. Rates that are not given are found: one that the baseline survives, one that it does not.
Runs of one seed share initial weights, data and noise, and differ in method and rate alone. A run that has collapsed is
ended. Runs are shared over the cores, one thread each; what is finished is kept in a folder, and the same call goes on
from there.
"""

import copy
import hashlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attaching import is_scaled, scale_skips_, start_skips_, without_records
from ..errors import InvalidConfigError, ScaleLongError, UnfinishedError, UnsupportedModelError
from ..finding import ExampleInputs, SkipPlan, find_skips, unwrap
from ..models import fuse_
from ..randomness import generator, seed_global
from ..scaling import NoScaling, as_scaling
from .collapse import RULE, Collapse, CollapseDetector, Readings, first_to_leave
from .features import Meter, attach_meter
from .many import Key, Store, Work, carry_out, default_jobs, describe, kept_random_state
from .survival import RateRange, RateRun

Build = Callable[[int], nn.Module]
"""From a seed to a new network. Python's, numpy's and torch's generators are seeded before it is called."""
Step = Callable[[nn.Module, int, torch.Generator], Tensor]
"""The loss of training step i: a scalar with a gradient. `rate_range` does the backward and the optimiser's step."""
MakeOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]
CarryOut = Callable[[Work, list[Key], int], Iterable[RateRun]]

logger = logging.getLogger(__name__)

METHODS = ("none", "merge_norm", "start:cs:0.7", "ls")
START = "start:"
REFERENCE_BATCHES = 4
CURVE_POINTS = 60
SMOOTHING = 0.9
"""Exponential smoothing of the curves and of the best loss."""
NOT_LEARNED = 0.9
"""A run that ends above this share of the reference loss has learned nothing, or lost it."""
GONE, GONE_FOR = 0.97, 60
"""A run that had learned something and then stays above the first share of the reference for so many steps is ended."""
SIZES_EVERY = 5
"""Steps between readings of the sizes of blocks and skips."""
LOWEST_RATE, MIDDLE_RATE, HIGHEST_RATE = 1e-5, 2e-3, 1.0
"""Where rates are looked for, and from where on."""


@dataclass(frozen=True)
class Method:
    """One way to begin: a scaling ("cs:0.7"), a start ("start:cs:0.7"), or a function that changes the new network.

    `build` makes another network than that of the other methods, for example one with another initialisation.
    """

    name: str
    change: str | Callable[[nn.Module], object] = "none"
    build: Build | None = None


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW with a short memory, as in the small recipes. One kernel for all weights: these networks are small."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.03, fused=fused)


def rate_range(
    build: Build | nn.Module,
    step: Step,
    *,
    rates: Sequence[float] | None = None,
    methods: Sequence[str | Method] | None = None,
    seeds: int | Sequence[int] = 8,
    steps: int = 300,
    warmup: int | None = None,
    your_rate: float | None = None,
    optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    reference_loss: float | None = None,
    example_inputs: ExampleInputs = None,
    plan: SkipPlan | None = None,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    out: str | PathLike[str] | None = None,
    title: str = "",
    about: dict[str, Any] | None = None,
    after: Callable[[nn.Module, RateRun], object] | None = None,
    say: Callable[[str], None] | None = print,
    progress: Callable[[RateRange], object] | None = None,
    carry_out: CarryOut = carry_out,
) -> RateRange:
    """Train every method at every rate with every seed, and count who survives.

    build: makes the network from a seed; or a network, which is copied for each run and left as it is (then seeds
        differ in data and noise alone).
    step: (model, i, generator) -> loss. Draw everything random from the generator (of the CPU), and equal seeds are
        equal; put it on the device of the model.
    rates: constant after `warmup` steps (default: a sixth of `steps`). Left out, they are found: see `find_rates`.
    methods: the first one is the baseline; see `Method`. Left out, those of METHODS that the network takes.
    your_rate: the rate that you train with, for the verdict.
    optimizer: (model, rate) -> torch optimiser; AdamW with betas of 0.9 and 0.99 if left out.
    reference_loss: of the zero predictor; left out, the loss of the baseline at the start.
    example_inputs, plan: to find the long skips; left out, the model is looked at while it takes the first step.
    device: where networks are trained; left out, the accelerator that is there, or where the given network is.
    jobs: processes (default: one per core; one on an accelerator).
    out: a folder that keeps every finished run; the same call continues there, other settings are refused.
    about: plain values that belong to the settings and are compared as well, such as a configuration.
    after: called at the end of each run with the trained model, in the process of the run.
    progress: called after each run with the range so far, whose verdict may be known long before the end.
    carry_out: (work, waiting runs, jobs) -> their results as they come; left out, processes of this machine.
    """
    task = Task(
        build=_checked_build(build),
        step=step,
        methods=_checked_methods(METHODS if methods is None else methods),
        rates=() if rates is None else _checked_rates(rates),
        seeds=_checked_seeds(seeds),
        steps=_checked_count("steps", steps, 2),
        warmup=_checked_count("warmup", steps // 6 if warmup is None else warmup, 0),
        optimizer=optimizer,
        clip=clip,
        example_inputs=example_inputs,
        device=_device(device, build),
        after=after,
    )
    if task.warmup >= task.steps:
        raise InvalidConfigError(f"a warm-up of {task.warmup} steps leaves nothing of {task.steps} steps")
    if not callable(step):
        raise InvalidConfigError(f"step must be a function (model, i, generator) -> loss, got {type(step).__name__}")
    for name, value in {"your_rate": your_rate, "reference_loss": reference_loss, "clip": clip}.items():
        if value is not None:
            _require_positive(name, value)
    jobs = default_jobs(task.device) if jobs is None else _checked_count("jobs", jobs, 1)
    with kept_random_state():
        if methods is None:
            task = task.accepted(plan)
        task, prints = task.prepared(plan, reference_loss)
    settings = {**task.settings(), "about": about or {}}
    with Store(Path(out) if out is not None else None, settings, prints) as store:
        done = store.read()

        def found() -> RateRange:
            runs = tuple(done[key] for key in task.keys if key in done)
            return task.result(runs, your_rate=your_rate, title=title)

        def carry(keys: list[Key]) -> None:
            """Do the runs that are not done yet, and keep each as it comes."""
            waiting = [key for key in keys if key not in done]
            for run in carry_out(task.run, waiting, jobs):
                done[run.method, run.rate, run.seed] = run
                store.add(run)
                if say is not None:
                    many = f"{sum(key in done for key in task.keys)}/{len(task.keys)}" if task.rates else "rates"
                    say(f"{many}  {describe(run)}")
                if progress is not None and task.rates:
                    progress(found())

        if not task.rates:
            task = replace(task, rates=find_rates(task, done, carry))
        finished = sum(key in done for key in task.keys)
        if say is not None and finished:
            say(f"{finished} of {len(task.keys)} runs are finished already")
        carry(task.keys)
        missing = sum(key not in done for key in task.keys)
        if missing:
            raise UnfinishedError(f"{missing} of {len(task.keys)} runs are not finished; the same command goes on")
        if store.folder is not None:
            found().save(store.folder)
        return found()


def _device(given: torch.device | str | None, build: Build | nn.Module) -> torch.device:
    """What is given; else that of a given network; else the accelerator that is there; else the CPU."""
    if given is not None:
        return torch.device(given)
    if isinstance(build, nn.Module):
        return next((parameter.device for parameter in build.parameters()), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def find_rates(
    task: "Task", done: Mapping[Key, RateRun], carry: Callable[[list[Key]], object]
) -> tuple[float, float, float]:
    """Three rates, each twice the one before: the highest that the baseline survives, the lowest at which it collapses,
    and one above, where a method that helps may still survive.

    From MIDDLE_RATE the first seed of the baseline goes up or down by factors of two until both were seen, or a limit
    is reached.
    """
    method, seed = task.methods[0].name, task.seeds[0]

    def collapses(rate: float) -> bool:
        carry([(method, rate, seed)])
        if (method, rate, seed) not in done:
            raise UnfinishedError("the run that looks for rates is not finished; the same command goes on")
        return done[method, rate, seed].outcome in ("collapsed", "not finite")

    rate = MIDDLE_RATE
    if collapses(rate):
        while rate / 2 > LOWEST_RATE and collapses(rate / 2):
            rate /= 2
        return rate / 2, rate, 2 * rate
    while 2 * rate < HIGHEST_RATE and not collapses(2 * rate):
        rate *= 2
    return rate, 2 * rate, 4 * rate


# One run


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that the runs share."""

    build: Build
    step: Step
    methods: tuple[Method, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    warmup: int
    optimizer: MakeOptimizer
    clip: float | None
    example_inputs: ExampleInputs
    device: torch.device
    after: Callable[[nn.Module, RateRun], object] | None
    reference: float | None = None
    plans: tuple[SkipPlan | None, ...] = ()
    """The long skips of the network of each method, where they are needed or could be found."""

    @property
    def keys(self) -> list[Key]:
        """Seed by seed, so that what is interrupted holds whole seeds."""
        return [(method.name, rate, seed) for seed in self.seeds for rate in self.rates for method in self.methods]

    def settings(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "warmup": self.warmup,
            "clip": self.clip,
            "rule": RULE,
            # Sums may come out differently in the last digits on another machine.
            "reference_loss": float(f"{self.reference:.3g}"),
        }

    def result(self, runs: tuple[RateRun, ...], **about: Any) -> RateRange:
        assert self.reference is not None
        return RateRange(
            methods=tuple(method.name for method in self.methods),
            rates=self.rates,
            seeds=self.seeds,
            runs=runs,
            steps=self.steps,
            warmup=self.warmup,
            reference_loss=self.reference,
            rule=RULE,
            **about,
        )

    def make(self, position: int, seed: int, plan: SkipPlan | None) -> nn.Module:
        """The network of a method before its first step. Weights that methods share are equal."""
        method = self.methods[position]
        seed_global(seed, "weights")
        model = (method.build or self.build)(seed)
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"build({seed}) must return a torch.nn.Module, got {type(model).__name__}")
        model.to(self.device)
        if callable(method.change):
            method.change(model)
        elif method.change.startswith(START):
            start_skips_(model, method.change.removeprefix(START), plan=plan)
        elif not isinstance(as_scaling(method.change), NoScaling):
            scale_skips_(model, method.change, plan=plan)
        return fuse_(model).train()

    def accepted(self, plan: SkipPlan | None) -> "Task":
        """Without the methods that this network refuses, such as a norm where its merges add."""
        found = plan or self._find(self.make(0, 0, None))
        kept = [self.methods[0]]
        for position, method in enumerate(self.methods[1:], 1):
            try:
                self.make(position, 0, found)
            except ScaleLongError as error:
                logger.warning("without %s, which this network refuses: %s", method.name, error)
            else:
                kept.append(method)
        return replace(self, methods=tuple(kept))

    def prepared(self, plan: SkipPlan | None, reference: float | None) -> tuple["Task", dict[str, str]]:
        """Try every method for a step, before any work: what is wrong shows now. Gives its weights' hashes as well."""
        plans: list[SkipPlan | None] = []
        prints, measured = {}, reference
        bare = replace(self, methods=tuple(replace(method, change="none") for method in self.methods))
        for position, method in enumerate(self.methods):
            shared = position > 0 and method.build is None and self.methods[0].build is None
            found = plans[0] if shared else plan
            if found is None:
                try:
                    found = self._find(bare.make(position, 0, None))
                except ScaleLongError:
                    # Without long skips a network can still be trained, but not scaled.
                    if isinstance(method.change, str) and not _is_none(method.change):
                        raise
            plans.append(found)
            model = self.make(position, 0, found)
            prints[method.name] = _fingerprint(model)
            losses = [self._loss(model, i, 0) for i in range(REFERENCE_BATCHES if measured is None else 1)]
            _require_loss(losses[0], method.name)
            if measured is None:
                measured = sum(float(loss.detach()) for loss in losses) / len(losses)
        assert measured is not None
        if not (math.isfinite(measured) and measured > 0):
            raise InvalidConfigError(
                f"the loss at the start is {measured:g}, and collapse is judged in shares of it: give reference_loss, "
                f"the loss of a network that has learned nothing, above 0"
            )
        return replace(self, plans=tuple(plans), reference=measured), prints

    def _find(self, model: nn.Module) -> SkipPlan:
        """The long skips, on what the model is given in the first step."""
        inputs = self.example_inputs
        if inputs is None:
            inputs = _seen_inputs(model, lambda: self._loss(model, 0, 0))
        return find_skips(model, inputs)

    def _loss(self, model: nn.Module, i: int, seed: int) -> Tensor:
        seed_global(seed, "step", i)
        return self.step(model, i, generator(seed, "range", i))

    def run(self, key: Key) -> RateRun:
        """One training, from the first step to the last or to its collapse."""
        name, rate, seed = key
        position = [method.name for method in self.methods].index(name)
        began = time.process_time()
        plan = self.plans[position]
        model = self.make(position, seed, plan)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(model, rate)
        full = [group["lr"] for group in optimizer.param_groups]
        assert self.reference is not None
        outcome = RunOutcome(self.reference, self.warmup, self.steps)
        with SizeRecorder(model, plan) as sizes:
            for i in range(self.steps):
                for group, lr in zip(optimizer.param_groups, full, strict=True):
                    group["lr"] = lr * self._warm(i)
                sizes.begin(i)
                loss = self._loss(model, i, seed)
                sizes.read(i)
                if outcome.add(i, float(loss.detach())):
                    break
                optimizer.zero_grad()
                loss.backward()
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(parameters, self.clip)
                optimizer.step()
        return self._ended(key, model, outcome, sizes.readings, time.process_time() - began)

    def _warm(self, i: int) -> float:
        """The share of the rate at step i."""
        return min(1.0, (i + 1) / max(self.warmup, 1))

    def _ended(self, key: Key, model: nn.Module, outcome: "RunOutcome", readings: Readings, seconds: float) -> RateRun:
        run = RateRun(
            method=key[0],
            rate=key[1],
            seed=key[2],
            outcome=outcome.name,
            steps=outcome.steps,
            onset=(outcome.onset or outcome.best_step) if outcome.name == "collapsed" else None,
            best=_rounded(outcome.best),
            best_step=outcome.best_step,
            last=_rounded(outcome.smoothed),
            curve=outcome.curve,
            # Against the reading at the best loss.
            left_first=None if outcome.name == "survived" else first_to_leave(readings, outcome.best_step),
            seconds=round(seconds, 2),
        )
        if self.after is not None:
            self.after(model, run)
        return run


class RunOutcome:
    """The losses of a run: their smoothed curve, and whether they have collapsed (`CollapseDetector`)."""

    def __init__(self, reference: float, warmup: int, steps: int) -> None:
        self.reference, self.warmup = reference, warmup
        self.detector = CollapseDetector(zero_loss=reference)
        self.smoothed, self.best, self.best_step, self.steps = math.nan, math.inf, 0, 0
        self.onset: int | None = None
        """The last step before the loss left."""
        self.curve: list[list[float]] = []
        self._every = max(1, -(-steps // CURVE_POINTS))
        self._good = 0
        """The last step at which the smoothed loss was below GONE of the reference."""

    def add(self, i: int, loss: float) -> bool:
        """Take the loss of step i, counted from 0. True once the run is lost."""
        self.steps = i + 1
        self.smoothed = loss if i == 0 else SMOOTHING * self.smoothed + (1 - SMOOTHING) * loss
        if i >= self.warmup and self.smoothed < self.best:
            self.best, self.best_step = self.smoothed, i + 1
        if self.smoothed < GONE * self.reference:
            self._good = i + 1
        event = self.detector.add(i + 1, loss)
        if isinstance(event, Collapse):
            self.onset = event.began
        elif self.steps - self._good >= GONE_FOR and self.has_learned:
            self.onset = self._good  # it had not learned enough for the rule to judge, and lost that
        if ((i + 1) % self._every == 0 or i == 0 or self.onset is not None) and math.isfinite(self.smoothed):
            self.curve.append([i + 1, float(f"{self.smoothed:.4g}")])
        return self.onset is not None

    @property
    def has_learned(self) -> bool:
        return self.best <= NOT_LEARNED * self.reference

    @property
    def name(self) -> str:
        """One of OUTCOMES."""
        if not math.isfinite(self.smoothed):
            return "not finite"
        high = self.smoothed > NOT_LEARNED * self.reference
        if self.onset is not None or (high and self.has_learned):
            return "collapsed"
        return "not learned" if high else "survived"


class SizeRecorder:
    """The sizes of blocks and long skips every few steps, to tell afterwards which of them left its level first."""

    def __init__(self, model: nn.Module, plan: SkipPlan | None) -> None:
        self.meter = Meter()
        self.readings: list[tuple[int, dict[str, float]]] = []
        self._handles = [] if plan is None else attach_meter(unwrap(model), plan, self.meter)

    def __enter__(self) -> "SizeRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, i: int) -> None:
        self.meter.on = i % SIZES_EVERY == 0
        self.meter.clear()

    def read(self, i: int) -> None:
        if self.meter.on:
            self.readings.append((i + 1, self.meter.sizes()))
        self.meter.on = False


# Checks, and what belongs to them


def _checked_build(build: Build | nn.Module) -> Build:
    if isinstance(build, nn.Module):
        if is_scaled(build):
            raise InvalidConfigError("the model is scaled already: give it as it is without scaling (unscale_)")
        given = build
        return lambda _: copy.deepcopy(given)
    if not callable(build):
        raise InvalidConfigError(f"give a network or a function from a seed to one, got {type(build).__name__}")
    return build


def _checked_methods(methods: Sequence[str | Method]) -> tuple[Method, ...]:
    listed = [methods] if isinstance(methods, str) else list(methods)
    found = tuple(method if isinstance(method, Method) else Method(method, method) for method in listed)
    for method in found:
        if isinstance(method.change, str):
            scaling = as_scaling(method.change.removeprefix(START))
            if method.change.startswith(START) and isinstance(scaling, NoScaling):
                raise InvalidConfigError(f"{method.change!r} starts nothing: write 'none', or 'start:cs:0.7'")
    _require_distinct("methods", [method.name for method in found])
    return found


def _checked_rates(rates: Sequence[float]) -> tuple[float, ...]:
    listed = [rates] if isinstance(rates, int | float) else list(rates)
    for rate in listed:
        _require_positive("rates", rate)
    _require_distinct("rates", listed)
    return tuple(sorted(map(float, listed)))


def _checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        seeds = range(_checked_count("seeds", seeds, 1))
    listed = list(seeds)  # type: ignore[arg-type]
    if any(not isinstance(seed, int) or isinstance(seed, bool) for seed in listed):
        raise InvalidConfigError(f"seeds must be whole numbers, or how many there are, got {listed}")
    _require_distinct("seeds", listed)
    return tuple(listed)


def _checked_count(name: str, value: Any, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidConfigError(f"{name} must be a whole number, at least {low}, got {value!r}")
    return value


def _require_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise InvalidConfigError(f"{name} must be above 0, got {value!r}")


def _require_distinct(name: str, values: Sequence[Any]) -> None:
    if not values:
        raise InvalidConfigError(f"give at least one of {name}")
    twice = sorted({str(value) for value in values if list(values).count(value) > 1})
    if twice:
        raise InvalidConfigError(f"{name}: {', '.join(twice)} is given twice: leave one out")


def _require_loss(loss: Any, method: str) -> None:
    good = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    if not good:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, Tensor) and loss.numel() == 1:
            found = "a loss without a gradient"
        raise InvalidConfigError(
            f"step(model, i, generator) must return the loss, one number with a gradient; with {method} it returned "
            f"{found}"
        )


def _seen_inputs(model: nn.Module, run: Callable[[], object]) -> ExampleInputs:
    """What the model is given in a step, by name; None if it is called in a way that cannot be repeated."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    host = unwrap(model)
    handle = host.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    if not seen:
        return None
    args, kwargs = seen[0]
    if not kwargs:
        return args
    try:
        bound = inspect.signature(host.forward).bind(*args, **kwargs)
    except TypeError:
        return None
    kinds = {parameter.kind for parameter in bound.signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return None
    return {**dict(zip(bound.signature.parameters, bound.args, strict=False)), **bound.kwargs}


def _is_none(change: str) -> bool:
    return not change.startswith(START) and isinstance(as_scaling(change), NoScaling)


def _fingerprint(model: nn.Module) -> str:
    """A hash of names and values of all weights."""
    digest = hashlib.sha256()
    with without_records():
        state = model.state_dict()
    for name, value in state.items():
        digest.update(name.encode())
        if isinstance(value, Tensor) and not value.is_meta:
            digest.update(str(tuple(value.shape)).encode())
            digest.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
