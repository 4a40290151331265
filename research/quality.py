"""Quality at equal steps by the paper's metric, and 10,000 steps: Fréchet distances at rates that nothing breaks at.

    python -m research.quality run --data DATA    # train and score what is missing, one JSON line per run
    python -m research.quality redraw             # results.md and figures, from the JSON files alone

DATA is a folder with CIFAR-10 (docs/data.md), for one setting; without it that setting is left out. All others take the
garments that come with the package. The rules were committed before the runs: docs/evidence/quality/plan.md. Interrupt
at any time: the same command goes on with the runs that are missing.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from research import edge, survival
from research.commands import study_parser
from research.pages import claims_table, counts, document, table, verdict_of
from research.reproduce.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    CLEARLY,
    FRECHET as ROUGH_FRECHET,
    LOSS,
    Claim,
    Quantity,
    below,
    faster,
    log_ratios,
)
from research.reproduce.settings import CS, LS, NONE, UNIFORM, Method
from research.survival import Arm, Run, Setting
from scalelong.data import ImageData, load_data, to_float
from scalelong.data.dataset import MemoryData
from scalelong.diffusion.images import to_bytes
from scalelong.diffusion.solvers import sample
from scalelong.evaluation import Moments, frechet_distance
from scalelong.evaluation.anchors import MOST_IMAGES, anchors_of, trusted_features
from scalelong.evaluation.features import features_of
from scalelong.experiments.figures import colour_of, draw_seeds, legend, panels, save
from scalelong.experiments.records import Curve, RunRecord, rounded
from scalelong.experiments.results import Results
from scalelong.files import write_text
from scalelong.models.stack import UViTStack
from scalelong.noise import NoiseProcess

FOLDER = Path("docs/evidence/quality")
SEEDS, LONG_SEEDS, SECOND_SEEDS = tuple(range(61_000, 61_008)), (61_100, 61_101, 61_102), tuple(range(61_200, 61_208))
AUTHORS, OURS = 0.0566, "unit"
"""`init_std`: the authors' deviation at width 64, and the default of the library."""
SAMPLER_STEPS, AT_ONCE = 8, 250
REFERENCE = 10_000
"""Photographs of CIFAR-10 that samples are compared with. Of the garments it is all of them."""
AVERAGE = 0.999
KEPT_EVERY = 500


# Settings


@dataclass(frozen=True)
class Trial(edge.Trial):
    """A run with one of the methods of the study at the edge, from one of two starts."""

    start: float | str = AUTHORS
    falling: bool = True

    @property
    def spec(self) -> Arm:
        """The line of a run does not say its start: each setting has one, and a file of its own."""
        return replace(edge.METHODS[self.arm], network={"init_std": self.start}, linear=self.falling)


@dataclass(frozen=True)
class Place(edge.Place):
    """A setting at its rate, with what is measured there."""

    start: float | str = AUTHORS
    falling: bool = True
    """Whether the rate falls linearly to zero. Otherwise it stays, and weights are averaged."""
    looks: tuple[int, ...] = ()
    """Steps at which the held-out loss is measured, besides the last."""
    scored: tuple[int, ...] = ()
    """Steps at which images are made."""
    images: int = 5000

    def runs(self, methods: Sequence[str] | None = None) -> list[edge.Trial]:
        chosen = [(method, seed) for method in (methods or self.methods) for seed in self.seeds]
        return [Trial(self.setting, method, self.lr, seed, self.start, self.falling) for method, seed in chosen]


