"""Find the long skips of a model: the plan says where they are and where each can be scaled.

plan                the plan as data
known               what is known about some models: inputs of families, wrappers, models that scale themselves
candidates, nest    which merges of a recorded forward are the U
source              the source of the functions that a module runs
axes                which axis of a tensor holds the channels
reach, readers      where a skip can be scaled, and which layers read its merge
find                find_skips
"""

from .candidates import (
    Candidate as Candidate,
    candidates as candidates,
)
from .find import (
    Patterns as Patterns,
    find_skips as find_skips,
)
from .known import (
    STATE as STATE,
    ExampleInputs as ExampleInputs,
    SkipHost as SkipHost,
    example_call as example_call,
    native_plan as native_plan,
    unwrap as unwrap,
    without_freeu as without_freeu,
    without_subclass as without_subclass,
)
from .nest import (
    select as select,
)
from .plan import (
    Attachment as Attachment,
    FoldTarget as FoldTarget,
    LongSkip as LongSkip,
    Places as Places,
    Readers as Readers,
    SkipPlan as SkipPlan,
)
from .readers import (
    FOLDING as FOLDING,
)
from .source import (
    EditSite as EditSite,
    attributes_of as attributes_of,
    find_function as find_function,
    functions_in as functions_in,
    has_operand as has_operand,
    inherited as inherited,
    list_of_a_sum as list_of_a_sum,
    position_of as position_of,
    syntax_tree as syntax_tree,
)
