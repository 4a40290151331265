"""Networks that are hard to scale: scaled right, or refused by name, never silently wrong.

Every network scales its own skips with `ks`, the coefficients outermost first. So it is its own reference for what an
attached scaling must compute. Most of them are a `Pyramid`, and differ only in how they join a skip.

    kind    1 wrong operand      2 bypassed method       3 phantom or missing skip   4 another path
            5 containers         6 more than a factor    7 folding                   8 ambiguous
            none: no long skip   after: changed later    reach: ways to write a merge
    must    it has to work. The others may be refused
    judge   which of the judges in test_hard_networks.py looks at it
"""

from typing import Any

from . import (
    absent,
    base,
    bypasses,
    changes,
    choices,
    containers,
    folding,
    hosts,
    merges,
    methods,
    operands,
    paths,
    structure,
)
from .base import Net, Pyramid
from .changes import SOURCE

__all__ = ["NETWORKS", "SOURCE", "Pyramid"]

# A network that others are made from is no case by itself.
_BASES = {
    base.Blocks,
    base.Net,
    base.Plain,
    base.Pyramid,
    base.Tokens,
    base.WidePyramid,
    choices.Decoders,
    folding.Folded,
    bypasses.Keyed,
    absent.NoSkips,
    merges.Reach,
    merges.WideReach,
    hosts.Registered,
    hosts.Task,
    containers.Sharing,
}


def _cases(room: Any) -> list[Any]:
    """The networks of a room, in the order in which they are written."""
    made = [net for net in vars(room).values() if isinstance(net, type) and issubclass(net, Net)]
    return [net for net in made if net.__module__ == room.__name__ and net not in _BASES]


_ROOMS = (operands, bypasses, structure, absent, paths, containers, methods, folding, choices, merges, hosts, changes)
NETWORKS: list[Any] = [net for room in _ROOMS for net in _cases(room)]
