"""Training that reads its images from a source, to see how much it waits for them."""

from typing import Any

from scalelong.data import ImageData, load_data

from .trainer import TrainingStep, configuration, trainer_on


def load(source: str, limit: int, size: int, *, streamed: bool) -> ImageData:
    """`streamed` gives it one byte less memory than its pixels need."""
    options: dict[str, Any] = {"memory_limit": 3 * limit * size**2 - 1} if streamed else {}
    return load_data(source, limit=limit, size=size, channels=3, **options)


def training_step(*, source: str, limit: int, streamed: bool, workers: int, **arguments: Any) -> TrainingStep:
    data = load(source, limit, arguments["shape"][-1], streamed=streamed)
    config = configuration(**arguments, workers=workers)
    trainer = trainer_on(config, data)
    trainer.begin_at(0)
    return TrainingStep(trainer)