SHORT, LONG = 400, 10_000
GARMENTS = Setting(data="garments", depth=16, steps=SHORT)
METHODS = ("none", "CS(0.7)", "LS", "1/√2")
SHORT_LOOKS: dict[str, Any] = {"looks": (100, 200, 300), "scored": (SHORT,)}
LOG_SPACED = tuple(round(10 ** (k / 8)) for k in range(8, 33))
PLACES: dict[str, Place] = {
    "garments": Place(GARMENTS, 4e-3, METHODS, SEEDS, **SHORT_LOOKS),
    "CIFAR-10": Place(replace(GARMENTS, data="cifar10"), 4e-3, METHODS, SEEDS, **SHORT_LOOKS),
    "garments, unit": Place(GARMENTS, 4e-3, METHODS, SEEDS, start=OURS, **SHORT_LOOKS),
    "length": Place(
        Setting(data="garments", depth=12, steps=LONG),
        2e-3,
        ("none", "CS(0.7)"),
        LONG_SEEDS,
        falling=False,
        looks=LOG_SPACED[:-1],
        scored=(1000, 3162, LONG),
        images=2500,
    ),
}
PLACES |= {
    "garments, depth 40": replace(PLACES["garments"], setting=replace(GARMENTS, depth=40), seeds=SECOND_SEEDS),
    "CIFAR-10, unit": replace(PLACES["CIFAR-10"], start=OURS, seeds=SECOND_SEEDS),
}
FIRST, SECOND = ("garments", "CIFAR-10", "garments, unit"), ("garments, depth 40", "CIFAR-10, unit")
"""The settings at equal steps. The second part was planned with the results of the first in sight."""
EQUAL_STEPS = (*FIRST, *SECOND)
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("garments", ("none", "CS(0.7)")),
    ("length", ("none", "CS(0.7)")),
    ("garments", ("LS",)),
    ("CIFAR-10", ("none", "CS(0.7)")),
    ("garments, unit", ("none", "CS(0.7)")),
    ("garments", ("1/√2",)),
    ("CIFAR-10", ("LS",)),
    ("garments, unit", ("LS",)),
    ("CIFAR-10", ("1/√2",)),
    ("garments, unit", ("1/√2",)),
    *((name, methods) for methods in (("none", "CS(0.7)"), ("LS",), ("1/√2",)) for name in SECOND),
)
"""In which they are run: if time runs out, the last ones are not done, and the page says so."""


# Distances


def reference_images(name: str, data: Path | None) -> ImageData:
    """What samples are compared with, as a data set that features can be trusted for."""
    if name == "garments":
        return load_data("garments")
    photographs = to_float(load_data(str(data)).fetch(range(REFERENCE)).images)
    return MemoryData("cifar10 at 16x16", to_bytes(torch.nn.functional.avg_pool2d(photographs, 2)))


class Scorer:
    """Fréchet distances to the data, with the features that `scalelong eval` would trust for it."""

    def __init__(self, data: ImageData) -> None:
        self.shape = data.channels, data.height, data.width
        self.extractor, self.reference = trusted_features("auto", data)
        anchors = anchors_of(data, self.extractor, self.reference, MOST_IMAGES)
        self.about = {
            "features": self.extractor.name,
            "digest": self.extractor.digest,
            "images": self.reference.moments.n,
            "anchors": {kind: rounded(values["frechet"]) for kind, values in anchors.values.items()},
            "images of an anchor": anchors.images,
        }

    def distance(self, model: nn.Module, count: int) -> float | None:
        """Of images from the same noise for every network; None if they are not finite."""
        made = torch.cat(
            [
                sample(model, NoiseProcess(), "epsilon", self.shape, part.tolist(), steps=SAMPLER_STEPS)
                for part in torch.arange(count).split(AT_ONCE)
            ]
        )
        if not bool(made.isfinite().all()):
            return None
        found = Moments.of(features_of(self.extractor, to_bytes(made)))
        return rounded(frechet_distance(found, self.reference.moments))


