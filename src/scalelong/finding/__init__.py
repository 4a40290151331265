"""Find the long skips of a model: the plan says where they are and where each can be scaled.

plan                   the plan as data
native                 models that scale their skips themselves; wrappers around models
examples               example inputs of known families
candidates, nest       which merges of a recorded forward are the U
source, expressions    the source of a merge, and how its expression can be edited
reach, readers         where a skip can be scaled, and which layers read its merge
find                   find_skips
"""

from .candidates import (
    Candidate as Candidate,
    candidates as candidates,
)
from .examples import (
    ExampleInputs as ExampleInputs,
    example_call as example_call,
    without_freeu as without_freeu,
    without_subclass as without_subclass,
)
from .expressions import (
    RUN as RUN,
    Editor as Editor,
    EditSite as EditSite,
    insert_first as insert_first,
)
from .find import (
    Patterns as Patterns,
    find_skips as find_skips,
)
from .native import (
    STATE as STATE,
    SkipHost as SkipHost,
    native_plan as native_plan,
    unwrap as unwrap,
)
from .nest import (
    select as select,
)
from .plan import (
    Attachment as Attachment,
    FoldTarget as FoldTarget,
    LongSkip as LongSkip,
    Places as Places,
    PlannedMerge as PlannedMerge,
    Readers as Readers,
    SkipPlan as SkipPlan,
)
from .readers import (
    FOLDING as FOLDING,
)
from .source import (
    attributes_of as attributes_of,
    find_function as find_function,
    functions_in as functions_in,
    inherited as inherited,
    syntax_tree as syntax_tree,
)
