"""`train`: prepare a run and hand it to the loop."""

import errno
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..console import Progress
from ..errors import RunFolderError
from ..runs.config import TrainConfig
from ..runs.folder import RunFolder
from ..runs.model import load_images
from ..runs.processes import check_batch_size, describe, make_accelerator, on_main
from ..runs.recipes import default_folder
from .interrupt import Interrupt
from .loop import Hook, Trainer

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    step: int
    finished: bool
    """False if a signal ended it early."""


def train(config: TrainConfig, out: str | PathLike[str] | None = None, *, hooks: Sequence[Hook] = ()) -> TrainResult:
    """Train as the configuration says, in a run folder. A run that is there already is continued."""
    run = RunFolder(out or default_folder(config))
    accelerator = make_accelerator(config, str(run.path))
    progress = Progress(config.steps, accelerator.is_main_process)
    try:
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            stack.callback(progress.close)
            check_batch_size(config, accelerator.num_processes)
            on_main(accelerator, lambda: stack.enter_context(run.locked()) and None)
            data, held_out = load_images(config, progress.say)
            on_main(accelerator, lambda: run.open(config, data, describe(accelerator), progress.say))
            trainer = Trainer(config, run, accelerator, data, held_out, progress, hooks)
            stack.callback(trainer.close)
            finished = trainer.fit(interrupt)
            return TrainResult(run.path, trainer.state.step, finished)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RunFolderError(
            f"{run.path} cannot be written: {error}. Its checkpoints are intact; make room, then run the same command "
            f"to continue"
        ) from error
