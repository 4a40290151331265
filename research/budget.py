"""Which network shows most for the same processor time on a small folder of images?

    python -m research.budget PHOTOGRAPHS --reference OTHERS --seconds 150 --seeds 1 --out budget/
    python -m research.budget --table docs/evidence/budget/photographs.jsonl     # of lines that were printed before

Each arm trains on PHOTOGRAPHS for so many seconds of processor time, sampling not counted. Its averaged weights make
images at a third of the time and at the end. They are scored against OTHERS, images of the same kind on which nobody
trained, so that copies of the training images gain nothing. A line of JSON and a grid for each.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.console import text_table
from scalelong.data import load_data, to_float
from scalelong.diffusion.images import to_bytes
from scalelong.diffusion.solvers import sample
from scalelong.evaluation import Moments, frechet_distance, kernel_score, load_extractor
from scalelong.evaluation.features import features_of
from scalelong.files import read_json_lines
from scalelong.models import Denoiser, unet
from scalelong.noise import NoiseProcess, losses
from scalelong.runs import image_grid, save_png

BATCH, WARMUP, SAMPLER_STEPS = 32, 100, 25


def uvit(side: int, channels: int) -> tuple[nn.Module, float]:
    """The second rung of `scalelong train --model uvit`."""
    return sl.UViT(image_size=side, patch_size=2, channels=channels, dim=128, depth=4, heads=4, init_std=0.06), 2e-3


def unit(side: int, channels: int) -> tuple[nn.Module, float]:
    """The same with unit gain, and residual branches at 0.3."""
    return sl.UViT(
        image_size=side, patch_size=2, channels=channels, dim=128, depth=4, heads=4, residual_scaling=0.3
    ), 2e-3


def small(side: int, channels: int) -> tuple[nn.Module, float]:
    """The first rungs of `scalelong train`."""
    return unet("small", sample_size=side, in_channels=channels, out_channels=channels), 1e-3


ARMS = {"uvit": uvit, "unit": unit, "unet/small": small}


def train(arm: str, seed: int, images: Tensor, options: argparse.Namespace, score: Any) -> None:
    torch.manual_seed(seed)
    model, rate = ARMS[arm](images.shape[2], images.shape[1])
    network, process = Denoiser(model), NoiseProcess(options.schedule)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.03)
    average = [parameter.detach().clone() for parameter in parameters]
    generator, used, step = torch.Generator().manual_seed(seed), 0.0, 0
    for mark in (options.seconds / 3, options.seconds):
        while used < mark:
            began = time.process_time()
            x0 = images[torch.randint(len(images), (BATCH,), generator=generator)]
            noise = torch.randn(x0.shape, generator=generator)
            t = process.times((torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) / BATCH)
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARMUP)
            losses(network.given(None), process, "v", x0, noise, t).mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            weight = 1 - min(0.9999, (1 + step) / (10 + step))
            for mean, parameter in zip(average, parameters, strict=True):
                mean.lerp_(parameter.detach(), weight)
            step, used = step + 1, used + time.process_time() - began
        raw = [parameter.detach().clone() for parameter in parameters]
        _copy(parameters, average)
        about = {
            "arm": arm,
            "seed": seed,
            "seconds": round(used),
            "step": step,
            "parameters": sum(map(Tensor.numel, raw)),
        }
        score(about, network, process)
        _copy(parameters, raw)


@torch.no_grad()
def _copy(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def table(lines: list[dict[str, Any]]) -> str:
    """Means over seeds after each time, and the range of the seeds."""
    cells: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["seconds"], line["arm"]), []).append(line)
    rows = []
    for (seconds, arm), found in sorted(cells.items()):
        row = {"seconds": str(seconds), "network": arm, "seeds": str(len(found))}
        for name, digits in (("step", 0), ("frechet", 2), ("kernel", 3)):
            values = [each[name] for each in found]
            row[name] = f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
        rows.append(row)
    return text_table(rows, left=("network",))


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m research.budget", description=__doc__)
    made.add_argument("images", nargs="?")
    made.add_argument("--reference")
    made.add_argument("--table", type=Path)
    made.add_argument("--side", type=int, default=16)
    made.add_argument("--seconds", type=float, default=150.0)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--samples", type=int, default=256)
    made.add_argument("--schedule", default="vp")
    made.add_argument("--arms", default=",".join(ARMS))
    made.add_argument("--out", type=Path, default=Path("budget"))
    options = made.parse_args()
    if options.table is not None:
        print(table(read_json_lines(options.table)))
        return
    if options.images is None or options.reference is None:
        made.error("give a folder of images and --reference, or --table FILE")
    options.out.mkdir(parents=True, exist_ok=True)
    data, reference = (load_data(name, size=options.side) for name in (options.images, options.reference))
    extractor = load_extractor("random", reference)
    real = features_of(extractor, reference.fetch(range(len(reference))).images)

    def score(about: dict[str, Any], network: Denoiser, process: NoiseProcess) -> None:
        shape = (data.channels, data.height, data.width)
        parts = torch.arange(options.samples).split(64)
        predict = network.given(None)
        made = [sample(predict, process, "v", shape, part.tolist(), steps=SAMPLER_STEPS) for part in parts]
        images = to_bytes(torch.cat(made))
        found = features_of(extractor, images)
        distance = frechet_distance(Moments.of(real), Moments.of(found))
        kernel = kernel_score(real, found).value
        save_png(
            options.out / f"{about['arm'].replace('/', '-')}-{about['seed']}-{about['seconds']}s.png",
            image_grid(images[:36]),
        )
        print(json.dumps({**about, "frechet": round(distance, 3), "kernel": round(kernel, 4)}), flush=True)

    pixels = to_float(data.fetch(range(len(data))).images)
    for seed in range(options.seeds):
        for arm in options.arms.split(","):
            train(arm, seed, pixels, options, score)


if __name__ == "__main__":
    main()
