"""Networks and trainers that work on the very same memory, so that none of them has better places than another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from scalelong.runs.config import TrainConfig
from scalelong.runs.model import DataShape
from scalelong.training import loop
from scalelong.training.loop import Trainer


@torch.no_grad()
def share_weights_(model: nn.Module, base: nn.Module) -> None:
    """Weights that both have with the same values become the base's memory."""
    known = dict(base.named_parameters())
    for name, weight in model.named_parameters():
        if name in known and torch.equal(weight, known[name]):
            weight.data = known[name].data


@contextmanager
def networks_share(base: Trainer) -> Iterator[None]:
    """Trainers made within have the weights of this one. They must be shared before anything is made of them."""
    build = loop.build_model

    def sharing(config: TrainConfig, shape: DataShape) -> nn.Module:
        model = build(config, shape)
        share_weights_(model, base.state.bare)
        return model

    loop.build_model = sharing
    try:
        yield
    finally:
        loop.build_model = build


def share_state_(trainer: Trainer, base: Trainer) -> None:
    """AdamW's moments and the averages of the weights that are shared."""
    known = dict(base.state.bare.named_parameters())
    averages = dict(zip(base.state.ema.names, base.state.ema.averages, strict=True))
    for name, weight in trainer.state.bare.named_parameters():
        if name in known and weight.data_ptr() == known[name].data_ptr():
            trainer.state.optimizer.state[weight] = base.state.optimizer.state[known[name]]
            trainer.state.ema.averages[trainer.state.ema.names.index(name)] = averages[name]
