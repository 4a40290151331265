"""Where: the long skips of a model, and what can be done with them. In the order in which they are used:

plan, draw             the plan as data and as a picture
examples               example inputs of known families
candidates, nest       which merges of a recorded forward are the U
reach, behind          where a skip can be scaled, and what lies behind its merge
find                   find_skips
actions, attach        one class per kind of attachment
edits, invocations,    scaling inside a function: its syntax tree changed, what the new code calls, and the code
source                 exchanged
host                   one protocol for models that scale their skips themselves and for all others
record, saving         the scaling in state dicts and in files
reruns, verify         forwards compared: is it right?
fold, start            constants in the weights, after training or before
api                    scale, unscale, coefficients
sequence, cache        the inner part at some sampling steps only
tune                   coefficients after training
"""

from .api import (
    ScalingSummary as ScalingSummary,
    coefficients as coefficients,
    is_scaled as is_scaled,
    plan_of as plan_of,
    scale_skips_ as scale_skips_,
    scaling_of as scaling_of,
    summary as summary,
    unscale_ as unscale_,
    unscaled as unscaled,
)
from .attach import (
    without_checks as without_checks,
)
from .cache import (
    Cached as Cached,
    cache_ as cache_,
    cached as cached,
    full_steps as full_steps,
    uncache_ as uncache_,
)
from .find import (
    find_skips as find_skips,
)
from .fold import (
    FoldReport as FoldReport,
    fold_ as fold_,
)
from .host import (
    SkipHost as SkipHost,
    native_plan as native_plan,
)
from .plan import (
    LongSkip as LongSkip,
    SkipPlan as SkipPlan,
)
from .record import (
    without_records as without_records,
)
from .saving import (
    load_scaling_ as load_scaling_,
    save_scaling as save_scaling,
)
from .start import (
    SkipStart as SkipStart,
    StartReport as StartReport,
    UnfoldableSkipsError as UnfoldableSkipsError,
    start_merges_ as start_merges_,
    start_skips_ as start_skips_,
)
from .tune import (
    TunedSkips as TunedSkips,
    tune_skips as tune_skips,
)
