"""What happens in training: sizes at the long skips, oscillation, alarms, and pages that explain them.

probe        where features are read: long skips and the blocks that they join
monitor      readings during training, from within anyone's loop
alarms       oscillation scores, alarms and where readings go
callbacks    the monitor for accelerate's and Lightning's loops
diagnosis    one page about a model's long skips, before training
nonfinite    where the numbers of a step stopped being finite
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .alarms import Alarm, AlarmRules, JsonLines, Oscillation, TensorBoard, oscillation, read_json_lines
    from .callbacks import AccelerateMonitor, lightning_callback
    from .diagnosis import Diagnosis, diagnose
    from .many import StepFailedError
    from .monitor import StabilityMonitor
    from .nonfinite import NonFiniteReport, explain_nonfinite
    from .probe import Features, probe
    from .range import CollapseRule, Method, rate_range
    from .survival import Difference, HalfRate, RateRange, RateRun

__all__ = [
    "AccelerateMonitor",
    "Alarm",
    "AlarmRules",
    "CollapseRule",
    "Diagnosis",
    "Difference",
    "Features",
    "HalfRate",
    "JsonLines",
    "Method",
    "NonFiniteReport",
    "Oscillation",
    "RateRange",
    "RateRun",
    "StabilityMonitor",
    "StepFailedError",
    "TensorBoard",
    "diagnose",
    "explain_nonfinite",
    "lightning_callback",
    "oscillation",
    "probe",
    "rate_range",
    "read_json_lines",
]

_ROOMS = {
    "alarms": ("Alarm", "AlarmRules", "JsonLines", "Oscillation", "TensorBoard", "oscillation", "read_json_lines"),
    "callbacks": ("AccelerateMonitor", "lightning_callback"),
    "diagnosis": ("Diagnosis", "diagnose"),
    "many": ("StepFailedError",),
    "monitor": ("StabilityMonitor",),
    "nonfinite": ("NonFiniteReport", "explain_nonfinite"),
    "probe": ("Features", "probe"),
    "range": ("CollapseRule", "Method", "rate_range"),
    "survival": ("Difference", "HalfRate", "RateRange", "RateRun"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the room `probe` would put the module in the place of the function of that name.
        if not (name in _ROOM_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
