"""What an LR finder says of a network whose collapse comes late, beside what several seeds survive.

    python -m research.finder              # about three minutes on one core

The finder is the usual one: the rate grows from 1e-5 to 1 by the same factor in each of 100 steps, and the suggestion
is the rate at which the smoothed loss falls fastest (Smith 2017, as fast.ai and Lightning do it). The network is the
demo's. Then it is trained at the suggested rate, constant after a warm-up, for 400 steps, with the same seed.
"""

import argparse
import math
from itertools import pairwise

import torch
from torch import nn

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.noise import NoiseProcess, mean_square
from scalelong.randomness import generator

RAMP, TRAIN, WARMUP = 100, 400, 50
LOW, HIGH = 1e-5, 1.0


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    start = {"init_std": 0.0653, "final_start": "authors", "residual_scaling": "none"}
    return sl.UViT(image_size=16, patch_size=4, channels=1, dim=48, depth=24, heads=4, **start)


def losses(model: nn.Module, seed: int, rates: list[float]) -> list[float]:
    """The loss of each step, with these rates one after the other."""
    images, process = to_float(load_data("garments").fetch(range(2000)).images), NoiseProcess()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.03)
    found = []
    for step, rate in enumerate(rates):
        draws = generator(seed, "finder", step)
        x = images[torch.randint(len(images), (8,), generator=draws)]
        t, noise = process.times(torch.rand(8, generator=draws)), torch.randn(x.shape, generator=draws)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = mean_square(model(process.add_noise(x, noise, t), t) - noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
        if not math.isfinite(found[-1]) or (step > 10 and found[-1] > 4 * min(found)):
            break
    return found


def suggested(seed: int) -> float:
    """The rate at which the smoothed loss falls fastest."""
    rates = [LOW * (HIGH / LOW) ** (step / (RAMP - 1)) for step in range(RAMP)]
    smooth, curve = 0.0, []
    for count, loss in enumerate(losses(network(seed), seed, rates), start=1):
        smooth = 0.9 * smooth + 0.1 * loss
        curve.append(smooth / (1 - 0.9**count))
    slopes = [later - earlier for earlier, later in pairwise(curve[10:])]
    return rates[11 + slopes.index(min(slopes))]


def end_of(seed: int, rate: float) -> tuple[float, float]:
    """The lowest mean of 20 losses on the way, and the last one."""
    found = losses(network(seed), seed, [rate * min(1.0, (step + 1) / WARMUP) for step in range(TRAIN)])
    means = [sum(found[i : i + 20]) / 20 for i in range(0, len(found) - 19, 20)] or found
    return min(means), means[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | the finder's rate | lowest loss on the way | loss at the end |\n|---|---|---|---|")
    for seed in range(500, 500 + options.seeds):
        rate = suggested(seed)
        best, last = end_of(seed, rate)
        print(f"| {seed} | {rate:.1e} | {best:.2f} | {last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
