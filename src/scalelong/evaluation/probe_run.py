"""A run from its folder to its probe: which images, which weights, which null condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..console import silent
from ..data import ImageData, load_data
from ..errors import ConditionError, DataError, InvalidConfigError, LabelError
from ..runs.model import build_model, load_run_data
from .probe import MOST_IMAGES, Advance, linear_probe
from .probe_result import LinearProbe

if TYPE_CHECKING:
    from ..runs.load import Run

STALE = 0.05
"""Share of the random start in the averaged weights that is worth a remark."""


def probe_run(
    run: Run,
    *,
    data: str | None = None,
    split: str | None = None,
    layers: Sequence[str] | None = None,
    times: Sequence[float] | None = None,
    protocol: str = "ridge",
    pool: str = "mean",
    draws: int = 1,
    images: int | None = MOST_IMAGES,
    augment: bool = True,
    seed: int = 0,
    batch_size: int = 256,
    device: Any = None,
    progress: Advance | None = None,
    say: Callable[[str], None] = print,
) -> LinearProbe:
    """Fit on the images that the run was trained on, choose and test on those that it held out.

    split: choose and test on another part of the data set, such as "test". `data`: other images for all three parts.
    """
    null = run.conditions.null()
    if null is None and run.config.diffusion.condition != "none":
        raise ConditionError(
            f"{run.folder} was trained with --condition {run.config.diffusion.condition} and without a null condition "
            f"(--condition-dropout 0): a probe would have to tell it the answer. Train with dropout, such as 0.1"
        )
    fitted, held_out = _images(run, data, split, say)
    remarks = _remarks(run)
    about = {
        "run": str(run.folder),
        "step": run.step,
        "weights": run.weights,
        "scaling": run.config.scaling,
        **({"remarks": remarks} if remarks else {}),
    }
    return linear_probe(
        run.model,
        fitted,
        held_out=held_out,
        times=times,
        schedule=run.process,
        condition=null,
        protocol=protocol,
        pool=pool,
        draws=draws,
        layers=layers,
        untrained=lambda: build_model(run.config, run.shape, adapters=False),
        images=images,
        augment=augment,
        seed=seed,
        batch_size=batch_size,
        device=device,
        about=about,
        progress=progress,
    )


def _images(
    run: Run, data: str | None, split: str | None, say: Callable[[str], None]
) -> tuple[ImageData, ImageData | None]:
    config = run.config
    size = config.images.size or (run.shape.height, run.shape.width)
    options: dict[str, Any] = {"size": size, "channels": config.images.channels or run.shape.channels}
    if (data or split) and config.images.autoencoder is not None:
        raise InvalidConfigError("--data and --split are for runs on pixels, and this one was trained on latents")
    if data is not None:
        return load_data(data, split=split or "train", **options), None
    found = load_run_data(config, silent)
    if found.images.classes is None:
        raise LabelError(
            f"a probe needs labels, and {config.data!r} has none: give images of the same kind in a folder per class "
            f"(--data FOLDER)"
        )
    held_out = found.held_out
    if split is None and held_out is not None:
        return found.train, held_out
    try:
        if config.images.autoencoder is None:
            held_out = load_data(config.data, split=split or "test", **options)
    except DataError as error:
        if split is not None:
            raise
        raise InvalidConfigError(
            f"{run.folder} held no images out (--held-out 0), and {config.data!r} has no part 'test': there is nothing "
            f"to test on that the network was not trained on. Give --data, or train with --held-out"
        ) from error
    if held_out is None:
        raise InvalidConfigError(f"{run.folder} held no images out, and is trained on latents: train with --held-out")
    if split is None:
        say(f"{run.folder} held no images out: the part 'test' of {config.data} is chosen and tested on")
    return found.train, held_out


def _remarks(run: Run) -> list[str]:
    optimizer = run.config.optimizer
    left = optimizer.ema_rate**run.step
    if run.weights == "ema" and not optimizer.ema_warmup and optimizer.ema_length is None and left > STALE:
        return [
            f"{left:.0%} of the averaged weights are still the random start (ema_rate {optimizer.ema_rate:g}, no "
            f"ema_warmup): --weights raw shows what was learned"
        ]
    return []
