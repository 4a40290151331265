"""Looks at the averaged model while it is trained: held-out loss, sample grids and scores. Training does not notice."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from ..data import ImageData, to_float
from ..diffusion.conditions import Conditions
from ..diffusion.inputs import held_out_loss
from ..diffusion.latents import Autoencoder
from ..files import write_text
from ..noise import NoiseProcess
from ..randomness import derived_seed, global_state, restore_global_state
from ..runs.config import TrainConfig
from ..runs.folder import RunFolder
from ..runs.model import DataShape
from ..runs.samples import image_grid, save_png
from .state import TrainState

if TYPE_CHECKING:
    from ..diffusion.images import ImageMaker
    from ..evaluation.judge import Scorer


@dataclass
class Inspector:
    """Every process does the same, because a sharded model needs all of them; the main one writes."""

    config: TrainConfig
    run: RunFolder
    state: TrainState
    process: NoiseProcess
    shape: DataShape
    conditions: Conditions
    captions: Sequence[str] | None
    held_out: ImageData | None

    def held_out_loss(self) -> dict[str, float] | None:
        if self.held_out is None:
            return None
        with self._averaged():
            value = held_out_loss(
                self.state.bare_network,
                self.process,
                self.config.diffusion.prediction,
                self.held_out,
                self.config.seed,
                self.state.accelerator.device,
                self.conditions,
            )
        return {"held_out_loss": value}

    def sample_grid(self) -> Tensor:
        """Samples with the same seeds every time, so that grids of different steps can be compared."""
        from ..diffusion.images import Request
        from ..diffusion.solvers import SampleSettings

        options, wishes = self.config.logging, self._wishes()
        wanted = [
            Request(derived_seed(self.config.seed, "samples", i), wishes[i] if wishes else None)
            for i in range(options.samples)
        ]
        settings = SampleSettings(sampler=options.sampler, steps=options.sampler_steps)
        with self._averaged():
            images = self._maker.all(wanted, settings, device=self.state.accelerator.device)
        classes = len(self.shape.classes or ()) if self.config.diffusion.condition == "class" else 0
        grid = image_grid(to_float(images), columns=classes if 0 < classes <= 16 else None)
        if self.state.accelerator.is_main_process:
            save_png(self.run.samples / f"step-{self.state.step:08d}.png", grid)
        return grid

    def scores(self) -> dict[str, float]:
        """Fréchet distance, precision and recall; how they are made is written beside the metrics."""
        with self._averaged():
            scores = self._scorer.score(self._maker, self.state.step, self.state.accelerator.device)
        if self.state.accelerator.is_main_process:
            write_text(self.run.path / "scores_protocol.json", json.dumps(asdict(scores.protocol), indent=2))
        values = {"frechet": scores.frechet, "precision": scores.precision, "recall": scores.recall}
        if scores.agreement is not None:
            values["agreement"] = scores.agreement
        named = [(f"{name}{end}", score, field) for name, score in values.items() for end, field in _ENDINGS]
        return {name: getattr(score, field) for name, score, field in named}

    def _wishes(self) -> list[str]:
        """The classes in turn, or captions evenly spread over the data."""
        count = self.config.logging.samples
        if self.config.diffusion.condition == "class":
            return [(self.shape.classes or ())[i % len(self.shape.classes or ())] for i in range(count)]
        if self.config.diffusion.condition == "text" and self.captions:
            return [self.captions[i * len(self.captions) // count] for i in range(count)]
        return []

    @cached_property
    def _maker(self) -> "ImageMaker":
        from ..diffusion.images import ImageMaker

        folder = self.config.images.autoencoder
        return ImageMaker(
            model=self.state.bare,
            network=self.state.bare_network,
            process=self.process,
            prediction=self.config.diffusion.prediction,
            shape=self.shape.image,
            conditions=self.conditions,
            autoencoder=None if folder is None else Autoencoder(folder),
        )

    @cached_property
    def _scorer(self) -> "Scorer":
        from ..evaluation.judge import Scorer

        return Scorer(self.config)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        random, model = global_state(), self.state.bare
        training = model.training
        model.eval()
        try:
            with self.state.ema.applied():
                yield
        finally:
            model.train(training)
            restore_global_state(random)


_ENDINGS = (("", "value"), ("_low", "low"), ("_high", "high"))
