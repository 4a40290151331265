"""Why small skips keep a deep U-ViT alive, where that ends, and what it buys: ablations at constant rates.

    python -m research.ablations run                  # what is missing of all studies, on the embedded garments
    python -m research.ablations run starts depth40   # some of them
    python -m research.ablations unet                 # the size of the first steps in a UNet, for comparison
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
from collections.abc import Sequence
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

GARMENTS = Setting(data="garments", steps=130)
PAIR = ("none", "start CS(0.7)")
STARTS = tuple(ARMS)[: list(ARMS).index("norm on queries and keys")]
CHANGES = tuple(ARMS)[len(STARTS) : list(ARMS).index("bf16")]
TOGETHER = tuple(name for name in ARMS if name.startswith(("norms in merges, ", "unit gain, branches", "all:")))
FALLING = ("none, falling rate", "start CS(0.7), falling rate")
BUYS = replace(GARMENTS, steps=400, batch=4)
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
    "buys-choice": study("What stability buys: the rates", FALLING, BUYS_RATES, seeds=CHOICE, steps=400, batch=4),
    "buys": study("What stability buys", FALLING, BUYS_RATES, seeds=CONFIRM, steps=400, batch=4),
    "long": study("1,000 steps, at 1.2e-2", PAIR, (1.2e-2,), steps=1000),
    "bf16": study("Mixed precision", ("bf16", "bf16, start CS(0.7)"), baseline="bf16"),
    "batch32": study("Batches of 32", PAIR, batch=32),
    "width128": study("Width 128, at 1.2e-2", PAIR, (1.2e-2,), width=128),
    "depth64": study("Depth 64, at 6e-3", PAIR, (6e-3,), depth=64),
}
"""In the order in which they are run: if time runs out, the last ones are not done."""
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


def run(name: str, folder: Path, jobs: int) -> None:
    records = survival.read_all(folder)
    data, observer = None, Looker(name)
    if name != "buys":
        survival.carry_out(planned(name, records), name, folder, data, jobs, observer)
        return
    for arm, rate in best_rates(records).items():
        part = replace(STUDIES[name], arms=(arm,), rates=(rate,))
        survival.carry_out(part, name, folder, data, jobs, observer)


# Looking into runs while they are trained


class Looker(survival.Observer):
    """Every ten steps: sizes block by block, how far one step moves the output, what the decoder makes of a nudge."""

    def __init__(self, name: str) -> None:
        self.arms, self.scores = WATCHED.get(name, ()), name.startswith("buys")
        self.series: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
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
            found["held_out"] = rounded(float(error))
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


def shortened(series: dict[str, list[float]]) -> dict[str, Any]:
    """By kind: a list for each block in the order of the network; numbers without a block as they are."""
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    for name, values in series.items():
        kind = name.partition(",")[0]
        if kind in found:
            found[kind].append(values)
        else:
            found[kind] = values
    return found


# A UNet, for comparison: does a start with small skips change how far a step moves it?


def unet_steps(folder: Path, seeds: Sequence[int] = SEEDS, steps: int = 40, lr: float = 1.6e-2) -> None:
    """UNet2DModel of diffusers, with GroupNorm behind its merges, over the warm-up; the U-ViT has the same steps."""
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(1)
    images, process = survival.load_images("garments", None), NoiseProcess()
    probe, times, _ = next(survival.batches(images, 7, process))
    lines = []
    for seed in seeds:
        for start in ("none", "cs:kappa=0.7", "cs:kappa=0.7,behind_norms=true"):
            torch.manual_seed(seed)
            sizes: Any = {"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
            blocks: Any = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
            model: Any = UNet2DModel(**sizes, block_out_channels=(32, 64), norm_num_groups=8, **blocks)
            if start != "none":
                try:
                    sl.start_skips_(model, start, (probe, times))
                except sl.ScaleLongError as error:
                    print(f"{start}: {type(error).__name__}", flush=True)
                    continue
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.03)
            stream, moved = survival.batches(images, seed, process), []
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (step + 1) / 50)
                x, t, noise = next(stream)
                loss = (model(x, t).sample - noise).square().mean()
                optimizer.zero_grad()
                loss.backward()
                with torch.no_grad():
                    look = step % LOOK_EVERY == 0
                    output = model(probe, times).sample if look else None
                    optimizer.step()
                    if output is not None:
                        moved.append(rounded(rms(model(probe, times).sample - output)))
            lines.append(json.dumps({"arm": start, "seed": seed, "step": moved}))
            print(lines[-1], flush=True)
    write_text(folder / "unet.json", "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.ablations", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run", help="train what is missing")
    train.add_argument("studies", nargs="*", help=f"by default all: {', '.join(STUDIES)}")
    train.add_argument("--jobs", type=int, default=1, help="processes of one core each")
    unet = commands.add_parser("unet", help="the size of the first steps in a UNet")
    drawn = commands.add_parser("redraw", help="page of results and figures, from the JSON lines alone")
    for command in (train, unet, drawn):
        command.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.command == "run":
        if unknown := sorted(set(options.studies) - set(STUDIES)):
            parser.error(f"no study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
        for name in options.studies or STUDIES:
            run(name, options.folder, options.jobs)
    elif options.command == "unet":
        unet_steps(options.folder)


if __name__ == "__main__":
    main()
