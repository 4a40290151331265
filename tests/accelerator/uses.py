"""Everything that computes, once, on the accelerator of `standin.py`; prints what it counted as JSON.

    python tests/accelerator/uses.py FOLDER

A process of its own: the device cannot be unregistered.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import standin
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["ACCELERATE_TORCH_DEVICE"] = standin.NAME  # accelerate looks for devices that it knows by name
counts = standin.install()

import scalelong as sl  # noqa: E402
from scalelong.cli import main  # noqa: E402
from scalelong.cli.train import parse  # noqa: E402
from scalelong.noise import SCHEDULES, NoiseProcess, noise_levels, widest_float  # noqa: E402
from scalelong.training import train as train_run  # noqa: E402

PRODUCTS = ("addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "native_group_norm")
"""What networks are made of. Plain products of matrices are left out: statistics are computed in float64 on the CPU."""


class Watch(TorchDispatchMode):
    """Counts products that are computed on the CPU by the program itself, not by the device."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.__name__.split(".")[0] in PRODUCTS and any(t.device.type == "cpu" for t in tensors):
            self.on_cpu += 1
        return result


def counted(work: Callable[[], Any]) -> dict[str, Any]:
    before = (counts.to_device, counts.to_cpu, counts.reads)
    with Watch() as watch:
        work()
    names = ("to_device", "to_cpu", "reads")
    found = {name: getattr(counts, name) - old for name, old in zip(names, before, strict=True)}
    return found | {"on_cpu": watch.on_cpu}


def command(*words: str) -> Callable[[], None]:
    def run() -> None:
        code = main(list(words))
        if code:
            raise SystemExit(f"{' '.join(words)} ended with {code}")

    return run


def network(**options: Any) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=4, heads=2, **options).to(standin.NAME)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 1, 8, 8, device=standin.NAME), torch.tensor([10.0, 500.0], device=standin.NAME)


class Net(torch.nn.Module):
    """A UNet of two levels that we do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.down = torch.nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.middle = torch.nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.up = torch.nn.Conv2d(16, 8, 3, padding=1)
        self.last = torch.nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        one = torch.relu(self.first(x)) + t[:, None, None, None] / 1000
        two = torch.relu(self.down(one))
        middle = torch.nn.functional.interpolate(self.middle(two), scale_factor=2)
        x = torch.relu(self.up(torch.cat([middle, two], dim=1)))
        x = torch.nn.functional.interpolate(x, scale_factor=2)
        return self.last(torch.cat([x, one], dim=1))


def attach() -> None:
    """A foreign model on the device: found, scaled, verified and undone there."""
    for method in ("cs", "ls", "merge_norm"):
        torch.manual_seed(0)
        model = Net().to(standin.NAME)
        x = inputs()
        before = model(*x)
        sl.scale_skips_(model, method, x)
        sl.verify(model, x)
        assert all(p.device.type == standin.NAME for p in model.parameters())
        sl.coefficients(model, *x)
        sl.unscale_(model)
        assert torch.equal(model(*x), before)


def train_own_loop() -> None:
    """A loop of one's own with Muon, the monitor and the guard."""
    model = network(scaling="ls")
    optimizer = sl.Muon(sl.muon_groups(model, lr=1e-3))
    guard = sl.CollapseGuard(model, optimizer)
    with sl.StabilityMonitor(model, every=2):
        for _ in range(4):
            x, t = inputs()
            loss = (model(x, t) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step(loss)


def rates(steps: int) -> None:
    """Which rates a network survives, in this process."""

    def step(model: torch.nn.Module, i: int, draws: torch.Generator) -> Tensor:
        x = torch.randn(4, 1, 8, 8, generator=draws).to(standin.NAME)
        return (model(x, torch.ones(4, device=standin.NAME)) - x).square().mean()

    sl.rate_range(lambda seed: network(), step, methods=("none",), rates=(1e-3,), seeds=1, steps=steps, jobs=1)


class Dropping(Net):
    """Draws from the device's own generator, which therefore has to be part of a checkpoint."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(x, t), 0.3, self.training)


TINY = ["--recipe", "digits-tiny", "--model-options", "dim=16", "depth=2", "heads=2", "patch_size=4"]
TINY += ["--batch-size", "8", "--held-out", "32", "--samples", "4", "--sampler-steps", "2", "--precision", "fp32"]
SCORED = ["--steps", "2", "--features", "random"]


def train(folder: Path, steps: int, monitor: int = 0, *more: str) -> Callable[[], None]:
    flags = ["--steps", str(steps), "--monitor-every", str(monitor), "--save-every", "1000", *more]
    return command("train", *TINY, *flags, "--out", str(folder))


def with_hook(folder: Path, steps: int) -> Callable[[], Any]:
    """A hook of the user's that reads nothing must not make a step wait."""
    config = parse([*TINY, "--steps", str(steps), "--monitor-every", "0", "--save-every", "1000"]).train
    return lambda: train_run(config, folder, hooks=[lambda _: None], quiet=True)


def resumed_with_dropout(folder: Path) -> None:
    model = ["--model", f"{__name__}:Dropping", "--scaling", "none", "--lr", "1e-3"]
    train(folder / "whole", 4, 0, *model)()
    train(folder / "parts", 2, 0, *model)()
    train(folder / "parts", 4, 0, *model)()


def without_float64(folder: Path) -> None:
    """Apple's GPUs have no float64."""
    counts.float64 = False
    widest_float.cache_clear()
    try:
        train_own_loop()
        attach()
        for schedule in SCHEDULES:
            process, (x, t) = NoiseProcess(schedule), inputs()  # pyright: ignore[reportArgumentType]
            process.add_noise(x, torch.zeros_like(x), t)
            noise_levels(process, t)
        train(folder, 10, 5)()
        command("sample", str(folder), "-n", "4", "--steps", "4")()
    finally:
        counts.float64 = True
        widest_float.cache_clear()


def same(first: Path, second: Path) -> bool:
    """The newest checkpoints have the same weights."""
    files = [sorted((run / "checkpoints" / "latest").glob("*.safetensors")) for run in (first, second)]
    return all(one.read_bytes() == two.read_bytes() for one, two in zip(*files, strict=True))


def run(folder: Path) -> dict[str, Any]:
    short, long = folder / "short", folder / "long"
    uses: dict[str, Callable[[], Any]] = {
        "train 20": train(short, 20),
        "train 40": train(long, 40),
        "hooked 20": with_hook(folder / "hooked 20", 20),
        "hooked 40": with_hook(folder / "hooked 40", 40),
        "monitored 40": train(folder / "monitored", 40, 10, "--ema-lengths", "5%", "10%"),
        "resume 40": train(short, 40),
        "resume with dropout": lambda: resumed_with_dropout(folder / "dropout"),
        "sample": command("sample", str(short), "-n", "4", "--steps", "4"),
        "eval": command("eval", str(short), "-n", "32", *SCORED),
        "eval of averages": command("eval", str(folder / "monitored"), "--ema-lengths", "7%"),
        "tune": command("lab", "tune", str(short), "-n", "16", *SCORED),
        "diagnose": command("diagnose", *TINY[:2]),
        "attach": attach,
        "own loop": train_own_loop,
        "range 20": lambda: rates(20),
        "range 40": lambda: rates(40),
        "without float64": lambda: without_float64(folder / "float32"),
    }
    found: dict[str, Any] = {name: counted(use) for name, use in uses.items()}
    found["same"] = same(short, long)
    found["same with dropout"] = same(folder / "dropout" / "whole", folder / "dropout" / "parts")
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
