"""Starts at widths of 128, 256 and 512: does unit gain save steps, and is that a factor or a head start?

    python -m research.head_start run            # train what is missing, one JSON line per run
    python -m research.head_start run 128 256    # some parts of it
    python -m research.head_start redraw         # results.md and figures, from the JSON lines alone

All data come with the package. The rules were committed before the runs: docs/evidence/starts/plan.md. Interrupt at any
time: the same command goes on with the runs that are missing. Seeds of one arm and rate are trained side by side
(`UViTStack`): each has its own weights, images, times and noise, drawn from its seed alone, so arms are paired by seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from research import survival
from research.commands import add_parts, parts_of, study_parser
from research.edge import short
from research.pages import document, table
from research.reproduce.claims import Region, region_of
from research.survival import Arm, Fate, Run, Setting
from scalelong.data import load_data, to_float
from scalelong.diffusion import NoiseProcess
from scalelong.experiments.figures import colour_of, draw_seeds, legend, log_scale, panels, save
from scalelong.experiments.records import Curve, steps_to
from scalelong.files import write_text
from scalelong.models.stack import UViTStack

FOLDER = Path("docs/evidence/starts")
SEEDS, SELECTION = tuple(range(62_000, 62_008)), (62_100, 62_101)
DEPTH, BATCH, HEAD = 8, 8, 64
HELD_OUT, JUDGE_EVERY = 64, 20
AVERAGE_EVERY, SHARE = 5, 1 / 3
CHANCE = 0.1
"""All intervals of a question hold together with 1 - CHANCE."""
WORTH = 1.05
"""A smaller saving is called none, as in the recipe."""

Record = dict[str, Any]


# Arms and parts

AUTHORS, UNIT, BRANCHES, ALL = "authors", "unit", "unit, 0.3", "authors, all"
ARMS = {
    AUTHORS: Arm(network={"init_std": 0.02}),
    UNIT: Arm(network={"init_std": "unit"}),
    BRANCHES: Arm(network={"init_std": "unit", "residual_scaling": 0.3}),
    ALL: Arm(network={"init_std": 0.02, "final_start": "authors"}),
}
"""A deviation is that at width 512; `build` takes it to the width."""
JUDGED_ARMS = (AUTHORS, UNIT, BRANCHES)
COMPARED = ((UNIT, AUTHORS), (BRANCHES, AUTHORS), (BRANCHES, UNIT))


class Trial(Run):
    """A run with an arm of this file."""

    @property
    def spec(self) -> Arm:
        return ARMS[self.arm]


@dataclass(frozen=True)
class Width:
    """What is run at a width."""

    width: int
    rates: tuple[float, ...]
    selecting: int
    """Steps of a run that helps to choose the rate, and until which steps saved are counted."""
    steps: int
    """Of a run that is judged."""
    seeds: tuple[int, ...]
    early: int
    side_by_side: int

    def setting(self, steps: int) -> Setting:
        return Setting(data="garments", depth=DEPTH, steps=steps, width=self.width, batch=BATCH)

    def choosing(self, arm: str) -> list[Trial]:
        place = self.setting(self.selecting)
        return [Trial(place, arm, rate, seed) for rate in self.rates for seed in SELECTION]

    def judged(self, arm: str, rate: float) -> list[Trial]:
        return [Trial(self.setting(self.steps), arm, rate, seed) for seed in self.seeds]


WIDTHS = {
    128: Width(128, (1e-3, 2e-3, 4e-3, 8e-3), 240, 480, SEEDS, 80, 8),
    256: Width(256, (5e-4, 1e-3, 2e-3, 4e-3), 160, 160, SEEDS, 60, 4),
    512: Width(512, (), 80, 80, SEEDS[:3], 40, 1),
}
GLIMPSE, FROM = 512, 256
"""The widest has half of the rates of the one before it."""
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "128": (128, JUDGED_ARMS),
    "256": (256, JUDGED_ARMS),
    "512": (512, (AUTHORS, BRANCHES, UNIT)),
    "all": (128, (ALL,)),
}
"""In the order of the plan: if time runs out, the last ones are not done, and the page says so."""


# What is shared with the study of UNets: averaged weights, held-out loss, the choice of a rate


class Average:
    """An average of weights that are being trained. Curves of plain weights at a constant rate are ragged."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.means = [parameter.detach().clone() for parameter in parameters]

    def take(self) -> None:
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter.detach(), SHARE)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the network has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, parameter in enumerate(self.parameters):
            parameter.data, self.means[place] = self.means[place], parameter.data


