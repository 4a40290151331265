"""The demonstration: none, CS and LS on handwritten digits, in under three minutes on two cores."""

from dataclasses import replace
from pathlib import Path

import torch

from ..runs.config import TrainConfig
from ..runs.recipes import recipe
from .compare import Comparison, compare

METHODS = ("none", "cs:0.7", "ls")
STEPS = 800


def demo_config(steps: int) -> TrainConfig:
    """digits-tiny with a deeper network on larger patches: four long skips, and few tokens, so that it learns soon."""
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        model_options={"patch_size": 4, "dim": 96, "depth": 8, "heads": 4},
        batch_size=64,
        # A short run has no time for a long warm-up or a long average, and small networks bear a high rate.
        optimizer=replace(base.optimizer, lr=2e-3, warmup=50, ema_rate=0.98),
        checkpoints=replace(base.checkpoints, save_every=max(1, steps // 3)),
        logging=replace(
            base.logging,
            log_every=max(1, steps // 60),
            held_out_every=max(1, steps // 25),
            samples_every=max(1, steps // 5),
            samples=36,
            sampler_steps=20,
            trackers=(),
        ),
    )


def run_demo(out: Path, steps: int = STEPS, seed: int = 0) -> Comparison | None:
    # All methods at once, even on two cores: one after the other would leave a core idle at the end.
    jobs = 1 if torch.cuda.is_available() else len(METHODS)
    return compare(demo_config(steps), METHODS, [seed], out, jobs=jobs)
