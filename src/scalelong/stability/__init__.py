"""What happens: sizes of features and gradients at the long skips, oscillation scores, alarms, and a diagnosis."""

from .alarms import Alarm, AlarmRules, JsonLines, Oscillation, TensorBoard, oscillation, read_json_lines
from .callbacks import AccelerateMonitor, lightning_callback
from .diagnosis import Diagnosis, diagnose
from .many import StepFailedError
from .monitor import StabilityMonitor
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
    "Oscillation",
    "RateRange",
    "RateRun",
    "StabilityMonitor",
    "StepFailedError",
    "TensorBoard",
    "diagnose",
    "lightning_callback",
    "oscillation",
    "probe",
    "rate_range",
    "read_json_lines",
]
