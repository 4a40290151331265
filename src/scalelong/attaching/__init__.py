"""Scale the long skips of a model: attach a scaling by a plan, verify it, save it, fold it, take it off.

actions, attach           what is done at a merge, and one class per kind of place
rewriting                 scaling inside a function: the code exchanged for one module, and what it calls
host                      one protocol for models that scale their skips themselves and for all others
merging                   `merge(x, skip, i)`: merges that the author of a model names himself
record, saving            the scaling in state dicts and in files
reruns, verify            forwards compared: is it right?
fold                      constants in the weights, after training or before
api                       scale, unscale, coefficients
tune                      coefficients after training
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
    operand as operand,
)
from .fold import (
    FoldReport as FoldReport,
    SkipStart as SkipStart,
    UnfoldableSkipsError as UnfoldableSkipsError,
    fold_ as fold_,
    start_skips_ as start_skips_,
)
from .host import (
    NativeHost as NativeHost,
    host_of as host_of,
    scaled_host_of as scaled_host_of,
)
from .merging import (
    merge as merge,
)
from .record import (
    KEY as KEY,
    LOAD_WITH as LOAD_WITH,
    spelled as spelled,
    without_records as without_records,
)
from .saving import (
    load_scaling_ as load_scaling_,
    save_scaling as save_scaling,
    saved_scalings as saved_scalings,
)
from .tune import (
    BLOCKS as BLOCKS,
    TunedSkips as TunedSkips,
    tune_skips as tune_skips,
)
from .verify import (
    verify as verify,
)
