"""What happens: sizes of features and gradients at the long skips, oscillation scores, alarms, and a diagnosis."""

from .alarms import Alarm, AlarmRules, JsonLines, Oscillation, TensorBoard, oscillation, read_json_lines
from .callbacks import AccelerateMonitor, lightning_callback
from .diagnosis import Diagnosis, diagnose
from .monitor import StabilityMonitor
from .probe import Features, probe

__all__ = [
    "AccelerateMonitor",
    "Alarm",
    "AlarmRules",
    "Diagnosis",
    "Features",
    "JsonLines",
    "Oscillation",
    "StabilityMonitor",
    "TensorBoard",
    "diagnose",
    "lightning_callback",
    "oscillation",
    "probe",
    "read_json_lines",
]