def remember(path: Path, name: str, about: dict[str, Any]) -> None:
    """The features and their anchors, once for each data set."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_text(path, json.dumps(known | {name: about}, ensure_ascii=False, indent=1) + "\n")


# Runs


class Judge(edge.Reader):
    """Held-out losses at some steps of a run, and distances at fewer."""

    place: Place

    def __init__(self, place: Place, images: Tensor, held_out: Tensor, scorer: Scorer) -> None:
        super().__init__(place, images, held_out)
        self.scorer = scorer
        self.distances: dict[Any, dict[int, float | None]] = {}

    def wants(self, run: Run, step: int) -> bool:  # noqa: ARG002
        return step in self.place.looks

    def before(self, run: Run, step: int, state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:  # noqa: ARG002
        self.look(run, step, state)

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        self.look(run, self.place.setting.steps, state)
        return {"held_out": self.curves[run.key], "frechet": self.distances[run.key]}

    @torch.no_grad()
    def look(self, run: Run, step: int, state: dict[str, Tensor]) -> None:
        self.judge(run, step, state)
        if step in self.place.scored:
            found = self.scorer.distance(self.filled(run, state), self.place.images)
            self.distances.setdefault(run.key, {})[step] = found
            print(f"{run.arm}, seed {run.seed}, step {step}: distance {found}", flush=True)


def train_averaged(
    runs: Sequence[Run], images: Tensor, done: Callable[[Run, dict[str, Any]], None], judge: Judge, kept: Path
) -> None:
    """Train all runs as one stack, whatever their constant scaling, and look at the averages of their weights.

    `survival.train` takes one method at a time; a stack saves about a quarter of the time. `kept` holds the state of an
    unfinished stack: 10,000 steps take an hour on a machine with other things to do.
    """
    arm, setting, process = runs[0].spec, runs[0].setting, NoiseProcess()
    models: list[Any] = [survival.build(run, images.shape[1]) for run in runs]
    stack, averages = UViTStack(models), UViTStack(models)
    weights: list[Tensor] = list(stack.parameters.values())
    means = [mean.detach() for mean in averages.parameters.values()]
    optimizer = torch.optim.AdamW(weights, betas=arm.betas, weight_decay=arm.decay, fused=True)
    streams = [survival.batches(images, run.seed, process, setting.batch) for run in runs]
    fates = [survival.Fate(arm.warmup) for _ in runs]

    def state_of(row: int) -> dict[str, Tensor]:
        averages.copy_to(row, models[row])
        return models[row].state_dict()

    began = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        began, judge.distances = state["step"], state["distances"]
        for fate, known in zip(fates, state["fates"], strict=True):
            vars(fate).update(known)
        judge.curves.update(state["curves"])
        with torch.no_grad():
            for mine, theirs in zip((*weights, *means), state["weights"], strict=True):
                mine.copy_(theirs)
        optimizer.load_state_dict(state["optimizer"])
        for _ in range(began):
            list(map(next, streams))
        print(f"goes on after step {began}", flush=True)
    for step in range(began, setting.steps):
        if step % KEPT_EVERY == 0 and step > began:
            # Before this step is looked at: otherwise it would be twice, once more when the run goes on.
            state = {
                "step": step,
                "fates": list(map(vars, fates)),
                "curves": dict(judge.curves),
                "distances": judge.distances,
            }
            torch.save(state | {"weights": [*weights, *means], "optimizer": optimizer.state_dict()}, kept)
        for row, run in enumerate(runs):
            if judge.wants(run, step):
                judge.look(run, step, state_of(row))
        for group in optimizer.param_groups:
            group["lr"] = runs[0].lr * arm.share(step, setting.steps)
        x, t, noise = (torch.stack(parts) for parts in zip(*map(next, streams), strict=True))
        losses = (stack(x, t) - noise).square().flatten(1).mean(1)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        with torch.no_grad():
            # In the beginning a shorter average: the first weights are worth nothing.
            share = 1 - min(AVERAGE, (step + 1) / (step + 10))
            for mean, weight in zip(means, weights, strict=True):
                mean.lerp_(weight, share)
        for fate, loss in zip(fates, losses.tolist(), strict=True):
            if fate.collapsed is None:
                fate.add(step, loss)
        if step % 500 == 499:
            print(f"step {step + 1}: smoothed losses {[round(fate.smoothed, 4) for fate in fates]}", flush=True)
    # All of them before the first is written: a stack goes on whole or not at all.
    ends = [
        fate.record() | judge.end(run, state_of(row)) for row, (run, fate) in enumerate(zip(runs, fates, strict=True))
    ]
    for run, result in zip(runs, ends, strict=True):
        done(run, result)
    kept.unlink(missing_ok=True)


def run(folder: Path, data: Path | None, order: Sequence[tuple[str, tuple[str, ...]]] = ORDER) -> None:
    """Train what is missing, in the order of the plan, all seeds of a method side by side."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    prepared: dict[str, tuple[Tensor, Tensor, Scorer]] = {}
    for name, methods in order:
        place, path = PLACES[name], folder / file_name(name)
        source = place.setting.data
        done = {survival.key_of(line) for line in survival.read(path)}
        missing = [run for run in place.runs(methods) if run.key not in done]
        if not missing:
            continue
        if source == "cifar10" and data is None:
            print(f"{name}: left out, because it needs CIFAR-10; give --data FOLDER", flush=True)
            continue
        if source not in prepared:
            scorer = Scorer(reference_images(source, data))
            remember(folder / "features.json", source, scorer.about)
            prepared[source] = survival.load_images(source, data), edge.held_out_images(source, data), scorer
        images, held_out, scorer = prepared[source]
        print(f"{name}: {len(missing)} runs of {', '.join(methods)} are missing", flush=True)
        judge = Judge(place, images, held_out, scorer)
        if place.falling:
            for method in methods:
                if waiting := [run for run in missing if run.arm == method]:
                    survival.train(waiting, images, partial(keep, path), judge)
        else:
            train_averaged(missing, images, partial(keep, path), judge, path.with_suffix(".pt"))