class Judge:
    """The held-out loss: the same noisy garments for all runs, none of them trained on."""

    def __init__(self) -> None:
        whole, process = load_data("garments"), NoiseProcess()
        clean = to_float(whole.fetch(range(len(whole) - HELD_OUT, len(whole))).images)
        self.t = process.times((torch.arange(HELD_OUT) + 0.5) / HELD_OUT)
        self.noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(11))
        self.x = process.add_noise(clean, self.noise, self.t)

    @torch.no_grad()
    def losses(self, predict: Callable[[Tensor, Tensor], Tensor], count: int) -> list[float]:
        """Of several networks at once: (S, 64, C, H, W) to as many."""
        x, t = (value.expand(count, *value.shape) for value in (self.x, self.t))
        return (predict(x, t) - self.noise).square().flatten(1).mean(1).tolist()


def last_loss(record: Record) -> float:
    """At the end; a run that did not survive counts as a predictor of zero."""
    return record["held_out"][-1][1] if record["survived"] and record["held_out"] else 1.0


def best_rate(runs: Sequence[Run], records: Mapping[Any, Record]) -> float | None:
    """The rate with the smallest mean loss at the end; None if not all of these runs are there."""
    if not runs or any(run.key not in records for run in runs):
        return None
    means = {rate: fmean(last_loss(records[run.key]) for run in runs if run.lr == rate) for rate in rates_of(runs)}
    return min(means, key=lambda rate: (means[rate], rate))


def rates_of(runs: Sequence[Run]) -> list[float]:
    return sorted({run.lr for run in runs})


def curve_of(record: Record) -> Curve:
    points = [(step, loss) for step, loss in record["held_out"] if loss is not None]
    return Curve(tuple(step for step, _ in points), tuple(loss for _, loss in points))


def keep(path: Path, run: Run, result: Record) -> None:
    survival.append(path, run, result)
    # Who ends high without a collapse does not survive either.
    fate = "survived" if result["survived"] else f"did not survive, collapsed at {result['collapsed'] or '-'}"
    last = result["held_out"][-1] if result["held_out"] else "-"
    print(f"{run.setting.width}, {run.arm}, {run.lr:g}, seed {run.seed}: {fate}, held out {last}", flush=True)


def read(folder: Path) -> dict[Any, Record]:
    return {survival.key_of(record): record for record in survival.read_all(folder)}


# Training


