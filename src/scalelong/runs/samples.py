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
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import open_image, to_float
from ..diffusion import Request, SampleSettings, as_picture, image_grid
from ..errors import CannotReadError, InvalidConfigError, SampleFolderError
from ..files import exclusive, in_words, make_folder, read_bytes, read_json, remove_leftovers, write_bytes, write_text
from ..optional import needs
from .load import Run
from .processes import check_launcher, on_main

logger = logging.getLogger(__name__)

# Many images as one

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
            return before["wishes"] | _prompts(wanted)
        try:
            used = self.path.exists() and any(entry for entry in self.path.iterdir() if not entry.name.startswith("."))
        except OSError as error:
            raise SampleFolderError(
                f"{self.path} cannot hold samples: {in_words(error)}; choose a folder with --out"
            ) from error
        if used:
            raise SampleFolderError(f"{self.path} is not empty and holds no samples; choose another folder with --out")
        return _prompts(wanted)

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
            raise SampleFolderError(f"{error}, or choose another folder with --out") from error
        known = {"weights": str, "sampler": str, "steps": int, "guidance": float | int, "wishes": dict}
        if not isinstance(note, dict) or not all(isinstance(note.get(name), kind) for name, kind in known.items()):
            raise SampleFolderError(
                f"{self.path / NOTE} does not say how the samples were made ({', '.join(known)}); choose another "
                f"folder with --out, or remove this one to make the samples anew"
            )
        return note

    def missing(self, wanted: Sequence[Request]) -> list[Request]:
        """Those whose file is not there. Files are written whole or not at all."""
        return [request for request in wanted if not self.file(request).exists()]

    def write(self, request: Request, image: Tensor) -> None:
        require_png(image[None])
        save_png(self.file(request), image)

    def file(self, request: Request) -> Path:
        return self.path / f"{request.seed:012d}.png"

    def write_grid(self, wanted: Sequence[Request], columns: int | None) -> Path:
        shown = self.stack(wanted)
        save_png(self.path / "grid.png", image_grid(to_float(shown), columns))
        return self.path / "grid.png"

    def stack(self, wanted: Sequence[Request]) -> Tensor:
        """The images as one tensor, uint8 (B, C, H, W)."""
        return stack_images([self.file(request) for request in wanted])

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


def require_png(images: Tensor) -> None:
    """(B, C, H, W) with as many channels as a PNG file can have."""
    if images.shape[1] not in (1, 3, 4):
        raise SampleFolderError(f"images of {images.shape[1]} channels cannot be PNG files")


def stack_images(files: Sequence[Path]) -> Tensor:
    """Images of one size as one tensor, uint8 (B, C, H, W); others are refused by name."""
    images = [read_png(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise SampleFolderError(
                f"{file} is {tuple(image.shape)} and {files[0]} is {tuple(images[0].shape)} (channels, height, width); "
                f"remove the one that is not a sample of this run, and the same command makes it again"
            )
    return torch.stack(images)


def read_png(path: Path) -> Tensor:
    import numpy as np

    try:
        with open_image(read_bytes(path, MOST_IMAGE)) as image:
            array = np.array(image)
    # Pillow meets damaged files with almost any exception.
    except Exception as error:
        raise SampleFolderError(
            f"{path} cannot be read as an image ({in_words(error)}); remove it, and the same command makes it again"
        ) from error
    tensor = torch.from_numpy(array)
    return tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()


def _prompts(wanted: Sequence[Request]) -> dict[str, str | None]:
    return {str(request.seed): request.prompt for request in wanted}


# Filling it, by one process or several

GRID = 100
"""Most images in the grid."""


def process_state() -> Any:
    """What accelerate knows about the processes that torchrun or `accelerate launch` started: often just this one."""
    check_launcher()
    return needs("accelerate", "train", "sampling").PartialState(cpu=not torch.accelerator.is_available())


def folder_name(run: Run, settings: SampleSettings) -> str:
    guidance = f"-guidance{settings.guidance:g}" if settings.guidance != 1 else ""
    precision = f"-{settings.precision}" if settings.precision != "no" else ""
    tuned = f"-tuned-{hashlib.sha256(run.config.scaling.encode()).hexdigest()[:6]}" if run.is_rescaled else ""
    weights = run.weights.replace(":", "").replace("%", "pct")  # of ema:10%; a colon is not for file names
    return f"step{run.step}-{weights}-{settings.sampler}{settings.steps}{guidance}{precision}{tuned}"


UNSAID = (("precision", "no"),)


def describe_samples(run: Run, settings: SampleSettings) -> dict[str, Any]:
    """All that decides the images but their seeds and prompts."""
    return {
        "weights": run.weights,
        "step": run.step,
        "weights_sha256": run.weights_sha256,
        # Folders that were made before there were these do not name them.
        **{name: value for name, value in asdict(settings).items() if (name, value) not in UNSAID},
        **({"scaling": run.config.scaling} if run.is_rescaled else {}),
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
    require_device(device)
    folder, state, about = SampleFolder(path), process_state(), describe_samples(run, settings)
    on_main(state, lambda: folder.check(about, wanted))
    if state.is_main_process:
        kind = "raw, not averaged" if run.weights == "raw" else run.weights.replace("ema", "EMA")
        log(f"weights: {kind}, step {run.step} of {run.folder}")
    mine = folder.missing(wanted)[state.process_index :: state.num_processes]
    made = run.maker.generate(mine, settings, batch_size=batch_size, device=device or str(state.device))
    # A prompt or setting that is refused shows with the first images, and must leave no folder. No process looks for
    # what is missing while another one writes already: opening it waits for all.
    first = list(islice(made, 1))
    if first:
        require_png(first[0][1])
    on_main(state, lambda: folder.open(about, wanted))
    state.wait_for_everyone()
    done = 0
    for part, images in chain(first, made):
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


def require_device(device: str | None) -> None:
    """Refuse a device that is not there before any work is done."""
    try:
        if device is None or torch.empty(1, device=device).device.type != "meta":
            return
    # torch has no one error for this: it depends on the device, and on how torch was built.
    except (RuntimeError, AssertionError, ValueError, NotImplementedError):
        pass
    raise InvalidConfigError(
        f"--device {str(device)[:40]!r} cannot be used on this machine, or by this build of torch: choose "
        f"cpu, or leave it out"
    )


def _columns(run: Run, count: int) -> int:
    """One class per column, if that makes a readable image."""
    classes = len(run.shape.classes or ()) if run.config.diffusion.condition == "class" else 0
    return classes if 1 < classes <= 16 and count >= classes else math.ceil(math.sqrt(count))
