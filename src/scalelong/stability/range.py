"""The range of learning rates in which a network trains, with and without each fix.

    def build(seed):                      # a new network; torch is seeded
        return UViT(image_size=16, patch_size=4, dim=64, depth=24, heads=4)

    def step(model, i, generator):        # the loss of training step i; draw data and noise from the generator
        ...
        return loss

    print(rate_range(build, step))

Every method is trained at every constant rate with every seed, and the survivors are counted. Rates that are not given
are found. Runs of one seed share initial weights, data and noise, and differ in method and rate alone. A run that has
collapsed is ended. Runs are shared over the cores, one thread each; finished ones are kept in a folder, and the same
call goes on from there.
"""

import copy
import hashlib
import json
import logging
import math
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attaching import is_scaled, scale_skips_, start_skips_, without_records
from ..config import flatten
from ..console import Progress
from ..errors import (
    InvalidConfigError,
    RunFolderError,
    ScaleLongError,
    UnfinishedError,
    UnsupportedModelError,
)
from ..files import append_json_line, fitting, locked, parse_json, read_json, read_text, results_folder, write_text
from ..finding import ExampleInputs, SkipPlan, find_skips, unwrap
from ..models import by_name, fuse_
from ..randomness import generator, seed_global
from ..scaling import NoScaling, as_scaling
from ..tracing import StateSnapshot
from .alarms import bare_merges
from .collapse import RULE, Collapse, CollapseDetector
from .features import Meter, attach_meter, first_to_leave
from .survival import RateRange, RateRun, rate_text

Build = Callable[[int], nn.Module]
"""From a seed to a new network. Python's, numpy's and torch's generators are seeded before it is called."""
Step = Callable[[nn.Module, int, torch.Generator], Tensor]
"""The loss of training step i: a scalar with a gradient. `rate_range` does the backward and the optimiser's step."""
MakeOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]
Key = tuple[str, float, int]
"""Method, rate, seed."""
Work = Callable[[Key], RateRun]

logger = logging.getLogger(__name__)

METHODS = ("none", "merge_norm", "start:cs:0.7", "ls")
"""The methods that are tried: no cure, the one that lasts, and the paper's two."""
START = "start:"
SETTINGS, RUNS = "settings.json", "runs.jsonl"
REFERENCE_BATCHES = 4
CURVE_POINTS = 60
SMOOTHING = 0.9
"""Exponential smoothing of the curves and of the best loss."""
NOT_LEARNED = 0.9
"""A run that has not collapsed and ends above this share of the reference loss has not learned."""
GONE, GONE_FOR = 0.97, 60
"""A run that was below NOT_LEARNED, and then stays above the first share for so many steps, is ended. It has not
collapsed, because it had learned too little."""
READ_EVERY = 10
"""Steps between two looks at the losses on an accelerator."""
SIZES_EVERY = 5
"""Steps between readings of the sizes of blocks and skips."""
LOWEST_RATE, MIDDLE_RATE, HIGHEST_RATE = 1e-5, 2e-3, 1.0
"""Limits of the search for rates, and where it begins."""
LOST = ("collapsed", "not finite")


class StepFailedError(ScaleLongError, RuntimeError):
    """The build or step function of the user raised in a run, or its process was killed."""


