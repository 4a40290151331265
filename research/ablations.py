"""Why small skips keep a deep U-ViT alive, where that ends, and what it buys: ablations at constant rates.

    python -m research.ablations run                  # what is missing of all studies, on the embedded garments
    python -m research.ablations run starts depth40   # some of them
    python -m research.ablations first                # the first step of all starts, without training
    python -m research.ablations redraw               # page of results and figures, from the JSON lines alone

Nothing has to be downloaded: the images are the garments that come with the package. The rules were committed
before the runs: docs/evidence/ablations/plan.md. Training, fates and statistics are those of `research.survival`; this
file names arms, seeds, rules, and what is looked at while they are trained. Interrupt at any time.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from research import survival
from research.survival import Arm, Run, Setting, Study, cs
from scalelong.data import load_data, to_float
from scalelong.diffusion import NoiseProcess
from scalelong.files import write_text

FOLDER = Path("docs/evidence/ablations")
SEEDS = tuple(range(9000, 9008))
CHOICE, CONFIRM = tuple(range(9100, 9102)), tuple(range(9200, 9208))
EDGE = tuple(range(9300, 9308))
LOOK_EVERY = 10

# Arms

SMALL = 0.7**5.5
"""One κ for all skips, with the mean logarithm of CS(0.7) over 12 skips."""
UNIT = {"init_std": "unit"}
NORMED = {"merge_norm": True}

ARMS: dict[str, Arm] = {
    "none": Arm(),
    # The scaling as a start, but for the second.
    "start CS(0.7)": Arm(start="cs:0.7"),
    "CS(0.7) attached": Arm(attach="cs:0.7"),
    "start CS(0.9)": Arm(start="cs:0.9"),
    "start CS(0.5)": Arm(start="cs:0.5"),
    "start CS(0.7), inner half": Arm(start=cs(12, first=7)),
    "start CS(0.7), outer half": Arm(start=cs(12, last=6)),
    "start 0.14 for all skips": Arm(start=f"uniform:{SMALL}"),
    "unit gain": Arm(network=UNIT),
    "unit gain, start CS(0.7)": Arm(network=UNIT, start="cs:0.7"),
    # Other changes.
    "norm on queries and keys": Arm(network={"qk_norm": True}),
    "norms in merges": Arm(network=NORMED),
    "branches at 0.3": Arm(network={"residual_scaling": 0.3}),
    "clipping at 1": Arm(clip=1.0),
    "warm-up of 130": Arm(warmup=130, more_steps=80),
    "betas 0.9, 0.999": Arm(betas=(0.9, 0.999)),
    "betas 0.9, 0.95": Arm(betas=(0.9, 0.95)),
    "decay 0": Arm(decay=0.0),
    "decay 0.3": Arm(decay=0.3),
    # Where the steps are small: in the half that nothing is heard of at the start, or in the other.
    "inner half at a tenth of the rate": Arm(inner_rate=0.1),
    "outer half at a tenth of the rate": Arm(outer_rate=0.1),
    "bf16": Arm(bf16=True),
    "bf16, start CS(0.7)": Arm(bf16=True, start="cs:0.7"),
    # What looked good, together.
    "norms in merges, start CS(0.7)": Arm(network=NORMED, start="cs:0.7"),
    "norms in merges, on queries and keys": Arm(network={**NORMED, "qk_norm": True}),
    "norms in merges, unit gain": Arm(network={**NORMED, **UNIT}),
    "unit gain, branches at 0.3": Arm(network={**UNIT, "residual_scaling": 0.3}),
    "all: norms, unit gain, branches at 0.3": Arm(network={**NORMED, **UNIT, "qk_norm": True, "residual_scaling": 0.3}),
    # With a rate that falls to zero.
    "none, falling rate": Arm(linear=True),
    "start CS(0.7), falling rate": Arm(linear=True, start="cs:0.7"),
}


class Trial(Run):
    """A run with an arm of this file."""

    @property
    def spec(self) -> Arm:
        return ARMS[self.arm]


# Studies

GARMENTS = Setting(data="garments", steps=100)
PAIR = ("none", "start CS(0.7)")
STARTS = tuple(ARMS)[: list(ARMS).index("norm on queries and keys")]
CHANGES = tuple(ARMS)[len(STARTS) : list(ARMS).index("bf16")]
TOGETHER = tuple(name for name in ARMS if name.startswith(("norms in merges, ", "unit gain, branches", "all:")))
FALLING = ("none, falling rate", "start CS(0.7), falling rate")
BUYS_RATES = (4e-3, 8e-3, 1.6e-2)


def study(question: str, arms: Sequence[str], rates: Sequence[float] = (1.6e-2,), **changes: Any) -> Study:
    seeds, baseline = changes.pop("seeds", SEEDS), changes.pop("baseline", "none")
    setting = replace(GARMENTS, **changes)
    return Study(question, (setting,), tuple(rates), tuple(arms), tuple(seeds), baseline, kind=Trial)


STUDIES: dict[str, Study] = {
    "starts": study("Which start", STARTS),
    "changes": study("Other changes", ("none", *CHANGES)),
    "harder": study("At 2.4e-2", (*STARTS, *CHANGES, *TOGETHER), (2.4e-2,), baseline="start CS(0.7)"),
    "depth16": study("Depth 16, at 2.4e-2", PAIR, (2.4e-2,), depth=16),
    "depth40": study("Depth 40, at 8e-3", PAIR, (8e-3,), depth=40),
    "batch4": study("Batches of 4, at 1.2e-2", PAIR, (1.2e-2,), batch=4),
    "buys-choice": study("What stability buys: the rates", FALLING, BUYS_RATES, seeds=CHOICE, steps=250, batch=4),
    "buys": study("What stability buys", FALLING, BUYS_RATES, seeds=CONFIRM, steps=250, batch=4),
    "long": study("1,000 steps, at 1.2e-2", PAIR, (1.2e-2,), steps=1000),
    "bf16": study("Mixed precision", ("bf16", "bf16, start CS(0.7)"), baseline="bf16"),
    "batch32": study("Batches of 32", PAIR, batch=32),
    "width128": study("Width 128, at 1.2e-2", PAIR, (1.2e-2,), width=128),
    "depth64": study("Depth 64, at 6e-3", PAIR, (6e-3,), depth=64),
    "long-cures": study(
        "1,000 steps, at 1.2e-2, other cures",
        ("start CS(0.7)", "norms in merges", "norms in merges, unit gain", "CS(0.7) attached"),
        (1.2e-2,),
        steps=1000,
        seeds=EDGE,
        baseline="start CS(0.7)",
    ),
    "edge-batch64": study("Batches of 64", PAIR, batch=64, seeds=EDGE),
    "edge-width128": study("Width 128, at 2.4e-2", PAIR, (2.4e-2,), width=128, seeds=EDGE),
    "edge-depth40": study("Depth 40, at 1.2e-2", PAIR, (1.2e-2,), depth=40, seeds=EDGE),
    "edge-depth64": study("Depth 64, at 1.2e-2", PAIR, (1.2e-2,), depth=64, seeds=EDGE),
}
"""In the order in which they are run: if time runs out, the last ones are not done."""
FAMILIES = (
    ("depth16", "depth40", "batch4"),
    ("bf16", "batch32", "width128", "depth64"),
    (
        "edge-batch64",
        "edge-width128",
        "edge-depth40",
        "edge-depth64",
    ),
)
"""Borders that the plan counts as one study each: Holm's correction goes over all of them that were run."""
FIRST = (
    ("changes", ("inner half at a tenth of the rate",)),
    ("starts", PAIR),
    ("changes", ("norms in merges", "outer half at a tenth of the rate")),
    ("changes", ("norm on queries and keys",)),
    ("harder", ("start CS(0.7)", "norms in merges", "norms in merges, start CS(0.7)")),
    ("buys-choice", FALLING),
    ("buys", FALLING),
    ("depth40", PAIR),
    ("starts", ("unit gain", "unit gain, start CS(0.7)")),
)
"""What is run before all else."""
WATCHED = {"starts": ("none", "start CS(0.7)", "start 0.14 for all skips", "unit gain", "unit gain, start CS(0.7)")}
WATCHED |= {"changes": ("norms in merges", "branches at 0.3")}
ADVANCES = 7
"""Survivors of 8 at 1.6e-2 with which an arm goes on to 2.4e-2."""


