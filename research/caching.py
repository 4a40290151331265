"""Cached sampling and κ after training, measured: three small networks, and the speed of SD 1.5's UNet.

    python -m research.caching train                # digits, garments, photos into runs/caching; minutes each
    python -m research.caching curves [NAME ...]    # time per image against Fréchet distance: caches, fewer steps
    python -m research.caching tuning [NAME ...]    # κ for 5 and 10 steps, FreeU for the UNet, tested on other seeds
    python -m research.caching measure [NAME ...]   # both
    python -m research.caching speed                # SD 1.5's UNet with random weights: every=5 against every step
    python -m research.caching deepcache            # against the package DeepCache, where it is installed
    python -m research.caching page                 # tables and pictures of what is there, into docs

What is finished stays in docs/evidence/caching and is not run again. Settings and seeds were fixed before the first
run; CACHING_RUNS names another place for the runs.
`photos` needs CIFAR-10: name the folder around it in SCALELONG_DATA.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from research.attach_cost import unet as sd15
from scalelong.cli import main as scalelong
from scalelong.console import Progress, text_table
from scalelong.diffusion import SampleSettings
from scalelong.experiments.caching import CacheCurve, cache_curve, draw_curves
from scalelong.experiments.tuning import draw_tuning, tune_run
from scalelong.files import make_folder, write_text
from scalelong.runs.load import load_run

OUT = Path("docs/evidence/caching")
FIGURES = Path("docs/figures")
RUNS = Path(os.environ.get("CACHING_RUNS", "runs/caching"))
SEED = 100_000
IMAGES = 1000
STEPS = 10
FEWER = (7, 5, 4, 3)

UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [24, 48, 48],
    "down_block_types": ["DownBlock2D"] * 3,
    "up_block_types": ["UpBlock2D"] * 3,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 16,
}

NETWORKS = {
    "digits": ["--recipe", "digits-tiny", "--steps", "2000"],
    "garments": [
        *("--recipe", "fashion-tiny", "--data", "garments", "--lr", "1e-3", "--steps", "1500"),
        *("--model-options", "patch_size=4", "dim=64", "depth=12"),
    ],
    "photos": [
        *("--recipe", "cifar10-tiny", "--model", str(RUNS / "unet.json"), "--lr", "1e-3", "--steps", "1500"),
        "--model-options",
    ],
}
"""A U-ViT of depth 6, one of depth 12, and a UNet of diffusers, by the flags of `scalelong train`."""

TUNING = [("linear", 5), ("linear", 10), ("freeu", 5), ("free", 5)]


def train(_: list[str]) -> None:
    make_folder(RUNS)
    write_text(RUNS / "unet.json", json.dumps(UNET))
    for name, flags in NETWORKS.items():
        code = scalelong(["train", "--out", str(RUNS / name), "--samples-every", "0", *flags])
        if code:
            sys.exit(code)


def curves(names: list[str]) -> None:
    for name in names or NETWORKS:
        file = OUT / f"{name}-cache.json"
        if file.exists():
            continue
        settings, progress = SampleSettings(steps=STEPS), Progress(f"{name}, batches")
        run = load_run(RUNS / name)
        found = cache_curve(run, settings=settings, fewer=FEWER, n=IMAGES, seed=SEED, progress=progress)
        keep(file, found.to_json())
        print(f"{name}\n{found}\n", flush=True)


def tuning(names: list[str]) -> None:
    for kind, steps in TUNING:
        for name in names or NETWORKS:
            file = OUT / f"{name}-{kind}-{steps}.json"
            if file.exists() or (kind == "freeu" and name != "photos"):  # FreeU filters features of images
                continue
            run, progress = load_run(RUNS / name), Progress(f"{name}, {kind}, {steps} steps, trials")
            settings = SampleSettings(steps=steps)
            found = tune_run(run, settings=settings, kind=kind, n=256, trials=10, seed=SEED, progress=progress)
            keep(file, json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
            print(f"{name}, {steps} steps, {kind}\n{found}\n", flush=True)


def measure(names: list[str]) -> None:
    curves(names)
    tuning(names)


def keep(file: Path, text: str) -> None:
    make_folder(file.parent)
    write_text(file, text + "\n")


# The speed of a large network


def speed(_: list[str], rounds: int = 3, steps: int = 5, size: int = 32) -> None:
    """Loops of 5 steps on a latent of 32x32, one after the other in turns, processor time on one thread."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("meta"):  # torch's own start takes longer than all forwards
        model = sd15(1)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.02, 0.02)
    text = torch.randn(1, 77, 768)

    @torch.no_grad()
    def loop() -> float:
        x = torch.randn(1, 4, size, size)
        began = time.process_time()
        for t in torch.linspace(999, 0, steps):
            x = x - 0.1 * model(x, t, encoder_hidden_states=text).sample
        return time.process_time() - began

    caches = {f"every={k},depth={d}": sl.cached(model, every=k, depth=d, verify=False) for k, d in ((5, 1), (5, 4))}
    for cache in caches.values():  # finds the inner part, once
        with cache, torch.no_grad():
            model(torch.randn(1, 4, size, size), torch.tensor(999.0), encoder_hidden_states=text)
        cache.full_steps = cache.cached_steps = 0
    ratios: dict[str, list[float]] = {name: [] for name in caches}
    for _round in range(rounds):
        plain = loop()
        for name, cache in caches.items():
            with cache:
                ratios[name].append(plain / loop())
            print(f"{name}: {ratios[name][-1]:.2f} times as fast, {plain:.0f} s without", flush=True)
    rows = [
        {
            "cache": name,
            "times as fast": f"{statistics.median(found):.2f}",
            "from": f"{min(found):.2f}",
            "to": f"{max(found):.2f}",
            "layers left out": f"{caches[name].share:.0%}",
        }
        for name, found in ratios.items()
    ]
    about = {"network": "UNet of SD 1.5, random weights", "latent": size, "steps": steps, "rounds": rounds}
    keep(OUT / "speed.json", json.dumps({**about, "rows": rows}, indent=1))
    print(text_table(rows, left=("cache",), rule=False))


