"""Everything that is known about a run, as plain data."""

from __future__ import annotations

import json
from typing import Any

import torch

from .._version import __version__
from ..errors import ScaleLongError
from ..evaluation.judge import stored_scores
from ..evaluation.scores import Scores
from ..runs.config import to_dict
from ..runs.folder import DATA
from ..runs.load import Run
from ..scaling import as_scaling
from ..skips import coefficients

WEIGHTS = {"ema": "exponential moving average (EMA)", "raw": "raw, not averaged"}


def describe_run(run: Run) -> dict[str, Any]:
    return {
        "scalelong": __version__,
        "weights": WEIGHTS[run.weights],
        "step": run.step,
        "scaling": as_scaling(run.config.scaling).to_dict(),
        "coefficients": skip_coefficients(run),
        "data": json.loads((run.folder / DATA).read_text()),
        "config": to_dict(run.config),
        "scores": [score.to_dict() for score in scores_of(run)],
    }


def scores_of(run: Run) -> list[Scores]:
    """The stored scores of exactly these weights."""
    return [
        score
        for score in stored_scores(run.folder)
        if score.subject.get("step") == run.step and score.protocol.weights == run.weights
    ]


def skip_coefficients(run: Run) -> list[float] | None:
    """κ_i from the outermost to the innermost long skip, on noise; None if the model does not tell."""
    condition = run.shape.example_condition(run.config, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, *run.shape.image), generator=generator)
    try:
        with torch.no_grad():
            run.network(x, torch.full((2,), 500.0), condition)
        return [float(value) for value in coefficients(run.model)]
    except (ScaleLongError, TypeError):
        return None
