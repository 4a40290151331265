"""What a diffusion U-ViT knows about classes: linear probes by scaling, depth and self-conditioning, with controls.

    python -m research.probe run                      # what is missing of all studies, on the embedded digits
    python -m research.probe run digits conditioning  # some of them
    python -m research.probe run cifar10 --cifar10 FOLDER   # needs CIFAR-10; left out without the flag
    python -m research.probe redraw                   # page of results and figures, from the JSON lines alone
    python -m research.probe cost                     # arithmetic and parameters of self-conditioning, counted

The rules were committed before the runs: docs/evidence/probe/plan.md. Interrupt at any time: finished runs are kept.
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import ImageData, load_data, to_float
from scalelong.files import append_json_line, read_json_lines
from scalelong.noise import NoiseProcess, losses
from scalelong.randomness import generator

FOLDER = Path("docs/evidence/probe")
SEEDS = tuple(range(7000, 7008))
HELD_OUT = 797
"""Digits that no network is trained on: 398 to choose on, 399 to test; the other 1000 are trained and fitted on."""
WARMUP, BATCH = 30, 32


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


@dataclass(frozen=True)
class Study:
    arms: dict[str, Arm]
    seeds: tuple[int, ...] = SEEDS


ALL_TIMES = (1.0, 25.0, 50.0, 100.0, 250.0, 500.0)
CIFAR = Arm(
    data="cifar10", depth=4, steps=1000, rate=2e-3, looks=(250, 500, 1000), probes=(250, 1000), times=(25.0, 100.0)
)
STUDIES: dict[str, Study] = {
    "digits": Study({"plain": Arm(times=ALL_TIMES)}),
    "conditioning": Study({kind: Arm(conditioning=kind) for kind in ("middle", "time")}),
    "scaling": Study({method: Arm(scaling=method) for method in ("cs:0.7", "ls")}),
    "cifar10": Study({"width 64": CIFAR}, seeds=SEEDS[:1]),
    "deeper": Study({f"depth 12, {m}": Arm(scaling=m, depth=12) for m in ("none", "cs:0.7", "ls")}),
    "cifar10-wide": Study({"width 128": replace(CIFAR, dim=128)}, seeds=SEEDS[:1]),
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
    if arm.conditioning != "none":
        found["loss_shuffled"] = round(shuffled_loss(model.eval(), apart), 6)
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.probe", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trained = commands.add_parser("run", help="train and probe what is missing")
    trained.add_argument("studies", nargs="*", help=f"by default all: {', '.join(STUDIES)}")
    trained.add_argument("--cifar10", type=Path, help="folder of CIFAR-10; without it those studies are left out")
    trained.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if unknown := sorted(set(options.studies) - set(STUDIES)):
        parser.error(f"no study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
    for name in options.studies or STUDIES:
        run(name, options.folder, options.cifar10)


if __name__ == "__main__":
    main()
