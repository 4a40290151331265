"""Samples of a run: a folder with one file per image, a note that says how they were made, and a grid.

images/step.../000000000000.png ...   named by their seeds
               samples.json           weights, sampler, steps, guidance, seeds, wishes (the prompts by seed)
               grid.png               the first images at once

The folder can be continued: what is there is not made again, and what was made in a different way is refused.
"""

import io
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import to_float
from ..diffusion.images import Request
from ..diffusion.solvers import SampleSettings
from ..errors import SampleFolderError
from ..files import file_digest, write_bytes, write_text
from ..optional import needs
from .checkpoint import EMA, MODEL, step_folder
from .load import Run
from .processes import on_main

logger = logging.getLogger(__name__)

# Many images as one

GAP = 2
SMALLEST_SIDE = 32
"""Smaller images are enlarged by a whole factor: thumbnails of 8 pixels cannot be judged."""


def image_grid(images: Tensor, columns: int | None = None) -> Tensor:
    """(B, C, H, W) in [-1, 1] to one uint8 image (C, H', W')."""
    pixels = ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    enlarge = max(1, math.ceil(SMALLEST_SIDE / min(pixels.shape[2:])))
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    count, channels, height, width = pixels.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = torch.full((channels, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP), 255, dtype=torch.uint8)
    for i, image in enumerate(pixels):
        top, left = GAP + (i // columns) * (height + GAP), GAP + (i % columns) * (width + GAP)
        grid[:, top : top + height, left : left + width] = image
    return grid


def save_png(path: Path, image: Tensor) -> None:
    """Write a uint8 image (C, H, W) with 1, 3 or 4 channels; of others, the first is shown."""
    pillow = needs("PIL.Image", "train", "writing sample grids")
    array = image.permute(1, 2, 0).contiguous().numpy()
    array = array if array.shape[2] in (3, 4) else array[:, :, 0]
    content = io.BytesIO()
    pillow.fromarray(array).save(content, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.getvalue())


# The folder

NOTE = "samples.json"


class SampleFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def open(self, about: dict[str, Any], wanted: Sequence[Request]) -> None:
        """Make the folder, or check that it holds samples made in the same way. Their number may grow."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SampleFolderError(f"the folder {self.path} cannot be created: {error}") from error
        if (self.path / NOTE).exists():
            before = self.note()
            kept = {key: value for key, value in before.items() if key != "wishes"}
            if kept != about:
                changes = "\n".join(
                    f"  {key}: {kept.get(key)!r} -> {about.get(key)!r}"
                    for key in {**kept, **about}
                    if kept.get(key) != about.get(key)
                )
                raise SampleFolderError(
                    f"{self.path} holds samples that were made in a different way:\n{changes}\n"
                    f"Give the same values to continue, or another folder with --out"
                )
            self._require_same_prompts(before["wishes"], wanted)
            prompts = before["wishes"] | _prompts(wanted)
        elif any(entry for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise SampleFolderError(f"{self.path} is not empty and holds no samples; choose another folder with --out")
        else:
            prompts = _prompts(wanted)
        write_text(self.path / NOTE, json.dumps({**about, "wishes": prompts}, indent=1, ensure_ascii=False))

    def note(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / NOTE).read_text())
        except (OSError, ValueError) as error:
            raise SampleFolderError(f"{self.path / NOTE} cannot be read: {error}") from error

    def missing(self, wanted: Sequence[Request]) -> list[Request]:
        """Those whose file is not there. Files are written whole or not at all."""
        return [request for request in wanted if not self.file(request).exists()]

    def write(self, request: Request, image: Tensor) -> None:
        if image.shape[0] not in (1, 3, 4):
            raise SampleFolderError(f"images of {image.shape[0]} channels cannot be PNG files")
        save_png(self.file(request), image)

    def file(self, request: Request) -> Path:
        return self.path / f"{request.seed:012d}.png"

    def write_grid(self, wanted: Sequence[Request], columns: int | None) -> Path:
        shown = torch.stack(list(self.read(wanted)))
        save_png(self.path / "grid.png", image_grid(to_float(shown), columns))
        return self.path / "grid.png"

    def read(self, wanted: Sequence[Request]) -> Iterator[Tensor]:
        """The images, uint8 (C, H, W)."""
        for request in wanted:
            yield read_png(self.file(request))

    def _require_same_prompts(self, before: dict[str, str | None], wanted: Sequence[Request]) -> None:
        for request in wanted:
            prompt = before.get(str(request.seed), request.prompt)
            if prompt != request.prompt:
                raise SampleFolderError(
                    f"{self.file(request)} shows {prompt!r}, and {request.prompt!r} is asked for now; choose another "
                    f"folder with --out"
                )


def read_png(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            array = np.array(image)
    except OSError as error:
        raise SampleFolderError(f"{path} cannot be read as an image: {error}") from error
    tensor = torch.from_numpy(array)
    return tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()


def _prompts(wanted: Sequence[Request]) -> dict[str, str | None]:
    return {str(request.seed): request.prompt for request in wanted}


# Filling it, by one process or several

GRID = 100
"""Most images in the grid."""


def processes() -> Any:
    """What accelerate knows about the processes that torchrun or `accelerate launch` started: often just this one."""
    return needs("accelerate", "train", "sampling").PartialState(cpu=not torch.accelerator.is_available())


def folder_name(run: Run, settings: SampleSettings) -> str:
    guidance = f"-guidance{settings.guidance:g}" if settings.guidance != 1 else ""
    return f"step{run.step}-{run.weights}-{settings.sampler}{settings.steps}{guidance}"


def describe_samples(run: Run, settings: SampleSettings) -> dict[str, Any]:
    """All that decides the images but their seeds and prompts."""
    weights = step_folder(run.folder / "checkpoints", run.step) / (EMA if run.weights == "ema" else MODEL)
    return {
        "weights": run.weights,
        "step": run.step,
        "weights_sha256": file_digest(weights),
        **asdict(settings),
    }


def fill_folder(
    run: Run,
    path: Path,
    wanted: Sequence[Request],
    settings: SampleSettings,
    batch_size: int = 64,
    device: str | None = None,
    log: Callable[[str], None] = logger.info,
    progress: Callable[[int, int], None] | None = None,
) -> SampleFolder:
    """Fill a folder with the images that are not there yet; several processes share the work, the main one logs.

    `progress` is called with (done, total), the images of this process.
    """
    folder, state = SampleFolder(path), processes()
    on_main(state, lambda: folder.open(describe_samples(run, settings), wanted))
    if state.is_main_process:
        log(f"weights: {'EMA' if run.weights == 'ema' else 'raw, not averaged'}, step {run.step} of {run.folder}")
    mine = folder.missing(wanted)[state.process_index :: state.num_processes]
    # No process looks for what is missing while another one writes already.
    state.wait_for_everyone()
    done = 0
    for part, images in run.maker.generate(mine, settings, batch_size=batch_size, device=device or str(state.device)):
        for request, image in zip(part, images, strict=True):
            folder.write(request, image)
        done += len(part)
        if progress is not None:
            progress(done, len(mine))
    state.wait_for_everyone()
    if state.is_main_process:
        shown = list(wanted[:GRID])
        grid = folder.write_grid(shown, columns=_columns(run, len(shown)))
        log(f"{len(wanted)} images in {path}; the first {len(shown)} at once: {grid}")
    return folder


def _columns(run: Run, count: int) -> int:
    """One class per column, if that makes a readable image."""
    classes = len(run.shape.classes or ()) if run.config.diffusion.condition == "class" else 0
    return classes if 1 < classes <= 16 and count >= classes else math.ceil(math.sqrt(count))
