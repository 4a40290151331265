"""What a comparison records besides the trainer's own metrics."""

from ..skips import coefficients
from ..training import Hook, TrainConfig, TrainState


def recording_hooks(every: int, config: TrainConfig) -> list[Hook]:
    def record(state: TrainState) -> dict[str, float] | None:
        if state.step % every and state.step != config.steps:
            return None
        return {f"kappa/{i}": value for i, value in enumerate(coefficients(state.bare), start=1)}

    return [record]