def planned(name: str, records: Sequence[dict[str, Any]]) -> Study:
    """The study as the rules make it, from what has been run before."""
    whole = STUDIES[name]
    if name == "harder":
        alive = {arm: sum(survivors("starts", arm, records)) for arm in STARTS}
        alive |= {arm: sum(survivors("changes", arm, records)) for arm in CHANGES}
        arms = [arm for arm in whole.arms if arm in TOGETHER or alive[arm] >= ADVANCES]
        return replace(whole, arms=tuple(arms))
    return whole


def survivors(name: str, arm: str, records: Sequence[dict[str, Any]]) -> list[bool]:
    return list(survival.survivors(STUDIES[name], arm, records).values())


def best_rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The rate of each arm with the smallest mean held-out loss over the seeds of the choice; a collapse counts 1."""
    found: dict[str, float] = {}
    for arm in FALLING:
        means = {}
        for rate in BUYS_RATES:
            scores = [
                record["held_out"] if record["survived"] else 1.0
                for record in records
                if record["arm"] == arm and record["lr"] == rate and record["seed"] in CHOICE
            ]
            if len(scores) == len(CHOICE):
                means[rate] = statistics.mean(scores)
        if len(means) == len(BUYS_RATES):
            found[arm] = min(means, key=lambda rate: means[rate])
    return found


def run(name: str, folder: Path, jobs: int, arms: Sequence[str] | None = None) -> None:
    """Train what is missing of a study, or of some of its arms."""
    records = survival.read_all(folder)
    parts = [planned(name, records) if arms is None else replace(STUDIES[name], arms=tuple(arms))]
    if name == "buys":
        parts = [replace(STUDIES[name], arms=(arm,), rates=(rate,)) for arm, rate in best_rates(records).items()]
    for part in parts:
        survival.carry_out(part, name, folder, None, jobs, Looker(name))


# Looking into runs while they are trained


class Looker(survival.Observer):
    """Every ten steps: sizes block by block, how far one step moves the output, what the decoder makes of a nudge."""

    def __init__(self, name: str) -> None:
        self.arms: tuple[str, ...] = WATCHED.get(name, ())
        self.scores = name.startswith("buys")
        self.series: dict[Any, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
        self.twins: dict[str, Any] = {}
        self.outputs: dict[Any, Tensor] = {}
        images, held_out = survival.load_images("garments", None), held_out_garments()
        # The same noisy images for all runs.
        self.probe, self.times, _ = next(survival.batches(images, 7, NoiseProcess()))
        process, generator = NoiseProcess(), torch.Generator().manual_seed(11)
        self.t = process.times((torch.arange(len(held_out)) + 0.5) / len(held_out))
        self.noise = torch.randn(held_out.shape, generator=generator)
        self.x = process.add_noise(held_out, self.noise, self.t)

    def wants(self, run: Run, step: int) -> bool:
        return run.arm in self.arms and step % LOOK_EVERY == 0

    def twin(self, run: Run, state: dict[str, Tensor]) -> Any:
        if run.arm not in self.twins:
            self.twins[run.arm] = survival.build(replace(run, seed=0), 1)
        twin = self.twins[run.arm]
        own = dict(twin.named_parameters()) | dict(twin.named_buffers())
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
        return twin

    def before(self, run: Run, step: int, state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:  # noqa: ARG002
        twin, series = self.twin(run, state), self.series[run.key]
        for name, parameter in twin.named_parameters():
            parameter.grad = gradients[name]
        for name, value in survival.look(twin, self.probe, self.times).items():
            series[name].append(rounded(value))
        with torch.no_grad():
            output = self.outputs[run.key] = twin(self.probe, self.times)
        series["nudge"].append(rounded(nudge(twin, self.probe, self.times, output)))

    def after(self, run: Run, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            output = self.twin(run, state)(self.probe, self.times)
        moved = output - self.outputs.pop(run.key)
        self.series[run.key]["step"].append(rounded(rms(moved)))

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if run.key in self.series:
            found["series"] = shortened(self.series.pop(run.key))
        if self.scores:
            with torch.no_grad():
                error = (self.twin(run, state)(self.x, self.t) - self.noise).square().mean()
            found["held_out"] = round(float(error), 5)
        return found


def held_out_garments() -> Tensor:
    whole = load_data("garments")
    return to_float(whole.fetch(range(len(whole) - survival.HELD_OUT, len(whole))).images)


def rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


def rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


@torch.no_grad()
def nudge(model: Any, x: Tensor, t: Tensor, output: Tensor, size: float = 0.01) -> float:
    """A relative change of the middle's output by 1 %: how many times larger is the relative change of the output?"""

    def push(_: nn.Module, __: Any, features: Tensor) -> Tensor:
        noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(5))
        return features + size * features.square().mean().sqrt() * noise

    handle = model.middle.register_forward_hook(push)
    try:
        pushed = model(x, t)
    finally:
        handle.remove()
    return rms(pushed - output) / max(rms(output), 1e-12) / size


