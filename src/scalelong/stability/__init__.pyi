"""The names of this package, each written once: type checkers read this file, and `__init__.py` reads it too."""

from .alarms import (
    Alarm as Alarm,
    AlarmDetector as AlarmDetector,
    what_to_do as what_to_do,
)
from .callbacks import (
    AccelerateMonitor as AccelerateMonitor,
    lightning_callback as lightning_callback,
    lightning_guard as lightning_guard,
    log_picture as log_picture,
    send_alert as send_alert,
    trainer_callback as trainer_callback,
    trainer_guard as trainer_guard,
)
from .collapse import (
    MARGIN as MARGIN,
    RULE as RULE,
    Collapse as Collapse,
    CollapseDetector as CollapseDetector,
    Spike as Spike,
    has_collapsed as has_collapsed,
    last_good as last_good,
)
from .diagnosis import (
    Diagnosis as Diagnosis,
    NonFiniteReport as NonFiniteReport,
    diagnose as diagnose,
    explain_nonfinite as explain_nonfinite,
)
from .features import (
    apart as apart,
    block_names as block_names,
    describe_left_first as describe_left_first,
    eager as eager,
    first_to_leave as first_to_leave,
    has_bare_merges as has_bare_merges,
    measure as measure,
    plan_for as plan_for,
)
from .guard import CollapseGuard as CollapseGuard
from .monitor import StabilityMonitor as StabilityMonitor
from .range import (
    METHODS as METHODS,
    RUNS as RUNS,
    Method as Method,
    StepFailedError as StepFailedError,
    rate_range as rate_range,
)
from .survival import (
    Difference as Difference,
    HalfRate as HalfRate,
    RateRange as RateRange,
    RateRun as RateRun,
    rate_text as rate_text,
)
