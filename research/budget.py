"""Which network shows most for the same processor time on a small folder of images?

    python -m research.budget PHOTOGRAPHS --reference OTHERS --seconds 150 --seeds 1 --out budget/

Each arm trains on PHOTOGRAPHS for so many seconds of processor time, sampling not counted. Its averaged weights make
images at a third of the time and at the end. They are scored against OTHERS, images of the same kind on which nobody
trained, so that copies of the training images gain nothing. A line of JSON and a grid for each.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.diffusion.images import to_bytes
from scalelong.diffusion.solvers import sample
from scalelong.evaluation import Moments, frechet_distance, kernel_score, load_extractor
from scalelong.evaluation.features import features_of
from scalelong.models import Denoiser
from scalelong.noise import NoiseProcess, losses
from scalelong.optional import needs
from scalelong.runs import image_grid, save_png

BATCH, WARMUP, SAMPLER_STEPS = 32, 100, 25


def uvit(side: int, channels: int) -> tuple[nn.Module, float]:
    """The second rung of `scalelong train`."""
    return sl.UViT(image_size=side, patch_size=2, channels=channels, dim=128, depth=4, heads=4, init_std=0.06), 2e-3


def unit(side: int, channels: int) -> tuple[nn.Module, float]:
    """The same with unit gain, and residual branches at 0.3."""
    return sl.UViT(
        image_size=side, patch_size=2, channels=channels, dim=128, depth=4, heads=4, residual_scaling=0.3
    ), 2e-3


def unet(side: int, channels: int) -> tuple[nn.Module, float]:
    """A UNet of about as many parameters: two levels, attention on the inner one."""
    network = needs("diffusers", "train", "a UNet").UNet2DModel(
        sample_size=side,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(48, 96),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return network, 1e-3


ARMS = {"uvit": uvit, "unit": unit, "unet": unet}


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


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m research.budget", description=__doc__)
    made.add_argument("images")
    made.add_argument("--reference", required=True)
    made.add_argument("--side", type=int, default=16)
    made.add_argument("--seconds", type=float, default=150.0)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--samples", type=int, default=256)
    made.add_argument("--schedule", default="vp")
    made.add_argument("--arms", default=",".join(ARMS))
    made.add_argument("--out", type=Path, default=Path("budget"))
    options = made.parse_args()
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
        save_png(options.out / f"{about['arm']}-{about['seed']}-{about['seconds']}s.png", image_grid(images[:36]))
        print(json.dumps({**about, "frechet": round(distance, 3), "kernel": round(kernel, 4)}), flush=True)

    pixels = to_float(data.fetch(range(len(data))).images)
    for seed in range(options.seeds):
        for arm in options.arms.split(","):
            train(arm, seed, pixels, options, score)


if __name__ == "__main__":
    main()
