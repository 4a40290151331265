"""A small UNet of diffusers at high rates: scaled branches, last convolutions that begin at zero, CS behind norms.

    python -m research.unets run       # train what is missing, one JSON line per run
    python -m research.unets redraw    # results.md and the figure, from the JSON lines alone

All data come with the package. The rules were committed before the runs: docs/evidence/unets/plan.md. Interrupt at any
time: the same command goes on with the runs that are missing. Averages, held-out losses and the choice of a rate are
those of `research.head_start`, fates those of `research.survival`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from research import survival
from research.ablations import holm
from research.commands import study_parser
from research.edge import short
from research.head_start import (
    AVERAGE_EVERY,
    CHANCE,
    JUDGE_EVERY,
    Average,
    Judge,
    Record,
    best_rate,
    keep,
    last_loss,
    read,
    sign,
)
from research.pages import document, table
from research.reproduce.claims import Region, percent, region_of
from research.survival import Arm, Fate, Run, Setting
from scalelong.diffusion import NoiseProcess
from scalelong.experiments.figures import colour_of, panels, save
from scalelong.files import write_text

FOLDER = Path("docs/evidence/unets")
RUNS = "runs.jsonl"
SEEDS, SELECTION = tuple(range(62_200, 62_208)), (62_300, 62_301)
RATES, HIGH = (4e-3, 8e-3, 1.6e-2, 3.2e-2), (3.2e-2, 1.6e-2)
TAU, MARGIN, LEVEL = 0.3, math.log(1.05), 0.05
# A UNet has levels where a U-ViT has a depth, and its width is that of the outermost level.
UNET = Setting(data="garments", depth=2, steps=160, width=16, batch=8)

NONE, BRANCHES, ZERO, BEHIND = "none", "branches at 0.3", "zero", "CS behind norms"
ARMS = (NONE, BRANCHES, ZERO, BEHIND)
HOW = Arm()
"""Warm-up, betas and decay of all arms."""


# Networks and training


def build(run: Run) -> nn.Module:
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    torch.manual_seed(run.seed)
    sizes: dict[str, Any] = {"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    width = run.setting.width
    model = UNet2DModel(**sizes, **blocks, block_out_channels=(width, 2 * width), norm_num_groups=8)
    if run.arm == BRANCHES:
        for layer in last_layers(model):
            layer.register_forward_hook(scale_output)
    if run.arm == ZERO:
        for layer in last_layers(model):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    if run.arm == BEHIND:
        example = torch.zeros(2, 1, 16, 16), torch.zeros(2)
        sl.scale_skips_(model, "cs:kappa=0.7,behind_norms=true", example)
    return model


def scale_output(_layer: nn.Module, _given: Any, output: Tensor) -> Tensor:
    return TAU * output


def last_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The last layer of every residual branch: second convolutions, and projections of attentions."""
    for name, module in model.named_modules():
        if name.endswith((".conv2", ".to_out.0")):
            yield module