def build(run: Run) -> sl.UViT:
    torch.manual_seed(run.seed)
    width, options = run.setting.width, dict(run.spec.network)
    if isinstance(options["init_std"], float):
        options["init_std"] *= math.sqrt(512 / width)
    sizes: Any = {"image_size": 16, "patch_size": 4, "channels": 1, "dim": width, "heads": max(1, width // HEAD)}
    return sl.UViT(**sizes, depth=run.setting.depth, **options)


def train(runs: Sequence[Run], images: Tensor, judge: Judge, done: Callable[[Run, Record], None]) -> None:
    """Train seeds of one arm and rate side by side. `done` hears of all of them at the end."""
    arm, setting, process = runs[0].spec, runs[0].setting, NoiseProcess()
    stack = UViTStack([build(run) for run in runs])
    parameters = list(stack.parameters.values())
    options: Any = {"betas": arm.betas, "weight_decay": arm.decay, "fused": True}
    optimizer = torch.optim.AdamW(parameters, lr=runs[0].lr, **options)
    streams = [survival.batches(images, run.seed, process, setting.batch) for run in runs]
    fates, average = [Fate(arm.warmup) for _ in runs], Average(parameters)
    curves: list[list[list[float | None]]] = [[] for _ in runs]
    for step in range(setting.steps):
        optimizer.param_groups[0]["lr"] = runs[0].lr * arm.share(step, setting.steps)
        x, t, noise = (torch.stack(parts) for parts in zip(*map(next, streams), strict=True))
        losses = (stack(x, t) - noise).square().flatten(1).mean(1)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        for fate, loss in zip(fates, losses.tolist(), strict=True):
            if fate.collapsed is None:
                fate.add(step, loss)
        if (step + 1) % AVERAGE_EVERY == 0:
            average.take()
        if (step + 1) % JUDGE_EVERY == 0 or step + 1 == setting.steps:
            with average.lent():
                found = judge.losses(stack, len(runs))
            for curve, fate, loss in zip(curves, fates, found, strict=True):
                if fate.collapsed is None:
                    curve.append([step + 1, short(loss)])
    for run, fate, curve in zip(runs, fates, curves, strict=True):
        done(run, {**fate.record(), "held_out": curve})


def run(part: str, folder: Path) -> None:
    """Train what is missing of a part: first what chooses the rates, then what is judged at them."""
    number, arms = PARTS[part]
    width, path = WIDTHS[number], folder / f"width{number}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    images, judge = survival.load_images("garments", None), Judge()
    groups = [[run for run in width.choosing(arm) if run.lr == rate] for arm in arms for rate in width.rates]
    _train_missing(groups, width, images, judge, path)
    for arm in arms:
        rate = chosen_rate(width, arm, read(folder))
        if rate is None:
            print(f"{part}: {arm} left out, because the runs that choose its rate are missing", flush=True)
            continue
        _train_missing([width.judged(arm, rate)], width, images, judge, path)


def _train_missing(groups: Sequence[list[Trial]], width: Width, images: Tensor, judge: Judge, path: Path) -> None:
    there = {survival.key_of(record) for record in survival.read(path)}
    for group in groups:
        waiting = [run for run in group if run.key not in there]
        for first in range(0, len(waiting), width.side_by_side):
            train(waiting[first : first + width.side_by_side], images, judge, partial(keep, path))


def chosen_rate(width: Width, arm: str, records: Mapping[Any, Record]) -> float | None:
    """The best of its rates, or half of that at the width before."""
    if width.width == GLIMPSE:
        before = best_rate(WIDTHS[FROM].choosing(arm), records)
        return None if before is None else before / 2
    return best_rate(width.choosing(arm), records)


def judged(width: Width, arm: str, records: Mapping[Any, Record]) -> dict[int, Record]:
    """The judged runs of an arm by seed; empty unless all are there."""
    rate = chosen_rate(width, arm, records)
    runs = [] if rate is None else width.judged(arm, rate)
    return {run.seed: records[run.key] for run in runs} if all(run.key in records for run in runs) else {}


# Steps saved, and by which rule they are judged


def saved(mine: Curve, theirs: Curve, until: int) -> tuple[float, float] | None:
    """The log of the ratio and the difference of steps to the smallest loss that both have until some step."""
    bests = mine.best(until), theirs.best(until)
    if bests[0] is None or bests[1] is None:
        return None
    level = max(bests[0], bests[1])
    own, other = steps_to(mine, level), steps_to(theirs, level)
    return None if not own or not other else (math.log(other / own), other - own)


def pairs(width: Width, arm: str, other: str, records: Mapping[Any, Record]) -> list[tuple[Curve, Curve]]:
    mine, theirs = judged(width, arm, records), judged(width, other, records)
    return [(curve_of(mine[seed]), curve_of(theirs[seed])) for seed in mine if seed in theirs]


@dataclass(frozen=True)
class Saving:
    """Steps saved by an arm against another at a width: a logarithm per seed."""

    width: int
    arm: str
    other: str
    until: int
    values: list[float]
    confidence: float

    @property
    def region(self) -> Region:
        return region_of(self.values, self.confidence)

    @property
    def verdict(self) -> str:
        low, high = math.exp(self.region.low), math.exp(self.region.high)
        if low > WORTH:
            return "**saves**"
        if high < 1 / WORTH:
            return "**costs**"
        return "saves nothing" if high < WORTH else "cannot be judged"

    @property
    def text(self) -> str:
        ends = (fmean(self.values), self.region.low, self.region.high)
        return "{:.2f} ({:.2f} to {:.2f})".format(*map(math.exp, ends))


def savings(records: Mapping[Any, Record]) -> list[Saving]:
    """The claims of the first question, with intervals that hold together."""
    found = []
    for number in (128, 256):
        width = WIDTHS[number]
        for arm, other in COMPARED:
            logs = [pair[0] for a, b in pairs(width, arm, other, records) if (pair := saved(a, b, width.selecting))]
            if len(logs) == len(width.seeds):
                found.append((number, arm, other, width.selecting, logs))
    return [Saving(*each, confidence=1 - CHANCE / len(found)) for each in found]


@dataclass(frozen=True)
class Change:
    """How the saving of an arm against the authors' start changes from an early to a late step."""

    width: int
    arm: str
    early: int
    late: int
    ratios: list[tuple[float, float]]
    """Logs of steps saved, early and late."""
    differences: list[tuple[float, float]]
    """In steps."""
    confidence: float
    saves: bool = True
    """False where the first question found that there is no saving."""

    @property
    def ratio_change(self) -> Region:
        return region_of([late - early for early, late in self.ratios], self.confidence)

    @property
    def difference_change(self) -> Region:
        return region_of([late - early for early, late in self.differences], self.confidence)

    @property
    def verdict(self) -> str:
        ratio, difference = sign(self.ratio_change), sign(self.difference_change)
        if not self.saves:
            return "there is no saving"
        if difference < 0:
            return "**less than a head start**: it fades"
        if ratio > 0:
            return "**more than a factor**"
        words = {
            (0, 1): "**a factor**",
            (-1, 0): "**a head start**",
            (-1, 1): "**between**: more than a head start, less than a factor",
            (0, 0): "cannot be told",
        }
        return words[ratio, difference]


def sign(region: Region) -> int:
    """On which side of zero an interval lies; 0 if it holds zero."""
    return 1 if region.low > 0 else -1 if region.high < 0 else 0


def changes(records: Mapping[Any, Record]) -> list[Change]:
    """The comparisons of the second question: two intervals each, and all hold together."""
    found = []
    for number in (128, 256):
        width = WIDTHS[number]
        for arm in (UNIT, BRANCHES):
            both = [
                (early, late)
                for a, b in pairs(width, arm, AUTHORS, records)
                if (early := saved(a, b, width.early)) and (late := saved(a, b, width.steps))
            ]
            if len(both) == len(width.seeds):
                ratios, differences = ([(early[k], late[k]) for early, late in both] for k in (0, 1))
                found.append((number, arm, width.early, width.steps, ratios, differences))
    nothing = {
        (claim.width, claim.arm)
        for claim in savings(records)
        if claim.other == AUTHORS and claim.verdict in ("**costs**", "saves nothing")
    }
    confidence = 1 - CHANCE / (2 * len(found)) if found else 1.0
    return [Change(*each, confidence=confidence, saves=each[:2] not in nothing) for each in found]


# Page and figures


def missing(records: Mapping[Any, Record]) -> list[str]:
    return [
        f"width {number}, {arm}"
        for number, arms in PARTS.values()
        for arm in arms
        if not judged(WIDTHS[number], arm, records)
    ]


def redraw(folder: Path) -> None:
    """results.md and the figures, from the JSON lines of the folder alone."""
    records = read(folder)
    draw_curves(records, folder / "curves.png")
    draw_saved(records, folder / "saved.png")
    write_text(folder / "results.md", page(folder))


def page(folder: Path) -> str:
    records = read(folder)
    left = "; ".join(missing(records))
    parts = [
        "# Starts at larger widths: all results",
        "Written by `python -m research.head_start redraw` from the JSON lines beside it. Meaning: "
        "[README](README.md); rules: [plan](plan.md). Intervals of a question hold together with 90 % (Bonferroni). "
        + (f"Of the plan was not run: {left}." if left else "All of the plan was run."),
        "## Rates: mean loss of the two runs of selection at the end",
        rates_table(records),
        "## Does it save?",
        savings_table(records),
        "![Losses](curves.png)",
        "## Factor or head start?",
        changes_table(records),
        "![Steps saved](saved.png)",
    ]
    if text := unjudged_table(records):
        parts += ["## Shown and not judged", text]
    return document([*parts, "## Held-out losses", losses_table(records)])


def rates_table(records: Mapping[Any, Record]) -> str:
    rows = []
    for number, arms in PARTS.values():
        width = WIDTHS[number]
        for arm in arms:
            rate = chosen_rate(width, arm, records)
            if rate is None:
                continue
            cells = ["half of that at 256"]
            if width.rates:
                runs = width.choosing(arm)
                means = {r: fmean(last_loss(records[run.key]) for run in runs if run.lr == r) for r in width.rates}
                cells = [f"{r:g}: {mean:.5f}" for r, mean in means.items()]
            end = " (an end of the four)" if rate in width.rates[:1] + width.rates[-1:] else ""
            rows.append([str(number), arm, ", ".join(cells), f"{rate:g}{end}"])
    return table(["width", "arm", "mean loss by rate", "chosen"], rows)


def savings_table(records: Mapping[Any, Record]) -> str:
    rows = [
        [
            str(claim.width),
            f"{claim.arm} against {claim.other}",
            *(f"{math.exp(value):.2f}" for value in claim.values),
            claim.text,
            claim.verdict,
        ]
        for claim in savings(records)
    ]
    return table(
        ["width", "steps saved, times", *(f"seed {seed}" for seed in SEEDS), "mean (interval)", "verdict"], rows
    )


def changes_table(records: Mapping[Any, Record]) -> str:
    rows = []
    for claim in changes(records):
        early, late = zip(*claim.ratios, strict=True)
        first, last = zip(*claim.differences, strict=True)
        ratio, difference = claim.ratio_change, claim.difference_change
        rows.append(
            [
                str(claim.width),
                f"{claim.arm} against {AUTHORS}",
                f"{claim.early} to {claim.late}",
                f"{math.exp(fmean(early)):.2f} to {math.exp(fmean(late)):.2f}",
                f"× {math.exp(ratio.low):.2f} to {math.exp(ratio.high):.2f}",
                f"{fmean(first):.0f} to {fmean(last):.0f}",
                f"{difference.low:+.0f} to {difference.high:+.0f}",
                claim.verdict,
            ]
        )
    heads = ["width", "arms", "steps", "times saved", "its change", "steps saved", "its change", "verdict"]
    return table(heads, rows)


def unjudged_table(records: Mapping[Any, Record]) -> str:
    """The glimpse, the last convolution, and other steps of the judged runs."""
    asked = [(512, *pair, until) for pair in COMPARED for until in (40, 80)]
    asked += [(128, AUTHORS, ALL, until) for until in (80, 240, 480)]
    asked += [(128, UNIT, ALL, until) for until in (80, 240, 480)]
    asked += [(128, *COMPARED[2], 480)]
    rows = []
    for number, arm, other, until in asked:
        found = [each for a, b in pairs(WIDTHS[number], arm, other, records) if (each := saved(a, b, until))]
        if found:
            logs, steps = zip(*found, strict=True)
            cells = " ".join(f"{math.exp(value):.2f}" for value in logs)
            mean = f"{math.exp(fmean(logs)):.2f}"
            if len(logs) == len(SEEDS):
                mean = Saving(number, arm, other, until, list(logs), 1 - CHANCE / 6).text
            rows.append([str(number), f"{arm} against {other}", str(until), cells, mean, f"{fmean(steps):.0f}"])
    heads = ["width", "arms", "until step", "times saved, by seed", "mean (interval)", "steps saved, mean"]
    return table(heads, rows) if rows else ""


def losses_table(records: Mapping[Any, Record]) -> str:
    """All judged runs, at the steps that are judged. † marks those that did not survive."""
    rows = []
    for number, arms in PARTS.values():
        width = WIDTHS[number]
        for arm in arms:
            found = judged(width, arm, records)
            for step in dict.fromkeys((width.early, width.selecting, width.steps)) if found else ():
                values = [curve_of(record).at(step) for record in found.values()]
                marks = ["" if record["survived"] else "†" for record in found.values()]
                cells = ["-" if v is None else f"{v:.4f}{m}" for v, m in zip(values, marks, strict=True)]
                rows.append([str(number), arm, str(step), *cells, *["-"] * (len(SEEDS) - len(cells))])
    text = table(["width", "arm", "step", *(f"seed {seed}" for seed in SEEDS)], rows)
    return f"Of averaged weights. † marks runs that did not survive.\n\n{text}"


def draw_curves(records: Mapping[Any, Record], path: Path) -> None:
    """Every seed thin, the mean thick, a panel for each width."""
    shown = [width for width in WIDTHS.values() if any(judged(width, arm, records) for arm in ARMS)]
    figure, axes = panels(len(shown), height=3.2, width=3.8)
    for axis, width in zip(axes, shown, strict=True):
        for place, arm in enumerate(ARMS):
            if found := judged(width, arm, records):
                rate = chosen_rate(width, arm, records)
                lines = [(curve.steps, curve.values) for curve in map(curve_of, found.values())]
                draw_seeds(axis, lines, f"{arm}: {rate:g}", colour_of(place))
        axis.set(title=f"width {width.width}", xlabel="step", ylabel="held-out loss", xscale="log")
        log_scale(axis)
        axis.tick_params(labelsize=7, which="both")
        ticks = [step for step in (20, 40, 80, 160, 240, 480) if step <= width.steps]
        axis.set_xticks(ticks, [str(step) for step in ticks])
        axis.set_xticks([], minor=True)
        legend(axis)
    save(figure, path)


def draw_saved(records: Mapping[Any, Record], path: Path) -> None:
    """Steps saved over the step until which losses are looked at: a factor is level on the left, a head start right."""
    compared = dict.fromkeys(claim.width for claim in changes(records))
    figure, axes = panels(2 * len(compared), height=2.9, width=4.4)
    for row, number in enumerate(compared):
        width = WIDTHS[number]
        for place, arm in enumerate((UNIT, BRANCHES), start=1):
            both = pairs(width, arm, AUTHORS, records)
            untils = range(2 * JUDGE_EVERY, width.steps + 1, JUDGE_EVERY)
            found = [[saved(a, b, until) for until in untils] for a, b in both]
            for side, value in enumerate((math.exp, float)):
                lines = [
                    ([u for u, each in zip(untils, seed, strict=True) if each], [value(e[side]) for e in seed if e])
                    for seed in found
                ]
                draw_seeds(axes[2 * row + side], lines, arm, colour_of(place))
        for side, label in enumerate(("times fewer steps", "steps saved")):
            axis = axes[2 * row + side]
            axis.axhline(1 - side, color="#999999", linewidth=0.8)
            axis.set(title=f"width {number}", xlabel="until step", ylabel=label)
            axis.tick_params(labelsize=7)
    legend(axes[0])
    save(figure, path)


def main() -> None:
    parser, commands = study_parser("head_start", __doc__, FOLDER)
    add_parts(commands["run"], PARTS)
    options = parser.parse_args()
    if options.command == "run":
        for part in parts_of(parser, options.parts, PARTS):
            run(part, options.folder)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
