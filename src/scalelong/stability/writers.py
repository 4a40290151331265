"""Where readings go."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..errors import MissingDependencyError
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [line for line in read_json_lines(self.path) if line["step"] < step]
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, self.path)
        return open(self.path, "a", encoding="utf-8")


def read_json_lines(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The readings of a file; a line that a kill cut off is left out."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


class TensorBoard:
    """Readings as scalars, alarms as text."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError("tensorboard", "train", "writing readings for TensorBoard") from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, reading: Mapping[str, float], alarms: Sequence[Alarm]) -> None:
        for name, value in reading.items():
            self._writer.add_scalar(f"stability/{name}", value, step)
        for alarm in alarms:
            self._writer.add_text("stability/alarms", str(alarm), step)

    def close(self) -> None:
        self._writer.close()
