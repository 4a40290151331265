"""What a diffusion U-ViT knows about classes: linear probes by scaling, depth and self-conditioning, with controls.

    python -m research.probe run                      # what is missing of all studies, on the embedded digits
    python -m research.probe run digits conditioning  # some of them
    python -m research.probe run cifar10 --cifar10 FOLDER   # needs CIFAR-10; left out without the flag
    python -m research.probe redraw                   # page of results and figures, from the JSON lines alone
    python -m research.probe cost                     # arithmetic and parameters of self-conditioning, counted

The rules were committed before the runs: docs/evidence/probe/plan.md. Interrupt at any time: finished runs are kept.
"""

import argparse
import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import ImageData, load_data, to_float
from scalelong.diffusion.images import to_bytes
from scalelong.diffusion.solvers import sample
from scalelong.evaluation import Moments, frechet_distance, load_extractor
from scalelong.evaluation.features import features_of
from scalelong.experiments import figures
from scalelong.files import append_json_line, read_json_lines, write_text
from scalelong.noise import NoiseProcess, losses
from scalelong.randomness import generator

FOLDER = Path("docs/evidence/probe")
SEEDS = tuple(range(7000, 7008))
HELD_OUT = 797
"""Digits that no network is trained on: 398 to choose on, 399 to test; the other 1000 are trained and fitted on."""
WARMUP, BATCH = 30, 32
SAMPLES, SAMPLER_STEPS = 1000, 25
METHODS = ("none", "cs:0.7", "ls")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One network and how it is trained."""

    depth: int = 6
    dim: int = 64
    scaling: str = "none"
    conditioning: str = "none"
    steps: int = 300
    rate: float = 4e-3
    looks: tuple[int, ...] = (100, 200, 300)
    """Steps at which the held-out loss is measured."""
    probes: tuple[int, ...] = (300,)
    times: tuple[float, ...] = (100.0, 250.0)
    data: str = "digits"
    samples: int = 0
    """Images to make at the end, for their Fréchet distance to the held-out ones."""


@dataclass(frozen=True)
class Study:
    arms: dict[str, Arm]
    seeds: tuple[int, ...] = SEEDS


ALL_TIMES = (1.0, 25.0, 50.0, 100.0, 250.0, 500.0)
CIFAR = Arm(data="cifar10", depth=4, steps=400, rate=2e-3, looks=(200, 400), probes=(400,), times=(25.0, 100.0))
STUDIES: dict[str, Study] = {
    "digits": Study({"plain": Arm(times=ALL_TIMES)}),
    "conditioning": Study({kind: Arm(conditioning=kind) for kind in ("middle", "time")}),
    "scaling": Study({method: Arm(scaling=method) for method in ("cs:0.7", "ls")}),
    "cifar10": Study({"width 64": CIFAR}, seeds=SEEDS[:1]),
    "deeper": Study({f"depth 12, {m}": Arm(scaling=m, depth=12, samples=SAMPLES) for m in METHODS}),
    "samples": Study({m: Arm(scaling=m, probes=(), samples=SAMPLES) for m in METHODS}),
    "cifar10-wide": Study({"width 128": replace(CIFAR, dim=128)}, seeds=SEEDS[:1]),
    "cifar10-long": Study(
        {"width 128, 1600 steps": replace(CIFAR, dim=128, steps=1600, looks=(800, 1600), probes=(800, 1600))},
        seeds=SEEDS[:1],
    ),
}
"""In the order in which they are run: if time runs out, the last ones are not done."""


# Training


def build(arm: Arm, channels: int, side: int, seed: int) -> sl.UViT:
    torch.manual_seed(seed)
    return sl.UViT(
        image_size=side,
        patch_size=2,
        channels=channels,
        dim=arm.dim,
        depth=arm.depth,
        heads=arm.dim // 16,
        scaling=arm.scaling,
        self_conditioning=arm.conditioning,
    )


def parts_of(arm: Arm, cifar10: Path | None) -> tuple[ImageData, ImageData]:
    """Trained on, and held out. The same for all seeds and arms."""
    if arm.data == "digits":
        return load_data("digits").split(HELD_OUT, seed=0)
    assert cifar10 is not None
    return load_data(cifar10, size=16, limit=20_000), load_data(cifar10, size=16, split="test", limit=2000)


def held_out_loss(model: nn.Module, x0: Tensor) -> float:
    """In v, at evenly spread times, with one fixed noise."""
    process, source = NoiseProcess(), generator(0, "research held-out")
    order = torch.randperm(len(x0), generator=source)
    t = process.times((order + 0.5) / len(x0))
    drawn = torch.randn(x0.shape, generator=source)
    found = []
    with torch.no_grad():
        for rows in torch.arange(len(x0)).split(256):
            found.append(losses(model, process, "v", x0[rows], drawn[rows], t[rows]))
    return float(torch.cat(found).mean())


def shuffled_loss(model: sl.UViT, x0: Tensor) -> float:
    """The same with each image given the features of another one: what the content of z is worth."""
    assert model.modulation is not None
    handle = model.modulation.register_forward_pre_hook(lambda _, args: (args[0].roll(1, dims=0),))
    try:
        return held_out_loss(model, x0)
    finally:
        handle.remove()


def train(arm: Arm, seed: int, cifar10: Path | None) -> dict[str, Any]:
    began = time.process_time()
    training, held_out = parts_of(arm, cifar10)
    images = to_float(training.fetch(torch.arange(len(training))).images)
    apart = to_float(held_out.fetch(torch.arange(len(held_out))).images)
    model = build(arm, training.channels, training.height, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arm.rate, betas=(0.9, 0.99), weight_decay=0.03, fused=True)
    process, curve, probes = NoiseProcess(), {}, {}
    for step in range(1, arm.steps + 1):
        # Seeds alone decide batches, times and noise, so that arms of one seed see the same.
        source = generator(seed, "research step", step)
        rows = torch.randint(len(images), (BATCH,), generator=source)
        t = process.times(torch.rand(BATCH, generator=source))
        drawn = torch.randn((BATCH, *images.shape[1:]), generator=source)
        rate = arm.rate * min(step / WARMUP, (arm.steps - step + 1) / (arm.steps - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = losses(model, process, "v", images[rows], drawn, t).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in arm.looks:
            curve[str(step)] = round(held_out_loss(model.eval(), apart), 6)
            model.train()
        if step in arm.probes:
            probes[str(step)] = probe(model, arm, training, held_out, seed)
    found = {"loss": curve, "probes": probes, "seconds": round(time.process_time() - began, 1)}
    if arm.samples:
        found["frechet"] = round(frechet(model.eval(), arm.samples, held_out), 4)
    if arm.conditioning != "none":
        found["loss_shuffled"] = round(shuffled_loss(model.eval(), apart), 6)
    return found


def frechet(model: sl.UViT, count: int, held_out: ImageData) -> float:
    """To the held-out images, with the features that tell digits from noise (docs/evaluation.md)."""
    extractor = load_extractor("random", held_out)
    shape = (held_out.channels, held_out.height, held_out.width)
    parts = [part.tolist() for part in torch.arange(count).split(250)]
    with torch.no_grad():
        made = [sample(model, NoiseProcess(), "v", shape, part, steps=SAMPLER_STEPS) for part in parts]
    real = held_out.fetch(torch.arange(len(held_out))).images
    features = [features_of(extractor, images) for images in (real, to_bytes(torch.cat(made)))]
    return frechet_distance(*map(Moments.of, features))


def probe(model: sl.UViT, arm: Arm, training: ImageData, held_out: ImageData, seed: int) -> dict[str, Any]:
    """Against the network of the same seed before its first step."""
    found = sl.linear_probe(
        model,
        training,
        held_out=held_out,
        times=arm.times,
        untrained=lambda: build(arm, training.channels, training.height, seed),
        images=3000,
        seed=0,
    )
    kept = found.to_dict()
    for table in ("network", "untrained", "pixels"):
        kept[table]["accuracy"] = [[round(value, 4) for value in row] for row in kept[table]["accuracy"]]
        del kept[table]["deviation"]
    return {name: kept[name] for name in ("network", "untrained", "pixels", "chosen", "baselines", "images")}


def run(name: str, folder: Path, cifar10: Path | None) -> None:
    torch.set_num_threads(1)
    study, path = STUDIES[name], folder / f"{name}.jsonl"
    if any(arm.data == "cifar10" for arm in study.arms.values()) and (cifar10 is None or not cifar10.is_dir()):
        print(f"{name}: left out, because there is no CIFAR-10 at --cifar10 {cifar10}", flush=True)
        return
    done = {(line["arm"], line["seed"]) for line in read_json_lines(path)} if path.exists() else set()
    for seed in study.seeds:
        for label, arm in study.arms.items():
            if (label, seed) not in done:
                found = {"arm": label, "seed": seed, **train(arm, seed, cifar10)}
                append_json_line(path, found)
                print(name, label, seed, found["loss"], f"{found['seconds']} s", flush=True)


# Results


def read(folder: Path, name: str) -> dict[str, dict[int, dict[str, Any]]]:
    """By arm and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    path = folder / f"{name}.jsonl"
    for line in read_json_lines(path) if path.exists() else ():
        found.setdefault(line["arm"], {})[line["seed"]] = line
    return found


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Half of the 95 % interval of a mean of n numbers, in standard errors."""


@dataclass(frozen=True)
class Gap:
    """The mean of paired differences, with its interval."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def half(self) -> float:
        n = len(self.values)
        return STUDENT[n] * statistics.stdev(self.values) / math.sqrt(n) if n > 1 else math.inf

    def holds(self, limit: float = 0.0) -> str:
        if self.mean - self.half > limit:
            return "above"
        return "below" if self.mean + self.half < limit else "no difference"

    def p(self) -> float:
        """Two-sided, of Student's t, by a fine sum over its density: no package is needed for it."""
        n = len(self.values)
        if n < 2 or statistics.stdev(self.values) == 0:
            return 1.0
        t, degrees = abs(self.mean) / (statistics.stdev(self.values) / math.sqrt(n)), n - 1
        scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        step = t / 4000
        inside = (
            sum((1 + ((i + 0.5) * step) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(4000)) * step * scale
        )
        return max(0.0, 1 - 2 * inside)

    def text(self, unit: float = 1.0, digits: int = 1, limit: float = 0.0) -> str:
        if len(self.values) < 2:
            return f"{unit * self.mean:+.{digits}f} (one seed)"
        low, high = (unit * (self.mean + sign * self.half) for sign in (-1, 1))
        return f"{unit * self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}], {self.holds(limit)}"


def gap(first: dict[int, Any], second: dict[int, Any], value: Any) -> Gap | None:
    """first minus second, over the seeds that both have."""
    shared = sorted(set(first) & set(second))
    return Gap(tuple(value(first[seed]) - value(second[seed]) for seed in shared)) if shared else None


def accuracy(line: dict[str, Any], layer: str, t: float, table: str = "network") -> float:
    """In %, of a layer or of the "best" one."""
    found = line["probes"][max(line["probes"], key=int)][table]
    column = found["times"].index(t)
    rows = {name: row[column] for name, row in zip(found["layers"], found["accuracy"], strict=True)}
    return 100 * (max(rows.values()) if layer == "best" else rows[layer])


def loss_at(step: int) -> Any:
    return lambda line: line["loss"][str(step)]


def frechet_of(line: dict[str, Any]) -> float:
    return line["frechet"]


def mean(lines: dict[int, dict[str, Any]], value: Any) -> float:
    return statistics.mean(value(line) for line in lines.values())


def digits_part(folder: Path) -> str:
    lines = read(folder, "digits").get("plain", {})
    if not lines:
        return ""
    times = ALL_TIMES
    first = next(iter(lines.values()))["probes"]["300"]
    head = "| layer | " + " | ".join(f"t = {t:g}" for t in times) + " |\n|---|" + "---|" * len(times)
    rows = [
        f"| {layer} | "
        + " | ".join(f"{mean(lines, lambda x, y=layer, t=t: accuracy(x, y, t)):.1f}" for t in times)
        + " |"
        for layer in first["network"]["layers"]
    ]
    for title, table in (("*untrained, best layer*", "untrained"), ("*pixels, same noise*", "pixels")):
        cells = [f"{mean(lines, lambda x, t=t, b=table: accuracy(x, 'best', t, b)):.1f}" for t in times]
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    best = [lambda x, t=t: accuracy(x, "best", t) for t in times]
    text = ["| trained minus | " + " | ".join(f"t = {t:g}" for t in times) + " |\n|---|" + "---|" * len(times)]
    for title, table in (("untrained", "untrained"), ("pixels, same noise", "pixels")):
        gaps = [
            Gap(tuple(value(line) - accuracy(line, "best", t, table) for line in lines.values()))
            for t, value in zip(times, best, strict=True)
        ]
        text.append(f"| {title} | " + " | ".join(f"{g.mean:+.1f} ± {g.half:.1f}" for g in gaps) + " |")
    aim = Gap(tuple(accuracy(x, "best", 250.0) - accuracy(x, "best", 250.0, "untrained") for x in lines.values()))
    verdict = {"above": "met", "below": "missed"}.get(aim.holds(10.0), "not told apart from ten")
    chosen = [line["probes"]["300"]["chosen"] for line in lines.values()]
    tests = [100 * cell["test"]["value"] for cell in chosen]
    places = sorted({f"{cell['layer']} at t = {cell['time']:g}" for cell in chosen})
    clean = [100 * line["probes"]["300"]["baselines"]["clean pixels"]["test"]["value"] for line in lines.values()]
    return "\n\n".join(
        [
            f"## Digits, {len(lines)} seeds: accuracy in % on validation images",
            "\n".join([head, *rows]),
            "Best layer of each; means of the seeds ± half of the 95 % interval:",
            "\n".join(text),
            f"**At t = 250 against the untrained network, aim ten points: {aim.mean:+.1f} ± {aim.half:.1f}, "
            f"{verdict}.** Seeds: "
            f"{', '.join(f'{value:+.1f}' for value in aim.values)}.",
            f"Layer and time chosen on validation images: {', '.join(places)}. Test accuracy "
            f"{statistics.mean(tests):.1f} % (seeds {min(tests):.1f} to {max(tests):.1f}); clean pixels "
            f"{statistics.mean(clean):.1f} %.",
        ]
    )


def conditioning_part(folder: Path) -> str:
    arms = {"plain": read(folder, "digits").get("plain", {}), **read(folder, "conditioning")}
    if set(arms) != {"plain", "middle", "time"}:
        return ""
    quantities = {f"loss, step {step}": (loss_at(step), 1e4, 0) for step in (100, 200, 300)}
    for t in (100.0, 250.0):
        quantities[f"middle, t = {t:g}"] = (lambda x, t=t: accuracy(x, "middle", t), 1.0, 1)
        quantities[f"best layer, t = {t:g}"] = (lambda x, t=t: accuracy(x, "best", t), 1.0, 1)
    rows = [
        "| | plain | middle | time | middle - plain | time - plain | **middle - time** |\n|---|---|---|---|---|---|---|"
    ]
    for name, (value, unit, digits) in quantities.items():
        plain = [f"{mean(arms[arm], value):.4f}" if unit > 1 else f"{mean(arms[arm], value):.1f}" for arm in arms]
        pairs = [gap(arms[a], arms[b], value) for a, b in (("middle", "plain"), ("time", "plain"), ("middle", "time"))]
        cells = [found.text(unit, digits) if found else "-" for found in pairs]
        rows.append(f"| {name} | " + " | ".join([*plain, *cells]) + " |")
    worth = {
        arm: Gap(tuple(line["loss_shuffled"] - line["loss"]["300"] for line in arms[arm].values()))
        for arm in ("middle", "time")
    }
    seeds = min(len(lines) for lines in arms.values())
    return "\n\n".join(
        [
            f"## Self-conditioning, {seeds} seeds",
            "Loss: held-out error in v; its differences in units of 1e-4, below zero is better. Accuracies in % on "
            "validation images.",
            "\n".join(rows),
            "Loss at the end if each image is given the z of another one, minus the loss, in 1e-4: middle "
            f"{worth['middle'].text(1e4, 0)} zero; time {worth['time'].text(1e4, 0)} zero. The other image has another "
            "noise level as well, so for the middle this is more than the content alone is worth.",
        ]
    )


def with_frechet(folder: Path, lines: dict[str, dict[int, dict[str, Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of depth 6 have it in a study of their own: the same runs again, with samples in the place of probes."""
    scored = read(folder, "samples")
    for arm, runs in lines.items():
        for seed, line in runs.items():
            line |= {"frechet": scored[arm][seed]["frechet"]} if seed in scored.get(arm, {}) else {}
    return lines


def scaling_arms(folder: Path) -> dict[int, dict[str, dict[int, dict[str, Any]]]]:
    """By depth, then by method."""
    shallow = {"none": read(folder, "digits").get("plain", {}), **read(folder, "scaling")}
    deep = {name.removeprefix("depth 12, "): lines for name, lines in read(folder, "deeper").items()}
    return {6: paired(with_frechet(folder, shallow)), 12: paired(deep)}


def paired(arms: dict[str, dict[int, dict[str, Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The seeds that all arms have: means of others cannot be compared."""
    shared = set.intersection(*(set(lines) for lines in arms.values())) if arms else set()
    return {arm: {seed: lines[seed] for seed in sorted(shared)} for arm, lines in arms.items()}


def scaling_part(folder: Path) -> str:
    rows = [
        "| depth, method | seeds | loss, step 300 | Fréchet distance | "
        "middle, t = 100 | best, t = 100 | middle, t = 250 | best, t = 250 |"
    ]
    rows[0] += "\n" + "|---" * 8 + "|"
    differences = [
        "| depth, difference | loss (1e-4) | Fréchet distance | "
        "middle, t = 100 | best, t = 100 | middle, t = 250 | best, t = 250 |"
    ]
    differences[0] += "\n" + "|---" * 7 + "|"
    places = [(layer, t) for t in (100.0, 250.0) for layer in ("middle", "best")]
    tests: dict[str, Gap] = {}
    distances: dict[str, Gap] = {}
    for depth, arms in scaling_arms(folder).items():
        for method, lines in arms.items():
            if not lines:
                continue
            cells = [f"{mean(lines, lambda x, p=place: accuracy(x, *p)):.1f}" for place in places]
            loss = f"{mean(lines, loss_at(300)):.4f}"
            scored = all("frechet" in line for line in lines.values())
            distance = f"{mean(lines, frechet_of):.3f}" if scored else "-"
            rows.append(f"| {depth}, {method} | {len(lines)} | {loss} | {distance} | " + " | ".join(cells) + " |")
            if method == "none" or not arms.get("none"):
                continue
            found = [gap(lines, arms["none"], lambda x, p=place: accuracy(x, *p)) for place in places]
            moved = gap(lines, arms["none"], loss_at(300))
            further = gap(lines, arms["none"], frechet_of) if scored else None
            distances |= {f"depth {depth}, {method}": further} if further and len(further.values) > 1 else {}
            texts = [each.text() if each else "-" for each in found]
            first = [moved.text(1e4, 0) if moved else "-", further.text(1.0, 3) if further else "-"]
            differences.append(f"| {depth}, {method} minus none | " + " | ".join([*first, *texts]) + " |")
            tests |= {
                f"depth {depth}, {method}, {layer} at t = {t:g}": each
                for (layer, t), each in zip(places, found, strict=True)
                if each is not None and len(each.values) > 1
            }
    return "\n\n".join(
        [
            "## Scaling of the long skips",
            "\n".join(rows),
            "\n".join(differences),
            held(tests, "accuracies"),
            held(distances, "Fréchet distances") if distances else "Fréchet distances: not run.",
        ]
    )


def held(tests: dict[str, Gap], what: str) -> str:
    single, kept = [name for name, each in tests.items() if each.holds() != "no difference"], holm(tests)
    return (
        f"Of {len(tests)} comparisons of {what}, {len(single)} exclude zero by themselves"
        + (f" ({'; '.join(single)})" if single else "")
        + f", and {len(kept)} after Holm's correction"
        + (f": {'; '.join(kept)}." if kept else ".")
    )


def holm(tests: dict[str, Gap], level: float = 0.05) -> list[str]:
    """The comparisons that hold together."""
    kept: list[str] = []
    for rank, name in enumerate(sorted(tests, key=lambda name: tests[name].p())):
        if tests[name].p() > level / (len(tests) - rank):
            break
        kept.append(name)
    return kept


def cifar_part(folder: Path) -> str:
    rows = [
        "| network | steps | loss | chosen | test | untrained | pixels, same t | clean pixels |\n" + "|---" * 8 + "|"
    ]
    for name in ("cifar10", "cifar10-wide", "cifar10-long"):
        for arm, lines in read(folder, name).items():
            for line in lines.values():
                for step, found in line["probes"].items():
                    chosen, others = found["chosen"], found["baselines"]
                    cells = [percent(others[key]) for key in ("untrained network", "pixels, same t", "clean pixels")]
                    rows.append(
                        f"| {arm} | {step} | {line['loss'][step]:.4f} | {chosen['layer']}, t = {chosen['time']:g} | "
                        f"**{percent(chosen)}** | " + " | ".join(cells) + " |"
                    )
    return "\n\n".join(["## CIFAR-10 at 16x16, one seed", "\n".join(rows)]) if len(rows) > 1 else ""


def percent(cell: dict[str, Any]) -> str:
    test = cell["test"]
    return f"{100 * test['value']:.1f} [{100 * test['low']:.1f}, {100 * test['high']:.1f}]"


def cost() -> str:
    """Arithmetic of one image and parameters, counted by torch and by the network."""
    from torch.utils.flop_counter import FlopCounterMode

    settings = {
        "digits: width 64, depth 6, 17 tokens": {
            "image_size": 8, "patch_size": 2, "channels": 1, "dim": 64, "depth": 6, "heads": 4,
        },
        "U-ViT-S/2 of CIFAR-10: width 512, depth 12, 257 tokens": {
            "image_size": 32, "patch_size": 2, "dim": 512, "depth": 12, "heads": 8,
        },
    }  # fmt: skip
    rows = ["| network | self-conditioning | more arithmetic | more parameters |\n|---|---|---|---|"]
    for title, sizes in settings.items():
        counted = {}
        for label, options in {
            "none": {},
            "middle": {"self_conditioning": "middle"},
            "time": {"self_conditioning": "time"},
            "middle, rank width / 8": {"self_conditioning": "middle", "self_conditioning_rank": sizes["dim"] // 8},
        }.items():
            model = sl.UViT(**sizes, **options)
            x = torch.zeros(1, model.channels, *model.image_size)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(x, torch.tensor([500.0]))
            counted[label] = counter.get_total_flops(), sum(p.numel() for p in model.parameters())
        for label, (flops, size) in counted.items():
            if label != "none":
                more = [100 * (a / b - 1) for a, b in zip((flops, size), counted["none"], strict=True)]
                rows.append(f"| {title} | {label} | {more[0]:.2f} % | {more[1]:.1f} % |")
    return "\n".join(rows)


def redraw(folder: Path) -> None:
    names = {name: read(folder, name) for name in STUDIES}
    counts = {name: sum(map(len, arms.values())) for name, arms in names.items()}
    wanted = {name: len(study.arms) * len(study.seeds) for name, study in STUDIES.items()}
    seconds = sum(line["seconds"] for arms in names.values() for lines in arms.values() for line in lines.values())
    done = ", ".join(f"{name} {counts[name]} of {wanted[name]}" for name in STUDIES)
    parts = [
        "# Results: what the layers know",
        "Made by `python -m research.probe redraw` from the JSON lines beside it; rules and settings: "
        f"[plan.md](plan.md). Runs done: {done}; {seconds / 60:.0f} minutes of one core.",
        digits_part(folder),
        "![Accuracy by layer and noise level, trained and untrained](digits.png)" if counts["digits"] else "",
        conditioning_part(folder),
        scaling_part(folder),
        "![Accuracy by layer, by scaling and depth](layers.png)" if counts["scaling"] else "",
        cifar_part(folder),
        f"## Cost of self-conditioning, counted\n\n{cost()}",
    ]
    write_text(folder / "results.md", "\n\n".join(part for part in parts if part) + "\n")
    if counts["digits"]:
        draw_digits(names["digits"]["plain"], folder / "digits.png")
    if counts["scaling"]:
        draw_layers(scaling_arms(folder), folder / "layers.png")
    if counts["conditioning"]:
        draw_conditioning({"plain": names["digits"]["plain"], **names["conditioning"]}, folder / "conditioning.png")


def draw_digits(lines: dict[int, dict[str, Any]], path: Path) -> None:
    """Means of all seeds, drawn as a single probe is drawn."""
    one = next(iter(lines.values()))["probes"]["300"]
    tables = {}
    for name in ("network", "untrained", "pixels"):
        rows = [line["probes"]["300"][name]["accuracy"] for line in lines.values()]
        means = [
            [statistics.mean(seed[i][j] for seed in rows) for j in range(len(ALL_TIMES))] for i in range(len(rows[0]))
        ]
        tables[name] = {"layers": one[name]["layers"], "times": one[name]["times"], "accuracy": means, "deviation": []}
    told = {"model": "U-ViT", "data": f"digits, mean of {len(lines)} seeds", "protocol": "ridge", "pool": "mean"}
    told |= {"draws": 1, "seed": 0, "classes": 10, "seen": False, "chosen_on": "validation", "about": {}, "format": 1}
    values = {**told, **tables, **{key: one[key] for key in ("chosen", "baselines", "images")}}
    values["chosen"] = {**one["chosen"], "time": None}  # no frame: each seed chose its own
    figure = sl.LinearProbe.from_dict(values).plot()
    figure.suptitle(f"Digits after 300 steps, mean of {len(lines)} seeds", fontsize=9)
    figure.savefig(path)


def draw_layers(depths: dict[int, dict[str, dict[int, dict[str, Any]]]], path: Path) -> None:
    plt = figures.pyplot()
    shown = {depth: {m: lines for m, lines in arms.items() if lines} for depth, arms in depths.items()}
    shown = {depth: arms for depth, arms in shown.items() if arms}
    figure, grid = plt.subplots(
        len(shown), 2, figsize=(9, 2.9 * len(shown)), layout="constrained", dpi=110, squeeze=False
    )
    for row, (depth, arms) in zip(grid, shown.items(), strict=True):
        for axes, t in zip(row, (100.0, 250.0), strict=True):
            for number, (method, lines) in enumerate(arms.items()):
                layers = next(iter(lines.values()))["probes"]["300"]["network"]["layers"]
                places = range(len(layers))
                for style, table, alpha in (("-", "network", 1.0), (":", "untrained", 0.7)):
                    every = [[accuracy(line, layer, t, table) for layer in layers] for line in lines.values()]
                    colour = figures.colour_of(number)
                    if table == "network":
                        for one in every:
                            axes.plot(places, one, color=colour, alpha=0.15, linewidth=0.7)
                    middle = [statistics.mean(values) for values in zip(*every, strict=True)]
                    label = method if table == "network" else None
                    axes.plot(places, middle, style, color=colour, alpha=alpha, linewidth=1.8, label=label)
                axes.set_xticks(places, [shorter(layer) for layer in layers], fontsize=7, rotation=60)
            seeds = len(next(iter(arms.values())))
            axes.set_title(f"depth {depth}, t = {t:g}, {seeds} seeds (dotted: before training)", fontsize=9)
            axes.set_ylabel("% right", fontsize=8)
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def shorter(layer: str) -> str:
    kind, _, number = layer.partition(".")
    return f"{kind[:3]} {int(number) + 1}" if number else kind


def draw_conditioning(arms: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Held-out loss minus that of the plain network of the same seed."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(figsize=(5.4, 3.2), layout="constrained", dpi=110)
    steps = (100, 200, 300)
    for number, arm in enumerate(("middle", "time"), start=1):
        shared = sorted(set(arms[arm]) & set(arms["plain"]))
        every = [[loss_at(s)(arms[arm][seed]) - loss_at(s)(arms["plain"][seed]) for s in steps] for seed in shared]
        for one in every:
            axes.plot(steps, one, color=figures.colour_of(number), alpha=0.3, linewidth=0.8)
        label = {"middle": "middle's features", "time": "time alone (control)"}[arm]
        means = [statistics.mean(values) for values in zip(*every, strict=True)]
        axes.plot(steps, means, "o-", color=figures.colour_of(number), linewidth=1.8, label=label)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set(xticks=steps, xlabel="training step", ylabel="held-out loss minus plain")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"Self-conditioning, {len(arms['plain'])} seeds: below zero is better", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.probe", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("run", help="train and probe what is missing")
    trained.add_argument("studies", nargs="*", help=f"by default all: {', '.join(STUDIES)}")
    trained.add_argument("--cifar10", type=Path, help="folder of CIFAR-10; without it those studies are left out")
    drawn = commands.add_parser("redraw", help="page of results and figures, from the JSON lines alone")
    commands.add_parser("cost", help="arithmetic and parameters of self-conditioning, counted")
    for command in (trained, drawn):
        command.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.command == "cost":
        print(cost())
    elif options.command == "redraw":
        redraw(options.folder)
    else:
        if unknown := sorted(set(options.studies) - set(STUDIES)):
            parser.error(f"no study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
        for name in options.studies or STUDIES:
            run(name, options.folder, options.cifar10)


if __name__ == "__main__":
    main()
