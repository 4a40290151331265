"""Readers of the library that no command calls, as commands: `@plan plan.json`.

They read files that users exchange: plans, scalings, ranges, folders of weights. A ScaleLongError is a named error, as
on the command line; any other is a traceback.
"""

import sys
from collections.abc import Callable
from typing import Any

SMALL = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "block_out_channels": (8, 8)}
SMALL |= {"norm_num_groups": 4, "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


def unet() -> Any:
    from diffusers.models.unets.unet_2d import UNet2DModel

    return UNet2DModel(**SMALL)


def inputs() -> Any:
    import torch

    return torch.zeros(1, 1, 8, 8), torch.tensor([3])


def plan(path: str) -> None:
    import scalelong as sl

    sl.scale_skips_(unet(), "cs", inputs(), plan=sl.SkipPlan.load(path))


def scaling(path: str) -> None:
    import scalelong as sl

    model = sl.load_scaling_(unet(), path)
    model(*inputs())


def method(path: str) -> None:
    import scalelong as sl
    from scalelong.files import read_text

    sl.Scaling.from_json(read_text(path))


def rates(path: str) -> None:
    import scalelong as sl
    from scalelong.files import read_text

    found = sl.RateRange.from_json(read_text(path))
    print(found)


def pretrained(path: str) -> None:
    import scalelong as sl

    sl.from_pretrained(path)


def official(path: str) -> None:
    import scalelong as sl

    sl.UViT.from_official(
        path, scaling="none", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, in_chans=1
    )


def scores(path: str) -> None:
    from scalelong.evaluation import stored_scores

    for found in stored_scores(path):
        print(found)


CALLS: dict[str, Callable[[str], None]] = {
    call.__name__: call for call in (plan, scaling, method, rates, pretrained, official, scores)
}


def call(name: str, words: list[str]) -> int:
    from scalelong.errors import ScaleLongError

    try:
        CALLS[name](words[0])
    except ScaleLongError as error:
        print(f"scalelong @{name}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