def train(run: Run, images: Tensor, judge: Judge, done: Callable[[Run, Record], None]) -> None:
    """Train one run until its end or its collapse."""
    setting, process, model = run.setting, NoiseProcess(), build(run)
    parameters = list(model.parameters())
    options: Any = {"betas": HOW.betas, "weight_decay": HOW.decay, "fused": True}
    optimizer = torch.optim.AdamW(parameters, lr=run.lr, **options)
    stream = survival.batches(images, run.seed, process, setting.batch)
    fate, average = Fate(HOW.warmup), Average(parameters)
    curve: list[list[float | None]] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return model(x[0], t[0]).sample[None]

    for step in range(setting.steps):
        optimizer.param_groups[0]["lr"] = run.lr * HOW.share(step, setting.steps)
        x, t, noise = next(stream)
        loss = (model(x, t).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fate.add(step, float(loss.detach())):
            break
        if (step + 1) % AVERAGE_EVERY == 0:
            average.take()
        if (step + 1) % JUDGE_EVERY == 0 or step + 1 == setting.steps:
            with average.lent():
                curve.append([step + 1, short(judge.losses(predict, 1)[0])])
    done(run, {**fate.record(), "held_out": curve})


def choosing(arm: str) -> list[Run]:
    return [Run(UNET, arm, rate, seed) for rate in RATES for seed in SELECTION]


def at_rate(arm: str, rate: float) -> list[Run]:
    return [Run(UNET, arm, rate, seed) for seed in SEEDS]


def run(folder: Path, high: Sequence[float] | None = None) -> None:
    """Train what is missing, in the order of the plan; `high`: at these high rates alone."""
    path = folder / RUNS
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    images, judge = survival.load_images("garments", None), Judge()

    def train_missing(runs: Sequence[Run]) -> None:
        there = read(folder)
        for each in runs:
            if each.key not in there:
                train(each, images, judge, partial(keep, path))

    train_missing([each for arm in ARMS for each in choosing(arm)])
    records = read(folder)
    chosen = {arm: best_rate(choosing(arm), records) for arm in ARMS}
    train_missing([each for arm, rate in chosen.items() if rate is not None for each in at_rate(arm, rate)])
    for rate in HIGH if high is None else high:
        train_missing([each for arm in ARMS for each in at_rate(arm, rate)])


# Claims


def found_at(arm: str, rate: float | None, records: Mapping[Any, Record]) -> dict[int, Record]:
    """The runs of an arm at a rate by seed; empty unless all are there."""
    runs = [] if rate is None else at_rate(arm, rate)
    return {each.seed: records[each.key] for each in runs} if all(each.key in records for each in runs) else {}


@dataclass(frozen=True)
class LossClaim:
    """The held-out loss of an arm against none, each at its best rate: the log of a ratio per seed."""

    arm: str
    values: list[float]
    confidence: float

    @property
    def region(self) -> Region:
        return region_of(self.values, self.confidence)

    @property
    def text(self) -> str:
        return f"{percent(fmean(self.values))} ({percent(self.region.low)} to {percent(self.region.high)})"

    @property
    def verdict(self) -> str:
        if side := sign(self.region):
            return "**worse**" if side > 0 else "**better**"
        if Region(-MARGIN, MARGIN).holds(self.region):
            farther = max(self.region.low, self.region.high, key=abs)
            return f"no difference larger than {percent(farther).lstrip('+-')}"
        return "cannot be judged"


def loss_claims(records: Mapping[Any, Record]) -> list[LossClaim]:
    found = {arm: found_at(arm, best_rate(choosing(arm), records), records) for arm in ARMS}
    values = {
        arm: [math.log(last_loss(runs[seed]) / last_loss(found[NONE][seed])) for seed in SEEDS]
        for arm, runs in found.items()
        if arm != NONE and runs and found[NONE]
    }
    return [LossClaim(arm, logs, 1 - CHANCE / len(values)) for arm, logs in values.items()]


@dataclass(frozen=True)
class SurvivalClaim:
    """Who survives the high rates, against none with equal seeds and rates."""

    arm: str
    rates: tuple[float, ...]
    survivors: int
    baseline_survivors: int
    runs: int
    p: float
    """Of McNemar's exact test, with Holm's correction."""

    @property
    def verdict(self) -> str:
        if self.p >= LEVEL:
            return "no difference by the rule"
        return "**more survive**" if self.survivors > self.baseline_survivors else "**fewer survive**"


def survival_claims(records: Mapping[Any, Record]) -> list[SurvivalClaim]:
    found: dict[str, tuple[tuple[float, ...], list[tuple[bool, bool]]]] = {}
    for arm in ARMS[1:]:
        both = {rate: (found_at(arm, rate, records), found_at(NONE, rate, records)) for rate in HIGH}
        whole = {rate: each for rate, each in both.items() if all(each)}
        alive = [(a[s]["survived"], b[s]["survived"]) for a, b in whole.values() for s in SEEDS]
        if alive:
            found[arm] = tuple(sorted(whole)), alive
    corrected = holm({arm: survival.mcnemar(alive)[2] for arm, (_, alive) in found.items()})
    return [
        SurvivalClaim(arm, rates, sum(a for a, _ in alive), sum(b for _, b in alive), len(alive), corrected[arm])
        for arm, (rates, alive) in found.items()
    ]


# Page and figure


def redraw(folder: Path) -> None:
    """results.md and the figure, from the JSON lines of the folder alone."""
    draw(read(folder), folder / "losses.png")
    write_text(folder / "results.md", page(folder))


def missing(records: Mapping[Any, Record]) -> list[str]:
    chosen = {arm: best_rate(choosing(arm), records) for arm in ARMS}
    left = [f"{arm} at its best rate" for arm in ARMS if not found_at(arm, chosen[arm], records)]
    return left + [f"{arm} at {rate:g}" for rate in HIGH for arm in ARMS if not found_at(arm, rate, records)]


def page(folder: Path) -> str:
    records = read(folder)
    left = "; ".join(missing(records))
    parts = [
        "# UNets at high rates: all results",
        "Written by `python -m research.unets redraw` from the JSON lines beside it. Meaning: [README](README.md); "
        "rules: [plan](plan.md). " + (f"Of the plan was not run: {left}." if left else "All of the plan was run."),
        "## Rates: mean loss of the two runs of selection at the end",
        rates_table(records),
        "## Loss at the best rate, against none",
        losses_table(records),
        "![Losses](losses.png)",
        "## Who survives",
        survivors_table(records),
        claims_table(records),
        "## Shown and not judged: losses at one rate, where all runs survive",
        one_rate_table(records),
    ]
    return document(parts)


def rates_table(records: Mapping[Any, Record]) -> str:
    """A run that does not survive counts as 1."""
    rows = []
    for arm in ARMS:
        runs = choosing(arm)
        rate = best_rate(runs, records)
        if rate is not None:
            means = [fmean(last_loss(records[each.key]) for each in runs if each.lr == r) for r in RATES]
            end = " (an end of the four)" if rate in (RATES[0], RATES[-1]) else ""
            rows.append([arm, *(f"{mean:.4f}" for mean in means), f"{rate:g}{end}"])
    return table(["arm", *(f"{rate:g}" for rate in RATES), "chosen"], rows)


def losses_table(records: Mapping[Any, Record]) -> str:
    claims = {claim.arm: claim for claim in loss_claims(records)}
    rows = []
    for arm in ARMS:
        rate = best_rate(choosing(arm), records)
        if found := found_at(arm, rate, records):
            cells = [f"{last_loss(found[seed]):.4f}" for seed in SEEDS]
            told = [claims[arm].text, claims[arm].verdict] if arm in claims else ["", ""]
            rows.append([arm, f"{rate:g}", *cells, *told])
    return table(["arm", "rate", *(f"seed {seed}" for seed in SEEDS), "against none (interval)", "verdict"], rows)


def survivors_table(records: Mapping[Any, Record]) -> str:
    """Of eight, with Wilson's interval, and when the others collapsed."""
    rows = []
    for arm in ARMS:
        rates = dict.fromkeys((best_rate(choosing(arm), records), *HIGH))
        for rate in rates:
            if found := found_at(arm, rate, records):
                alive = sum(record["survived"] for record in found.values())
                low, high = survival.wilson(alive, len(found))
                ends = sorted(record["collapsed"] for record in found.values() if record["collapsed"])
                over = ", ".join(map(str, ends)) or "-"
                rows.append([arm, f"{rate:g}", f"{alive} of {len(found)}", f"{low:.2f} to {high:.2f}", over])
    return table(["arm", "rate", "survive", "95 %", "collapsed at step"], rows)


def claims_table(records: Mapping[Any, Record]) -> str:
    rows = [
        [
            f"{claim.arm} against none",
            " and ".join(f"{rate:g}" for rate in claim.rates),
            f"{claim.survivors} of {claim.runs}",
            f"{claim.baseline_survivors} of {claim.runs}",
            f"{claim.p:.2g}",
            claim.verdict,
        ]
        for claim in survival_claims(records)
    ]
    return table(["arms", "rates", "survive", "of none", "p (McNemar, Holm)", "verdict"], rows)


def one_rate_table(records: Mapping[Any, Record]) -> str:
    """So that an arm with another best rate can be seen beside none at the same rate."""
    rows = []
    for rate in HIGH:
        base = found_at(NONE, rate, records)
        for arm in ARMS[1:]:
            mine = found_at(arm, rate, records)
            if base and mine and all(record["survived"] for record in (*base.values(), *mine.values())):
                logs = [math.log(last_loss(mine[seed]) / last_loss(base[seed])) for seed in SEEDS]
                rows.append([f"{arm} against none", f"{rate:g}", LossClaim(arm, logs, 1 - CHANCE / len(ARMS[1:])).text])
    return table(["arms", "rate", "loss (interval)"], rows)


def draw(records: Mapping[Any, Record], path: Path) -> None:
    """Left the loss at the end of the runs that survive, right the share of them at high rates, with its interval."""
    figure, (left, right) = panels(2, height=3.4, width=5)
    for place, arm in enumerate(ARMS):
        # Arms stand beside each other at each rate.
        aside = 1.05 ** (place - (len(ARMS) - 1) / 2)
        for seeds, marker in ((SELECTION, "x"), (SEEDS, "o")):
            mine = [each for each in records.values() if each["arm"] == arm and each["seed"] in seeds]
            points = [(each["lr"] * aside, last_loss(each)) for each in mine if each["survived"]]
            left.plot(
                *(zip(*points, strict=True) if points else ((), ())),
                marker,
                color=colour_of(place),
                alpha=0.7,
                markersize=4,
            )
        left.plot([], [], "o", color=colour_of(place), label=arm)
        for rate in HIGH:
            if found := found_at(arm, rate, records):
                alive, middle = sum(record["survived"] for record in found.values()), HIGH[::-1].index(rate)
                spot = middle + 0.12 * (place - (len(ARMS) - 1) / 2)
                right.plot([spot, spot], survival.wilson(alive, len(found)), color=colour_of(place), alpha=0.4)
                right.plot(spot, alive / len(found), "o", color=colour_of(place), markersize=5)
    left.set(xlabel="rate (× selection, ● judged)", ylabel="held-out loss at the end", xscale="log")
    left.set_title("runs that survive", fontsize=9)
    left.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    left.set_xticks([], minor=True)
    right.set(xlabel="rate", ylabel="share of eight that survive (95 %)", xlim=(-0.5, len(HIGH) - 0.5))
    right.set_title("who survives", fontsize=9)
    right.set_xticks(range(len(HIGH)), [f"{rate:g}" for rate in sorted(HIGH)])
    left.legend(frameon=False, fontsize=7)
    save(figure, path)


def main() -> None:
    parser, commands = study_parser("unets", __doc__, FOLDER)
    rates: dict[str, Any] = {"type": float, "nargs": "*", "choices": HIGH}
    commands["run"].add_argument("--high", **rates, help="the high rates to run (default: all)")
    options = parser.parse_args()
    if options.command == "run":
        run(options.folder, options.high)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
