"""What the stability monitor costs: steps with and without it, in turns, so that a busy machine treats both alike.

python benchmarks/monitor.py [--every 10] [--rounds 30] [--dim 256] [--depth 12] [--batch 64]
"""

import argparse
import statistics
import time
from typing import Any

import torch

from scalelong.models import UViT
from scalelong.stability import StabilityMonitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of `every` steps without and with the monitor")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--probe", type=int, default=4, help="images in the probe batch; 0 for none")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loop = Loop(options)
    loop.steps(3, None)
    plain, watched = [], []
    for number in range(options.rounds):
        # The order changes from round to round, so that a drift of the machine's speed cancels.
        for with_monitor in (False, True) if number % 2 else (True, False):
            (watched if with_monitor else plain).append(loop.timed(with_monitor))
    ratios = [b / a - 1 for a, b in zip(plain, watched, strict=True)]
    step = statistics.median(plain) / options.every
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"U-ViT dim {options.dim} depth {options.depth}, batch {options.batch}, {loop.parameters:,} parameters")
    print(f"step without monitor: {1000 * step:.1f} ms of CPU time (median of {options.rounds} x {options.every})")
    middle, mean = statistics.median(ratios), statistics.fmean(ratios)
    print(f"cost at every={options.every}: median {middle:+.2%}, mean {mean:+.2%} ± {error:.2%} of a step")


class Loop:
    """A training step on random images."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = UViT(image_size=32, patch_size=4, dim=options.dim, depth=options.depth, heads=8, scaling="cs")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.t = torch.randn(options.batch, 3, 32, 32), 999 * torch.rand(options.batch)
        self.every = options.every
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.probe: Any = (self.x[: options.probe], self.t[: options.probe]) if options.probe else None

    def steps(self, count: int, monitor: StabilityMonitor | None) -> None:
        for _ in range(count):
            loss = (self.model(self.x, self.t) - self.x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss)

    def timed(self, with_monitor: bool) -> float:
        """CPU time of `every` steps: what other programs of the machine use is not counted."""
        if not with_monitor:
            began = time.process_time()
            self.steps(self.every, None)
            return time.process_time() - began
        with StabilityMonitor(self.model, every=self.every, probe_batch=self.probe) as monitor:
            began = time.process_time()
            self.steps(self.every, monitor)
            return time.process_time() - began


if __name__ == "__main__":
    main()
