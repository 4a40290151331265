"""Many images into a folder, by one process or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..diffusion.images import Request
from ..diffusion.solvers import SampleSettings
from ..errors import MissingDependencyError
from ..files import file_digest
from ..training.checkpoint import EMA, MODEL, step_folder
from ..training.processes import on_main
from .folder import SampleFolder

if TYPE_CHECKING:
    from ..training import Run

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
