"""Score a run, or a folder of images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data import ImageData, load_data
from ..diffusion.images import requests
from ..diffusion.solvers import SampleSettings
from ..errors import InvalidSamplesError
from ..files import write_text
from ..runs.samples import NOTE, SampleFolder, fill_folder, folder_name, processes
from .agreement import agreement
from .features.base import load_extractor
from .judge import score_images
from .protocol import Scores
from .reference import reference_of

if TYPE_CHECKING:
    from ..runs.config import TrainConfig
    from ..runs.load import Run

SCORES = "scores.jsonl"


def reference_data(config: TrainConfig) -> ImageData:
    """The images that a run is trained on, held-out ones included, also if it is trained on their latents."""
    return load_data(config.data, size=config.images.size, channels=config.images.channels)


def evaluation_wishes(config: TrainConfig, data: ImageData, count: int) -> tuple[Sequence[str], str]:
    """What a conditional model is asked for, and a name for it: the classes in turn, or captions of the data."""
    if config.diffusion.condition == "class":
        return data.classes or (), "classes in turn"
    if config.diffusion.condition == "text":
        captions = data.annotations.captions or []
        return [captions[i * len(captions) // count] for i in range(count)], "captions of the data, evenly spread"
    return (), "none"


def score_run(
    run: Run,
    *,
    n: int = 1000,
    seed: int = 0,
    settings: SampleSettings | None = None,
    features: str = "classifier",
    feature_weights: str | Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> Scores:
    """Samples go into a folder of the run, so that an interrupted evaluation continues; scores into scores.jsonl."""
    settings = settings or SampleSettings()
    data = reference_data(run.config)
    say = say if processes().is_main_process else _silent
    extractor = load_extractor(features, data, feature_weights, say)
    reference = reference_of(data, extractor, say)
    wishes, conditions = evaluation_wishes(run.config, data, n)
    wanted = requests(n, seed, wishes)
    path = run.folder / "images" / f"eval-{folder_name(run, settings)}-n{n}-seed{seed}"
    folder = fill_folder(run, path, wanted, settings, batch_size, device)
    images = torch.stack(list(folder.read(wanted)))
    scores = score_images(
        images,
        data,
        extractor,
        reference,
        subject={"run": str(run.folder), "step": run.step, "seed": seed, "images": str(path)},
        sampler=settings.sampler,
        sampler_steps=settings.steps,
        guidance=settings.guidance,
        weights=run.weights,
        conditions=conditions,
    )
    asked_for = agreement(images, [request.wish for request in wanted], data, run.config.diffusion.condition, say)
    scores = replace(scores, agreement=asked_for)
    if processes().is_main_process:
        store(run.folder / SCORES, scores)
    return scores


def score_folder(
    path: str | Path,
    data: ImageData,
    *,
    n: int | None = None,
    features: str = "classifier",
    feature_weights: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> Scores:
    """Any folder of images, of samples of ours or from elsewhere; with `n`, exactly that many must be there."""
    path = Path(path)
    made_by: dict[str, Any] = {}
    if (path / NOTE).exists():
        note = SampleFolder(path).note()
        made_by = {
            "sampler": note["sampler"],
            "sampler_steps": note["steps"],
            "guidance": note["guidance"],
            "weights": note["weights"],
            "conditions": "as in its samples.json" if any(note["wishes"].values()) else "none",
        }
    images = _folder_images(path, data)
    if n is not None and len(images) < n:
        raise InvalidSamplesError(f"{n} images are needed and {path} holds {len(images)}")
    extractor = load_extractor(features, data, feature_weights, say)
    scores = score_images(
        images if n is None else images[:n],
        data,
        extractor,
        reference_of(data, extractor, say),
        subject={"folder": str(path)},
        **made_by,
    )
    store(path / SCORES, scores)
    return scores


def _folder_images(path: Path, data: ImageData) -> torch.Tensor:
    found = sorted(file for file in path.glob("*.png") if file.name != "grid.png") if (path / NOTE).exists() else None
    if found is not None:
        from ..runs.samples import read_png

        return torch.stack([read_png(file) for file in found]) if found else torch.empty(0, 0, 0, 0)
    # No resizing: images of another size are another set of images.
    images = load_data(str(path), channels=data.channels, max_broken=0)
    return images.fetch(range(len(images))).images


def _silent(_: str) -> None:
    """Of several processes, one speaks."""


def store(file: Path, scores: Scores) -> None:
    """One JSON object per line."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    write_text(file, before + json.dumps(scores.to_dict(), ensure_ascii=False) + "\n")


def stored_scores(folder: str | Path) -> list[Scores]:
    file = Path(folder) / SCORES
    if not file.exists():
        return []
    return [Scores.from_dict(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line]
