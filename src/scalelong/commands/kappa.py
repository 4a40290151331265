"""`scalelong kappa`: choose κ for your data and network."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidConfigError
from .options import DATA, add_quiet_option, constant_in, load_images, names_in, whole_number

if TYPE_CHECKING:
    from torch import Tensor, nn


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong kappa",
        description="Choose κ of constant scaling, κ_i = κ^(i-1), and say why.",
        epilog="examples: scalelong kappa --data fashion-mnist --skips 6; "
        "scalelong kappa --data cifar10 --model cifar10-s2 --method network",
    )
    schedules = names_in("noise", "Schedule")
    made.add_argument("--data", help=f"{DATA} (without it: the paper's uniform data)")
    made.add_argument("--skips", type=whole_number, help="number of long skips, N")
    made.add_argument("--model", help="a network by name, as `scalelong models` lists them")
    made.add_argument("--method", choices=("data", "network", "pilot"), default="data", help="how (default: data)")
    made.add_argument(
        "--schedule", choices=schedules, default=constant_in("noise", "SCHEDULE"), help="default: %(default)s"
    )
    made.add_argument("--steps", type=whole_number, default=400, help="training steps of a pilot run (default 400)")
    made.add_argument("--seeds", type=whole_number, default=2, help="seeds of a pilot (default 2)")
    made.add_argument("--json", action="store_true", help="print the choice as JSON, and nothing else")
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the choice to this file, as JSON")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> int:
    import torch

    from ..files import require_file_place, write_text
    from ..kappa import choose_kappa

    if options.out is not None:
        require_file_place(options.out)
    if options.skips is None and options.model is None:
        raise InvalidConfigError("say how many long skips there are (--skips N), or which network it is (--model NAME)")

    model = None if options.model is None else build_model(options.model)
    images = None if options.data is None else _fitting(options.data, model)
    torch.manual_seed(0)
    choice = choose_kappa(
        model,
        images,
        options.schedule,
        options.method,
        skips=options.skips,
        inputs=partial(_conditions, model),
        **({"steps": options.steps, "seeds": options.seeds} if options.method == "pilot" else {}),
    )
    if options.out is not None:
        write_text(options.out, choice.to_json())
    print(choice.to_json() if options.json else choice)
    return 0


def build_model(name: str) -> nn.Module:
    from ..models import UNET_PRESETS, UVIT_PRESETS, UViT, unet

    if name in UVIT_PRESETS:
        return UViT.preset(name)
    if name in UNET_PRESETS:
        return unet(name)
    raise InvalidConfigError(f"unknown network {name!r}; known: {', '.join([*UVIT_PRESETS, *UNET_PRESETS])}")


def _fitting(spec: str, model: nn.Module | None) -> Tensor:
    """Images in the size and number of channels that the model takes."""
    if model is None:
        return load_images(spec)
    config = getattr(model, "config", None)
    size = getattr(model, "image_size", None) or getattr(config, "sample_size", None)
    channels = getattr(model, "channels", None) or getattr(config, "in_channels", None)
    if channels not in (1, 3):
        raise InvalidConfigError(
            f"this network takes {channels} channels: latents, which --data cannot give. Use scalelong.choose_kappa"
        )
    return load_images(spec, size=size, channels=channels)


def _conditions(model: nn.Module | None, noisy: Tensor, steps: Tensor) -> tuple[Any, ...]:
    """The arguments of a preset: class-conditional ones get label 0."""
    import torch

    config = getattr(model, "config", None)
    classes = getattr(model, "classes", None) or getattr(config, "num_class_embeds", None)
    return (noisy, steps, torch.zeros(len(noisy), dtype=torch.long)) if classes else (noisy, steps)
