"""Scores of a model that is being trained, at the same seeds every time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..data import ImageData
from ..diffusion.images import ImageMaker, requests
from ..diffusion.solvers import SampleSettings
from .agreement import agreement
from .features.classifier import Classifier, train_classifier
from .judge import score_images
from .protocol import Scores
from .reference import Reference, reference_of
from .subjects import evaluation_wishes, reference_data

if TYPE_CHECKING:
    from ..runs.config import TrainConfig


class Scorer:
    """The classifier and the reference statistics are made at the first score, or come from the cache."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def score(self, maker: ImageMaker, step: int, device: torch.device | str) -> Scores:
        options, condition = self.config.logging, self.config.diffusion.condition
        wishes, conditions = evaluation_wishes(self.config, self._data, options.scores_images)
        wanted = requests(options.scores_images, 0, wishes)
        images = maker.all(wanted, SampleSettings(sampler=options.sampler, steps=options.sampler_steps), device=device)
        made_by: dict[str, Any] = {
            "sampler": options.sampler,
            "sampler_steps": options.sampler_steps,
            "guidance": 1.0,
            "weights": "ema",
            "conditions": conditions,
        }
        scores = score_images(images, self._data, self._classifier, self._reference, subject={"step": step}, **made_by)
        asked_for = agreement(images, [request.wish for request in wanted], self._data, condition, lambda _: None)
        return replace(scores, agreement=asked_for)

    @cached_property
    def _data(self) -> ImageData:
        return reference_data(self.config)

    @cached_property
    def _classifier(self) -> Classifier:
        return train_classifier(self._data)

    @cached_property
    def _reference(self) -> Reference:
        return reference_of(self._data, self._classifier)
