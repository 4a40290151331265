"""Looks at the averaged model while it is trained: held-out loss and sample grids. Training does not notice."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import ImageData
from ..diffusion import NoiseProcess, sample
from .config import TrainConfig
from .grid import image_grid, save_png
from .held_out import held_out_loss
from .model_factory import DataShape
from .randomness import derived_seed, global_state, restore_global_state
from .run_folder import RunFolder
from .state import TrainState


@dataclass
class Inspector:
    """Every process does the same, because a sharded model needs all of them; the main one writes."""

    config: TrainConfig
    run: RunFolder
    state: TrainState
    process: NoiseProcess
    shape: DataShape
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
                conditional=self.config.diffusion.condition == "class",
            )
        return {"held_out_loss": value}

    def sample_grid(self) -> Tensor:
        """Samples with the same seeds every time, so that grids of different steps can be compared."""
        options = self.config.logging
        labels, columns = self._labels(options.samples)
        with self._averaged():
            images = sample(
                self.state.bare_network.with_labels(labels),
                self.process,
                self.config.diffusion.prediction,
                self.shape.image,
                [derived_seed(self.config.seed, "samples", i) for i in range(options.samples)],
                sampler=options.sampler,
                steps=options.sampler_steps,
                device=self.state.accelerator.device,
            )
        grid = image_grid(images, columns)
        if self.state.accelerator.is_main_process:
            save_png(self.run.samples / f"step-{self.state.step:08d}.png", grid)
        return grid

    def _labels(self, count: int) -> tuple[Tensor | None, int | None]:
        """One class per column."""
        if self.config.diffusion.condition == "none" or self.shape.classes is None:
            return None, None
        classes = len(self.shape.classes)
        labels = torch.arange(count, device=self.state.accelerator.device) % classes
        return labels, classes if classes <= 16 else None

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
