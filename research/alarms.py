"""What the rule of collapse says of recorded runs: false alarms in healthy ones, and how soon collapses are found.

    python -m research.alarms record FOLDER    # losses of every step, by noise level, of all runs; then judge
    python -m research.alarms judge FOLDER

Healthy runs are long and small: small batches, small networks and noisy data are where noise is largest against what
there is to lose, and there a rule of collapse errs first. They go through all kinds of recipes (unconditional, class,
text, latent, UNet), objectives, scalings and optimisers (AdamW, Muon, μP). Collapses are deep networks at high rates,
with seeds, depths and settings of which those from number 2000 on did not shape the rule. A run that was recorded is
not trained again.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.models import fuse_, output_tensor
from scalelong.noise import LEVELS, NoiseProcess, Prediction, flat_losses, mean_square, noise_levels, noisy_and_target
from scalelong.randomness import generator
from scalelong.stability import Collapse, CollapseDetector

from .training import AUTHORS, muon

WITHIN = 30
"""A collapse is to be found within so many steps."""
OBJECTIVES: dict[str, Prediction] = {"vp": "epsilon", "vp v": "v", "flow": "flow", "edm": "edm"}
DATA = ("digits", "garments", "noisy garments")
KINDS = ("unconditional", "class", "text", "latent", "unet")


@dataclass(frozen=True)
class Run:
    """One training. A run that is not deep has a rate at which it should stay healthy."""

    number: int
    data: str
    objective: str
    batch: int
    kind: str
    scaling: str
    optimizer: str
    lr: float
    dim: int
    depth: int
    steps: int

    @property
    def deep(self) -> bool:
        return self.depth > 4

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items()).replace(":", "-")


def runs() -> Iterator[Run]:
    for i in range(64):
        small = {"dim": (8, 16)[i % 2], "depth": (2, 4)[i % 2], "steps": 800}
        scaling = ("none", "ls", "cs", "merge_norm")[i // 8 % 4] if KINDS[i % 5] != "unet" else "none"
        optimizer = ("adamw", "muon", "adamw", "mup")[i // 4 % 4] if KINDS[i % 5] != "unet" else "adamw"
        rate = (1e-3, 2e-3, 4e-3)[i // 2 % 3]
        kind = (tuple(OBJECTIVES)[i // 3 % 4], (1, 2, 4, 8)[i % 4], KINDS[i % 5], scaling, optimizer, rate)
        yield Run(i, DATA[i % 3], *kind, **small)
    for i in range(48):
        kind = (("vp", "flow", "vp v")[i // 8 % 3], 8, "unconditional", ("none", "none", "cs:0.7")[i % 3], "adamw")
        rate = (1.2e-2, 2.4e-2)[i // 2 % 2] if i < 24 else 4.8e-2
        yield Run(1000 + i, DATA[i % 2], *kind, lr=rate, dim=32, depth=(12, 16, 20)[i % 3], steps=250)
    for i in range(24):  # recorded after the rule had its constants
        kind = (tuple(OBJECTIVES)[i % 4], (4, 16)[i // 4 % 2], "unconditional", ("none", "none", "ls")[i % 3], "adamw")
        sizes = {"dim": (24, 48)[i // 2 % 2], "depth": (14, 18)[i // 8 % 2], "steps": 250}
        yield Run(2000 + i, DATA[i % 2], *kind, lr=3.4e-2, **sizes)


def images(data: str) -> Tensor:
    """1,500 images of 8 by 8 pixels."""
    found = to_float(load_data(data.removeprefix("noisy ")).fetch(range(1500)).images)
    found = F.avg_pool2d(found, found.shape[-1] // 8)
    return found + 0.5 * torch.randn(found.shape, generator=generator(0, "noisy")) if "noisy" in data else found


def build(run: Run) -> nn.Module:
    torch.manual_seed(run.number)
    if run.kind == "unet":
        from diffusers.models.unets.unet_2d import UNet2DModel

        blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, "norm_num_groups": 4}
        channels = {"in_channels": 1, "out_channels": 1, "block_out_channels": [run.dim, 2 * run.dim]}
        return UNet2DModel(sample_size=8, layers_per_block=1, **channels, **blocks)  # pyright: ignore
    condition: dict[str, Any] = {"class": {"classes": 10}, "text": {"context_dim": 16, "context_length": 4}}.get(
        run.kind, {}
    )
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "channels": 1}
    if run.kind == "latent":
        sizes = {"image_size": 4, "patch_size": 2, "channels": 4}
    elif run.deep:
        sizes |= {"patch_size": 2, **AUTHORS}
    model = sl.UViT(**sizes, dim=run.dim, depth=run.depth, heads=2, **condition)
    return model if run.scaling == "none" else sl.scale_skips_(model, run.scaling)


def optimizers(run: Run, model: nn.Module) -> list[torch.optim.Optimizer]:
    if run.optimizer == "muon":
        return muon(model)
    groups: Any = model.parameters()
    if run.optimizer == "mup":
        sl.mup.start_(model, base=run.dim // 2)
        groups = sl.mup.parameter_groups(model, base=run.dim // 2, lr=run.lr)
    return [torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.99), weight_decay=0.03)]


def record(run: Run, data: Tensor) -> dict[str, Any]:
    """Images, losses and zero losses of each step by noise level: (steps, LEVELS) each."""
    model, process = fuse_(build(run)), NoiseProcess(run.objective.partition(" ")[0])  # pyright: ignore
    used, sums = optimizers(run, model), []
    data = F.pixel_unshuffle(data, 2) if run.kind == "latent" else data
    for step in range(run.steps):
        draws = generator(run.number, "alarms", step)
        chosen = torch.randint(len(data), (run.batch,), generator=draws)
        t = process.times(torch.rand(run.batch, generator=draws))
        x, wanted = noisy_and_target(
            process, OBJECTIVES[run.objective], data[chosen], torch.randn(data[chosen].shape, generator=draws), t
        )
        # Labels and texts that say something about the image: its number, its mean.
        more = {
            "class": {"y": chosen % 10},
            "text": {"context": data[chosen].mean((1, 2, 3)).view(-1, 1, 1).expand(-1, 4, 16)},
        }
        losses = mean_square(wanted - output_tensor(model(x, t, **more.get(run.kind, {}))))
        losses.mean().backward()
        for optimizer in used:
            for group in optimizer.param_groups:
                group["lr"] = run.lr * group.get("lr_scale", 1.0) * min(1.0, (step + 1) / 50)
            optimizer.step()
            optimizer.zero_grad()
        each = torch.stack([torch.ones(run.batch), losses.detach(), flat_losses(wanted)])
        sums.append(each @ F.one_hot(noise_levels(process, t), LEVELS).float())
    return dict(zip(("counts", "losses", "zeros"), torch.stack(sums, 1).numpy(), strict=True))


def alarms(found: Any, *, by_level: bool) -> list[Collapse]:
    """The collapses that the rule sees, from losses by noise level or from the mean of each step."""
    counts, losses, zeros = (found[name] for name in ("counts", "losses", "zeros"))
    detector = CollapseDetector(levels=LEVELS) if by_level else CollapseDetector(zero_loss=zeros.sum() / counts.sum())
    events = []
    for step, (c, s, z) in enumerate(zip(counts, losses, zeros, strict=True), start=1):
        if by_level:
            event = detector.add_levels(step, list(c), list(s), list(z))
        else:
            event = detector.add(step, float(s.sum() / c.sum()))
        events += [event] if isinstance(event, Collapse) else []
    return events


def onset(found: Any, window: int) -> int | None:
    """The step from which on a run is lost, by the whole curve: it had learned a fifth over a window, and the next
    window / 2 and 5 window / 2 steps have lost more than half of that. 0: too late to tell; None: a healthy run."""
    loss, zero = (np.cumsum([0, *found[name].sum(1)]) for name in ("losses", "zeros"))
    steps, best = len(loss) - 1, 0.0

    def learned(start: int, length: int) -> float:
        stop = min(steps, start + length)
        share = (loss[stop] - loss[start]) / (zero[stop] - zero[start])
        return 1 - share if np.isfinite(share) else -np.inf

    for step in range(window, steps - window // 2 + 1):
        best = max(best, learned(step - window, window))
        if best >= 0.2 and learned(step, window // 2) < best / 2 and learned(step, 5 * window // 2) < best / 2:
            return step if steps - step >= WITHIN else 0
    return None


def judge(folder: Path) -> None:
    counts = {"healthy": 0, "false": 0, "collapses": 0, "found": 0, "early": 0}
    delays: list[int] = []
    for run in runs():
        path = folder / f"{run.name}.npz"
        if not path.exists():
            continue
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        lost = onset(found, 20 if run.deep else 200)
        for by_level in (True, False):
            steps = [event.step for event in alarms(found, by_level=by_level)]
            if lost is None:
                counts["healthy"] += 1
                counts["false"] += bool(steps)
            elif lost:
                counts["collapses"] += 1
                counts["early"] += bool(steps) and steps[0] < lost - WITHIN
                counts["found"] += bool(steps) and abs(steps[0] - lost) <= WITHIN
                delays += [steps[0] - lost] if steps else []
            if bool(steps) != bool(lost) or (lost and abs(steps[0] - lost) > WITHIN):
                print(f"{run.name}: lost from {lost} on, alarms at {steps}, {'levels' if by_level else 'means'}")
    print(f"each run is judged by level and by mean: {counts}; steps to the alarm: {sorted(delays)}")


def main() -> None:
    command, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    if command == "record":
        data = {name: images(name) for name in DATA}
        for run in sorted(runs(), key=lambda run: (run.kind == "unet", run.number % 1000)):
            path = folder / f"{run.name}.npz"
            if not path.exists():
                np.savez_compressed(path, **record(run, data[run.data]))
    judge(folder)


if __name__ == "__main__":
    main()