def keep(path: Path, run: Run, result: dict[str, Any]) -> None:
    # Smoothed losses of 10,000 steps would be most of the file, and nothing is made of them.
    result = {name: value for name, value in result.items() if name not in ("curve", "gates")}
    survival.append(path, run, result)
    fate = "survived" if result["survived"] else f"did not survive, collapsed at {result['collapsed']}"
    print(f"{run.arm}, seed {run.seed}: {fate}, loss {result['held_out'][-1][1]}", flush=True)


def file_name(name: str) -> str:
    return f"{name.replace(', ', '-').replace(' ', '').lower()}.jsonl"


# Claims

FRECHET = replace(ROUGH_FRECHET, form="{:.3f}")
CHANCE = edge.CHANCE


def record_of(name: str, line: dict[str, Any], noise: float) -> RunRecord:
    """A run that did not survive has the distance of noise, and the loss of a predictor of zero."""
    points = [(step, loss) for step, loss in line["held_out"] if loss is not None]
    alive = line["survived"]
    distances = {int(step): value for step, value in line["frechet"].items()}
    last = distances[max(distances)]
    return RunRecord(
        method=line["arm"],
        seed=line["seed"],
        setting=name,
        held_out=Curve(tuple(step for step, _ in points), tuple(loss for _, loss in points)),
        frechet=last if alive and last is not None else noise,
        diverged=None if alive else "it did not survive",
        measured={"frechet": distances},
    )


def results_of(folder: Path) -> Results:
    """The runs of the methods of which all seeds are there."""
    about = features_in(folder)
    found = []
    for name, place in PLACES.items():
        lines = {survival.key_of(line): line for line in survival.read(folder / file_name(name))}
        for method in place.methods:
            keys = [run.key for run in place.runs([method])]
            if all(key in lines for key in keys):
                noise = about[place.setting.data]["anchors"]["noise"]
                found += [record_of(name, lines[key], noise) for key in keys]
    return Results(found)


def features_in(folder: Path) -> dict[str, Any]:
    path = folder / "features.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def at_equal_steps(results: Results, quantity: Quantity, places: Sequence[str] = FIRST) -> Iterator[Claim]:
    for name in places:
        there = results.methods(name)
        for other in (NONE, UNIFORM):
            for method in (CS, LS):
                if method.label in there and other.label in there:
                    yield below(results, name, method, other, quantity)


def after_long(results: Results) -> Iterator[Claim]:
    if {NONE.label, CS.label} <= set(results.methods("length")):
        for quantity in (FRECHET, LOSS):
            yield below(results, "length", CS, NONE, quantity)
        yield faster(results, "length", CS, NONE)


