"""The paper's claims where its effect can appear: deep U-ViTs at the edge of stability, in small batches.

    python -m research.edge kappas --data DATA    # which κ the estimators choose here, before any run
    python -m research.edge run --data DATA       # train what is missing, one JSON line per run
    python -m research.edge redraw                # results.md and figures, from the JSON files alone

DATA is a folder with CIFAR-10 (docs/data.md), for one setting of the question about κ; without it that setting is left
out. All others take the garments that come with the package. The rules were committed before the runs:
docs/evidence/edge/plan.md. Training and fates are those of `research.survival`. Interrupt at any time: the same command
goes on with the runs that are missing.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from research import survival
from research.ablations import holm
from research.commands import add_parts, parts_of, study_parser
from research.pages import claims_table, counts, document, table, verdict_of
from research.reproduce.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    CLEARLY,
    LOSS,
    Claim,
    Quantity,
    Verdict,
    below,
    faster,
    scaling_below,
)
from research.reproduce.items import DIRECTION
from research.reproduce.settings import Method
from research.survival import Arm, Run, Setting
from scalelong.data import load_data, to_float
from scalelong.diffusion import NoiseProcess
from scalelong.experiments.figures import colour_of, legend, panels, save
from scalelong.experiments.records import Curve, RunRecord, rounded
from scalelong.experiments.results import Results, fisher_p
from scalelong.files import write_text
from scalelong.kappa import choose_kappa
from scalelong.stability.alarms import oscillation

FOLDER = Path("docs/evidence/edge")
SEEDS, KAPPA_SEEDS = tuple(range(51_000, 51_008)), tuple(range(51_100, 51_108))
HELD_OUT, JUDGE_EVERY, READ_EVERY = 128, 25, 2


def blocks_read(depth: int) -> tuple[str, ...]:
    """The blocks whose outputs are read: seven, evenly spread, mirrored in the decoder; fewer of a small network."""
    half = depth // 2
    places = list(dict.fromkeys(i * half // 3 for i in range(3)))
    return *(f"encoder.{i}" for i in places), "middle", *(f"decoder.{half - 1 - i}" for i in reversed(places))


# Methods and settings

METHODS: dict[str, Arm] = {
    "none": Arm(),
    "1/√2": Arm(attach="uniform"),
    "CS(0.7)": Arm(attach="cs:0.7"),
    "LS": Arm(attach="ls:start=paper"),
    "CS(0.7) reversed": Arm(attach="cs:kappa=0.7,reverse=true"),
    "stable τ = 0.1": Arm(network={"residual_scaling": 0.1}),
    "stable τ = 0.3": Arm(network={"residual_scaling": 0.3}),
    "ReZero": Arm(network={"residual_scaling": "rezero"}),
    "LS, bounded": Arm(attach="ls"),
}
PAPER = ("none", "1/√2", "CS(0.7)", "LS")


def arm_of(method: str) -> Arm:
    """Of the table above, or CS with any κ: "CS(0.63)"."""
    if method in METHODS:
        return METHODS[method]
    kappa = float(method.removeprefix("CS(").removesuffix(")"))
    return Arm() if kappa == 1 else Arm(attach=f"cs:{kappa}")


class Trial(Run):
    """A run with a method of this file."""

    @property
    def spec(self) -> Arm:
        return arm_of(self.arm)


@dataclass(frozen=True)
class Place:
    """A setting at its rate, and the methods that are compared there."""

    setting: Setting
    lr: float
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    read: bool = False
    """Whether features and gradients are read while it trains, for Figure 1."""

    def runs(self, methods: Sequence[str] | None = None) -> list[Trial]:
        return [Trial(self.setting, m, self.lr, s) for m in (methods or self.methods) for s in self.seeds]


GARMENTS = Setting(data="garments", steps=200)
PLACES: dict[str, Place] = {
    "edge": Place(GARMENTS, 1.2e-2, tuple(METHODS), read=True),
    "near": Place(GARMENTS, 8e-3, tuple(METHODS), read=True),
    "batch 2": Place(Setting(data="garments", steps=200, batch=2), 1.2e-2, PAPER),
    "depth 16": Place(Setting(data="garments", steps=200, depth=16), 1.6e-2, PAPER),
    "depth 40": Place(Setting(data="garments", steps=200, depth=40), 8e-3, PAPER),
}
KAPPA_PLACES: dict[str, Place] = {
    "κ, CIFAR-10": Place(Setting(steps=300), 8e-3, (), KAPPA_SEEDS),
    "κ, garments": Place(Setting(data="garments", steps=130), 1.6e-2, (), KAPPA_SEEDS),
}
"""Their methods are what the estimators chose: `kappas.json`."""
ORDER = ("edge", "κ, CIFAR-10", "batch 2", "depth 16", "near", "κ, garments", "depth 40")
"""In which they are run: if time runs out, the last ones are not done, and the page says so."""


def place_of(name: str, folder: Path) -> Place:
    """With its methods: those about κ have none before the estimators were asked."""
    if name in PLACES:
        return PLACES[name]
    place = KAPPA_PLACES[name]
    chosen = answers_in(folder).get(place.setting.data)
    return replace(place, methods=kappa_methods(chosen) if chosen else ())


# κ, as the estimators choose it for these networks

KAPPA_DEFAULT = "CS(0.7)"
ASKED = {
    "A": ("data", "kappa"),
    "A, low end": ("data", "low"),
    "B": ("network", "kappa"),
    "B, low end": ("network", "low"),
    "C": ("pilot", "kappa"),
}
"""By the name on the page: the estimator, and what is taken of its answer."""
NEAREST = 0.02
"""κ that lie nearer to each other than this are one method: eight seeds cannot tell them apart."""


def ask(folder: Path, data: Path | None) -> None:
    """What each estimator answers for the data and the first seed's network of each setting about κ."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for place in KAPPA_PLACES.values():
        setting = place.setting
        if setting.data == "cifar10" and data is None:
            continue
        images = survival.load_images(setting.data, data)
        build = partial(survival.build, Trial(setting, "none", place.lr, place.seeds[0]), images.shape[1])
        pilot = {"steps": 160, "seeds": 1, "learning_rate": place.lr, "batch_size": setting.batch}
        answers = {}
        for method in ("data", "network", "pilot"):
            choice = choose_kappa(build, images, "vp", method, **(pilot if method == "pilot" else {}))
            answers[method] = {"kappa": choice.kappa, "low": choice.low, "reasons": list(choice.reasons)}
            print(f"{setting.data}: {choice}", flush=True)
        found[setting.data] = answers
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "kappas.json", json.dumps(found, ensure_ascii=False, indent=1) + "\n")


