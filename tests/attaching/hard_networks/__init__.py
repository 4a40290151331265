"""Networks that are hard to scale: scaled right, or refused by name, never silently wrong.

Every network scales its own skips with `ks`, the coefficients outermost first. So it is its own reference for what an
attached scaling must compute. Most of them are a `Pyramid`, and differ only in how they join a skip.

    kind    "none": no long skip; "after": changed after it was scaled
    must    it has to work. The others may be refused
    judge   which of the judges in test_hard_networks.py looks at it
"""

from typing import Any

from . import hosts, merges, methods, paths, structure
from .base import Net

__all__ = ["NETWORKS"]

# A network that others are made from is no case by itself.
_BASES = {methods.Folded, structure.NoSkips, merges.Reach, merges.WideReach, paths.Sharing}


def _cases(file: Any) -> list[Any]:
    made = [net for net in vars(file).values() if isinstance(net, type) and issubclass(net, Net)]
    return [net for net in made if net.__module__ == file.__name__ and net not in _BASES]


NETWORKS: list[Any] = [net for file in (merges, hosts, structure, paths, methods) for net in _cases(file)]