KINDS = ("RMS", "logit", "gradient", "merge from main", "merge from skip")


def shortened(series: dict[str, list[float | None]]) -> dict[str, Any]:
    """By kind: a list for each block in the order of the network; numbers without a block as they are."""
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    for name, values in series.items():
        kind = name.partition(",")[0]
        if kind in found:
            found[kind].append(values)
        else:
            found[kind] = values
    return found


# The first step, without training: how far does it move the function, and which half of the network is heard?

FIRST_RATE = 1e-4
"""Small enough that the function moves in proportion."""
UNET = "UNet of diffusers"
UNET_STARTS = {"none": None, "start CS(0.7)": "cs:kappa=0.7,behind_norms=true"}
FIRST_ARMS = (
    # What the predictions are about,
    *((24, arm) for arm in ("none", "start CS(0.7)", "unit gain", "unit gain, start CS(0.7)")),
    *((8, arm) for arm in PAIR),
    *((UNET, arm) for arm in PAIR),
    # and the others.
    *((24, arm) for arm in ("start CS(0.9)", "start CS(0.5)", "start 0.14 for all skips", "norms in merges")),
    *((24, arm) for arm in ("start CS(0.7), inner half", "start CS(0.7), outer half", "branches at 0.3")),
    *((depth, arm) for depth in (16, 40) for arm in PAIR),
)
FIRST_PARTS = (FIRST_ARMS[:6], FIRST_ARMS[6:8], FIRST_ARMS[8:])
"""Each with all seeds before the next."""


def first_steps(folder: Path) -> None:
    """One line per network and seed; what is there is not measured again."""
    torch.set_num_threads(1)
    path = folder / "first.json"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {(line["depth"], line["arm"], line["seed"]) for line in map(json.loads, lines)}
    images = survival.load_images("garments", None)
    for arms in FIRST_PARTS:
        for seed in SEEDS:
            for depth, arm in arms:
                if (depth, arm, seed) not in done:
                    found = first_step(*network(depth, arm, seed), seed, images)
                    lines.append(json.dumps({"depth": depth, "arm": arm, "seed": seed, **found}))
                    write_text(path, "\n".join(lines) + "\n")
                    print(lines[-1], flush=True)