@dataclass(frozen=True)
class Method:
    """One way to begin: a scaling ("cs:0.7"), a start ("start:cs:0.7"), or a function that changes the new network.

    `build` makes a network of its own, for example one with a different initialisation.
    """

    name: str
    change: str | Callable[[nn.Module], object] = "none"
    build: Build | None = None

    @property
    def plain(self) -> bool:
        """True if the network is left as it is built."""
        return isinstance(self.change, str) and isinstance(as_scaling(self.change.removeprefix(START)), NoScaling)


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
    device: torch.device | str | None = None,
    jobs: int | None = None,
    out: str | PathLike[str] | None = None,
    title: str = "",
    about: dict[str, Any] | None = None,
    after: Callable[[nn.Module, RateRun], object] | None = None,
    run_all: Callable[[Work, list[Key], int], Iterable[RateRun]] | None = None,
) -> RateRange:
    """Train every method at every rate with every seed, and count who survives.

    build: makes the network from a seed; or a network, which is copied for each run and left as it is (then seeds
        differ in data and noise alone).
    step: (model, i, generator) -> loss. Draw everything random from the generator (of the CPU), and equal seeds are
        equal; put it on the device of the model.
    rates: constant after `warmup` steps (default: a sixth of `steps`). Left out, they are found, from `your_rate` on
        (`find_rates`).
    methods: the first one is the baseline; see `Method`. Left out, those of METHODS that the network takes.
    your_rate: the rate that you train with, for the verdict.
    optimizer: (model, rate) -> torch optimiser; AdamW with betas of 0.9 and 0.99 if left out.
    reference_loss: of a network that knows nothing; left out, the loss of the baseline at the start.
    example_inputs: to find the long skips; left out, the model is looked at while it takes the first step.
    device: where networks are trained; left out, the accelerator that is there, or where the given network is.
    jobs: processes (default: one per core; one on an accelerator).
    out: a folder that keeps every finished run; the same call continues there, other settings are refused.
    about: plain values that belong to the settings and are compared as well, such as a configuration.
    after: called at the end of each run with the trained model, in the process of the run.
    run_all: (work, waiting runs, jobs) -> their results as they come; left out, processes of this machine.
    """
    task = Task(build, step, methods, rates, seeds, steps, warmup, optimizer, clip, example_inputs, device, after)
    for name, value in {"your_rate": your_rate, "reference_loss": reference_loss, "clip": clip}.items():
        if value is not None:
            _require_positive(name, value)
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if task.device.type == "cpu" and hasattr(os, "sched_getaffinity") else 1
    _require_count("jobs", jobs, 1)
    with ExitStack() as end:
        end.callback(StateSnapshot().restore)
        task, prints = task.prepared(reference_loss, leave_out=methods is None)
    folder = None if out is None else results_folder(out)
    settings = {"steps": task.steps, "warmup": task.warmup, "clip": clip, "rule": RULE, "about": about or {}}
    # Sums may come out differently in the last digits on another machine.
    settings |= {"reference_loss": float(f"{task.reference:.3g}"), "weights": prints}
    with nullcontext() if folder is None else locked(folder, wait=False):
        done = {} if folder is None else _continued(folder, settings)

        def carry(keys: list[Key]) -> None:
            """Do the runs that are not done yet, and keep each as it comes."""
            purpose = "" if task.rates else "to find rates: "
            with Progress(f"{purpose}runs", len(keys)) as progress:
                for run in (run_all or _run_all)(task.run, [key for key in keys if key not in done], jobs):
                    done[run.method, run.rate, run.seed] = run
                    if folder is not None:
                        append_json_line(folder / RUNS, asdict(run))
                    finished = sum(key in done for key in keys)
                    logger.info(f"{purpose or f'{finished}/{len(keys)}  '}{run}")
                    progress(finished)
            if missing := sum(key not in done for key in keys):
                raise UnfinishedError(f"{missing} of {len(keys)} runs are not finished; the same command goes on")

        if task.rates and all(key in done for key in task.keys):
            logger.info(f"all {len(task.keys)} runs are finished already")
        if not task.rates:
            task = replace(task, rates=find_rates(task, done, carry, your_rate or MIDDLE_RATE))
        carry(task.keys)
        found = RateRange(
            methods=tuple(method.name for method in task.methods),
            rates=task.rates,
            seeds=task.seeds,
            runs=tuple(done[key] for key in task.keys),
            steps=task.steps,
            warmup=task.warmup,
            reference_loss=task.reference,
            rule=RULE,
            your_rate=your_rate,
            title=title,
        )
        if folder is not None:
            found.save(folder)
        return found