def of_starts(results: Results) -> Iterator[Claim]:
    """Ours against the authors', under equal seeds, which are equal images and noise but other weights."""
    ours, theirs = "garments, unit", "garments"
    for method in METHODS:
        if method in results.methods(ours) and method in results.methods(theirs):
            # As two methods of one setting, which is what `log_ratios` compares.
            renamed = [replace(run, method=run.setting, setting=method) for run in results.runs if run.method == method]
            values = log_ratios(Results(renamed), method, Method(ours), Method(theirs), FRECHET)
            text = f"Fréchet distance: our start below the authors', {method}"
            yield Claim(text, theirs, values, BELOW_ZERO, (ABOVE_ZERO,), effect=CLEARLY)


ITEMS: dict[str, tuple[str, Callable[[Results], Iterator[Claim]]]] = {
    "table1": ("Table 1: Fréchet distance at equal steps", partial(at_equal_steps, quantity=FRECHET)),
    "loss": ("Loss at equal steps", partial(at_equal_steps, quantity=LOSS)),
    "second": (
        "Table 1, second part: Fréchet distance at equal steps",
        partial(at_equal_steps, quantity=FRECHET, places=SECOND),
    ),
    "second loss": (
        "Loss at equal steps, second part",
        partial(at_equal_steps, quantity=LOSS, places=SECOND),
    ),
    "length": ("Length: 10,000 steps", after_long),
    "start": ("Start: ours and the authors'", of_starts),
}


def claims_of(item: str, results: Results) -> list[Claim]:
    """With intervals that hold together."""
    found = list(ITEMS[item][1](results))
    return [replace(claim, confidence=1 - CHANCE / len(found)) for claim in found]


# Page and figures


def redraw(folder: Path) -> None:
    """results.md and the figures, from the JSON files of the folder alone."""
    results = results_of(folder)
    if any(run.setting in EQUAL_STEPS for run in results.runs):
        draw_distances(results, folder / "distances.png")
    if results.methods("length"):
        draw_length(results, folder / "length.png")
    write_text(folder / "results.md", page(folder))


def page(folder: Path) -> str:
    results = results_of(folder)
    parts = [
        "# Quality at equal steps, and length: all results",
        "Written by `python -m research.quality redraw` from the JSON lines beside it. Meaning: [README](README.md); "
        "rules: [plan](plan.md). Intervals of an item hold together with 90 % (Bonferroni). "
        + edge.run_of_plan(PLACES, results),
        "## Verdicts",
        table(["item", "settings", "verdict", "claims"], [item_row(item, results) for item in ITEMS]),
        "## Features",
        features_table(folder),
    ]
    if any(run.setting in EQUAL_STEPS for run in results.runs):
        parts.append("![Fréchet distances](distances.png)")
    if results.methods("length"):
        parts.append("![10,000 steps](length.png)")
    for item, (title, _) in ITEMS.items():
        if claims := claims_of(item, results):
            seeds = PLACES[claims[0].setting].seeds
            parts += [f"## {title}", claims_table(claims, seeds)]
    parts += ["## All runs at equal steps", runs_table(results)]
    if results.methods("length"):
        parts += ["## All runs of 10,000 steps", *map(partial(length_table, results), ("held-out loss", "distance"))]
    return document(parts)


def item_row(item: str, results: Results) -> list[str]:
    title, claims = ITEMS[item][0], claims_of(item, results)
    if not claims:
        return [title, "none was run", "", ""]
    places = ", ".join(dict.fromkeys(claim.setting for claim in claims))
    return [title, places, f"**{verdict_of(claims)}**", counts(claims)]


def features_table(folder: Path) -> str:
    rows = [
        [
            name,
            f"{about['features']} {about['digest'][:12]}",
            f"{about['images']:,}",
            *(f"{about['anchors'][kind]:.3g}" for kind in ("real", "noise", "blurred", "shuffled")),
        ]
        for name, about in features_in(folder).items()
    ]
    return table(["data", "features", "compared with", "real", "noise", "blurred", "shuffled"], rows)


def runs_table(results: Results) -> str:
    rows = []
    for name in EQUAL_STEPS:
        for method in results.methods(name):
            runs = results.of(method, name)
            alive = f"{sum(run.diverged is None for run in runs)} of {len(runs)}"
            for quantity in (FRECHET, LOSS):
                values = [quantity.of(run) for run in runs]
                mean = fmean(value for value in values if value is not None)
                rows.append([name, method, alive, quantity.name, *map(quantity.text, values), quantity.text(mean)])
    numbers = range(1, len(SEEDS) + 1)
    heads = ["setting", "method", "survive", "number", *(f"seed {number}" for number in numbers), "mean"]
    return table(heads, rows)


