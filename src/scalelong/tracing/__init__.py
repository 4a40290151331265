"""What ran: one forward of a model, recorded. The model is left as it was.

trace         the record: operations, module calls, merges, what follows from what
identity      which operation a tensor came from, through views, aliases and writes in place
containers    tensors inside lists, dictionaries and objects
merges        one class per kind of merge
callsites     where in the source an operation was called
isolation     run a model and leave no trace on it
"""

from .callsites import (
    CallSite as CallSite,
    Invocation as Invocation,
    common_scope as common_scope,
)
from .containers import (
    TreePath as TreePath,
    leaves as leaves,
)
from .isolation import (
    Snapshot as Snapshot,
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
    FunctionCall as FunctionCall,
    Merge as Merge,
    Node as Node,
    Trace as Trace,
    bits as bits,
)
