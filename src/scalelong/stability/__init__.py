"""What happens in training: sizes at the long skips, oscillation, alarms, and pages that explain them.

probe        where features are read: long skips and the blocks that they join
monitor      readings during training, from inside of anyone's loop
alarms       oscillation scores, alarms and where readings go
callbacks    the monitor for accelerate's and Lightning's loops
diagnosis    one page about a model's long skips, before training
nonfinite    where the numbers of a step stopped being finite
"""

from .alarms import Alarm, AlarmRules, JsonLines, Oscillation, TensorBoard, oscillation, read_json_lines
from .callbacks import AccelerateMonitor, lightning_callback
from .diagnosis import Diagnosis, diagnose
from .monitor import StabilityMonitor
from .nonfinite import NonFiniteReport, explain_nonfinite
from .probe import Features, probe
