"""The page with a table and a figure of every comparison."""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalelong.console import text_table
from scalelong.errors import InvalidConfigError
from scalelong.experiments.figures import colour_of
from scalelong.experiments.results import COLLAPSED
from scalelong.files import write_bytes, write_text

from .evidence import Evidence

TITLE_WIDTH = 80


def redraw(folder: Path) -> None:
    found = [Evidence(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise InvalidConfigError(f"there are no results in {folder}: looked for *.json")
    for entry in found:
        draw(entry, folder / f"{entry.name}.png")
    write_text(folder / "README.md", page(found))


def page(evidence: Sequence[Evidence]) -> str:
    parts = [
        "# Raw results of the recipe\n\nWritten by `python -m research.recipe redraw docs/evidence/recipe`"
        " from the JSON files beside it. Losses are errors in ε on held-out images, of averaged weights, with the "
        "same noise and times for all variants of a seed. Steps are those to the best loss that the baseline "
        "had at half or at the end of its run. A run has collapsed if its loss ends at more than "
        f"{COLLAPSED:g} times its best. What they mean: [recipe](../../recipe.md).\n"
    ]
    for entry in evidence:
        changes = "\n".join(
            f"- `{name}`: " + (", ".join(f"{key.split('.')[-1]} {value}" for key, value in differs.items()) or "-")
            for name, differs in entry.differs.items()
        )
        steps = max(
            (curve.steps[-1] for found in entry.curves.values() for curve in found.values() if len(curve)), default=0
        )
        parts.append(
            f"## {entry.title}\n\n{steps} steps.\n\n```\n{entry.command}\n```\n\n{changes}\n\n"
            f"```\n{text_table(entry.rows())}\n```\n\n![{entry.title}]({entry.name}.png)\n"
        )
    return "\n".join(parts)


def draw(entry: Evidence, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained", dpi=110)
    for position, (name, curves) in enumerate(entry.curves.items()):
        for number, curve in enumerate(curves.values()):
            style: Any = ("-", "--", ":")[position // 8 % 3]
            axes.plot(
                curve.steps,
                curve.values,
                style,
                color=colour_of(position),
                linewidth=1,
                alpha=0.8,
                label=name if number == 0 else None,
            )
    axes.set(xlabel="training step", ylabel="held-out loss", yscale="log")
    axes.set_title(textwrap.fill(entry.title, TITLE_WIDTH), fontsize=10)
    axes.legend(frameon=False, fontsize=7)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    write_bytes(path, content.getvalue())
