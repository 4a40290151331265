"""A figure or a table of the paper: what it claims, what to run, what to measure, and when a claim holds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalelong.experiments.runs import PlannedRun

from .arms import Arm
from .claims import Claim
from .quantities import Quantity
from .results import Results
from .settings import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Item:
    name: str
    """As on the command line: fig1, table2, ..."""
    title: str
    paper: str
    """What the paper says, in our words."""
    here: str
    """What is done instead, and where it differs."""
    arms: Callable[[Scale], list[Arm]]
    quantities: tuple[Quantity, ...]
    """What the tables of the page show of every run."""
    claims: Callable[[Results], list[Claim]]
    figures: "dict[str, Callable[[Results], Figure]]"
    """By name of the file."""
    published: dict[str, str] = field(default_factory=dict)
    """The paper's own numbers by method, where it prints them."""
    measure: Callable[[PlannedRun], dict[str, Any]] | None = None
    """Further measurements on a finished run."""
    survey: Callable[[Scale, int], dict[str, Any]] | None = None
    """Measurements that need no run, such as those on the data alone; they are given the number of seeds."""
    traces: bool = False
    """Whether the page draws single readings, so that the raw results must hold those of the first seed."""
