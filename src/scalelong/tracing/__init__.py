"""One forward of a model, recorded. The model is left as it was.

trace         the record: operations, module calls, merges, what follows from what
identity      which operation a tensor came from, through views, aliases and writes in place
recorder      how it is made
isolation     run a model and leave no trace on it
"""

from .isolation import (
    StateSnapshot as StateSnapshot,
    default_generators as default_generators,
    foreign_hooks_marked as foreign_hooks_marked,
    in_foreign_hook as in_foreign_hook,
    isolated_run as isolated_run,
)
from .recorder import (
    counted_as as counted_as,
    record as record,
    record_forward as record_forward,
)
from .trace import (
    Argument as Argument,
    Call as Call,
    CallSite as CallSite,
    FunctionCall as FunctionCall,
    Invocation as Invocation,
    Merge as Merge,
    Node as Node,
    RanCall as RanCall,
    Trace as Trace,
    TreePath as TreePath,
    bits as bits,
    common_scope as common_scope,
    held_tensors as held_tensors,
    leaves as leaves,
)
