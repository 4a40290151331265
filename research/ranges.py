"""The range of learning rates of six networks: three depths of U-ViT, a UNet of diffusers, MONAI's UNet on a
segmentation task, and a training loop of somebody's own.

    python -m research.ranges                      # all, about half an hour on two cores
    python -m research.ranges uvit-24 monai        # some of them
    python -m research.ranges --page               # write the page from what is there

What is finished is kept in docs/evidence/ranges, one folder each, and is not run again. Seeds, rates and methods were
fixed before the first run, and no other setting was tried: the rates double from one at which all networks train.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.experiments.demo import demo_config
from scalelong.experiments.rates import config_range
from scalelong.files import write_text
from scalelong.stability import RateRange

OUT = Path("docs/evidence/ranges")
SEEDS = range(7000, 7008)
STEPS, WARMUP = 130, 40
BATCH = 8
START = "start:cs:0.7"


def uvit(depth: int) -> Callable[..., RateRange]:
    """The U-ViT of the demo: width 64, the authors' start, ε-prediction on garments."""

    def run(**settings: Any) -> RateRange:
        config = demo_config(depth)
        free = replace(config, optimizer=replace(config.optimizer, lr=0.0))
        return config_range(free, rates=(4e-3, 8e-3, 1.6e-2), methods=("none", START), stack=1, **settings)

    return run


def unet(**settings: Any) -> RateRange:
    """UNet2DModel of diffusers on garments. GroupNorm stands behind its merges, so the start goes behind the norm."""
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    images = garments()

    def build(_: int) -> nn.Module:
        sizes: dict[str, Any] = {"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
        return UNet2DModel(**sizes, block_out_channels=(32, 64), norm_num_groups=8, **blocks)

    def step(model: nn.Module, _: int, source: torch.Generator) -> Tensor:
        noisy, t, noise = noised(images, source)
        return F.mse_loss(model(noisy, 999 * t).sample, noise)

    methods = ("none", "start:cs:kappa=0.7,behind_norms=true")
    return sl.rate_range(build, step, rates=(4e-3, 1.6e-2, 6.4e-2), methods=methods, **settings)


def monai(**settings: Any) -> RateRange:
    """MONAI's UNet finds the garment in a noisy picture: cross-entropy of two classes."""
    from monai.networks.nets import UNet  # pyright: ignore[reportPrivateImportUsage]

    images = garments()

    def build(_: int) -> nn.Module:
        return UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(16, 32, 64), strides=(2, 2))

    def step(model: nn.Module, _: int, source: torch.Generator) -> Tensor:
        clean = images[torch.randint(len(images), (BATCH,), generator=source)]
        seen = clean + torch.randn(clean.shape, generator=source)
        return F.cross_entropy(model(seen), (clean[:, 0] > -0.5).long())

    return sl.rate_range(build, step, rates=(4e-3, 1.6e-2, 6.4e-2), methods=("none", START), **settings)


class PlainUNet(nn.Module):
    """A UNet as one writes it oneself: convolutions and SiLU, concatenated skips, no norms."""

    def __init__(self, width: int = 24, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = nn.Conv2d(2, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))
        self.middle = nn.Conv2d(widths[-1], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, b, 3, padding=1) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        level = t.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        features = [F.silu(self.first(torch.cat([x, level], 1)))]
        for layer in self.down:
            features.append(F.silu(layer(features[-1])))
        h = F.silu(self.middle(features.pop()))
        for layer in self.up:
            h = F.interpolate(h, scale_factor=2)
            h = F.silu(layer(torch.cat([h, features.pop()], 1)))
        return self.last(h)


def own_loop(**settings: Any) -> RateRange:
    """A loop of one's own: flow matching with a UNet without norms, Adam, gradients clipped at 1."""
    images = garments()

    def step(model: nn.Module, _: int, source: torch.Generator) -> Tensor:
        clean = images[torch.randint(len(images), (BATCH,), generator=source)]
        noise = torch.randn(clean.shape, generator=source)
        t = torch.rand(BATCH, generator=source)
        mixed = torch.lerp(clean, noise, t.view(-1, 1, 1, 1))
        return F.mse_loss(model(mixed, t), noise - clean)

    return sl.rate_range(
        lambda _: PlainUNet(),
        step,
        rates=(4e-3, 1.6e-2, 6.4e-2),
        methods=("none", START),
        optimizer=lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
        clip=1.0,
        **settings,
    )


def garments() -> Tensor:
    """(N, 1, 16, 16) in [-1, 1], from the package."""
    data = load_data("garments")
    return to_float(data.fetch(range(len(data))).images)


def noised(images: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, t in [0, 1] and ε of a batch, with ᾱ = cos²(πt/2)."""
    clean = images[torch.randint(len(images), (BATCH,), generator=source)]
    noise = torch.randn(clean.shape, generator=source)
    t = torch.rand(BATCH, generator=source)
    angle = (t * torch.pi / 2).view(-1, 1, 1, 1)
    return clean * angle.cos() + noise * angle.sin(), t, noise


SETTINGS: dict[str, tuple[str, Callable[..., RateRange]]] = {
    "uvit-8": ("U-ViT of depth 8, garments", uvit(8)),
    "uvit-16": ("U-ViT of depth 16, garments", uvit(16)),
    "uvit-24": ("U-ViT of depth 24, garments", uvit(24)),
    "unet": ("UNet2DModel of diffusers with GroupNorm, garments", unet),
    "monai": ("MONAI's UNet with instance norm, segmentation", monai),
    "own-loop": ("a UNet without norms in a loop of its own, flow matching", own_loop),
}


def page(found: Sequence[tuple[str, RateRange]]) -> str:
    """The verdict of each range, as it was computed, with its table and picture."""
    lines = [
        "# The range of learning rates of six networks",
        "",
        "`python -m research.ranges` writes this page; it says what was run and with which seeds. "
        f"{len(SEEDS)} seeds, {STEPS} steps at constant rates after {WARMUP} of warm-up, batches of {BATCH}.",
    ]
    for name, result in found:
        lines += ["", f"## {result.title}", "", result.verdict, "", "```", result.table(), "```", ""]
        lines += [f"![{result.title}]({name}/range.png)"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.ranges", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--page", action="store_true", help="only write the page, from what is finished")
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per core)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(SETTINGS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
    if not options.page:
        for name in options.names or SETTINGS:
            title, run = SETTINGS[name]
            shared = {"seeds": SEEDS, "steps": STEPS, "warmup": WARMUP, "jobs": options.jobs}
            print(run(**shared, out=options.out / name, title=title), flush=True)
    done = [(name, options.out / name) for name in SETTINGS if (options.out / name / "range.json").exists()]
    write_text(
        options.out / "README.md",
        page([(name, RateRange.from_json((folder / "range.json").read_text("utf-8"))) for name, folder in done]),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