def network(depth: int | str, arm: str, seed: int) -> tuple[Any, list[Any]]:
    """A new network, and its blocks from the first to the last."""
    if isinstance(depth, int):
        model: Any = survival.build(Trial(replace(GARMENTS, depth=depth), arm, FIRST_RATE, seed), 1)
        return model, [*model.encoder, model.middle, *model.decoder]
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    torch.manual_seed(seed)
    sizes: Any = {"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 2}
    sizes |= {"block_out_channels": (32, 64, 64), "norm_num_groups": 8}
    blocks: Any = {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3}
    model = UNet2DModel(**sizes, **blocks)
    if start := UNET_STARTS[arm]:
        sl.start_skips_(model, start, (torch.zeros(2, 1, 16, 16), torch.zeros(2)))
    return model, [*model.down_blocks, model.mid_block, *model.up_blocks]


def first_step(model: Any, blocks: list[Any], seed: int, images: Tensor) -> dict[str, Any]:
    """Adam's first step is the rate times the signs of the gradient.

    With all weights moved so, or those of the inner or outer half of the blocks alone: how far does the output move for
    a rate of 1? "gradients" has the norm of each block.
    """
    x, t, noise = next(survival.batches(images, seed, NoiseProcess()))

    def predict() -> Tensor:
        output = model(x, t)
        return output if isinstance(output, Tensor) else output.sample

    before = predict()
    (before - noise).square().mean().backward()
    quarter = round(len(blocks) / 4)
    inside = {id(parameter) for block in blocks[quarter:-quarter] for parameter in block.parameters()}
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def moved(rate: float, part: str = "all") -> Tensor:
        for parameter, old in zip(model.parameters(), weights, strict=True):
            taken = part == "all" or (part == "inner") == (id(parameter) in inside)
            parameter.copy_(old - rate * parameter.grad.sign() if taken and parameter.grad is not None else old)
        return predict()

    found: dict[str, Any] = {
        part: rounded(rms(moved(FIRST_RATE, part) - before.detach()) / FIRST_RATE) for part in ("all", "inner", "outer")
    }
    gradients = [[p.grad.square().sum() for p in block.parameters() if p.grad is not None] for block in blocks]
    norms = [rounded(float(torch.stack(squares).sum().sqrt())) for squares in gradients]
    return {**found, "gradients": norms}


# Statistics


def fisher(first: int, of_first: int, second: int, of_second: int) -> float:
    """The exact two-sided test of two shares: the sum of all tables that are no more likely than the one found."""
    alive, of = first + second, of_first + of_second

    def likelihood(k: int) -> float:
        return math.comb(of_first, k) * math.comb(of_second, alive - k) / math.comb(of, alive)

    low, high = max(0, alive - of_second), min(of_first, alive)
    found = likelihood(first)
    return min(1.0, sum(p for k in range(low, high + 1) if (p := likelihood(k)) <= found * (1 + 1e-9)))


def holm(values: dict[str, float]) -> dict[str, float]:
    """Holm's correction: p-values that may be compared with a level over the whole family."""
    found, least = {}, 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        least = max(least, min(1.0, (len(values) - rank) * values[name]))
        found[name] = least
    return found


Cell = dict[int, dict[str, Any]]
"""The records of an arm in a study, by seed."""


def cell(name: str, arm: str, records: Sequence[dict[str, Any]], rate: float | None = None) -> Cell:
    whole = STUDIES[name]
    part = replace(whole, arms=(arm,), rates=whole.rates if rate is None else (rate,))
    keys = {run.key for run in survival.runs_of(part)}
    return {record["seed"]: record for record in records if survival.key_of(record) in keys}


def alive(found: Cell) -> int:
    return sum(record["survived"] for record in found.values())


def corrected_tests(
    names: Sequence[str], baseline: str, tests: dict[str, float], records: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Holm's correction over the arms of these studies, and over those of all borders that belong to one of them."""
    others = next((group for group in FAMILIES if names[0] in group), ())
    together = {("", arm): p for arm, p in tests.items()}
    for other in others:
        base = cell(other, STUDIES[other].baseline, records)
        for arm in STUDIES[other].arms:
            found = cell(other, arm, records)
            if other != names[0] and arm != STUDIES[other].baseline and found and base:
                together[other, arm] = fisher(alive(found), len(found), alive(base), len(base))
    corrected = holm({f"{study}/{arm}": p for (study, arm), p in together.items()})
    return {arm: corrected[f"/{arm}"] for arm in tests if arm != baseline}


def family(names: Sequence[str], baseline: str, records: Sequence[dict[str, Any]]) -> str:
    """Survivors, interval, test and losses of the arms of some studies, against one baseline."""
    base = cell(names[0], baseline, records)
    cells = {arm: cell(name, arm, records) for name in names for arm in planned(name, records).arms}
    cells = {arm: found for arm, found in cells.items() if found}
    tests = {
        arm: fisher(alive(found), len(found), alive(base), len(base))
        for arm, found in cells.items()
        if arm != baseline and base
    }
    corrected = corrected_tests(names, baseline, tests, records)
    lines = [
        "| arm | survivors | 95 % | p, Fisher | p, Holm | collapsed seeds (step) | median best loss | best losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, found in cells.items():
        low, high = survival.wilson(alive(found), len(found))
        test = f"{tests[arm]:.2g} | {corrected[arm]:.2g}" if arm in tests else " | "
        ordered = [record for _, record in sorted(found.items())]
        lost = " ".join(f"{r['seed']} ({r['collapsed'] or 'end'})" for r in ordered if not r["survived"])
        best = [record["best"] for record in ordered if record["best"] is not None]
        listed = " ".join(
            f"{record['best']:.3f}" + ("" if record["survived"] else "†")
            for record in ordered
            if record["best"] is not None
        )
        middle = f"{statistics.median(best):.3f}" if best else ""
        lines.append(
            f"| {arm} | {alive(found)} of {len(found)} | {low:.2f} to {high:.2f} | {test} | {lost} | {middle} | "
            f"{listed} |"
        )
    return "\n".join(lines)


# The cause


def mean_step(record: dict[str, Any]) -> float:
    """The RMS change of the output by one step of the optimiser, mean over the readings of steps 10 to 40."""
    return statistics.mean(value or math.inf for value in record["series"]["step"][1:5])


def merge_gain(record: dict[str, Any], reading: int) -> float:
    """Geometric mean of the spectral norms of the merges' main halves."""
    values = [max(block[reading] or math.inf, 1e-12) for block in record["series"]["merge from main"]]
    return math.exp(statistics.mean(map(math.log, values)))


def departures(record: dict[str, Any]) -> dict[str, int]:
    """For each kind of quantity: the first reading from which on it stays above twice its value at the best loss."""
    curve, series = record["curve"], record["series"]
    # The smoothed loss is kept at every tenth step; before the end of the warm-up there is no best.
    best = min(range(5, len(curve)), key=lambda n: curve[n], default=5)
    found: dict[str, int] = {}
    for kind in KINDS:
        for position, values in enumerate(series[kind]):
            where = kind
            if kind in ("RMS", "logit", "gradient"):
                where += ", encoder" if position <= len(series[kind]) // 2 else ", decoder"
            start = min(best + 1, len(values) - 1)
            usual = values[start] or math.inf
            gone = len(values)
            while gone > start + 1 and (values[gone - 1] is None or values[gone - 1] > 2 * usual):
                gone -= 1
            if gone < len(values):
                found[where] = min(found.get(where, 10**9), LOOK_EVERY * gone)
    return found


def first_to_leave(records: Sequence[dict[str, Any]]) -> str:
    lost = [record for record in records if "series" in record and not record["survived"] and record["collapsed"]]
    firsts: dict[str, int] = defaultdict(int)
    leads: dict[str, list[int]] = defaultdict(list)
    for record in lost:
        gone = departures(record)
        if gone:
            early = min(gone.values())
            for kind, step in gone.items():
                firsts[kind] += step == early
                leads[kind].append(record["collapsed"] - step)
    lines = [
        f"{len(lost)} collapsed runs.\n",
        "| kind | earliest (ties count) | left at all | steps before the collapse, median |",
        "|---|---|---|---|",
    ]
    for kind in sorted(leads, key=lambda kind: -firsts[kind]):
        lines.append(f"| {kind} | {firsts[kind]} | {len(leads[kind])} | {statistics.median(leads[kind]):g} |")
    return "\n".join(lines)


def _largest(kind: str, first: int, last: int | None = None) -> Callable[[dict[str, Any], int], float]:
    return lambda record, n: max((block[n] or math.inf) for block in record["series"][kind][first:last])


HALF = GARMENTS.depth // 2
QUANTITIES: dict[str, Callable[[dict[str, Any], int], float]] = {
    "one step moves the output by (RMS)": lambda record, n: record["series"]["step"][n],
    "a nudge of the middle grows by": lambda record, n: record["series"]["nudge"][n],
    "innermost merge, main half, norm": _largest("merge from main", 0, 1),
    "largest RMS in the decoder": _largest("RMS", HALF + 1),
    "largest logit of attention": _largest("logit", 0),
    "gradient, middle over last block": lambda record, n: (
        (record["series"]["gradient"][HALF][n] or math.nan) / (record["series"]["gradient"][-1][n] or math.nan)
    ),
    # In the table alone.
    "sixth merge, main half": _largest("merge from main", 5, 6),
    "outermost merge, main half": _largest("merge from main", 11, 12),
    "innermost merge, skip half": _largest("merge from skip", 0, 1),
}
"""What was looked at, of a record and a reading."""


def medians(found: Sequence[dict[str, Any]], value: Callable[[dict[str, Any], int], float]) -> dict[int, float]:
    """By step: the median over the seeds, while at least half of them are still trained."""
    points = {}
    for n in range(max((len(record["series"]["step"]) for record in found), default=0)):
        here = [value(record, n) for record in found if n < len(record["series"]["step"])]
        here = [v for v in here if v is not None and math.isfinite(v)]
        if len(here) >= len(found) / 2:
            points[LOOK_EVERY * n] = statistics.median(here)
    return points


def looked(records: Sequence[dict[str, Any]]) -> str:
    """The medians of all quantities, for each arm that was looked into."""
    lines = [f"| arm | step | {' | '.join(QUANTITIES)} |", "|---|---|" + "---|" * len(QUANTITIES)]
    for arm in (*WATCHED["starts"], *WATCHED["changes"]):
        found = [record for record in cell_at(arm, records, 0).values() if "series" in record]
        columns = [medians(found, value) for value in QUANTITIES.values()]
        for step in columns[0]:
            cells = [f"{column[step]:.2g}" if step in column else "" for column in columns]
            lines.append(f"| {arm} | {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def predictions(records: Sequence[dict[str, Any]]) -> str:
    """The predictions of the plan, each held or failed."""
    watched = {arm: cell("starts", arm, records) for arm in WATCHED["starts"]}
    watched |= {arm: cell("changes", arm, records) for arm in WATCHED["changes"]}
    steps = {
        arm: {seed: mean_step(record) for seed, record in found.items() if "series" in record}
        for arm, found in watched.items()
    }
    lines = ["| arm | survivors | mean step, by seed | median |", "|---|---|---|---|"]
    for arm, by_seed in steps.items():
        if by_seed:
            listed = " ".join(f"{value:.3f}" for _, value in sorted(by_seed.items()))
            lines.append(f"| {arm} | {alive(watched[arm])} | {listed} | {statistics.median(by_seed.values()):.3f} |")
    verdicts = []

    def verdict(text: str, held: list[bool]) -> None:
        if held:
            verdicts.append(f"- {text}: {sum(held)} of {len(held)} seeds, **{'held' if sum(held) >= 7 else 'failed'}**")

    def smaller(first: str, second: str) -> list[bool]:
        both = sorted(set(steps[first]) & set(steps[second]))
        return [steps[first][seed] < steps[second][seed] for seed in both]

    none, start, unit, both = "none", "start CS(0.7)", "unit gain", "unit gain, start CS(0.7)"
    verdict("the step is smaller with CS(0.7) as a start than with none", smaller(start, none))
    verdict("the step is smaller with unit gain than with none", smaller(unit, none))
    seeds = sorted(set.intersection(*(set(steps[arm]) for arm in (none, start, unit, both))))

    def change(first: str, second: str, seed: int) -> float:
        return abs(math.log(steps[first][seed] / steps[second][seed]))

    verdict(
        "with unit gain, CS(0.7) changes the step by a factor nearer to 1 than without",
        [change(both, unit, seed) < change(start, none, seed) for seed in seeds],
    )
    above, larger = [], []
    for seed, record in sorted(watched[none].items()):
        twin = watched[start].get(seed)
        if record["collapsed"] and "series" in record and twin is not None and "series" in twin:
            last = len(record["series"]["step"]) - 1
            gain = merge_gain(record, last)
            above.append(gain > 1)
            larger.append(gain > merge_gain(twin, min(last, len(twin["series"]["step"]) - 1)))
    verdict("main halves of the merges above 1 (geometric mean) before the collapse of none", above)
    verdict("and larger than in the run with CS(0.7) of that seed at that step", larger)
    return "\n".join(lines) + "\n\n" + "\n".join(verdicts)


def read_first(folder: Path) -> dict[tuple[Any, str], dict[int, dict[str, Any]]]:
    """The measurements of the first step, by depth and arm and by seed."""
    path = folder / "first.json"
    found: dict[tuple[Any, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        # How loud the middle block is: its gradient over that of the last block.
        heard = line["gradients"][len(line["gradients"]) // 2] / line["gradients"][-1]
        share = line["inner"] / line["all"]
        found[line["depth"], line["arm"]][line["seed"]] = {**line, "heard": heard, "share": share}
    return found


def first_table(folder: Path) -> str:
    """The first step by arm and depth, and the predictions of the plan about it."""
    found = read_first(folder)
    if not found:
        return ""
    lines = [
        "| depth | arm | seeds | all | inner half | outer half | inner / all | gradient, middle / last block |",
        "|---|---|---|---|---|---|---|---|",
    ]
    parts = ("all", "inner", "outer", "share", "heard")
    for (depth, arm), by_seed in found.items():
        middle = [f"{statistics.median(line[part] for line in by_seed.values()):.3g}" for part in parts]
        lines.append(f"| {depth} | {arm} | {len(by_seed)} | {' | '.join(middle)} |")
    none, start, unit, both = "none", "start CS(0.7)", "unit gain", "unit gain, start CS(0.7)"

    def factor(first: str, second: str, part: str = "all", depth: Any = GARMENTS.depth) -> dict[int, float]:
        shared = set(found[depth, first]) & set(found[depth, second])
        return {seed: found[depth, first][seed][part] / found[depth, second][seed][part] for seed in sorted(shared)}

    def nearer(first: dict[int, float], second: dict[int, float]) -> list[bool]:
        return [abs(math.log(first[s])) < abs(math.log(second[s])) for s in first if s in second]

    def louder(depth: Any) -> list[bool]:
        here, there = found[GARMENTS.depth, none], found[depth, none]
        return [there[s]["share"] > here[s]["share"] for s in sorted(set(here) & set(there))]

    lowered, inner, outer = (factor(start, none, part) for part in ("all", "inner", "outer"))
    checks = {
        "first explanation: CS(0.7) as a start moves the output less than none": [v < 1 for v in lowered.values()],
        "first explanation: unit gain moves it less than none": [v < 1 for v in factor(unit, none).values()],
        "first explanation: with unit gain, CS(0.7) changes it by a factor nearer to 1": nearer(
            factor(both, unit), lowered
        ),
        "first explanation: CS(0.7) lowers the inner half by more than the outer": [inner[s] < outer[s] for s in inner],
        "first explanation: at depth 8, CS(0.7) changes it by a factor nearer to 1": nearer(
            factor(start, none, depth=8), lowered
        ),
        "second explanation: the inner half moves the output more with CS(0.7) as a start": [
            v > 1 for v in inner.values()
        ],
        "second explanation: and with unit gain": [v > 1 for v in factor(unit, none, "inner").values()],
        "second explanation: with unit gain, CS(0.7) changes that by a factor nearer to 1": nearer(
            factor(both, unit, "inner"), inner
        ),
        "second explanation: without scaling, the share of the inner half is larger at depth 8": louder(8),
        "second explanation: and in the UNet": louder(UNET),
    }
    lines.append("")
    for text, held in checks.items():
        word = "held" if sum(held) >= 7 else "failed" if len(held) == len(SEEDS) else "open"
        lines.append(f"- {text}: {sum(held)} of {len(held)} seeds, **{word}**")
    return "\n".join(lines)


def bought(records: Sequence[dict[str, Any]]) -> str:
    rates = best_rates(records)
    if not rates:
        return ""
    lines = ["| arm | rate | mean score of the choice | chosen |", "|---|---|---|---|"]
    for arm in FALLING:
        for rate in BUYS_RATES:
            found = [record for record in cell("buys-choice", arm, records, rate).values() if record["seed"] in CHOICE]
            score = statistics.mean(record["held_out"] if record["survived"] else 1.0 for record in found)
            lines.append(f"| {arm} | {rate:g} | {score:.4f} | {'yes' if rates.get(arm) == rate else ''} |")
    scores = {
        arm: {
            seed: record["held_out"] if record["survived"] else 1.0
            for seed, record in cell("buys", arm, records, rate).items()
        }
        for arm, rate in rates.items()
    }
    pairs = sorted(set.intersection(*map(set, scores.values()))) if len(scores) == 2 else []
    if pairs:
        none, start = (scores[arm] for arm in FALLING)
        wins = sum(start[seed] < none[seed] for seed in pairs)
        word = "buys quality" if wins >= 7 else "costs" if wins <= len(pairs) - 7 else "no difference"
        lines += [
            "",
            *(f"- {arm} at {rates[arm]:g}: " + " ".join(f"{scores[arm][s]:.4f}" for s in pairs) for arm in scores),
        ]
        mean = statistics.mean(start[seed] - none[seed] for seed in pairs)
        lines.append(f"- CS(0.7) is lower in {wins} of {len(pairs)} pairs; mean difference {mean:+.4f}: **{word}**")
    return "\n".join(lines)


# Page and figures


def redraw(folder: Path) -> None:
    """results.md, survivors.png and cause.png, from the JSON lines of the folder alone."""
    records = survival.read_all(folder)
    parts = [
        "# Ablations: all results\n\nWritten by `python -m research.ablations redraw` from the JSON lines beside it. "
        "Meaning: [README](README.md); rules: [plan](plan.md). † marks runs that did not survive.",
        "## Starts and other changes, at 1.6e-2, against none\n\n" + family(("starts", "changes"), "none", records),
        "![Survivors](survivors.png)",
    ]
    for name, whole in STUDIES.items():
        if name in ("starts", "changes") or name.startswith("buys") or not (folder / f"{name}.jsonl").exists():
            continue
        parts.append(
            f"## {whole.question}\n\n`python -m research.ablations run {name}`; "
            f"{survival.describe(whole.settings[0])}; against {whole.baseline}.\n\n"
            f"{family((name,), whole.baseline, records)}"
        )
    if text := bought(records):
        parts.append(f"## What stability buys\n\n`python -m research.ablations run buys-choice buys`\n\n{text}")
    if text := first_table(folder):
        parts.append(
            "## The first step, before any training\n\n`python -m research.ablations first`; medians of the seeds. "
            f"How far Adam's first step moves the output, for a rate of 1.\n\n{text}\n\n![The first step](first.png)"
        )
        draw_first(folder, folder / "first.png")
    parts.append(f"## The cause: predictions of the plan\n\n{predictions(records)}")
    parts.append("![What was looked at](cause.png)")
    watched = [record for record in records if record["arm"] == "none" and "series" in record]
    parts.append(f"## What leaves first, without scaling: the rule of the plan\n\n{first_to_leave(watched)}")
    parts.append(
        "## What was looked at\n\nMedians of the seeds, while at least half are trained; norms are spectral. "
        f"Chosen after the runs had been seen.\n\n{looked(records)}"
    )
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")
    draw_survivors(records, folder / "survivors.png")
    draw_cause(records, folder / "cause.png")


def draw_survivors(records: Sequence[dict[str, Any]], path: Path) -> None:
    """All arms at 1.6e-2 and 2.4e-2: share of survivors with its interval, and the losses that were reached."""
    arms = [arm for arm in (*STARTS, *CHANGES, *TOGETHER) if cell_at(arm, records, 0) or cell_at(arm, records, 1)]
    plt = survival.pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.2 + 0.34 * len(arms)), sharey=True, layout="constrained", dpi=110
    )
    for number, (colour, label) in enumerate((("#0072b2", "1.6e-2"), ("#d55e00", "2.4e-2"))):
        for row, arm in enumerate(arms):
            found = cell_at(arm, records, number)
            if not found:
                continue
            place = row + (number - 0.5) * 0.3
            low, high = survival.wilson(alive(found), len(found))
            left.plot([low, high], [place, place], color=colour, alpha=0.35, linewidth=2)
            left.plot(alive(found) / len(found), place, "o", color=colour, markersize=5)
            for survived, marker in ((True, "o"), (False, "x")):
                best = [r["best"] for r in found.values() if r["survived"] is survived and r["best"] is not None]
                right.plot(best, [place] * len(best), marker, color=colour, markersize=3.5, alpha=0.7)
        left.plot([], [], "o", color=colour, label=f"rate {label}")
    left.set(yticks=range(len(arms)), yticklabels=arms, xlim=(-0.03, 1.03), xlabel="share of runs that survive (95 %)")
    left.invert_yaxis()
    right.set(xlabel="best smoothed loss of each run (× collapsed later)")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    title = f"U-ViT of depth {GARMENTS.depth} on garments, {GARMENTS.steps} steps, {len(SEEDS)} seeds"
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.savefig(path)
    plt.close(figure)


def cell_at(arm: str, records: Sequence[dict[str, Any]], number: int) -> Cell:
    if number:
        return cell("harder", arm, records)
    return cell("starts" if arm in STARTS else "changes", arm, records) if arm not in TOGETHER else {}


def draw_first(folder: Path, path: Path) -> None:
    """Gradients block by block, and how far the first step of the inner half moves the output."""
    found = read_first(folder)
    plt = survival.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", dpi=110, width_ratios=(1.2, 1))
    for number, ((depth, arm), by_seed) in enumerate([item for item in found.items() if item[0] in FIRST_ARMS[:8]]):
        lines = [line["gradients"] for line in by_seed.values()]
        middle = [
            statistics.median(values) / statistics.median(v[-1] for v in lines) for values in zip(*lines, strict=True)
        ]
        places = [n / (len(middle) - 1) for n in range(len(middle))]
        label = f"{arm}, {f'depth {depth}' if isinstance(depth, int) else depth}"
        style = "-" if depth == GARMENTS.depth else "--" if isinstance(depth, int) else ":"
        left.semilogy(places, middle, style, marker=".", color=f"C{number}", linewidth=1.3, label=label)
    left.set(xlabel="block: 0 first, 0.5 middle, 1 last", ylabel="gradient norm, last block = 1")
    left.set_title("Before training: whom the loss hears (median of the seeds)", fontsize=9)
    left.legend(fontsize=7, frameon=False, loc="lower center", ncols=2)
    rows = sorted(
        (key for key in found if key[0] == GARMENTS.depth),
        key=lambda key: statistics.median(line["inner"] for line in found[key].values()),
    )
    for row, key in enumerate(rows):
        values = [line["inner"] for line in found[key].values()]
        right.semilogx(values, [row] * len(values), "o", color="#0072b2", markersize=4, alpha=0.6)
    right.set(yticks=range(len(rows)), yticklabels=[arm for _, arm in rows], xlabel="output moved / rate")
    right.set_title("Adam's first step, inner half of the blocks alone", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def draw_cause(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Medians over the seeds that are still trained, of what was looked at."""
    plt = survival.pyplot()
    figure, grid = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained", dpi=110)
    for number, arm in enumerate((*WATCHED["starts"], *WATCHED["changes"])):
        found = [record for record in cell_at(arm, records, 0).values() if "series" in record]
        for axes, (title, value) in zip(grid.flat, list(QUANTITIES.items())[: grid.size], strict=True):
            points = medians(found, value)
            if points:
                label = f"{arm}: {sum(r['survived'] for r in found)} of {len(found)}"
                axes.semilogy(list(points), list(points.values()), color=f"C{number}", linewidth=1.4, label=label)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=7, which="both")
            axes.yaxis.set_major_formatter("{x:.3g}")
            axes.yaxis.set_minor_formatter("{x:.2g}" if "norm" in title or "moves" in title else "")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.ablations", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run", help="train what is missing")
    train.add_argument("studies", nargs="*", help=f"by default all: {', '.join(STUDIES)}")
    train.add_argument("--jobs", type=int, default=1, help="processes of one core each")
    first = commands.add_parser("first", help="the first step, measured without training")
    drawn = commands.add_parser("redraw", help="page of results and figures, from the JSON lines alone")
    for command in (train, first, drawn):
        command.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.command == "run":
        if unknown := sorted(set(options.studies) - set(STUDIES)):
            parser.error(f"no study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
        for name, arms in () if options.studies else FIRST:
            run(name, options.folder, options.jobs, arms)
        for name in options.studies or STUDIES:
            run(name, options.folder, options.jobs)
    elif options.command == "first":
        first_steps(options.folder)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
