"""What `scalelong train` trains: the configuration, its folder, and how it was sized.

A run that has begun goes on with its own values and those that were given. A new one is sized for the machine, unless a
recipe, a file or weights to begin with fix its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig, default_folder, field_paths, flatten, seconds_of, to_dict, with_values
from ..console import silent

if TYPE_CHECKING:
    from ..training import Plan


@dataclasses.dataclass
class Command:
    """A parsed command line."""

    train: TrainConfig
    out: Path | None = None
    dry_run: bool = False
    quiet: bool = False
    given: frozenset[str] = frozenset()
    """The fields of the configuration that have a flag on the command line."""
    by_name: bool = False
    """Begins with a recipe or a file, which say all that is not given; otherwise it is chosen for the machine."""
    trust: bool = False

    @property
    def is_sized(self) -> bool:
        """Sizes that are not given are chosen for the machine; a run that begins with weights has their network."""
        return not self.by_name and self.train.images.autoencoder is None and self.train.start_from is None


def settle(command: Command, say: Callable[[str], None]) -> tuple[TrainConfig, Path, Plan | None]:
    """The configuration to train with, its folder, and how it was sized, unless it is that of a run that has begun."""
    from ..console import Progress
    from ..runs import RunFolder, load_images
    from ..training import fit_held_out, lengthen_run, size_run

    config, given = command.train, command.given
    network_open = command.is_sized and not given & {"model", "model_options"}
    folder = command.out or default_folder(config, network_open)
    before = RunFolder(folder).begun_with()
    if before is not None:
        return continued(command, before), folder, None
    _mention_classes(config, say)
    if config.start_from is not None:
        plan = started(command, say)
        return plan.config, folder, plan
    if command.is_sized:
        progress = Progress("reading images", enabled=False if command.quiet else None)
        plan = size_run(config, given, say, progress)
        return plan.config, folder, plan
    if "held_out" not in given:
        config = fit_held_out(config, say, " (--held-out says otherwise)")
    if config.budget is None:
        return config, folder, None
    plan = lengthen_run(config, given, load_images(config, silent)[0])
    return plan.config, folder, plan


def _mention_classes(config: TrainConfig, say: Callable[[str], None]) -> None:
    """A folder of folders is often one of classes, which training uses only if it is asked to."""
    folder = Path(config.data)
    if config.diffusion.condition != "none" or not folder.is_dir():
        return
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) > 1:
        shown = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
        say(f"{folder} has {len(classes)} folders ({shown}): --condition class trains on them as classes")


def started(command: Command, say: Callable[[str], None]) -> Plan:
    """A run that begins with weights has their network; it gets the steps that fit the budget, and held-out images."""
    from ..runs import adopt_weights, load_images
    from ..training import fit_held_out, held_out, lengthen_run

    config, given = adopt_weights(command.train, command.given, command.trust), command.given
    if "held_out" not in given:
        if not command.by_name:
            config = with_values(config, {"images.held_out": held_out(len(load_images(config, silent)[0]))})
        config = fit_held_out(config, say, " (--held-out says otherwise)")
    return lengthen_run(config, given, load_images(config, silent)[0])


def continued(command: Command, before: TrainConfig) -> TrainConfig:
    """A run that has begun is never sized again. Its folder says what was chosen, the flags what is to change."""
    config, given, paths = command.train, command.given, field_paths()
    was, now = flatten(to_dict(before)), flatten(to_dict(config))
    if not command.by_name or before.start_from is not None:
        require_consent(before, command.out or "the run folder", command.trust, given)
        settings = config.optimizer
        dictionaries = {"optimizer_options": settings.optimizer_options, "decay_options": settings.decay_options}
        values = {paths[name]: dictionaries.get(name, now.get(paths[name])) for name in given - {"model_options"}}
        options = {**before.model_options, **config.model_options}
        config = dataclasses.replace(with_values(before, values), model_options=options)
    elif "held_out" not in given:
        config = with_values(config, {"images.held_out": before.images.held_out})
    if command.train.budget is None or "steps" in given or before.budget is None:
        return config
    # The same budget means the same steps, and another one as many more or less.
    chosen = ("checkpoints.save_every", "logging.log_every")
    config = with_values(config, {path: was[path] for path in chosen if path.split(".")[-1] not in given})
    factor = seconds_of(command.train.budget) / seconds_of(before.budget)
    return dataclasses.replace(config, steps=max(1, round(before.steps * factor)))


def dry_run(command: Command, say: Callable[[str], None]) -> str:
    """All that would happen, and how long it would take."""
    from ..runs import load_images
    from ..training import describe_run, lengthen_run

    config, folder, plan = settle(command, say)
    data, _ = load_images(config, say)  # says which files were not read
    timed = plan or lengthen_run(config, field_paths(), data)
    parts = [str(plan)] if plan is not None and not command.by_name else []
    return "\n\n".join([*parts, describe_run(config, data, folder, seconds=timed.seconds)])


def require_consent(config: TrainConfig, source: Any, trust: bool, given: Any) -> None:
    """Code that a file or a run folder names, and not the user, needs consent."""
    from ..runs import require_trust, require_trusted_training

    if "model" not in given:
        require_trust(config, source, trust)
    require_trusted_training(config, source, trust, given)
