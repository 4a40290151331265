"""Samples of a run: a folder with one file per image, a note that says how they were made, and a grid.

images/step.../000000000000.png ...   named by their seeds
               samples.json           weights, sampler, steps, guidance, seeds, wishes (the prompts by seed)
               grid.png               the first images at once

The folder can be continued: what is there is not made again, and what was made in a different way is refused.
"""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import open_image
from ..diffusion import Request, SampleSettings, as_picture, prompted_grid
from ..errors import CannotReadError, RunFolderError
from ..files import (
    below,
    exclusive,
    in_words,
    make_folder,
    read_bytes,
    read_json,
    remove_leftovers,
    write_bytes,
    write_text,
)
from .load import Run
from .processes import on_main, process_state, require_device

logger = logging.getLogger(__name__)

MOST_IMAGE = 512 * 1024**2
"""Bytes of the largest sample that is read."""


def save_png(path: Path, image: Tensor) -> None:
    content = io.BytesIO()
    as_picture(image).save(content, format="PNG")
    write_bytes(path, content.getvalue(), synced=False)


# The folder

NOTE = "samples.json"


class SampleFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def check(self, about: dict[str, Any], wanted: Sequence[Request]) -> dict[str, str | None]:
        """Raise unless the folder is new, empty, or holds samples made in the same way: the prompts of all by seed."""
        prompts = {str(request.seed): request.prompt for request in wanted}
        if (self.path / NOTE).exists():
            before = self.note()
            kept = {key: value for key, value in before.items() if key != "wishes"}
            if changed := [key for key in {**kept, **about} if kept.get(key) != about.get(key)]:
                changes = "\n".join(f"  {key}: {kept.get(key)!r} -> {about.get(key)!r}" for key in changed)
                raise RunFolderError(
                    f"{self.path} holds samples that were made in a different way:\n{changes}\n"
                    f"Give the same values to continue, or another folder with `out`"
                )
            for request in wanted:
                prompt = before["wishes"].get(str(request.seed), request.prompt)
                if prompt != request.prompt:
                    shown = f"{self.file(request)} shows {prompt!r}, and {request.prompt!r} is asked for now"
                    raise RunFolderError(f"{shown}; choose another folder with `out`")
            return before["wishes"] | prompts
        if any(name for name in below(self.path).names() if not name.startswith(".")):
            raise RunFolderError(f"{self.path} is not empty and holds no samples; choose another folder with `out`")
        return prompts

    def open(self, about: dict[str, Any], wanted: Sequence[Request]) -> None:
        """Make the folder, or check that it holds samples made in the same way. Their number may grow."""
        make_folder(self.path)
        remove_leftovers(self.path)
        with exclusive(self.path):  # another process may add its own seeds
            note = {**about, "wishes": self.check(about, wanted)}
            write_text(self.path / NOTE, json.dumps(note, indent=1, ensure_ascii=False))

    def note(self) -> dict[str, Any]:
        """How the samples were made, and the prompt of each."""
        try:
            note = read_json(self.path / NOTE)
        except CannotReadError as error:
            raise RunFolderError(f"{error}, or choose another folder with `out`") from error
        known = {"weights": str, "sampler": str, "steps": int, "guidance": float | int, "wishes": dict}
        if not isinstance(note, dict) or not all(isinstance(note.get(name), kind) for name, kind in known.items()):
            said = f"{self.path / NOTE} does not say how the samples were made ({', '.join(known)})"
            raise RunFolderError(f"{said}; choose another folder with `out`, or remove this one")
        return note

    def missing(self, wanted: Sequence[Request]) -> list[Request]:
        """Those whose file is not there. Files are written whole or not at all."""
        return [request for request in wanted if not self.file(request).exists()]

    def file(self, request: Request) -> Path:
        return self.path / f"{request.seed:012d}.png"

    def stack(self, wanted: Sequence[Request]) -> Tensor:
        """The images as one tensor, uint8 (B, C, H, W)."""
        return stack_images([self.file(request) for request in wanted])