def curve_of(run: RunRecord, number: str) -> dict[int, float]:
    if number == "held-out loss":
        return dict(run.held_out.points)
    return {step: value for step, value in run.measured["frechet"].items() if value is not None}


def length_table(results: Results, number: str) -> str:
    """By step: all seeds of every method."""
    runs = [run for method in results.methods("length") for run in results.of(method, "length")]
    curves = [curve_of(run, number) for run in runs]
    steps = sorted({step for curve in curves for step in curve})
    form = LOSS.form if number == "held-out loss" else FRECHET.form
    rows = [[f"{step:,}", *(form.format(curve[step]) if step in curve else "-" for curve in curves)] for step in steps]
    return table([f"step: {number}", *(f"{run.method}, {run.seed}" for run in runs)], rows)


def draw_distances(results: Results, path: Path) -> None:
    """The distance of every run. Equal seeds are joined: what counts is whether lines fall."""
    places = [name for name in EQUAL_STEPS if results.methods(name)]
    figure, axes = panels(len(places), height=3.0)
    for axis, name in zip(axes, places, strict=True):
        methods = [method for method in METHODS if method in results.methods(name)]
        values = [[FRECHET.of(run) or float("nan") for run in results.of(method, name)] for method in methods]
        for seed in zip(*values, strict=True):
            axis.plot(range(len(methods)), seed, color="#bbbbbb", linewidth=0.7, zorder=1)
        for number, found in enumerate(values):
            axis.plot([number] * len(found), found, "o", color=colour_of(number), markersize=4, alpha=0.7)
            axis.plot([number], [fmean(found)], "_", color=colour_of(number), markersize=24, markeredgewidth=2.2)
        axis.set_xticks(range(len(methods)), methods, fontsize=8)
        axis.set_xlim(-0.5, len(methods) - 0.5)
        axis.set(title=name, ylabel="Fréchet distance")
        axis.tick_params(axis="y", labelsize=7)
    save(figure, path)


def draw_length(results: Results, path: Path) -> None:
    """Losses and distances by step, and the loss relative to none of the same seed, which shows what they do not."""
    figure, axes = panels(3, height=3.0)
    methods = results.methods("length")
    for number, method in enumerate(methods):
        runs = results.of(method, "length")
        for axis, what in ((axes[0], "held-out loss"), (axes[2], "distance")):
            curves = [curve_of(run, what) for run in runs]
            draw_seeds(axis, [(list(curve), list(curve.values())) for curve in curves], method, colour_of(number))
        if method != NONE.label:
            lines = []
            for mine, theirs in results.pairs(method, NONE.label, "length"):
                first, second = dict(mine.held_out.points), dict(theirs.held_out.points)
                shared = [step for step in first if step in second]
                lines.append((shared, [100 * (first[step] / second[step] - 1) for step in shared]))
            draw_seeds(axes[1], lines, method, colour_of(number))
    axes[1].axhline(0, color=colour_of(0), linewidth=0.8)
    labels = ("held-out loss", "loss, % above none", "Fréchet distance")
    for axis, label in zip(axes, labels, strict=True):
        axis.set(xscale="log", xlabel="step", ylabel=label)
        axis.tick_params(labelsize=7, which="both")
    axes[0].set_yscale("log")
    ticks = (0.05, 0.1, 0.2, 0.4, 0.8)
    axes[0].set_yticks(ticks, map(str, ticks))
    axes[0].set_yticks([], minor=True)
    for line in axes[2].get_lines():
        line.set(marker="o", markersize=3)
    legend(axes[0])
    save(figure, path)


def main() -> None:
    parser, commands = study_parser("quality", __doc__, FOLDER)
    commands["run"].add_argument("--data", type=Path, help="a folder with CIFAR-10")
    options = parser.parse_args()
    if options.command == "run":
        run(options.folder, options.data)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