def answers_in(folder: Path) -> dict[str, Any]:
    """By data set; empty before the estimators were asked."""
    path = folder / "kappas.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def chosen_kappas(answers: dict[str, Any]) -> dict[str, float]:
    """By the name of the choice: κ, with two digits."""
    return {name: round(answers[method][end], 2) for name, (method, end) in ASKED.items()}


def kappa_methods(answers: dict[str, Any]) -> tuple[str, ...]:
    """0.7 and every other κ that was chosen, each once."""
    found = [0.7]
    for kappa in chosen_kappas(answers).values():
        if all(abs(kappa - other) > NEAREST for other in found):
            found.append(kappa)
    return tuple(KAPPA_DEFAULT if kappa == 0.7 else f"CS({kappa:g})" for kappa in found)


def method_for(kappa: float, methods: Sequence[str]) -> str:
    """The method that stands for a κ: itself, or the one that is as near as makes no difference."""
    return min(methods, key=lambda method: abs(float(method[3:-1]) - kappa))


# Looking at runs while they are trained


class Reader(survival.Observer):
    """Held-out losses every 25 steps; where asked for, sizes of features and of the gradient every two."""

    def __init__(self, place: Place, images: Tensor, held_out: Tensor) -> None:
        self.place = place
        self.shells: dict[str, nn.Module] = {}
        self.curves: dict[Any, list[list[float | None]]] = defaultdict(list)
        self.series: dict[Any, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
        process = NoiseProcess()
        # The same noisy images for all runs.
        self.probe, self.probe_times, _ = next(survival.batches(images, 7, process))
        self.t = process.times((torch.arange(len(held_out)) + 0.5) / len(held_out))
        self.noise = torch.randn(held_out.shape, generator=torch.Generator().manual_seed(11))
        self.x = process.add_noise(held_out, self.noise, self.t)

    def judges(self, step: int) -> bool:
        return step > 0 and step % JUDGE_EVERY == 0

    def reads(self, run: Run, step: int) -> bool:  # noqa: ARG002
        return self.place.read and step % READ_EVERY == 0

    def wants(self, run: Run, step: int) -> bool:
        return self.judges(step) or self.reads(run, step)

    def before(self, run: Run, step: int, state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        if self.judges(step):
            self.judge(run, step, state)
        if self.reads(run, step):
            series = self.series[run.key]
            squares = torch.stack([gradient.square().sum() for gradient in gradients.values()])
            series["gradient"].append(short(float(squares.sum().sqrt())))
            for name, value in self.sizes(run, state).items():
                series[name].append(short(value))

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        curve = self.curves[run.key]
        self.judge(run, self.place.setting.steps, state)
        series = self.series.pop(run.key, {})
        return {"held_out": curve, **({"series": series} if series else {})}

    @torch.no_grad()
    def judge(self, run: Run, step: int, state: dict[str, Tensor]) -> None:
        predicted = functional_call(self.shell(run), state, (self.x, self.t))
        self.curves[run.key].append([step, short(float((predicted - self.noise).square().mean()))])

    @torch.no_grad()
    def sizes(self, run: Run, state: dict[str, Tensor]) -> dict[str, float]:
        """RMS behind some blocks, on the probe batch."""
        shell, found = self.shell(run), {}

        def hook(name: str) -> Callable[..., None]:
            def keep(_: nn.Module, __: Any, output: Tensor) -> None:
                found[name] = float(output.square().mean().sqrt())

            return keep

        blocks = blocks_read(run.setting.depth)
        handles = [shell.get_submodule(name).register_forward_hook(hook(name)) for name in blocks]
        functional_call(shell, state, (self.probe, self.probe_times))
        for handle in handles:
            handle.remove()
        return found

    @torch.no_grad()
    def filled(self, run: Run, state: dict[str, Tensor]) -> nn.Module:
        """A network with the weights of a run."""
        model = self.shell(run)
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            own.copy_(state[name])
        return model.eval()

    def shell(self, run: Run) -> nn.Module:
        if run.arm not in self.shells:
            self.shells[run.arm] = survival.build(run, self.x.shape[1])
        return self.shells[run.arm]


def short(value: float) -> float | None:
    return rounded(value) if math.isfinite(value) else None


def held_out_images(name: str, data: Path | None) -> Tensor:
    """Images that no run is trained on: the last garments, or photographs behind those that are trained on."""
    if name == "garments":
        whole = load_data("garments")
        return to_float(whole.fetch(range(len(whole) - HELD_OUT, len(whole))).images)
    whole = load_data(str(data))
    images = to_float(whole.fetch(range(4000, 4000 + HELD_OUT)).images)
    return torch.nn.functional.avg_pool2d(images, 2)


def run(name: str, folder: Path, data: Path | None) -> None:
    """Train what is missing of a setting, a method after the other, all seeds of a method side by side."""
    place, path = place_of(name, folder), folder / f"{file_name(name)}.jsonl"
    if place.setting.data == "cifar10" and data is None:
        print(f"{name}: left out, because it needs CIFAR-10; give --data FOLDER", flush=True)
        return
    if not place.methods:
        print(
            f"{name}: left out, because no estimator was asked; first run `python -m research.edge kappas`", flush=True
        )
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    finished = {survival.key_of(record) for record in survival.read(path)}
    missing = [run for run in place.runs() if run.key not in finished]
    print(f"{name}: {len(missing)} of {len(place.runs())} runs are missing", flush=True)
    if not missing:
        return
    images, held_out = survival.load_images(place.setting.data, data), held_out_images(place.setting.data, data)
    for method in place.methods:
        waiting = [run for run in missing if run.arm == method]
        if waiting:
            survival.train(waiting, images, partial(keep, path), Reader(place, images, held_out))


def keep(path: Path, run: Run, result: dict[str, Any]) -> None:
    if result["collapsed"] is not None:
        result["held_out"].pop()  # it did not come to the last step
    survival.append(path, run, result)
    fate = "survived" if result["survived"] else f"collapsed at {result['collapsed']}"
    print(f"{run.arm}, {run.lr:g}, seed {run.seed}: {fate}, best {result['best']}", flush=True)


def file_name(name: str) -> str:
    return name.replace("κ, ", "kappa-").replace(" ", "").lower()


# Claims: numbers of pairs of runs, judged by the rule of `scalelong reproduce`

WINDOW, BEFORE_COLLAPSE = 15, 20
JUDGED = (100, 150, 200)
CHANCE = 0.1
"""All intervals of an item hold together with 1 - CHANCE."""
KAPPA_MARGIN = math.log(1.05)
NONE, UNIFORM, CS, LS, REVERSED, *BLOCKS = (Method(name) for name in list(METHODS)[:8])


def record_of(place: str, line: dict[str, Any]) -> RunRecord:
    """A run that did not survive counts as one that diverged: its loss is that of a predictor of zero."""
    points = [(step, loss) for step, loss in line["held_out"] if loss is not None]
    return RunRecord(
        method=line["arm"],
        seed=line["seed"],
        setting=place,
        held_out=Curve(tuple(step for step, _ in points), tuple(loss for _, loss in points)),
        diverged=None if line["survived"] else "it did not survive",
        traces=line.get("series", {}),
        measured={"collapsed": line["collapsed"]},
    )


def loss_at(step: int) -> Quantity:
    """The held-out loss; 1 from the collapse on."""

    def value(run: RunRecord) -> float | None:
        end = run.measured["collapsed"]
        return 1.0 if end is not None and end <= step else dict(run.held_out.points).get(step)

    return Quantity(f"held-out loss at step {step}", value)


def until_the_best(run: RunRecord) -> RunRecord:
    """Its held-out losses up to the smallest one: what it learned before whatever came later."""
    values = run.held_out.values
    count = values.index(min(values)) + 1 if values else 0
    return replace(run, held_out=Curve(run.held_out.steps[:count], values[:count]), diverged=None)


def oscillation_ratio(mine: RunRecord, theirs: RunRecord, names: Sequence[str]) -> float | None:
    """The log of the ratio of the mean O1, over the readings that both have before the first collapse comes near."""
    ends = [end for run in (mine, theirs) if (end := run.measured["collapsed"]) is not None]
    count = min(len(run.traces[name]) for run in (mine, theirs) for name in names)
    if ends:
        count = min(count, max(0, min(ends) - BEFORE_COLLAPSE) // READ_EVERY + 1)
    scores = [[oscillation(run.traces[name][:count], window=WINDOW).o1 for name in names] for run in (mine, theirs)]
    first, second = map(fmean, scores)
    return math.log(first / second) if first > 0 and second > 0 else None


def smoother(results: Results, place: str, method: Method, other: Method, what: str) -> Claim:
    def names(run: RunRecord) -> list[str]:
        return [name for name in run.traces if (name == "gradient") == (what == "gradient")]

    return Claim(
        f"O1 of the {what}: {method.label} below {other.label}",
        place,
        [
            oscillation_ratio(mine, theirs, names(mine))
            for mine, theirs in results.pairs(method.label, other.label, place)
        ],
        BELOW_ZERO,
        (ABOVE_ZERO,),
        effect=CLEARLY,
    )


def fig1(results: Results, place: str) -> list[Claim]:
    return [
        smoother(results, place, method, other, what)
        for what in ("features", "gradient")
        for other in (NONE, UNIFORM)
        for method in (CS, LS)
    ]


def fig5(results: Results, place: str) -> list[Claim]:
    learned = Results([until_the_best(run) for run in results.runs])
    return [faster(learned, place, method, NONE) for method in (CS, LS)]


def fig6(results: Results, place: str) -> list[Claim]:
    return scaling_below(results, [place], [LOSS])


def table3(results: Results, place: str) -> list[Claim]:
    return [below(results, place, method, other, LOSS) for method in (CS, LS) for other in BLOCKS]


def table4(results: Results, place: str) -> list[Claim]:
    return [below(results, place, CS, REVERSED, loss_at(step), DIRECTION) for step in JUDGED]


@dataclass(frozen=True)
class Item:
    """A figure or a table of the paper, and the settings in which it is judged."""

    title: str
    places: tuple[str, ...]
    claims: Callable[[Results, str], list[Claim]]
    methods: tuple[str, ...] = PAPER
    """That its claims are about: where one of them was not run, the item is not judged."""


BOTH = ("edge", "near")
ITEMS = {
    "fig1": Item("Figure 1: oscillation of features and gradients", BOTH, fig1),
    "fig5": Item("Figure 5: training curves", tuple(PLACES), fig5, ("none", "CS(0.7)", "LS")),
    "fig6": Item("Figure 6: batch sizes and depths", ("edge", "batch 2", "depth 16", "depth 40"), fig6),
    "table3": Item("Table 3: scaling of block outputs", BOTH, table3, ("CS(0.7)", "LS", *(b.label for b in BLOCKS))),
    "table4": Item("Table 4: direction of the decay", BOTH, table4, ("CS(0.7)", "CS(0.7) reversed")),
}


def finished(name: str, folder: Path) -> list[dict[str, Any]]:
    return whole_methods(place_of(name, folder), folder / f"{file_name(name)}.jsonl")


def whole_methods(place: Place, path: Path) -> list[dict[str, Any]]:
    """The runs of the methods of a setting of which all seeds are there."""
    lines = survival.read(path)
    by_key = {survival.key_of(line): line for line in lines}
    wanted = {method: [run.key for run in place.runs([method])] for method in place.methods}
    return [by_key[key] for keys in wanted.values() if all(key in by_key for key in keys) for key in keys]


def missing(folder: Path) -> dict[str, list[str]]:
    """By setting: the methods that were not run with all seeds; those about κ only if nothing was asked."""
    found = {}
    for name in ORDER:
        there = {line["arm"] for line in finished(name, folder)}
        left = [method for method in place_of(name, folder).methods if method not in there]
        if left or not there:
            found[name] = left
    return found


def run_of_plan(places: Mapping[str, Place], results: Results) -> str:
    """What a page says of the methods that were not run with all seeds."""
    left = {name: [m for m in place.methods if m not in results.methods(name)] for name, place in places.items()}
    told = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in left.items() if methods)
    return f"Of the plan was not run: {told}." if told else "All of the plan was run."


def results_of(folder: Path) -> Results:
    """All runs for the paper's claims."""
    return Results([record_of(name, line) for name in PLACES for line in finished(name, folder)])


def claims_of(item: Item, results: Results) -> list[Claim]:
    """With intervals that hold together."""
    there = [place for place in item.places if set(item.methods) <= set(results.methods(place))]
    found = [claim for place in there for claim in item.claims(results, place)]
    return [replace(claim, confidence=1 - CHANCE / len(found)) for claim in found]


# κ, against 0.7


@dataclass(frozen=True)
class KappaRow:
    """A κ that an estimator chose, beside 0.7."""

    place: str
    choices: str
    method: str
    survivors: int
    default_survivors: int
    p: float
    """Of McNemar's exact test, with Holm's correction."""
    claim: Claim

    @property
    def verdict(self) -> str:
        gain, found = self.survivors - self.default_survivors, self.claim.verdict
        if found is Verdict.REPRODUCED or (gain > 0 and self.p < 0.05):
            return "**beats 0.7**"
        if found is Verdict.CONTRADICTED or (gain < 0 and self.p < 0.05):
            return "**worse than 0.7**"
        return self.claim.verdict_text().replace("no effect", "no difference").replace(" at this scale", "")


def kappa_rows(folder: Path) -> list[KappaRow]:
    """Every κ that was chosen and run, against 0.7."""
    compared: list[tuple[str, str, Results]] = []
    for name in KAPPA_PLACES:
        results = Results([record_of(name, line) for line in finished(name, folder)])
        if KAPPA_DEFAULT in results.methods():
            compared += [(name, method, results) for method in results.methods() if method != KAPPA_DEFAULT]
    if not compared:
        return []
    raw = {}
    for name, method, results in compared:
        pairs = [(a.diverged is None, b.diverged is None) for a, b in results.pairs(method, KAPPA_DEFAULT)]
        raw[name + method] = survival.mcnemar(pairs)[2]
    corrected, rows = holm(raw), []
    answers = answers_in(folder)
    for name, method, results in compared:
        place = place_of(name, folder)
        chosen = chosen_kappas(answers[place.setting.data])
        claim = below(results, name, Method(method), Method(KAPPA_DEFAULT), LOSS, KAPPA_MARGIN)
        alive, others = (sum(run.diverged is None for run in results.of(which)) for which in (method, KAPPA_DEFAULT))
        rows.append(
            KappaRow(
                name,
                "; ".join(choice for choice, k in chosen.items() if method_for(k, place.methods) == method),
                method,
                alive,
                others,
                corrected[name + method],
                replace(claim, confidence=1 - CHANCE / len(compared)),
            )
        )
    return rows


# Page and figures


def redraw(folder: Path) -> None:
    """results.md and the figures, from the JSON files of the folder alone."""
    results = results_of(folder)
    draw_losses(results, folder / "losses.png")
    if traced := [run for run in results.runs if run.traces]:
        draw_traces(traced, folder / "traces.png")
    write_text(folder / "results.md", page(folder))


def page(folder: Path) -> str:
    results, rows = results_of(folder), kappa_rows(folder)
    left = "; ".join(f"{name}: {', '.join(methods) or 'all'}" for name, methods in missing(folder).items())
    parts = [
        "# At the edge: all results",
        "Written by `python -m research.edge redraw` from the JSON lines beside it. Meaning: [README](README.md); "
        "rules: [plan](plan.md). Intervals of an item hold together with 90 % (Bonferroni). "
        + (f"Of the plan was not run: {left}." if left else "All of the plan was run."),
        "## Verdicts",
        table(
            ["figure or table", "settings", "verdict", "claims"], [item_row(item, results) for item in ITEMS.values()]
        ),
        "## Who survives",
        survivors_table(results),
        "![Losses](losses.png)",
    ]
    if any(run.traces for run in results.runs):
        parts.append("![Traces of the first seed](traces.png)")
    for item in ITEMS.values():
        if claims := claims_of(item, results):
            parts += [f"## {item.title}", claims_table(claims, SEEDS)]
    if rows:
        parts += ["## κ", kappa_table(rows)]
    return document([*parts, "## Held-out loss at the end", losses_table(results)])


def item_row(item: Item, results: Results) -> list[str]:
    claims = claims_of(item, results)
    if not claims:
        return [item.title, "none was run", "", ""]
    places = ", ".join(dict.fromkeys(claim.setting for claim in claims))
    return [item.title, places, f"**{verdict_of(claims)}**", counts(claims)]


def places_of(results: Results) -> list[str]:
    return list(dict.fromkeys(run.setting for run in results.runs))


def survivors_table(results: Results) -> str:
    """With Fisher's exact test against none, which no verdict rests on and which is not corrected."""
    rows = []
    for method in results.methods():
        cells = []
        for place in places_of(results):
            runs, base = results.of(method, place), results.of(NONE.label, place)
            alive, others = (sum(run.diverged is None for run in found) for found in (runs, base))
            told = f"{alive} of {len(runs)}" if runs else ""
            if runs and base and method != NONE.label:
                told += f" (p = {fisher_p(alive, len(runs), others, len(base)):.2g})"
            cells.append(told)
        rows.append([method, *cells])
    return table(["survivors (Fisher's p against none)", *places_of(results)], rows)


def kappa_table(rows: Sequence[KappaRow]) -> str:
    heads = ["setting", "chosen by", "method", "survivors", "with 0.7", "p, Holm", "loss against 0.7", "verdict"]
    cells = [
        [
            row.place,
            row.choices,
            row.method,
            *(f"{count} of {len(KAPPA_SEEDS)}" for count in (row.survivors, row.default_survivors)),
            f"{row.p:.2g}",
            row.claim.interval_text(),
            row.verdict,
        ]
        for row in rows
    ]
    return table(heads, cells)


def losses_table(results: Results) -> str:
    rows = [
        [place, method, *(LOSS.text(LOSS.of(run)) for run in results.of(method, place))]
        for place in places_of(results)
        for method in results.methods(place)
    ]
    most = max(map(len, rows), default=2)
    return table(["setting", "method", *(f"seed {number}" for number in range(1, most - 1))], rows)


def draw_losses(results: Results, path: Path) -> None:
    """The held-out loss at the end of every run; those that did not survive stand at 1."""
    places = places_of(results)
    figure, axes = panels(max(1, len(places)), height=3.2)
    for axis, place in zip(axes, places, strict=False):
        methods = results.methods(place)
        for number, method in enumerate(methods):
            values = [value for run in results.of(method, place) if (value := LOSS.of(run)) is not None]
            axis.plot([number] * len(values), values, "o", color=colour_of(number), markersize=4, alpha=0.7)
        axis.set_xticks(range(len(methods)), methods, rotation=40, ha="right", fontsize=7)
        axis.set(title=place, ylabel="held-out loss", yscale="log")
        axis.tick_params(axis="y", labelsize=7, which="both")
    save(figure, path)


def draw_traces(runs: Sequence[RunRecord], path: Path) -> None:
    """RMS behind the middle block and norm of the gradient, of the first seed."""
    places, first = list(dict.fromkeys(run.setting for run in runs)), min(run.seed for run in runs)
    shown = [(name, place) for name in ("middle", "gradient") for place in places]
    figure, axes = panels(len(shown))
    for axis, (name, place) in zip(axes, shown, strict=True):
        for number, run in enumerate(run for run in runs if run.setting == place and run.seed == first):
            steps = range(0, READ_EVERY * len(run.traces[name]), READ_EVERY)
            axis.plot(steps, run.traces[name], color=colour_of(number), linewidth=0.8, label=run.method)
        label = "norm of the gradient" if name == "gradient" else "RMS behind the middle block"
        axis.set(title=place, xlabel="step", ylabel=label, yscale="log")
        axis.tick_params(labelsize=7, which="both")
    legend(axes[0])
    save(figure, path)


def main() -> None:
    parser, commands = study_parser("edge", __doc__, FOLDER, {"kappas": "ask the estimators of κ"})
    add_parts(commands["run"], ORDER)
    for command in ("kappas", "run"):
        commands[command].add_argument("--data", type=Path, help="a folder with CIFAR-10")
    options = parser.parse_args()
    if options.command == "kappas":
        ask(options.folder, options.data)
    elif options.command == "run":
        for name in parts_of(parser, options.parts, ORDER):
            run(name, options.folder, options.data)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
