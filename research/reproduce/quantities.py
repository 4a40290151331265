"""What is compared: numbers of one run."""

from collections.abc import Callable
from dataclasses import dataclass

from .results import Results, RunRecord


@dataclass(frozen=True)
class Quantity:
    name: str
    of: Callable[[RunRecord], float | None]
    """None where a run has no such number."""
    form: str = "{:.4f}"

    def text(self, value: float | None) -> str:
        return "-" if value is None else self.form.format(value)


def final_loss(record: RunRecord) -> float:
    """At the end of training. A run that diverged counts as a predictor of zero, whose loss is 1."""
    return 1.0 if record.diverged or not record.held_out else record.held_out[-1][1]


def loss_at(step: int) -> Quantity:
    def value(record: RunRecord) -> float | None:
        return 1.0 if record.diverged else dict(record.held_out).get(step)

    return Quantity(f"held-out loss at step {step}", value)


def _if_counted(value: float | None, record: RunRecord) -> float | None:
    """Oscillation of a collapsed network is no oscillation score."""
    return None if record.gate else value


LOSS = Quantity("held-out loss", final_loss)
FRECHET = Quantity("Fréchet distance", lambda record: record.frechet, "{:.2f}")
FEATURES = Quantity("O1 of the features", lambda record: _if_counted(record.o1_features, record))
GRADIENTS = Quantity("O1 of the gradient", lambda record: _if_counted(record.o1_gradient, record), "{:.3f}")


def qualities(results: Results) -> tuple[Quantity, ...]:
    """What a trained network is judged by: the held-out loss, and the Fréchet distance where it was measured.

    The paper speaks of FID alone. Of few images it is noisy; differences of the loss are seen much sooner. Neither is
    chosen after the fact: both count.
    """
    return (LOSS, FRECHET) if any(run.frechet is not None for run in results.runs) else (LOSS,)