def find_rates(
    task: "Task", done: dict[Key, RateRun], carry: Callable[[list[Key]], object], start: float
) -> tuple[float, float, float]:
    """Three rates, each twice the one before: the highest that the baseline survives, the lowest at which it is lost,
    and one above, where a method that helps may still survive.

    The first seed of the baseline goes up or down from `start` by factors of four, two rates at the same time, until
    both were seen or a limit is reached; then it halves the step.
    """
    method, seed = task.methods[0].name, task.seeds[0]

    def lost(rate: float, *others: float) -> bool:
        """The others are tried at the same time."""
        carry([(method, each, seed) for each in (rate, *others)])
        tried = {key[1]: run for key, run in done.items() if (key[0], key[2]) == (method, seed)}
        # Above a rate at which a network learns, one that learns nothing is lost from the first step on. Elsewhere it
        # may be slow, unless it was ended.
        learned = any(run.survived for each, run in tried.items() if each < rate)
        ended = learned or tried[rate].steps < task.steps
        return tried[rate].outcome in LOST or (ended and not tried[rate].survived)

    if lost(start, 4 * start):
        while start / 4 > LOWEST_RATE and lost(start / 4, start / 16):
            start /= 4
        start /= 4
    else:
        while 4 * start < HIGHEST_RATE and not lost(4 * start, 16 * start):
            start *= 4
    # Alive at `start`, lost at four times that.
    high = 2 * start if lost(2 * start) else 4 * start
    return high / 2, high, 2 * high


# One run


