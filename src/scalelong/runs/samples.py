"""Many images as one."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data import to_float
from ..diffusion.images import Request
from ..diffusion.solvers import SampleSettings
from ..errors import MissingDependencyError, ScaleLongError
from ..files import file_digest, write_bytes, write_text
from .checkpoint import EMA, MODEL, step_folder
from .processes import on_main

if TYPE_CHECKING:
    from .load import Run



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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "train", "writing sample grids") from error
    array = image.permute(1, 2, 0).contiguous().numpy()
    array = array if array.shape[2] in (3, 4) else array[:, :, 0]
    content = io.BytesIO()
    Image.fromarray(array).save(content, format="PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.getvalue())


# A folder of samples: one file per image, and a note that says how they were made. It can be continued.
#
# samples/000000000000.png ...   named by their seeds
#         samples.json           weights, sampler, steps, guidance, seeds, wishes
#         grid.png               the first images at once

NOTE = "samples.json"


class SampleFolderError(ScaleLongError, ValueError):
    """The folder holds other samples, or something else."""


class SampleFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def open(self, about: dict[str, Any], wanted: Sequence[Request]) -> None:
        """Make the folder, or check that it holds samples made in the same way. Their number may grow."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SampleFolderError(f"the folder {self.path} cannot be made: {error}") from error
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
                    f"{self.path} holds samples that were made in another way:\n{changes}\n"
                    f"Give the same values to continue, or another folder with --out"
                )
            self._require_same_wishes(before["wishes"], wanted)
            wishes = before["wishes"] | _wishes(wanted)
        elif any(entry for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise SampleFolderError(f"{self.path} is not empty and holds no samples; choose another folder with --out")
        else:
            wishes = _wishes(wanted)
        write_text(self.path / NOTE, json.dumps({**about, "wishes": wishes}, indent=1, ensure_ascii=False))

    def note(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / NOTE).read_text())
        except (OSError, ValueError) as error:
            raise SampleFolderError(f"{self.path / NOTE} cannot be read: {error}") from error

    def missing(self, wanted: Sequence[Request]) -> list[Request]:
        """Those whose file is not there. Files are written whole or not at all."""
        return [request for request in wanted if not self.file(request).exists()]

    def write(self, request: Request, image: Tensor) -> None:
        if image.shape[0] in (1, 3, 4):
            save_png(self.file(request), image)
        else:
            raise SampleFolderError(f"images of {image.shape[0]} channels cannot be PNG files")

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

    def _require_same_wishes(self, before: dict[str, str | None], wanted: Sequence[Request]) -> None:
        for request in wanted:
            wish = before.get(str(request.seed), request.wish)
            if wish != request.wish:
                raise SampleFolderError(
                    f"{self.file(request)} shows {wish!r}, and {request.wish!r} is asked for now; choose another "
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


def _wishes(wanted: Sequence[Request]) -> dict[str, str | None]:
    return {str(request.seed): request.wish for request in wanted}


# Many images into a folder, by one process or several.

GRID = 100
"""At most so many images are shown in the grid."""


def processes() -> Any:
    """What accelerate knows about the processes that torchrun or `accelerate launch` started: often just this one."""
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "train", "sampling") from error
    return PartialState(cpu=not torch.accelerator.is_available())


def folder_name(run: Run, settings: SampleSettings) -> str:
    guidance = f"-guidance{settings.guidance:g}" if settings.guidance != 1 else ""
    return f"step{run.step}-{run.weights}-{settings.sampler}{settings.steps}{guidance}"


def describe(run: Run, settings: SampleSettings) -> dict[str, Any]:
    """All that decides the images but their seeds and wishes."""
    weights = step_folder(run.folder / "checkpoints", run.step) / (EMA if run.weights == "ema" else MODEL)
    return {
        "weights": run.weights,
        "step": run.step,
        "weights_sha256": file_digest(weights),
        "sampler": settings.sampler,
        "steps": settings.steps,
        "guidance": settings.guidance,
    }


def fill_folder(
    run: Run,
    path: Path,
    wanted: Sequence[Request],
    settings: SampleSettings,
    batch_size: int = 64,
    device: str | None = None,
) -> SampleFolder:
    """Fill a folder with the images that are not there yet; several processes share the work."""
    folder, state = SampleFolder(path), processes()
    on_main(state, lambda: folder.open(describe(run, settings), wanted))
    if state.is_main_process:
        print(f"weights: {'EMA' if run.weights == 'ema' else 'raw, not averaged'}, step {run.step} of {run.folder}")
    mine = folder.missing(wanted)[state.process_index :: state.num_processes]
    # No process looks for what is missing while another one writes already.
    state.wait_for_everyone()
    done = 0
    for part, images in run.maker.generate(mine, settings, batch_size=batch_size, device=device or str(state.device)):
        for request, image in zip(part, images, strict=True):
            folder.write(request, image)
        done += len(part)
        if state.is_main_process:
            print(f"{done}/{len(mine)} images" + (" of this process" if state.num_processes > 1 else ""), flush=True)
    state.wait_for_everyone()
    if state.is_main_process:
        shown = list(wanted[:GRID])
        grid = folder.write_grid(shown, columns=_columns(run, len(shown)))
        print(f"{len(wanted)} images in {path}; the first {len(shown)} at once: {grid}")
    return folder


def _columns(run: Run, count: int) -> int:
    """One class per column, if that makes a readable picture."""
    classes = len(run.shape.classes or ()) if run.config.diffusion.condition == "class" else 0
    return classes if 1 < classes <= 16 and count >= classes else math.ceil(math.sqrt(count))
