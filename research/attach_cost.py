"""What it costs to verify a scaling, and to check it in every forward.

    python -m research.attach_cost [--small]

Seconds to plan, to scale without and with verification, for the UNet of Stable Diffusion 1.5 on the CPU at a small
resolution and on the meta device (`--small`: an eighth of its width). Then the time of a forward with the checks over
that of the same forward without them, in turns, with quartiles; and the checks by themselves.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import scalelong as sl
from scalelong.skips import find_skips, without_checks

SD15 = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}


def unet(divisor: int) -> nn.Module:
    from diffusers import UNet2DConditionModel  # pyright: ignore[reportPrivateImportUsage]

    widths = tuple(width // divisor for width in SD15["block_out_channels"])
    groups = 32 if divisor == 1 else 8
    return UNet2DConditionModel(**{**SD15, "block_out_channels": widths, "norm_num_groups": groups}).eval()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report_attaching(divisor: int) -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = unet(divisor)
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        find_skips(model)  # imports and caches
        plan = seconds(lambda model=model: find_skips(model))
        print(f"UNet of SD 1.5{'' if divisor == 1 else f', width / {divisor}'}, {parameters:.0f} M, {device}")
        print(f"  find_skips {plan:6.1f} s")
        for verify in (False, True):
            scale = seconds(lambda model=model, verify=verify: sl.scale_skips_(model, "cs", verify=verify))
            print(f"  scale_skips_(verify={verify!s:5}) {scale:6.1f} s")
            sl.unscale_(model, verify=False)
        if device == "cpu":
            inputs = {
                "sample": torch.randn(1, 4, 16, 16),
                "timestep": torch.tensor([1]),
                "encoder_hidden_states": torch.randn(1, 4, 768),
            }
            with torch.no_grad():
                print(f"  one forward {min(seconds(lambda m=model, i=inputs: m(**i)) for _ in range(3)):6.1f} s")


def report_forward(rounds: int) -> None:
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
    ).eval()
    inputs = (torch.randn(1, 3, 32, 32), torch.tensor([1]))
    checked = sl.scale_skips_(model, "cs")
    bare = copy.deepcopy(checked)
    times: dict[str, list[float]] = {"checked": [], "bare": []}
    with torch.no_grad(), without_checks(bare):
        checked(*inputs)
        for turn in range(rounds):
            order = [("checked", checked), ("bare", bare)]
            for name, one in order if turn % 2 else order[::-1]:
                times[name].append(seconds(lambda one=one: one(*inputs)))
    ratios = sorted(a / b for a, b in zip(times["checked"], times["bare"], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"forward with checks / without, UNet2DModel at 32x32, {rounds} turns")
    print(f"  median {statistics.median(ratios):.4f}, quartiles {low:.4f} to {high:.4f}")
    typical, alone = statistics.median(times["bare"]), checks_alone(checked, inputs)
    print(f"  the checks alone {1e6 * alone:.0f} µs, a forward {1e3 * typical:.1f} ms: {alone / typical:.3%}")


def checks_alone(model: nn.Module, inputs: tuple[torch.Tensor, ...], times: int = 2000) -> float:
    """Seconds for what the checks of one forward do, the fastest of five."""
    (enter,), (leave,) = model._forward_pre_hooks.values(), model._forward_hooks.values()
    tally = leave.tally  # pyright: ignore[reportFunctionMemberAccess]

    def check() -> None:
        for _ in range(times):
            enter(model, inputs, {})
            tally.require_hooks()
            for slot in range(len(tally.labels)):
                tally.count((slot,))
            leave(model, inputs, None)

    return min(seconds(check) for _ in range(5)) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="an eighth of the width")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report_forward(options.rounds)
    report_attaching(8 if options.small else 1)


if __name__ == "__main__":
    main()
