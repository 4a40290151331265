"""From images to scores: of a run (`score_run`), of a folder (`score_folder`), and during training (`Scorer`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..console import Progress
from ..data import ImageData, load_data, split_rows, to_float
from ..diffusion import ImageMaker, SampleSettings, image_grid, requests
from ..errors import EvaluationError
from ..files import append_json_line, read_json_lines, sync
from ..runs import NOTE, SampleFolder, fill_folder, folder_name, process_state, save_png, stack_images
from .anchors import anchors_of, resemblance, trusted_features
from .features import FeatureExtractor, Reference, features_of
from .scores import NEIGHBOURS, RADIUS_QUANTILE, Evidence, Protocol, Scores, near_copies, nearest

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..runs import Run


# From images to scores.


def score_images(
    images: Tensor,
    data: ImageData,
    extractor: FeatureExtractor,
    reference: Reference,
    *,
    subject: dict[str, Any],
    **made_by: Any,
) -> Scores:
    """`made_by` is what is known of how the images were made: the fields of Protocol from `sampler` on."""
    shape = (data.channels, data.height, data.width)
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != shape:
        raise EvaluationError(
            f"samples must be uint8 (N, {', '.join(map(str, shape))}), got {images.dtype} {tuple(images.shape)}"
        )
    if len(images) <= NEIGHBOURS:
        raise EvaluationError(f"at least {NEIGHBOURS + 1} images are needed, got {len(images)}")
    features = features_of(extractor, images)
    count = min(len(features), len(reference.features))
    real = reference.features[:: max(1, len(reference.features) // count)][:count]
    protocol = Protocol(
        features=extractor.name,
        features_sha256=extractor.digest,
        data=data.name,
        data_sha256=reference.data,
        reference_images=reference.moments.n,
        images=len(images),
        neighbours=NEIGHBOURS,
        radius_quantile=RADIUS_QUANTILE,
        **made_by,
    )
    anchors = anchors_of(data, extractor, reference, len(images))
    rows = torch.arange(len(reference.features)) * reference.stride
    same = resemblance(images, data, rows)
    evidence = Evidence(features, reference.moments, real, reference.features, anchors, same)
    shown = data.fetch(rows[:: max(1, len(rows) // MOST_FOR_DETAIL)]).images
    detail = _fine_detail(images[:MOST_FOR_DETAIL]) / max(_fine_detail(shown), 1e-12)
    return Scores.of(evidence, protocol, {**subject, "detail": detail})


MOST_FOR_DETAIL = 500


def _fine_detail(images: Tensor) -> float:
    """The mean difference between a pixel and the mean of its neighbours: small in blurred images, large in noise."""
    x = images.float()
    around = (x[:, :, :-2, 1:-1] + x[:, :, 2:, 1:-1] + x[:, :, 1:-1, :-2] + x[:, :, 1:-1, 2:]) / 4
    return float((x[:, :, 1:-1, 1:-1] - around).abs().mean()) if around.numel() else 0.0


# Does it copy its training images? The samples that are nearest to one, next to it

PAIRS, ACROSS = 16, 8
LEAST_HELD_OUT = 20
"""Fewer held-out images are no baseline."""


def copies_of(
    images: Tensor, features: Tensor, data: ImageData, reference: Reference, held_out: int, seed: int, picture: Path
) -> dict[str, Any]:
    """The share of near-copies of training images among the samples and among held-out images, and a picture.

    In the picture, each row of samples has below it the row of their nearest training images; nearest pairs first.
    """
    rows = torch.arange(len(reference.features)) * reference.stride
    apart = torch.isin(rows, split_rows(len(data), held_out, seed)[1])
    training, others = reference.features[~apart], reference.features[apart]
    distances, places = nearest(features, training)

    def copied(found: Tensor, shown: Tensor) -> Tensor:
        return near_copies(training, found, resemblance(shown, data, rows[~apart])).double().mean()

    order = distances.argsort(stable=True)[:PAIRS]
    originals = data.fetch(rows[~apart][places[order]]).images
    columns = min(ACROSS, len(order))
    shown = [
        part
        for start in range(0, len(order), columns)
        for part in (images[order[start : start + columns]], originals[start : start + columns])
        if len(part) == columns  # the grid has no holes
    ]
    save_png(picture, image_grid(to_float(torch.cat(shown)), columns=columns))
    enough = len(others) >= LEAST_HELD_OUT
    return {
        "samples": float(copied(features, images)),
        "held_out": float(copied(others, data.fetch(rows[apart]).images)) if enough else None,
        "held_out_images": len(others),
        "picture": str(picture),
    }


# Score a run, or a folder of images.

STORED = "scores.jsonl"


def reference_data(config: TrainConfig) -> ImageData:
    """The images that a run is trained on, held-out ones included, also if it is trained on their latents."""
    return load_data(config.data, **config.images.reading())


def evaluation_prompts(config: TrainConfig, data: ImageData, count: int) -> tuple[Sequence[str], str]:
    """The prompts of a conditional model, and how they were chosen: the classes in turn, or captions of the data."""
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
    features: str = "auto",
    feature_weights: str | Path | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> Scores:
    """Samples go into a folder of the run, so that an interrupted evaluation continues; scores into scores.jsonl."""
    settings = settings or SampleSettings()
    data = reference_data(run.config)
    extractor, reference = trusted_features(features, data, feature_weights, device)
    prompts, conditions = evaluation_prompts(run.config, data, n)
    wanted = requests(n, seed, prompts)
    progress = Progress("images")
    path = run.folder / "images" / f"eval-{folder_name(run, settings)}-n{n}-seed{seed}"
    folder = fill_folder(run, path, wanted, settings, batch_size, device, progress)
    images = folder.stack(wanted)
    subject: dict[str, Any] = {"run": str(run.folder), "step": run.step, "seed": seed, "images": str(path)}
    if process_state().is_main_process:
        picture = path.with_name(f"nearest-{path.name}.png")
        features_ = features_of(extractor, images)
        held_out = run.config.images.held_out
        subject["copies"] = copies_of(images, features_, data, reference, held_out, run.config.seed, picture)
    scores = score_images(
        images,
        data,
        extractor,
        reference,
        subject=subject | ({"scaling": run.config.scaling} if run.is_rescaled else {}),
        sampler=_way_of_sampling(settings.sampler, settings.precision),
        sampler_steps=settings.steps,
        guidance=settings.guidance,
        weights=run.weights,
        conditions=conditions,
    )
    if process_state().is_main_process:
        store(run.folder / STORED, scores)
    return scores


def score_folder(
    path: str | Path,
    data: ImageData,
    *,
    n: int | None = None,
    features: str = "auto",
    feature_weights: str | Path | None = None,
) -> Scores:
    """Any folder of images, of samples of ours or from elsewhere; with `n`, exactly that many must be there."""
    path = Path(path)
    made_by: dict[str, Any] = {}
    if (path / NOTE).exists():
        note = SampleFolder(path).note()
        made_by = {
            "sampler": _way_of_sampling(note["sampler"], note.get("precision", "no")),
            "sampler_steps": note["steps"],
            "guidance": note["guidance"],
            "weights": note["weights"],
            "conditions": "as in its samples.json" if any(note["wishes"].values()) else "none",
        }
    images = _folder_images(path, data)
    if n is not None and len(images) < n:
        raise EvaluationError(f"{n} images are needed and {path} holds {len(images)}: give a smaller `n`")
    extractor, reference = trusted_features(features, data, feature_weights)
    scores = score_images(
        images if n is None else images[:n],
        data,
        extractor,
        reference,
        subject={"folder": str(path)},
        **made_by,
    )
    store(path / STORED, scores)
    return scores


def _way_of_sampling(sampler: str, precision: str) -> str:
    """A network that multiplies in a different precision is a different way of sampling."""
    return sampler if precision == "no" else f"{sampler}, {precision}"


def _folder_images(path: Path, data: ImageData) -> torch.Tensor:
    found = sorted(file for file in path.glob("*.png") if file.name != "grid.png") if (path / NOTE).exists() else None
    if found is not None:
        return stack_images(found) if found else torch.empty(0, 0, 0, 0)
    # No resizing: images of a different size are a different set of images.
    images = load_data(str(path), channels=data.channels, skip_broken=0)
    return images.fetch(range(len(images))).images


def store(file: Path, scores: Scores) -> None:
    """One JSON object per line. Several evaluations may end at once, and each adds its own."""
    append_json_line(file, scores.to_dict())
    sync(file)


def stored_scores(folder: str | Path) -> list[Scores]:
    file = Path(folder) / STORED
    found = []
    for line in read_json_lines(file) if file.exists() else []:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a line that someone else wrote
            found.append(Scores.from_dict(line))
    return found


# Scores of a model that is being trained, at the same seeds every time.


class Scorer:
    """The features and the reference statistics are made at the first score, or come from the cache."""

    def __init__(self, config: TrainConfig, data: ImageData | None = None) -> None:
        self.config, self._given = config, data
        self._features: tuple[FeatureExtractor, Reference] | None = None

    def score(self, maker: ImageMaker, step: int, device: torch.device | str) -> Scores:
        options = self.config.logging
        prompts, conditions = evaluation_prompts(self.config, self._data, options.scores_images)
        wanted = requests(options.scores_images, 0, prompts)
        images = maker.all(wanted, SampleSettings(sampler=options.sampler, steps=options.sampler_steps), device=device)
        if self._features is None:
            self._features = trusted_features("auto", self._data, device=device)
        return score_images(
            images,
            self._data,
            *self._features,
            subject={"step": step},
            sampler=options.sampler,
            sampler_steps=options.sampler_steps,
            guidance=1.0,
            weights="ema",
            conditions=conditions,
        )

    @cached_property
    def _data(self) -> ImageData:
        return reference_data(self.config) if self._given is None else self._given
