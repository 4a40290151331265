"""What it costs to find long skips, and to scale them in each forward and training step.

    python benchmarks/attach.py [--repeats 15] [--batch 16]

One thread, and the processor time of this process, so that other processes disturb little. Variants run in turn, one
after the other in every round. Shown are the median and the quartiles of the ratio to the unscaled model of the same
round; "again" is an exact copy of the unscaled model, so its ratio is the noise.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.errors import CancelledScalingWarning
from scalelong.skips import find_skips


class ConcatenatingUNet(nn.Module):
    """A UNet of the other kind: the concatenation is the argument of the decoder blocks, as in guided-diffusion."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(levels)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for layer in self.down:
            skips.append(F.silu(layer(skips[-1])))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)


def ddpm_cifar10() -> nn.Module:
    """The UNet of google/ddpm-cifar10-32: 35.7M parameters."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    return UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        layers_per_block=2,
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )


def stable_diffusion() -> nn.Module:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


def time_planning() -> None:
    with torch.device("meta"):
        model = stable_diffusion()
    plan, seconds = find_skips(model), []
    for _ in range(3):
        start = time.process_time()
        find_skips(model)
        seconds.append(time.process_time() - start)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"planning SD 1.5 on meta ({size:.0f}M parameters, {len(plan)} long skips): {min(seconds):.2f} s (best of 3)\n"
    )


def compare(title: str, variants: dict[str, nn.Module], step: Callable[[nn.Module], None], repeats: int) -> None:
    """Time all variants in turn; the first is the baseline."""
    for model in variants.values():
        step(model)
    rounds = []
    for _ in range(repeats):
        row = []
        for model in variants.values():
            start = time.process_time()
            step(model)
            row.append(time.process_time() - start)
        rounds.append(row)
    print(title)
    for column, name in enumerate(variants):
        seconds = statistics.median(row[column] for row in rounds)
        ratios = sorted(row[column] / row[0] - 1 for row in rounds)
        low, middle, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
        print(f"  {name:<12} {1e3 * seconds:8.1f} ms   {100 * middle:+6.2f} %  [{100 * low:+.2f}, {100 * high:+.2f}]")
    print()


def variants_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, nn.Module]:
    plan = find_skips(model, inputs)
    ones = sl.CustomScaling((1.0,) * len(plan))
    variants = {"unscaled": model, "again": copy.deepcopy(model)}
    for name, config in (("kappa = 1", ones), ("cs", "cs"), ("ls", "ls")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CancelledScalingWarning)
            variants[name] = sl.scale_skips_(copy.deepcopy(model), config, plan=plan)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), batch {options.batch}\n")
    time_planning()
    image = torch.randn(options.batch, 3, 32, 32)
    networks = {
        "DDPM CIFAR-10 UNet (diffusers; skips are arguments)": (ddpm_cifar10(), (image, torch.tensor(1))),
        "concatenating UNet (the concatenation is the argument)": (ConcatenatingUNet(), (image,)),
    }
    for title, (model, inputs) in networks.items():

        def forward(model: nn.Module, inputs: tuple[Tensor, ...] = inputs) -> None:
            with torch.no_grad():
                model(*inputs)

        def training_step(model: nn.Module, inputs: tuple[Tensor, ...] = inputs) -> None:
            output = model(*inputs)
            (output if isinstance(output, Tensor) else output.sample).square().mean().backward()
            model.zero_grad(set_to_none=True)

        variants = variants_of(model, inputs)
        compare(f"{title}, forward", variants, forward, options.repeats)
        compare(f"{title}, training step", variants, training_step, max(options.repeats // 3, 3))


if __name__ == "__main__":
    main()