@dataclass
class Task:
    """All that the runs share, checked before any work. The fields are the arguments of `rate_range`."""

    build: Any
    step: Step
    methods: Any = None
    rates: Any = None
    seeds: Any = 8
    steps: int = 300
    warmup: Any = None
    optimizer: MakeOptimizer = adamw
    clip: float | None = None
    example_inputs: ExampleInputs = None
    device: Any = None
    after: Callable[[nn.Module, RateRun], object] | None = None
    reference: float = math.nan
    plans: tuple[SkipPlan | None, ...] = ()
    """The long skips of the network of each method, where they are needed or could be found."""

    def __post_init__(self) -> None:
        if not callable(self.step) or not callable(self.build):
            raise InvalidConfigError("give a network or a function from a seed to one, and a function for the loss")
        methods = METHODS if self.methods is None else _list(self.methods)
        self.methods = tuple(each if isinstance(each, Method) else Method(each, each) for each in methods)
        for method in self.methods:
            if method.plain and str(method.change).startswith(START):
                raise InvalidConfigError(f"{method.change!r} starts nothing: write 'none', or 'start:cs:0.7'")
        if isinstance(self.seeds, int):
            _require_count("seeds", self.seeds, 1)
            self.seeds = range(self.seeds)
        self.warmup = self.steps // 6 if self.warmup is None else self.warmup
        _require_count("steps", self.steps, 2)
        _require_count("warmup", self.warmup, 0)
        if self.warmup >= self.steps:
            raise InvalidConfigError(f"a warm-up of {self.warmup} steps leaves nothing of {self.steps} steps")
        given = {"methods": [each.name for each in self.methods], "seeds": self.seeds}
        for rate in (rates := _list(self.rates or ())):
            _require_positive("rates", rate)
        for name, values in (given | ({} if self.rates is None else {"rates": rates})).items():
            if not values or len(set(values)) < len(values):
                raise InvalidConfigError(f"give at least one of {name}, each once; got {', '.join(map(str, values))}")
        self.rates, self.seeds = tuple(sorted(map(float, rates))), tuple(self.seeds)
        if isinstance(network := self.build, nn.Module):
            if is_scaled(network):
                raise InvalidConfigError("the model is scaled already: give it as it is without scaling (unscale_)")
            self.device = next((p.device for p in network.parameters()), "cpu") if self.device is None else self.device
            self.build = lambda _: copy.deepcopy(network)
        if self.device is None and torch.accelerator.is_available():
            self.device = torch.accelerator.current_accelerator()
        self.device = torch.device(self.device or "cpu")

    @property
    def keys(self) -> list[Key]:
        """Seed by seed, so that what is interrupted holds whole seeds."""
        return [(method.name, rate, seed) for seed in self.seeds for rate in self.rates for method in self.methods]

    def make(self, method: Method, seed: int, plan: SkipPlan | None) -> nn.Module:
        """The network of a method before its first step. Weights that methods share are equal."""
        seed_global(seed, "weights")
        model = (method.build or self.build)(seed)
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"build({seed}) must return a torch.nn.Module, got {type(model).__name__}")
        model.to(self.device)
        if callable(method.change):
            method.change(model)
        elif method.change.startswith(START):
            start_skips_(model, method.change.removeprefix(START), plan=plan)
        elif not method.plain:
            scale_skips_(model, method.change, plan=plan)
        return fuse_(model).train()

    def prepared(self, reference: float | None, *, leave_out: bool) -> tuple["Task", dict[str, str]]:
        """Try every method for a step, before any work: what is wrong shows now. Gives its weights' hashes as well.

        `leave_out`: methods that this network refuses are left out; otherwise they raise.
        """
        kept: list[Method] = []
        plans: list[SkipPlan | None] = []
        prints: dict[str, str] = {}
        for method in self.methods:
            shared = bool(plans) and method.build is None and kept[0].build is None
            try:
                found = (plans[0] if shared else None) or self._find(method)
            except ScaleLongError:
                # Without long skips a network can still be trained, but not scaled.
                if leave_out or (isinstance(method.change, str) and not method.plain):
                    raise
                found = None
            try:
                if leave_out and method.change == "merge_norm" and not bare_merges(found or ()):
                    raise UnsupportedModelError("no merge of this network is a concatenation without a norm")
                model = self.make(method, 0, found)
            except ScaleLongError as error:
                if method.plain or not leave_out:
                    raise
                logger.warning("without %s, which this network refuses: %s", method.name, error)
                continue
            kept.append(method)
            plans.append(found)
            prints[method.name] = _fingerprint(model)
            losses = [self._loss(model, i, 0) for i in range(REFERENCE_BATCHES if reference is None else 1)]
            if not isinstance(loss := losses[0], Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise InvalidConfigError(
                    f"step(model, i, generator) must return the loss, one number with a gradient; with {method.name} "
                    f"it returned {what}"
                )
            if reference is None:
                reference = sum(float(loss.detach()) for loss in losses) / len(losses)
        assert reference is not None
        if not (math.isfinite(reference) and reference > 0):
            raise InvalidConfigError(
                f"the loss at the start is {reference:g}, and collapse is judged in shares of it: give reference_loss, "
                f"the loss of a network that has learned nothing, above 0"
            )
        given = {"methods": tuple(kept), "rates": self.rates or None}
        return replace(self, plans=tuple(plans), reference=reference, **given), prints

    def _find(self, method: Method) -> SkipPlan:
        """The long skips, on what the model is given in the first step."""
        model, inputs = self.make(replace(method, change="none"), 0, None), self.example_inputs
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
        began, plan = time.process_time(), self.plans[position]
        model = self.make(self.methods[position], seed, plan)
        optimizer = self.optimizer(model, rate)
        full = [group["lr"] for group in optimizer.param_groups]
        outcome, meter = RunOutcome(self.reference, self.warmup, self.steps), Meter()
        sizes: list[tuple[int, dict[str, float]]] = []
        handles = [] if plan is None else attach_meter(unwrap(model), plan, meter)
        unread: list[Tensor] = []
        for i in range(self.steps):
            for group, lr in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = lr * min(1.0, (i + 1) / max(self.warmup, 1))
            meter.on = plan is not None and i % SIZES_EVERY == 0
            meter.clear()
            loss = self._loss(model, i, seed)
            if meter.on:
                sizes.append((i + 1, meter.sizes()))
            meter.on = False
            unread.append(loss.detach())
            # Reading a number means waiting for the device: an accelerator may go some steps past a collapse instead.
            if loss.device.type == "cpu" or len(unread) == READ_EVERY or i == self.steps - 1:
                first = i + 1 - len(unread)
                if any(outcome.add(first + k, value) for k, value in enumerate(torch.stack(unread).tolist())):
                    break
                unread.clear()
            optimizer.zero_grad()
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], self.clip)
            optimizer.step()
        for handle in handles:
            handle.remove()
        run = RateRun(
            method=name,
            rate=rate,
            seed=seed,
            outcome=outcome.name,
            steps=outcome.steps,
            onset=outcome.onset if outcome.name == "collapsed" else None,
            best=_rounded(outcome.best),
            best_step=outcome.best_step,
            last=_rounded(outcome.smoothed),
            curve=outcome.curve,
            # Against the reading at the best loss.
            left_first=None if outcome.name == "survived" else first_to_leave(sizes, outcome.best_step),
            seconds=round(time.process_time() - began, 2),
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
        """The last step before the collapse."""
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
        self.onset = event.began if isinstance(event, Collapse) else None
        gone = self.best <= NOT_LEARNED * self.reference and self.steps - self._good >= GONE_FOR
        ended = gone or self.onset is not None
        if ((i + 1) % self._every == 0 or i == 0 or ended) and math.isfinite(self.smoothed):
            self.curve.append([i + 1, float(f"{self.smoothed:.4g}")])
        return ended

    @property
    def name(self) -> str:
        """One of OUTCOMES."""
        if not math.isfinite(self.smoothed):
            return "not finite"
        if self.onset is not None:
            return "collapsed"
        return "survived" if self.smoothed <= NOT_LEARNED * self.reference else "not learned"


# Processes


_work: Work
"""The work of the pool. Its forked processes inherit it, so that it need not be pickled."""


def _run_all(work: Work, waiting: list[Key], jobs: int) -> Iterator[RateRun]:
    """Results as they come. Forked processes share the data and take functions of any kind, as a DataLoader's do."""
    global _work
    _work, jobs = work, min(jobs, len(waiting))
    if jobs < 2 or "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        for key in waiting:
            with ExitStack() as end:
                end.callback(StateSnapshot().restore)
                end.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
                run = _attempt(key)
            yield run
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
    futures: list[Future[RateRun]] = []
    try:
        with warnings.catch_warnings():
            # Python warns that threads of the parent do not exist in a forked child; nothing here needs them.
            warnings.simplefilter("ignore", DeprecationWarning)
            futures += [pool.submit(_attempt, key) for key in waiting]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise StepFailedError("the process of a run was killed, perhaps for want of memory: try fewer jobs") from error
    finally:
        if not all(future.done() for future in futures):
            # What still runs is of no use: the caller has stopped to ask, or a run has failed.
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _attempt(key: Key) -> RateRun:
    try:
        return _work(key)
    except Exception:
        # As text: not every exception can be pickled.
        method, rate, seed = key
        raise StepFailedError(f"{method} at {rate_text(rate)}, seed {seed} failed:\n{traceback.format_exc()}") from None


# Finished runs in a folder, one JSON line each


def _continued(folder: Path, settings: dict[str, Any]) -> dict[Key, RateRun]:
    """The runs that the folder holds. Different settings are refused; more methods, rates and seeds are welcome."""
    path, now = folder / SETTINGS, flatten(json.loads(json.dumps(settings)))
    before = read_json(path) if path.exists() else {}
    known = flatten(before)
    if known.get("about.lora") == 0:  # a field of earlier versions
        known.pop("about.lora")
    # Weights are those of the methods that were asked for, which may be others now.
    names = [name for name in {**known, **now} if (name in known and name in now) or not name.startswith("weights.")]
    changed = [name for name in names if known and known.get(name) != now.get(name)]
    if changed:
        what = "; ".join(f"{name} was {known.get(name)!r} and is {now.get(name)!r}" for name in changed[:4])
        raise RunFolderError(
            f"{folder} holds runs with other settings: {what}. Choose another folder (`out`), or give the settings "
            f"that it has; weights are hashes of the networks at the start"
        )
    weights = {**before.get("weights", {}), **settings["weights"]}
    write_text(path, json.dumps({**settings, "weights": weights}, indent=1))
    path = folder / RUNS
    text = read_text(path) if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # a crash cut off the last line
        write_text(path, whole)
    try:
        runs = [fitting(RateRun, parse_json(line)) for line in whole.splitlines() if line.strip()]
    except ValueError as error:
        raise RunFolderError(
            f"a line of {path} is damaged ({error}): remove that line, or choose another folder (`out`)"
        ) from error
    return {(run.method, run.rate, run.seed): run for run in runs}


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


# Checks


def _list(values: Any) -> list[Any]:
    return [values] if isinstance(values, str | int | float) else list(values)


def _require_count(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidConfigError(f"{name} must be a whole number, at least {low}, got {value!r}")


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InvalidConfigError(f"{name} must be above 0, got {value!r}")


def _seen_inputs(model: nn.Module, run: Callable[[], object]) -> ExampleInputs:
    """The inputs of the model in a step: by position, or by name if it was given names; None if there are none."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    host = unwrap(model)
    handle = host.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    args, kwargs = seen[0] if seen else ((), {})
    return by_name(host, args, kwargs) if kwargs else args or None


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
