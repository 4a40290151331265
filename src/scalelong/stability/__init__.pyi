"""The names of this package, each written once: type checkers read this file, and `__init__.py` reads it too."""

from .advice import what_to_do as what_to_do
from .alarms import (
    Alarm as Alarm,
    AlarmDetector as AlarmDetector,
    AlarmRules as AlarmRules,
    Oscillation as Oscillation,
    oscillation as oscillation,
)
from .callbacks import (
    AccelerateMonitor as AccelerateMonitor,
    lightning_callback as lightning_callback,
    lightning_guard as lightning_guard,
    trainer_callback as trainer_callback,
    trainer_guard as trainer_guard,
)
from .collapse import (
    MARGIN as MARGIN,
    RULE as RULE,
    Collapse as Collapse,
    CollapseDetector as CollapseDetector,
    Spike as Spike,
    describe_left_first as describe_left_first,
    first_to_leave as first_to_leave,
    has_collapsed as has_collapsed,
    last_good as last_good,
)
from .diagnosis import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
)
from .features import (
    Features as Features,
    apart as apart,
    block_names as block_names,
    has_bare_merges as has_bare_merges,
    measure as measure,
    plan_for as plan_for,
    probe as probe,
)
from .guard import CollapseGuard as CollapseGuard
from .many import RUNS as RUNS, StepFailedError as StepFailedError
from .monitor import StabilityMonitor as StabilityMonitor
from .nonfinite import (
    NonFiniteReport as NonFiniteReport,
    explain_nonfinite as explain_nonfinite,
)
from .range import (
    METHODS as METHODS,
    Method as Method,
    rate_range as rate_range,
)
from .survival import (
    PLACES as PLACES,
    Difference as Difference,
    HalfRate as HalfRate,
    RateRange as RateRange,
    RateRun as RateRun,
    rate_text as rate_text,
)
from .trackers import Tracker as Tracker, log_picture as log_picture, send_alert as send_alert
