"""Parts that the figures of all items share: axes in rows, one colour per method, every seed drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalelong.experiments.figures import colour_of, pyplot
from scalelong.experiments.results import mean

from .methods import CORE
from .results import Results, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = 3


def panels(count: int, height: float = 2.7) -> "tuple[Figure, list[Axes]]":
    """Axes in rows of three, or of two where that leaves no gap."""
    columns = 2 if count == 4 else min(COLUMNS, max(1, count))
    rows = -(-count // columns)
    figure = pyplot().figure(figsize=(3.4 * columns, height * rows), layout="constrained", dpi=90)
    found = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in found[count:]:
        unused.set_axis_off()
    return figure, found[:count]


def colour(results: Results, method: str) -> str:
    """A method has one colour in all figures; those that only one item has follow."""
    core = [entry.label for entry in CORE]
    others = list(dict.fromkeys(run.method for run in results.runs if run.method not in core))
    return colour_of([*core, *others].index(method))


def draw_seeds(axes: "Axes", lines: Sequence[tuple[Sequence[float], Sequence[float]]], label: str, color: str) -> None:
    """A thin line for every seed, and a thick one for their mean where they share their abscissas."""
    for x, y in lines:
        axes.plot(x, y, color=color, alpha=0.35, linewidth=0.8)
    shared = min((len(x) for x, _ in lines), default=0)
    if shared:
        means = [mean([y[place] for _, y in lines]) for place in range(shared)]
        axes.plot(lines[0][0][:shared], means, color=color, linewidth=1.7, label=label)


def legend(axes: "Axes", **options: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7, **options)


def by_method(results: Results, setting: str) -> list[tuple[str, list[RunRecord]]]:
    return [(method, results.of(setting, method)) for method in results.methods(setting)]
