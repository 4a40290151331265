"""After a non-finite step: say where it came from, and go back if that is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..data import batches
from ..runs.checkpoint import newest_good, saved_steps
from ..runs.config import TrainConfig
from ..runs.folder import RunFolder
from ..runs.processes import gather_objects
from .diagnosis import diagnose_step

if TYPE_CHECKING:
    from .loop import Trainer


def diagnose(trainer: "Trainer", step: int) -> str:
    """The passes of the bad step again. Each process looks at its own images; the first finding is reported."""
    order = trainer.order.batches(range(step, step + 1), trainer.parts)
    source = list(batches(trainer.data, order))
    found = diagnose_step(
        trainer.state.bare,
        lambda: trainer.backward(step, iter(source), local=True),
        [
            torch.cat(
                [trainer.examples(step, part, batch).x0 for part, batch in zip(trainer.parts, source, strict=True)]
            )
        ],
        step,
        max(saved_steps(trainer.run.checkpoints), default=None),
    )
    telling = gather_objects(trainer.accelerator, (found.layer is None, str(found)))
    return sorted(telling, key=lambda finding: finding[0])[0][1]


def roll_back(run: RunFolder, config: TrainConfig, bad_step: int, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from with a lower rate, or None to stop. If one did not help, the one before it."""
    history = run.rollbacks()
    if config.guard.on_nan == "stop" or len(history) >= config.guard.max_rollbacks:
        return None
    path = newest_good(run.checkpoints, say)
    if path is not None and history and _step(path) <= history[-1]["to_step"]:
        path = newest_good(run.checkpoints, say, before=history[-1]["to_step"]) or path
    if path is None:
        return None
    run.record_rollback({"bad_step": bad_step, "to_step": _step(path), "factor": config.guard.rollback_factor})
    say(
        f"step {bad_step} was not finite: back to step {_step(path)}, rate now {run.rate_factor():g} of the planned "
        f"(rollback {len(history) + 1} of {config.guard.max_rollbacks})"
    )
    return path


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