# Against the package DeepCache


def deepcache(_: list[str]) -> None:
    """The same loop with the branch of DeepCache that stands for our depth, on a small UNet of SD's kind."""
    from DeepCache import DeepCacheSDHelper  # pyright: ignore[reportMissingImports]
    from diffusers import DDIMScheduler, UNet2DConditionModel  # pyright: ignore[reportPrivateImportUsage]

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    widths, blocks = (16, 32, 32), ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=widths,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=blocks,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    scheduler: Any = DDIMScheduler()
    text = torch.randn(1, 7, 16)

    class Pipeline:
        unet: nn.Module = model

    setattr(Pipeline, "scheduler", scheduler)  # noqa: B010, where DeepCache looks for it

    @torch.no_grad()
    def loop(call: Callable[..., Any]) -> Tensor:
        scheduler.set_timesteps(9)
        x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
        for t in scheduler.timesteps:
            out = call(x, t, encoder_hidden_states=text, return_dict=False)[0]
            x = scheduler.step(out, t, x).prev_sample
        return x

    plain = loop(model)
    for branch in (0, 1, 2):
        helper = DeepCacheSDHelper(pipe=Pipeline())
        helper.set_params(cache_interval=3, cache_branch_id=branch)
        helper.enable()
        theirs = loop(lambda *args, **kwargs: Pipeline.unet(*args, **kwargs))
        helper.disable()
        with sl.cached(model, depth=branch + 1, every=3):
            ours = loop(model)
        far, apart = (float((a - ours).abs().max()) for a in (theirs, plain))
        print(f"branch {branch}, depth {branch + 1}: {far:.1e} from DeepCache, {apart:.1e} from a loop without cache")


# The page


def page(_: list[str]) -> None:
    found = [CacheCurve.from_json(file.read_text(encoding="utf-8")) for file in sorted(OUT.glob("*-cache.json"))]
    if found:
        draw_curves(found, FIGURES / "caching.png")
    for curve in found:
        print(f"\n### {curve.subject}\n\n{curve}")
    tuned = [
        sl.TunedSkips.load(file)
        for kind, steps in TUNING
        for name in NETWORKS
        if (file := OUT / f"{name}-{kind}-{steps}.json").exists()
    ]
    if tuned:
        draw_tuning(tuned, FIGURES / "tuning.png")
    rows = []
    for each in tuned:
        mean, low, high = each.difference
        before = statistics.fmean(pair[0] for pair in each.test) if each.test else float("nan")
        rows.append(
            {
                "network": each.about["run"],
                "steps": str(each.about["settings"]["steps"]),
                "kind": each.kind,
                "search": f"{each.trials[0].score:.3g} to {each.best.score:.3g}",
                "test before": f"{before:.3g}" if each.test else "-",
                "difference": f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]" if each.test else "-",
                "verdict": each.verdict,
                "scaling": each.spelled(),
            }
        )
    print("\n" + text_table(rows, left=True, rule=False))


PARTS = {
    "train": train,
    "curves": curves,
    "tuning": tuning,
    "measure": measure,
    "speed": speed,
    "deepcache": deepcache,
    "page": page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NETWORKS)} (default: all)")
    options = parser.parse_args()
    unknown = set(options.names) - set(NETWORKS)
    if unknown:
        parser.error(f"unknown network {', '.join(sorted(unknown))}; known: {', '.join(NETWORKS)}")
    torch.set_num_threads(1)
    PARTS[options.part](options.names)


if __name__ == "__main__":
    main()
