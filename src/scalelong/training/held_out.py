"""The loss on images that are not trained on, with the same noise and times at every look and for every method."""

import torch
from torch import Tensor

from ..data import ImageData, to_float
from ..diffusion.conditions import Conditions
from ..diffusion.latents import sample_latents
from ..noise import NoiseProcess, Prediction, epsilon_losses
from ..randomness import generator
from ..runs.model import Network

BATCH = 128


@torch.no_grad()
def held_out_loss(
    network: Network,
    process: NoiseProcess,
    prediction: Prediction,
    data: ImageData,
    seed: int,
    device: torch.device,
    conditions: Conditions,
) -> float:
    """The mean error in ε. The times are spread evenly, so that few images suffice."""
    count = len(data)
    # Every image gets its own time, in an order that has nothing to do with the order of the images.
    ranks = torch.randperm(count, generator=generator(seed, "held-out times"))
    times = process.times((ranks + 0.5) / count)
    noise_source = generator(seed, "held-out noise")
    found: list[Tensor] = []
    for start in range(0, count, BATCH):
        rows = torch.arange(start, min(start + BATCH, count))
        batch = data.fetch(rows)
        images = batch.images.to(device)
        x0 = sample_latents(images) if images.is_floating_point() else to_float(images)
        noise = torch.randn(x0.shape, generator=noise_source).to(device)
        condition = conditions.of(batch)
        predict = network.given(None if condition is None else condition.to(device))
        found.append(epsilon_losses(predict, process, prediction, x0, noise, times[rows].to(device)).cpu())
    return float(torch.cat(found).double().mean())
