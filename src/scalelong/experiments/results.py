"""The results of runs as rows, read once from their folders: compare, the report and all of `research/` use them.

    record = read_run("runs/compare-digits-tiny/cs-0.7-seed0")
    record.method, record.held_out.values[-1], record.kappas, record.collapsed
    results = Results([read_run(folder) for folder in folders])
    print(text_table(table_rows(results.summaries())))

A `RunRecord` is one run: its name, seed, what differs, held-out curve, κ, oscillation, scores, and whether it diverged
or collapsed. `Results` selects records, pairs them by seed and summarises them by method. Nothing here needs torch: a
report of a long run should be there in a second.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from ..errors import InvalidConfigError
from ..files import write_text
from ..stability.alarms import Oscillation, oscillation

BASELINE = "none"
COLLAPSED = 2.0
"""A loss that ends at more than this many times its smallest value has collapsed."""
VARIANT, DIVERGED, METRICS, CONFIG = "variant.json", "diverged.json", "metrics.jsonl", "config.yaml"
DIAGNOSIS = "diagnosis.json"


# Curves


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The value at a step, interpolated; None outside of what was recorded."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if step == right:
                # Interpolated, it may come out below by a rounding error, and then the curve itself never reaches it.
                return high
            if left <= step < right:
                return low + (high - low) * (step - left) / (right - left)
        return self.values[0]

    def best(self, step: int) -> float | None:
        """The smallest value up to a step, the interpolated one there included; None if there is nothing yet."""
        last = self.at(step)
        values = [value for at, value in self.points if at <= step] + ([] if last is None else [last])
        return min(values, default=None)

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    @property
    def collapsed(self) -> bool:
        """Whether a loss went up again for good, though it stayed finite."""
        return len(self) > 0 and self.values[-1] > COLLAPSED * min(self.values)

    @cached_property
    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))

    def rounded(self, digits: int) -> "Curve":
        return Curve(self.steps, tuple(rounded(value, digits) for value in self.values))


def steps_to(curve: Curve, target: float) -> float | None:
    """When the curve first comes down to the target, interpolated between two records; None if it never does."""
    before: tuple[int, float] | None = None
    for step, value in curve.points:
        if value <= target:
            if before is None:
                return float(step)
            left, high = before
            return left + (step - left) * (high - target) / (high - value)
        before = (step, value)
    return None


def steps_ratio(curve: Curve, baseline: Curve) -> float | None:
    """Steps that a method needs for the baseline's last loss, divided by the steps that the baseline needs for it.

    Of a baseline that collapsed it is the smallest loss. Below 1 is faster than the baseline. None: the method does not
    get there in the steps that were run.
    """
    if not len(curve) or not len(baseline):
        return None
    target = min(baseline.values) if baseline.collapsed else baseline.values[-1]
    mine, theirs = steps_to(curve, target), steps_to(baseline, target)
    return None if mine is None or not theirs else mine / theirs


def rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


# Reading metrics.jsonl, which may have a million lines

MOST_LINES, MOST_BYTES = 8192, 8_000_000
"""Of one kind of line, kept at a time. Comparisons record a few hundred; only long runs are thinned."""


def read_curves(folder: str | PathLike[str]) -> dict[str, Curve]:
    """All quantities of a run by name. Of a long run every 2ᵏ-th record, at equal distances, and the last one."""
    found: dict[str, dict[int, float]] = {}
    for line in _kept_lines(Path(folder) / METRICS):
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a line that a kill cut off, or one that someone else wrote
        for name, value in values.items():
            if isinstance(value, int | float):
                found.setdefault(name, {})[step] = float(value)
    return {name: _curve(values) for name, values in found.items()}


def _curve(values: Mapping[int, float]) -> Curve:
    steps = tuple(sorted(values))
    return Curve(steps, tuple(values[step] for step in steps))


@dataclass(eq=False)
class _Kind:
    """Lines that hold the same quantities. Where they become too many, every other one is dropped."""

    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    stride: int = 1
    seen: int = 0
    last: bytes = b""

    def keep(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)
        if len(self.lines) > MOST_LINES or self.size > MOST_BYTES:
            self.lines = self.lines[::2]
            self.size = sum(map(len, self.lines))
            self.stride *= 2


def _kept_lines(path: Path) -> Iterator[bytes]:
    """The lines worth parsing. To parse a million would take a minute; to tell their kinds apart takes half a second.

    A kind is told by the name of its first quantity, that of its last, and the number of quotes between them. Held-out
    losses and scores, which are rare, are of their own kind and all kept.
    """
    if not path.exists():
        return
    kinds: dict[tuple[bytes, int, bytes], _Kind] = {}
    with open(path, "rb") as file:
        for line in file:
            start, end = line.split(b'"', 4), line.rsplit(b'"', 2)
            key = (start[3] if len(start) > 4 else b"", line.count(b'"'), end[1] if len(end) > 2 else b"")
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _Kind()
            if kind.seen % kind.stride == 0:
                kind.keep(line)
            kind.last = line
            kind.seen += 1
    for kind in kinds.values():
        yield from kind.lines
        if kind.stride > 1:
            yield kind.last


def last_line(folder: Path, name: str) -> dict[str, Any] | None:
    """The newest line of the metrics that has this quantity, looked for from the end of the file."""
    path = Path(folder) / METRICS
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 200_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if f'"{name}":'.encode() in line:
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


# One run

NOT_RECORDED = Oscillation(math.nan, math.nan, math.nan, math.nan, 0, "nothing was recorded")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What became of one run. The same run may appear in several results, under the names that it has there."""

    method: str
    """The name of the method or variant."""
    seed: int
    setting: str = ""
    """Where methods are compared: data, network, depth, batch."""
    run: str = ""
    """Name of the run folder."""
    differs: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration by which this method differs from others: {"scaling": "cs"}."""
    held_out: Curve = Curve()
    """Held-out losses of the averaged weights."""
    kappas: tuple[float, ...] = ()
    """Coefficients of the last step."""
    oscillation: Oscillation = NOT_RECORDED
    """Of the features on the probe batch, over all blocks: mean O1, O2, O3 and the highest peak."""
    o1_gradient: float | None = None
    frechet: float | None = None
    """Fréchet distance of the last samples, where it was measured."""
    diverged: str | None = None
    """Why the run ended early: its numbers stopped being finite."""
    seconds: float | None = None
    """Seconds of training, on whatever machine that was; without held-out losses and scores."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """All that was recorded, by name; empty for records that come from a file of results."""
    traces: dict[str, list[float]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """Further measurements of a study."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration by dotted names."""
    folder: Path | None = None
    finished: bool = True

    @property
    def collapsed(self) -> bool:
        """Whether the loss went up again for good."""
        return self.held_out.collapsed

    @property
    def survived(self) -> bool:
        return not self.collapsed and self.diverged is None

    def rounded(self, digits: int = 4) -> "RunRecord":
        """Four digits say all there is to say, and what is published is computed from what is stored."""

        def short(value: float | None) -> float | None:
            return None if value is None or not math.isfinite(value) else rounded(value, digits)

        o1 = short(self.oscillation.o1)
        return replace(
            self,
            held_out=self.held_out.rounded(digits),
            kappas=tuple(rounded(value, digits) for value in self.kappas),
            oscillation=replace(self.oscillation, o1=math.nan if o1 is None else o1),
            o1_gradient=short(self.o1_gradient),
            frechet=short(self.frechet),
            seconds=short(self.seconds),
            traces={name: [rounded(value, digits) for value in values] for name, values in self.traces.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """As in the results.json of `scalelong reproduce`."""
        return {
            "setting": self.setting,
            "method": self.method,
            "seed": self.seed,
            "run": self.run,
            "held_out": [list(point) for point in self.held_out.points],
            "kappas": list(self.kappas),
            "o1_features": self.oscillation.o1 if math.isfinite(self.oscillation.o1) else None,
            "o1_gradient": self.o1_gradient,
            "gate": self.oscillation.gate,
            "frechet": self.frechet,
            "diverged": self.diverged is not None,
            "seconds": self.seconds,
            "traces": self.traces,
            "measured": self.measured,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunRecord":
        o1, nan = values["o1_features"], math.nan
        return cls(
            setting=values["setting"],
            method=values["method"],
            seed=values["seed"],
            run=values["run"],
            held_out=Curve(*(tuple(column) for column in zip(*values["held_out"], strict=True)))
            if values["held_out"]
            else Curve(),
            kappas=tuple(values["kappas"]),
            oscillation=Oscillation(nan if o1 is None else o1, nan, nan, nan, 0, values["gate"]),
            o1_gradient=values["o1_gradient"],
            frechet=values["frechet"],
            diverged="it diverged" if values["diverged"] else None,
            seconds=values["seconds"],
            traces=values["traces"],
            measured=values["measured"],
        )


def read_run(
    folder: str | PathLike[str],
    *,
    method: str | None = None,
    setting: str = "",
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunRecord:
    """One run, read once. What is not given comes from the folder: the variant's name, or else its scaling."""
    folder = Path(folder)
    values = dict(config) if config is not None else _config(folder)
    named = read_json(folder / VARIANT)
    curves = read_curves(folder)
    gradient = curves.get("gradient_norm/all")
    return RunRecord(
        method=method or named.get("name") or str(values.get("scaling", BASELINE)),
        seed=int(values.get("seed", 0)) if seed is None else seed,
        setting=setting,
        run=folder.name,
        differs=dict(named.get("changes", {})),
        held_out=curves.get("held_out_loss", Curve()),
        kappas=_kappas(curves),
        oscillation=block_oscillation(curves),
        o1_gradient=oscillation(gradient.values).o1 if gradient else None,
        frechet=curves["frechet"].last if "frechet" in curves else None,
        diverged=_divergence(folder),
        seconds=curves["seconds"].last if "seconds" in curves else None,
        curves=curves,
        config=values,
        folder=folder,
        finished=_finished(folder, values),
    )


def write_variant(folder: Path, name: str, changes: Mapping[str, Any]) -> None:
    """The name under which a comparison knows the run, beside the run, for reports."""
    if not (folder / VARIANT).exists():
        write_text(folder / VARIANT, json.dumps({"name": name, "changes": dict(changes)}, ensure_ascii=False))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidConfigError(
            f"{path} cannot be read as JSON: {error}; restore the file, or remove it from the run folder"
        ) from error
    return values if isinstance(values, dict) else {}


def _config(folder: Path) -> dict[str, Any]:
    """config.yaml by dotted names, as it stands there. `load_config` would check it, and needs torch for that."""
    import yaml

    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        # The loader in C is ten times faster where it is there.
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InvalidConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"{path} must hold fields such as 'steps: 1000', got {type(values).__name__}")
    return _flat(values)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _divergence(folder: Path) -> str | None:
    return read_json(folder / DIVERGED).get("message", "") if (folder / DIVERGED).exists() else None


def _finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """All steps are done, or the numbers stopped being finite: there is nothing left to do."""
    if (folder / DIVERGED).exists():
        return True
    saved = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    steps = [int(step) for step in saved if step.isdigit()]
    return bool(steps) and max(steps) >= int(config.get("steps", 0))


def _kappas(curves: Mapping[str, Curve]) -> tuple[float, ...]:
    names = sorted((name for name in curves if name.startswith("kappa/")), key=lambda name: int(name.split("/")[1]))
    return tuple(curves[name].values[-1] for name in names)


def block_oscillation(curves: Mapping[str, Curve]) -> Oscillation:
    """The scores of all blocks of one run together. A gate that closes for one block closes for the run."""
    held_out = curves.get("held_out_loss")
    loss = held_out.values[-1] if held_out else None
    series = [curve.values for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    scores = [oscillation(values, loss=loss) for values in series]
    if not scores:
        return NOT_RECORDED
    return Oscillation(
        o1=fmean(score.o1 for score in scores),
        o2=fmean(score.o2 for score in scores),
        o3=fmean(score.o3 for score in scores),
        peak=max(score.peak for score in scores),
        readings=scores[0].readings,
        gate=next((score.gate for score in scores if score.gate), ""),
    )


# Many runs


def baseline_of(methods: Sequence[str]) -> str:
    """The method that the others are measured against: "none", or else the first."""
    return BASELINE if BASELINE in methods else methods[0]


@dataclass(frozen=True)
class MethodSummary:
    """What became of one method. Lists have an entry per seed; None stands for what does not exist.

    The fields are those of comparison.json.
    """

    method: str
    seeds: list[int]
    held_out_loss: list[float | None]
    """At `step`, the last step that all runs reached."""
    step: int
    steps_ratio: list[float | None]
    """Steps to the baseline's loss, relative to the baseline of the same seed."""
    coefficients: list[float]
    """κ_i at the end, mean over seeds."""
    seconds_per_step: float | None
    diverged: list[int]
    """Seeds whose numbers stopped being finite."""
    collapsed: list[int]
    """Seeds whose loss went up again for good."""
    oscillation: list[Oscillation]
    frechet: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """Records of runs: selected, paired and summarised."""

    runs: Sequence[RunRecord]

    def of(self, method: str, setting: str | None = None) -> list[RunRecord]:
        """The runs of a method, in the order of their seeds."""
        found = [run for run in self.runs if run.method == method and setting in (None, run.setting)]
        return sorted(found, key=lambda run: run.seed)

    def methods(self, setting: str | None = None) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs if setting in (None, run.setting)))

    @property
    def baseline(self) -> str:
        return baseline_of(self.methods())

    def pairs(self, method: str, other: str, setting: str | None = None) -> list[tuple[RunRecord, RunRecord]]:
        """Runs of two methods under equal seeds."""
        theirs = {run.seed: run for run in self.of(other, setting)}
        return [(run, theirs[run.seed]) for run in self.of(method, setting) if run.seed in theirs]

    @property
    def last_common_step(self) -> int:
        return min((run.held_out.steps[-1] for run in self.runs if len(run.held_out)), default=0)

    def summaries(self) -> list[MethodSummary]:
        """A row per method, over all seeds."""
        return [self._summary(method) for method in self.methods()]

    def _summary(self, method: str) -> MethodSummary:
        runs = [run for run in self.runs if run.method == method]
        baselines = {run.seed: run.held_out for run in self.of(self.baseline)}
        count = len(runs[0].kappas)
        paces = sorted(value for run in runs for value in run.curves.get("seconds_per_step", Curve()).values)
        return MethodSummary(
            method=method,
            seeds=[run.seed for run in runs],
            held_out_loss=[run.held_out.at(self.last_common_step) for run in runs],
            step=self.last_common_step,
            steps_ratio=[steps_ratio(run.held_out, baselines.get(run.seed, Curve())) for run in runs],
            coefficients=[fmean(run.kappas[i] for run in runs if len(run.kappas) > i) for i in range(count)],
            # The median: a machine that others use as well makes single records slow.
            seconds_per_step=paces[len(paces) // 2] if paces else None,
            diverged=[run.seed for run in runs if run.diverged is not None],
            collapsed=[run.seed for run in runs if run.collapsed],
            oscillation=[run.oscillation for run in runs],
            frechet=[run.frechet for run in runs],
        )


# Tables


def table_rows(summaries: Sequence[MethodSummary]) -> list[dict[str, str]]:
    scored = any(score is not None for entry in summaries for score in entry.frechet)
    base = baseline_of([entry.method for entry in summaries])
    return [
        {
            "method": entry.method,
            f"held-out loss, step {entry.step}": spread(entry.held_out_loss, "{:.4f}"),
            **({"Fréchet distance": spread(entry.frechet, "{:.2f}")} if scored else {}),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "ms/step": "-" if entry.seconds_per_step is None else f"{1000 * entry.seconds_per_step:.0f}",
            "κ_1 ... κ_N": " ".join(f"{value:.2f}" for value in entry.coefficients) or "-",
            **_oscillation_cells(entry.oscillation),
            **_lost(entry, summaries),
        }
        for entry in summaries
    ]


def _lost(entry: MethodSummary, summaries: Sequence[MethodSummary]) -> dict[str, str]:
    """Seeds that diverged or collapsed, if there are any."""
    kinds = [kind for kind in ("diverged", "collapsed") if any(getattr(other, kind) for other in summaries)]
    return {kind: ", ".join(f"seed {seed}" for seed in getattr(entry, kind)) or "-" for kind in kinds}


def _oscillation_cells(scores: Sequence[Oscillation]) -> dict[str, str]:
    valid = [score for score in scores if score.valid]
    return {
        "O1": spread([score.o1 for score in valid], "{:.2g}"),
        "O2": spread([score.o2 for score in valid], "{:.2g}"),
        "O3": spread([score.o3 for score in valid], "{:.2g}"),
        "peak": spread([score.peak for score in valid], "{:.2f}"),
    }


def spread(values: Sequence[float | None], form: str) -> str:
    """The mean, and the range if there are several seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return form.format(known[0])
    return f"{form.format(fmean(known))} ({form.format(min(known))} to {form.format(max(known))})"


def ratio_text(ratios: Sequence[float | None]) -> str:
    reached = [ratio for ratio in ratios if ratio is not None]
    missing = len(ratios) - len(reached)
    text = "× " + spread(reached, "{:.2f}") if reached else ""
    if missing:
        text += f"{', ' if text else ''}not reached" + (
            f" by {missing} of {len(ratios)} seeds" if len(ratios) > 1 else ""
        )
    return text


# Intervals, and what the runs say in a sentence

# Student's t, 95 % one-sided, for 1, 2, ... degrees of freedom.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)


def student_t(freedom: int) -> float:
    """The 95 % quantile of Student's t.

    Beyond the table by the expansion of Cornish and Fisher around the normal's quantile (Abramowitz and Stegun,
    26.7.5), which is right to four digits from 17 degrees of freedom on.
    """
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.95)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies with 90 % confidence; everywhere, for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def fisher_p(survived: int, runs: int, other_survived: int, other_runs: int) -> float:
    """Fisher's exact test, two-sided: how often chance alone divides the survivors at least this unevenly."""
    total, alive = runs + other_runs, survived + other_survived

    def chance(count: int) -> float:
        return math.comb(runs, count) * math.comb(other_runs, alive - count) / math.comb(total, alive)

    possible = range(max(0, alive - other_runs), min(runs, alive) + 1)
    seen = chance(survived) * (1 + 1e-9)
    return min(1.0, sum(chance(count) for count in possible if chance(count) <= seen))


CHANCE = 0.05


def verdict(results: Results) -> list[str]:
    """What the runs say, in sentences that are computed from them: who survived, and who ends lower than the baseline.

    Losses are compared under equal seeds, by the logarithm of their ratio, with its 90 % interval (Student's t).
    """
    methods = [method for method in results.methods() if results.of(method)]
    if not methods:
        return []
    said = [_survivors(results, methods)]
    base = results.baseline
    for method in methods:
        if method != base:
            said += _against(results, method, base)
    running = sum(not run.finished for run in results.runs)
    if running:
        said.append(f"{_count(running, 'run')} of {len(results.runs)} not finished: this is what is there so far.")
    return said


def _survivors(results: Results, methods: Sequence[str]) -> str:
    runs = list(results.runs)
    if all(run.survived for run in runs):
        losses = [run.held_out.last for run in runs if run.held_out.last is not None]
        if len(runs) == 1:
            loss = f" and ends with a held-out loss of {losses[0]:.4g}" if losses else ""
            return f"The run with {runs[0].method} did not collapse{loss}."
        return f"All {len(runs)} runs survived: none diverged and none collapsed."
    counts = [(method, sum(run.survived for run in results.of(method)), len(results.of(method))) for method in methods]
    if len(runs) == 1:
        how = "diverged: its numbers stopped being finite" if runs[0].diverged is not None else "collapsed"
        return f"The run with {runs[0].method} {how}."
    return "Survivors: " + ", ".join(f"{method} {alive} of {count}" for method, alive, count in counts) + "."


def _against(results: Results, method: str, base: str) -> list[str]:
    mine, theirs = results.of(method), results.of(base)
    said: list[str] = []
    alive, other = sum(run.survived for run in mine), sum(run.survived for run in theirs)
    lost = alive < len(mine) or other < len(theirs)
    if lost and min(len(mine), len(theirs)) > 1:
        p = fisher_p(alive, len(mine), other, len(theirs))
        counts = f"{alive} of {len(mine)} against {other} of {len(theirs)}"
        if p < CHANCE:
            more = "more" if alive / len(mine) > other / len(theirs) else "less"
            said.append(f"{method} survives {more} often than {base}: {counts} (Fisher's exact test, p = {p:.2g}).")
        else:
            said.append(
                f"Whether {method} survives more often than {base} cannot be told from {counts} "
                f"(Fisher's exact test, p = {p:.2g})."
            )
    pairs = [
        (one.held_out.at(results.last_common_step), two.held_out.at(results.last_common_step))
        for one, two in results.pairs(method, base)
        if one.survived and two.survived
    ]
    logs = [math.log(one / two) for one, two in pairs if one and two and one > 0 and two > 0]
    if logs:
        said.append(_difference(method, base, logs))
    elif not lost:
        said.append(f"{method} and {base} have no seed in common that could be compared.")
    return said


def _difference(method: str, base: str, logs: Sequence[float]) -> str:
    middle, (low, high) = fmean(logs), interval(logs)
    ends = f"{method} ends {_percent(middle)} {base} in held-out loss"
    if len(logs) < 2:
        return f"One seed cannot be judged: there {ends}."
    span = f"90 % interval {100 * math.expm1(low):+.1f} % to {100 * math.expm1(high):+.1f} %, {len(logs)} seeds"
    if low <= 0 <= high:
        return f"No difference can be seen between {method} and {base} in held-out loss ({span})."
    return f"{ends} ({span})."


def _percent(log: float) -> str:
    return f"{100 * abs(math.expm1(log)):.1f} % {'below' if log < 0 else 'above'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
