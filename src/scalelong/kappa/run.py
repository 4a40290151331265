"""One short training run, with everything random under control."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..theory.schedules import alpha_bars
from ..theory.sensitivity import as_tensor
from .network import ModelInputs, default_inputs


class PilotRun:
    """One short training run that can be advanced step by step: AdamW on Eq. (2), with a linear warm-up.

    Everything random comes from `seed`, so that runs with equal seeds see equal images, times and noise, and their
    losses differ by what is compared alone.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        held_out: Tensor,
        *,
        schedule: Any = "ddpm",
        seed: int = 0,
        batch_size: int = 32,
        learning_rate: float = 1e-3,
        warmup: int = 50,
        inputs: ModelInputs = default_inputs,
    ) -> None:
        self.model, self.images, self.batch_size, self.warmup, self.inputs = model, images, batch_size, warmup, inputs
        self.alpha_bars = alpha_bars(schedule).to(images.device, torch.float32)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        # The held-out noise is the same in all runs, and its times cover the schedule evenly.
        shared = torch.Generator().manual_seed(0)
        self.held_out = held_out
        self.held_out_noise = torch.randn(held_out.shape, generator=shared).to(held_out)
        self.held_out_steps = _even_steps(len(held_out), len(self.alpha_bars)).to(held_out.device)
        self.steps_done = 0

    def advance(self, steps: int) -> None:
        self.model.train()
        with torch.random.fork_rng():
            # For dropout: equal in runs with equal seeds, and nothing to the caller's own random numbers.
            torch.manual_seed(self.seed + self.steps_done)
            self._train(steps)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            chosen = torch.randint(len(self.images), (self.batch_size,), generator=self.generator)
            times = torch.randint(len(self.alpha_bars), (self.batch_size,), generator=self.generator)
            clean = self.images[chosen.to(self.images.device)]
            noise = torch.randn(clean.shape, generator=self.generator).to(clean)
            loss = self._loss(clean, noise, times.to(clean.device))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.steps_done += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * min(1.0, self.steps_done / max(self.warmup, 1))
            self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Eq. (2) per dimension on images that were not trained on; infinite where the run has diverged."""
        self.model.eval()
        losses = [
            self._loss(self.held_out[part], self.held_out_noise[part], self.held_out_steps[part]) * len(part)
            for part in torch.arange(len(self.held_out), device=self.held_out.device).split(128)
        ]
        loss = float(sum(losses)) / len(self.held_out)
        return loss if math.isfinite(loss) else math.inf

    def _loss(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        alpha_bar = self.alpha_bars[times].view(-1, *[1] * (clean.dim() - 1))
        noisy = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
        prediction = as_tensor(self.model(*self.inputs(noisy, times)))
        return (prediction - noise).square().mean()


def _even_steps(count: int, length: int) -> Tensor:
    """`count` times spread evenly over the schedule, in an order that has nothing to do with the images."""
    even = ((torch.arange(count) + 0.5) * length / count).long()
    return even[torch.randperm(count, generator=torch.Generator().manual_seed(1))]