def stack_images(files: Sequence[Path]) -> Tensor:
    """Images of one size as one tensor, uint8 (B, C, H, W); others are refused by name."""
    images = [read_png(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            sizes = (
                f"{file} is {tuple(image.shape)} and {files[0]} is {tuple(images[0].shape)} (channels, height, width)"
            )
            raise RunFolderError(f"{sizes}; remove the one that is no sample of this run: it is made again")
    return torch.stack(images)


def read_png(path: Path) -> Tensor:
    import numpy as np

    try:
        with open_image(read_bytes(path, MOST_IMAGE)) as image:
            array = np.array(image)
    # Pillow meets damaged files with almost any exception.
    except Exception as error:
        raise RunFolderError(
            f"{path} cannot be read as an image ({in_words(error)}); remove it, and the same command makes it again"
        ) from error
    tensor = torch.from_numpy(array)
    return tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()


# Filling it, by one process or several

GRID = 100
"""Most images in the grid."""


def folder_name(run: Run, settings: SampleSettings) -> str:
    guidance = f"-guidance{settings.guidance:g}" if settings.guidance != 1 else ""
    precision = f"-{settings.precision}" if settings.precision != "no" else ""
    tuned = f"-tuned-{hashlib.sha256(run.config.scaling.encode()).hexdigest()[:6]}" if run.is_rescaled else ""
    weights = run.weights.replace(":", "").replace("%", "pct")  # of ema:10%; a colon is not for file names
    return f"step{run.step}-{weights}-{settings.sampler}{settings.steps}{guidance}{precision}{tuned}"


def describe_samples(run: Run, settings: SampleSettings) -> dict[str, Any]:
    """All that decides the images but their seeds and prompts."""
    return {
        "weights": run.weights,
        "step": run.step,
        "weights_sha256": run.weights_sha256,
        **asdict(settings),
        **({"scaling": run.config.scaling} if run.is_rescaled else {}),
    }


def fill_folder(
    run: Run,
    path: Path,
    wanted: Sequence[Request],
    settings: SampleSettings,
    batch_size: int = 64,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SampleFolder:
    """Fill a folder with the images that are not there yet; several processes share the work, the main one logs.

    `progress` is called with (done, total), the images of this process.
    """
    require_device(device)
    folder, state, about = SampleFolder(path), process_state(), describe_samples(run, settings)
    on_main(state, lambda: folder.check(about, wanted))
    if state.is_main_process:
        kind = "raw, not averaged" if run.weights == "raw" else run.weights.replace("ema", "EMA")
        logger.info(f"weights: {kind}, step {run.step} of {run.folder}")
    mine = folder.missing(wanted)[state.process_index :: state.num_processes]
    made = run.maker.generate(mine, settings, batch_size=batch_size, device=device or str(state.device))
    # A prompt or setting that is refused shows with the first images, and must leave no folder. No process looks for
    # what is missing while another one writes already: opening it waits for all.
    first = list(islice(made, 1))
    if first and first[0][1].shape[1] not in (1, 3, 4):
        raise RunFolderError(f"images of {first[0][1].shape[1]} channels cannot be PNG files")
    on_main(state, lambda: folder.open(about, wanted))
    state.wait_for_everyone()
    done = 0
    for part, images in chain(first, made):
        for request, image in zip(part, images, strict=True):
            save_png(folder.file(request), image)
        done += len(part)
        if progress is not None:
            progress(done, len(mine))
    state.wait_for_everyone()
    if state.is_main_process:
        shown = list(wanted[:GRID])
        grid = prompted_grid(folder.stack(shown), [request.prompt for request in shown])
        save_png(path / "grid.png", grid)
        logger.info(f"{len(wanted)} images in {path}; the first {len(shown)} at once: {path / 'grid.png'}")
    return folder
