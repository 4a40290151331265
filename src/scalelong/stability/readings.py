"""The readings of a monitor for people: the last one as rows, all of them as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..optional import needs
from .alarms import Alarm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Reading = Mapping[str, float]

LINES = 8
"""Long skips that a legend names; of more, it names the outermost and the innermost."""

SINGLE = {
    "loss": "loss",
    "loss_max": "largest loss",
    "gradient_norm/all": "gradient norm",
    "activation_max": "largest activation",
    "headroom": "headroom of the number format, times",
}
PER_SKIP = {"kappa": "κ_i", "skip_rms": "RMS", "probe_skip_rms": "RMS on the probe batch"}
"""What a reading holds of each long skip, as "kappa/1"."""


def reading_rows(reading: Reading) -> list[dict[str, str]]:
    """What is true of the whole model first, then every long skip, outermost first."""
    rows = [{"quantity": label, "value": f"{reading[name]:.4g}"} for name, label in SINGLE.items() if name in reading]
    for index in _indices([reading]):
        found = {label: reading.get(f"{name}/{index}") for name, label in PER_SKIP.items()}
        parts = [f"{label} {value:.4g}" for label, value in found.items() if value is not None]
        rows.append({"quantity": f"long skip {index}", "value": ", ".join(parts)})
    return rows


def draw_readings(history: Sequence[Reading], alarms: Sequence[Alarm] = ()) -> Figure:
    """Four panels over the steps. Alarms are vertical lines in all of them."""
    figure = needs("matplotlib.figure", "report", "drawing readings").Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten().tolist()
    indices = _indices(history)
    many = needs("matplotlib", "report", "drawing readings").colormaps["viridis"]
    colours = {index: many(0.9 * place / max(1, len(indices) - 1)) for place, index in enumerate(indices)}

    _draw(panels[0], history, "loss", color="#0072b2")
    _draw(panels[1], history, "gradient_norm/all", color="#d55e00")
    for axes, name in ((panels[2], "kappa"), (panels[3], _features(history))):
        for index in indices:
            named = len(indices) <= LINES or index in (indices[0], indices[-1])
            label = f"skip {index}" if named else "_"  # matplotlib's sign for "not in the legend"
            _draw(axes, history, f"{name}/{index}", color=colours[index], label=label)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7, frameon=False, ncols=2)
    for axes, title in zip(panels, ("loss", "gradient norm", "κ_i", PER_SKIP[_features(history)]), strict=True):
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        _finish(axes, [alarm.step for alarm in alarms], log=title != "κ_i")
    for axes in panels[2:]:
        axes.set_xlabel("step")
    return figure


def _draw(axes: Axes, history: Sequence[Reading], name: str, **style: Any) -> None:
    """What was not recorded or is not finite leaves a gap."""
    points = [(reading["step"], reading[name]) for reading in history if name in reading]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    marker = "o" if len(points) <= 40 else ""
    axes.plot([step for step, _ in points], values, marker=marker, markersize=3, linewidth=1.3, **style)


def _finish(axes: Axes, alarms: Sequence[float], log: bool) -> None:
    lines: list[Any] = list(axes.lines)
    drawn = [value for line in lines for value in line.get_ydata() if math.isfinite(value)]
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#8a8a8a")
    # Over a wide range only; narrow ones are easier to read on a plain axis.
    elif log and min(drawn) > 0 and max(drawn) > 10 * min(drawn):
        axes.set_yscale("log")
    for step in sorted(set(alarms)):
        axes.axvline(step, color="#cc3311", linestyle=":", linewidth=1)


def _features(history: Sequence[Reading]) -> str:
    """The probe batch stays the same, so that what changes there is the network."""
    return "probe_skip_rms" if any("probe_skip_rms/1" in reading for reading in history) else "skip_rms"


def _indices(history: Sequence[Reading]) -> list[int]:
    found = {name.partition("/")[2] for reading in history for name in reading if name.partition("/")[0] in PER_SKIP}
    return sorted(map(int, found))
