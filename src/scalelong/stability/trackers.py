"""Where readings go: a JSON Lines file, or trackers, with alarms as their alerts and grids as their images.

    StabilityMonitor(model, path="stability.jsonl", writers=[Tracker(wandb.init(project="mine"))])

One function per thing that a tracker is told, so that a tracker is added in this file alone. A tracker is what its own
library gives (a run of wandb or trackio, the module mlflow, a SummaryWriter), a tracker of accelerate,
or a logger of Lightning.

| told                       | TensorBoard | wandb       | trackio     | MLflow                                 |
|----------------------------|-------------|-------------|-------------|----------------------------------------|
| a reading (`log_metrics`)  | scalars     | `run.log`   | `run.log`   | `log_metrics`                          |
| an alarm (`send_alert`)    | a text      | `run.alert` | `run.alert` | the tag `alarm`, and a file in alarms/ |
| a grid (`log_picture`)     | an image    | an image    | an image    | an image                               |
"""

import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from torch import Tensor

from ..errors import InvalidConfigError
from ..files import make_folder, read_json_lines, write_json_lines, writing
from .alarms import Alarm


class Writer(Protocol):
    def write(self, step: int, reading: Mapping[str, float], alarms: Sequence[Alarm]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object per reading. A run that goes on from an earlier step replaces what was written after it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def write(self, step: int, reading: Mapping[str, float], alarms: Sequence[Alarm]) -> None:
        file = self._file = self._file or self._opened(step)
        # JSON knows no NaN: a number that is not finite is written as null.
        values = {name: value if math.isfinite(value) else None for name, value in reading.items()}
        line: dict[str, Any] = {"step": step, **values}
        if alarms:
            line["alarms"] = [{"kind": alarm.kind, "where": alarm.where, "message": str(alarm)} for alarm in alarms]
        file.write(json.dumps(line) + "\n")
        file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self, step: int) -> TextIO:
        make_folder(self.path.parent)
        if self.path.exists():
            kept = [line for line in read_json_lines(self.path) if line.get("step", step) < step]
            write_json_lines(self.path, kept)
        with writing(self.path):
            return open(self.path, "a", encoding="utf-8")


KNOWN = ("tensorboard", "wandb", "trackio", "mlflow")


class Tracker:
    """Where a StabilityMonitor writes: `Tracker(run)`, for the trackers of KNOWN. The run stays open at the end."""

    def __init__(self, target: Any, prefix: str = "stability/") -> None:
        self.target, self.prefix = target, prefix
        if kind_of(target) is None:
            raise InvalidConfigError(
                f"a {type(target).__module__}.{type(target).__name__} is no tracker that is known here "
                f"({', '.join(KNOWN)}): give a run of wandb or trackio, the module mlflow, or a SummaryWriter; for "
                f"others write a class with write(step, reading, alarms) and close()"
            )

    def write(self, step: int, reading: Mapping[str, float], alarms: Sequence[Alarm]) -> None:
        log_metrics(self.target, step, {f"{self.prefix}{name}": value for name, value in reading.items()})
        for alarm in alarms:
            send_alert(self.target, alarm.step, alarm.kind, str(alarm))

    def close(self) -> None:
        """Whoever opened the run closes it."""


def log_metrics(target: Any, step: int, values: Mapping[str, float]) -> None:
    found = own(target)
    match kind_of(found):
        case "tensorboard":
            for name, value in values.items():
                found.add_scalar(name, value, step)
        case "wandb" | "trackio":
            found.log(dict(values), step=step)
        case "mlflow":
            client, run = _mlflow(target)
            for name, value in values.items():
                if math.isfinite(value):  # its stores refuse the others, or make zeros of them
                    client.log_metric(run, name, value, step=step)


def send_alert(target: Any, step: int, title: str, text: str) -> None:
    """An alarm, as what the tracker shows or sends as an alert. A tracker without any gets nothing."""
    found = own(target)
    match kind_of(found):
        case "tensorboard":
            found.add_text("alarms", text, step)
            found.flush()  # whoever is alarmed looks now
        case "wandb":
            found.alert(title=f"scalelong: {title}", text=text, level="WARN")
        case "trackio":
            found.alert(title=f"scalelong: {title}", text=text, step=step)
        case "mlflow":
            # MLflow has no alerts: a tag is seen in the list of runs, and can be searched for.
            client, run = _mlflow(target)
            client.set_tag(run, "alarm", f"step {step}: {title}")
            client.log_text(run, text, f"alarms/step-{step:08d}-{title.replace(' ', '-')}.txt")


def log_picture(target: Any, step: int, name: str, picture: Tensor) -> bool:
    """A picture, uint8 (C, H, W) with 1 or 3 channels. False if the tracker is none of those that are known."""
    found = own(target)
    array = picture.permute(1, 2, 0).numpy()
    flat = array[..., 0] if array.shape[2] == 1 else array
    match kind_of(found):
        case "tensorboard":
            found.add_image(name, picture, global_step=step)
        case "wandb":
            found.log({name: [_of(found, "wandb").Image(flat)]}, step=step)
        case "trackio":
            coloured = array if flat is array else array.repeat(3, axis=2)  # it takes no gray ones
            found.log({name: _of(found, "trackio").Image(coloured)}, step=step)
        case "mlflow":
            client, run = _mlflow(target)
            client.log_image(run, flat, key=name, step=step)
        case _:
            return False
    return True


def kind_of(target: Any) -> str | None:
    """One of KNOWN, or None."""
    found = own(target)
    if hasattr(found, "add_scalar") and hasattr(found, "add_text"):  # SummaryWriter of torch and of tensorboardX
        return "tensorboard"
    name = found.__name__ if isinstance(found, ModuleType) else type(found).__module__
    root = name.partition(".")[0]
    return root if root in ("wandb", "trackio", "mlflow") else None


def own(target: Any) -> Any:
    """The object of the tracker's own library behind a tracker of accelerate, or a logger of Lightning."""
    name = type(target).__module__
    if hasattr(target, "store_init_configuration") or name.startswith("accelerate."):
        return target.tracker
    if name.startswith(("lightning.", "pytorch_lightning.", "lightning_fabric.")):
        return target.experiment
    return target


def _mlflow(target: Any) -> tuple[Any, str]:
    """A client and the id of a run: of a logger of Lightning, a run, or (the module) the run that is active."""
    found = own(target)
    if hasattr(target, "run_id") and hasattr(found, "log_metric"):  # Lightning's logger, whose experiment is a client
        return found, target.run_id
    import mlflow  # pyright: ignore[reportMissingImports]

    run = mlflow.active_run() if isinstance(found, ModuleType) else found
    if run is None:
        raise InvalidConfigError("no run of MLflow is active: call mlflow.start_run() before the monitor is made")
    return mlflow.MlflowClient(), run.info.run_id


def _of(found: Any, package: str) -> Any:
    """The library that an object belongs to, which is therefore installed."""
    return found if isinstance(found, ModuleType) else __import__(package)
