"""A plan as a picture: the encoder goes down on the left, the decoder up on the right, and the long skips join them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from ..errors import InvalidConfigError
from ..optional import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .plan import LongSkip, SkipPlan

ENCODER, DECODER, PATH, SKIP, MUTED = "#dbe9f6", "#fde5d2", "#333333", "#0072b2", "#8a8a8a"

# In inches, so that letters, boxes and lines keep their proportions for any number of skips.
ROW, BOX, MARGIN, GAP, MIDDLE = 0.44, 0.28, 0.28, 0.25, 1.3
LETTER = 0.078
"""The width of one letter of the labels."""
LONGEST = 36
"""Letters of a module's name that are shown."""


def draw_plan(plan: SkipPlan, coefficients: Sequence[float] | None = None) -> Figure:
    """The U of a plan, outermost skip at the top. Widths of the lines show the coefficients, where these are given."""
    kappas = _checked(plan, coefficients)
    labels = [_label(skip, kappa) for skip, kappa in zip(plan, kappas, strict=True)]
    columns = [LETTER * max(map(len, column)) + 0.24 for column in zip(*labels, strict=True)]
    span = max(3.6, sum(columns) + 1.2)
    names = {"encoder": [_shortened(s.producer) for s in plan], "decoder": [_shortened(s.consumer) for s in plan]}
    sides = {side: LETTER * max(12, *map(len, ["", *found])) + 0.25 for side, found in names.items()}
    width, height = 2 * MARGIN + sum(sides.values()) + span, ROW * len(plan) + 1.35

    figure = needs("matplotlib.figure", "report", "drawing a plan").Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    rows = [height - 0.85 - ROW * position for position in range(len(plan))]
    ends = (MARGIN + sides["encoder"], width - MARGIN - sides["decoder"])
    inner = (sum(ends) / 2, MARGIN)

    _write(axes, width / 2, height - 0.22, f"{plan.model}: {plan.counted()}", size=10.5, weight="bold")
    for y, skip, kappa, label in zip(rows, plan, kappas, labels, strict=True):
        _draw_skip(axes, ends, y, skip, kappa)
        _draw_label(axes, sum(ends) / 2, y, label, columns)
    _box(axes, *inner, MIDDLE, BOX, "inner layers", "#ececec")
    for x, (side, found) in zip((MARGIN, ends[1]), names.items(), strict=True):
        _draw_side(axes, x + sides[side] / 2, sides[side], _blocks(found, rows), inner, down=side == "encoder")
    return figure


def _draw_skip(axes: Axes, ends: tuple[float, float], y: float, skip: LongSkip, kappa: float | None) -> None:
    weight = 0.4 if kappa is None or not math.isfinite(kappa) else min(1.0, abs(kappa))
    style = {"color": SKIP, "linestyle": "-"} if skip.attachment is not None else {"color": MUTED, "linestyle": "--"}
    _arrow(axes, (ends[0], y), (ends[1], y), linewidth=0.7 + 2.0 * weight, **style)


def _draw_label(axes: Axes, middle: float, y: float, label: Sequence[str], columns: Sequence[float]) -> None:
    x = middle - sum(columns) / 2
    _rectangle(axes, middle, y, sum(columns), BOX, facecolor="white", edgecolor="none")
    for text, width in zip(label, columns, strict=True):
        _write(axes, x + 0.14, y, text, size=8.5, ha="left")
        x += width


def _draw_side(
    axes: Axes,
    x: float,
    width: float,
    blocks: list[tuple[str, float, float]],
    inner: tuple[float, float],
    *,
    down: bool,
) -> None:
    """The modules of one side and the main path through them: down to the inner layers, or up from them."""
    half = BOX / 2
    for name, top, low in blocks:
        _box(axes, x, (top + low) / 2, width, top - low + BOX, name, ENCODER if down else DECODER)
    if not blocks:
        return
    first, deepest = (x, blocks[0][1] + half), (x, blocks[-1][2] - half)
    _write(axes, x + 0.1, first[1] + GAP / 2, "input" if down else "output", size=8, color=PATH, ha="left")
    ways = [((x, above - half), (x, below + half)) for (*_, above), (_, below, _) in pairwise(blocks)]
    ways.append(((x, first[1] + GAP), first))
    for start, end in ways:
        _arrow(axes, *((start, end) if down else (end, start)), color=PATH, linewidth=1.1)
    if down:
        bend = "angle,angleA=-90,angleB=0,rad=8"
        _arrow(axes, deepest, (inner[0] - MIDDLE / 2, inner[1]), color=PATH, linewidth=1.1, connectionstyle=bend)
    else:
        bend = "angle,angleA=0,angleB=-90,rad=8"
        _arrow(axes, (inner[0] + MIDDLE / 2, inner[1]), deepest, color=PATH, linewidth=1.1, connectionstyle=bend)


def _blocks(names: Sequence[str], rows: Sequence[float]) -> list[tuple[str, float, float]]:
    """Name, first and last height: skips of one module that follow each other share its box."""
    found = groupby(zip(names, rows, strict=True), key=lambda entry: entry[0])
    heights = [(name, [y for _, y in entries]) for name, entries in found]
    return [(name, ys[0], ys[-1]) for name, ys in heights]


# Shapes and texts


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    head = "-|>,head_width=0.15,head_length=0.3"
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": head, "shrinkA": 0, "shrinkB": 0, **style})


def _box(axes: Axes, x: float, y: float, width: float, height: float, name: str, colour: str) -> None:
    _rectangle(axes, x, y, width, height, facecolor=colour, edgecolor="#555555", linewidth=0.8)
    _write(axes, x, y, name, size=8)


def _rectangle(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    patch = needs("matplotlib.patches", "report", "drawing a plan").FancyBboxPatch
    corner = (x - width / 2 + 0.05, y - height / 2 + 0.05)
    shape = "round,pad=0.05,rounding_size=0.06"
    axes.add_patch(patch(corner, width - 0.1, height - 0.1, boxstyle=shape, zorder=4, **style))


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    # Above the arrows of annotations, whose zorder is 3. A $ in a module's name is no formula.
    axes.text(x, y, text, **{"ha": "center", "va": "center_baseline", "parse_math": False, "zorder": 5, **style})


def _label(skip: LongSkip, kappa: float | None) -> tuple[str, ...]:
    known = () if kappa is None else (f"κ = {kappa:.3g}",)
    remark = "" if skip.attachment is not None else " (cannot be scaled)"
    return (str(skip.index), "×".join(map(str, skip.shape)), f"{skip.merge}{remark}", *known)


def _shortened(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    name = name or "the model"
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _checked(plan: SkipPlan, coefficients: Sequence[float] | None) -> list[float | None]:
    if coefficients is None:
        return [None] * len(plan)
    values = [float(value) for value in coefficients]
    if len(values) != len(plan):
        raise InvalidConfigError(
            f"coefficients= takes one number for each of the {len(plan)} long skips, got {len(values)}"
        )
    return list(values)
