"""Looks at the averaged model while it is trained: held-out loss, sample grids and scores. Training does not notice."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property

from torch import Tensor

from ..config import TrainConfig
from ..data import to_float
from ..diffusion import Autoencoder, ImageMaker, InputMaker, Request, SampleSettings, by_level, held_out_losses
from ..evaluation import Scorer
from ..files import write_text
from ..models import evaluating
from ..randomness import derived_seed, global_state, restore_global_state
from ..runs import RunData, RunFolder, image_grid, save_png
from .state import TrainState

_ENDINGS = (("", "value"), ("_low", "low"), ("_high", "high"))
"""What stands behind the name of a score in the metrics, and the field that it is read from."""


@dataclass
class Inspector:
    """Every process does the same, because a sharded model needs all of them; the main one writes."""

    config: TrainConfig
    run: RunFolder
    state: TrainState
    data: RunData
    inputs: InputMaker

    def held_out_loss(self) -> dict[str, float] | None:
        if self.data.held_out is None:
            return None
        with self._averaged():
            losses, levels = held_out_losses(
                self.state.bare_network, self.inputs, self.config.diffusion.prediction, self.data.held_out
            )
        named = {f"held_out_loss/{name}": value for name, value in by_level(losses, levels).items()}
        return {"held_out_loss": float(losses.mean()), **named}

    def sample_grid(self) -> Tensor:
        """Samples with the same seeds every time, so that grids of different steps can be compared."""
        options, prompts = self.config.logging, self._prompts()
        wanted = [
            Request(derived_seed(self.config.seed, "samples", i), prompts[i] if prompts else None)
            for i in range(options.samples)
        ]
        settings = SampleSettings(sampler=options.sampler, steps=options.sampler_steps)
        with self._averaged():
            images = self._maker.all(wanted, settings, device=self.state.accelerator.device)
        classes = len(self.data.shape.classes or ()) if self.config.diffusion.condition == "class" else 0
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
        values = scores.values
        named = [(f"{name}{end}", score, field) for name, score in values.items() for end, field in _ENDINGS]
        return {name: getattr(score, field) for name, score, field in named}

    def _prompts(self) -> list[str]:
        """The classes in turn, or captions evenly spread over the data."""
        count, classes = self.config.logging.samples, self.data.shape.classes or ()
        if self.config.diffusion.condition == "class":
            return [classes[i % len(classes)] for i in range(count)]
        captions = self.data.train.annotations.captions
        if self.config.diffusion.condition == "text" and captions:
            return [captions[i * len(captions) // count] for i in range(count)]
        return []

    @cached_property
    def _maker(self) -> ImageMaker:
        folder = self.config.images.autoencoder
        return ImageMaker(
            model=self.state.bare,
            network=self.state.bare_network,
            process=self.inputs.process,
            prediction=self.config.diffusion.prediction,
            shape=self.data.shape.image,
            conditions=self.inputs.conditions,
            autoencoder=None if folder is None else Autoencoder(folder),
        )

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.config, self.data.images)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Averaged weights in eval mode. Afterwards weights, modes and all global random numbers are as before."""
        random = global_state()
        try:
            with evaluating(self.state.bare), self.state.ema.applied():
                yield
        finally:
            restore_global_state(random)
