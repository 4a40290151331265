"""What a linear probe found: a table over layers and noise levels, what was chosen, and the baselines beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..console import html_lines, html_table, text_table
from ..errors import CannotReadError, EvaluationError
from ..files import in_words, parse_json, read_text, write_bytes, write_text
from ..optional import needs
from .scores import Score, Z

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """Accuracy of the best penalty, by layer and time."""

    layers: tuple[str, ...]
    times: tuple[float, ...]
    accuracy: list[list[float]]
    """[layer][time]; the mean over the draws."""
    deviation: list[list[float]]
    """Between draws of the noise; zero for one draw."""

    def at(self, layer: str, time: float) -> float:
        return self.accuracy[self.layers.index(layer)][self.times.index(time)]

    def best(self, time: float | None = None) -> tuple[str, float, float]:
        """(layer, time, accuracy) of the highest, at one time or at all."""
        times = self.times if time is None else (time,)
        cells = [(layer, t, self.at(layer, t)) for layer in self.layers for t in times]
        return max(cells, key=lambda cell: cell[2])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layer at one time, as it was chosen, and what the test images say about it."""

    layer: str
    time: float | None
    """None for clean pixels."""
    penalty: float | None
    validation: float | None
    test: Score
    """The accuracy with its 95 % interval (Wilson's)."""
    gain: Score | None = None
    """Of a baseline: how much higher the network's accuracy is on the same test images, with a 95 % interval."""

    @property
    def place(self) -> str:
        return self.layer if self.time is None else f"{self.layer}, t = {self.time:g}"


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """Print it, `plot` it, `save` and `load` it. `chosen.test` is the number to quote, with `baselines` beside it."""

    model: str
    data: str
    protocol: str
    pool: str
    draws: int
    seed: int
    classes: int
    images: dict[str, int]
    """To fit, to choose on, to test."""
    seen: bool
    """Whether nobody said that the images of the last two were held out when the network was trained."""
    network: Table
    untrained: Table
    pixels: Table
    chosen: Cell
    baselines: dict[str, Cell]
    chosen_on: str
    """ "validation"; "test" by the published protocol, whose accuracies are too high for that."""
    about: dict[str, Any]
    """What the caller wants to remember: run, step, weights."""

    @property
    def chance(self) -> float:
        return 1 / self.classes

    def rows(self) -> list[dict[str, str]]:
        """A row per layer, a column per time: accuracies in per cent. Baselines below."""
        rows = [self._row(layer, self.network, layer) for layer in self.network.layers]
        layers = self.untrained.layers
        best = [max(self.untrained.at(layer, t) for layer in layers) for t in self.untrained.times]
        rows.append({"": "untrained network, best layer"} | self._cells(best))
        rows.append(self._row(f"{self.pixels.layers[0]}, same noise", self.pixels, self.pixels.layers[0]))
        return rows

    def _row(self, title: str, table: Table, layer: str) -> dict[str, str]:
        return {"": title} | self._cells(table.accuracy[table.layers.index(layer)])

    def _cells(self, values: Sequence[float]) -> dict[str, str]:
        names = [f"t = {t:g}" for t in self.network.times]
        return {name: f"{100 * value:.1f}" for name, value in zip(names, values, strict=True)}

    def remarks(self) -> list[str]:
        i, chosen = self.images, self.chosen
        lines = [
            f"accuracy in % on {i[self.chosen_on]} {self.chosen_on} images of {self.data}; chance "
            f"{100 * self.chance:.1f}; {self.protocol}, pool {self.pool}, {self.draws} "
            f"draw{'s' * (self.draws != 1)} of noise, seed {self.seed}",
            f"chosen: {chosen.place}: {percent(chosen.test)} on {i['test']} test images",
        ]
        for name, cell in self.baselines.items():
            gain = "" if cell.gain is None else f"; the network is {points(cell.gain)} above it"
            lines.append(f"  {name} ({cell.place}): {percent(cell.test)}{gain}")
        if self.chosen_on == "test":
            lines.append(
                "this protocol chooses layer, time and epoch ON THE TEST IMAGES, as published: its accuracies are too "
                "high, and its intervals do not hold. For a number to rely on, take --protocol ridge"
            )
        if self.seen:
            lines.append(
                "all images are of one data set: if the network was trained on the tested ones, it may know them"
            )
        return [*lines, *self.about.get("remarks", [])]

    def __str__(self) -> str:
        return "\n".join([text_table(self.rows(), left=("",), rule=False), *self.remarks()])

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + html_lines(self.remarks())

    def plot(self) -> Figure:
        """A figure of matplotlib: network and untrained network as heat maps in one scale, pixels as their last row."""
        return draw_probe(self)

    def save_plot(self, path: str | PathLike[str]) -> None:
        """Write the picture whole, or not at all. The suffix of the file is its format."""
        content = io.BytesIO()
        self.plot().savefig(content, format=Path(path).suffix.removeprefix(".") or "png")
        write_bytes(path, content.getvalue())

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LinearProbe:
        if not isinstance(values, dict) or values.get("format") != FORMAT or "chosen" not in values:
            raise EvaluationError(f"this is no result of a probe in format {FORMAT}, as `scalelong probe` writes it")
        try:
            known = {name: values[name] for name in cls.__dataclass_fields__}
            tables = {name: _table(values[name]) for name in ("network", "untrained", "pixels")}
            baselines = {name: _cell(cell) for name, cell in values["baselines"].items()}
            return cls(**{**known, **tables, "chosen": _cell(values["chosen"]), "baselines": baselines})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvaluationError(f"the result of the probe is damaged ({in_words(error)}): make it anew") from error

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LinearProbe:
        try:
            return cls.from_dict(parse_json(read_text(path)))
        except CannotReadError as error:
            raise EvaluationError(f"the result of the probe is missing: {error}") from error
        except ValueError as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"{path} is not JSON: {error}") from error


def paired(differences: Tensor) -> Score:
    """The mean difference over the same test images, ± 1.96 standard errors."""
    mean = float(differences.mean())
    error = Z * float(differences.std() / max(len(differences), 1) ** 0.5) if len(differences) > 1 else 0.0
    return Score(mean, mean - error, mean + error)


def percent(score: Score) -> str:
    return f"{100 * score.value:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def points(score: Score) -> str:
    return f"{100 * score.value:+.1f} points [{100 * score.low:+.1f}, {100 * score.high:+.1f}]"


def _table(values: dict[str, Any]) -> Table:
    return Table(**{**values, "layers": tuple(values["layers"]), "times": tuple(values["times"])})


def _cell(values: dict[str, Any]) -> Cell:
    gain = values["gain"]
    return Cell(**{**values, "test": Score(**values["test"]), "gain": None if gain is None else Score(**gain)})


# The picture


def draw_probe(found: LinearProbe) -> Figure:
    tables = {f"{found.model}, trained": found.network, "the same before training": found.untrained}
    layers, times = [*found.network.layers, f"{found.pixels.layers[0]}, same noise"], found.network.times
    longest = max(map(len, layers))
    width, height = 1.6 + 0.085 * longest + 2 * (0.62 * len(times) + 0.35), 1.7 + 0.3 * len(layers)
    figure = needs("matplotlib.figure", "report", "drawing a probe").Figure(
        figsize=(width, height), layout="constrained", dpi=120
    )
    values = [cell for table in (*tables.values(), found.pixels) for row in table.accuracy for cell in row]
    bounds = (100 * min(found.chance, *values), 100 * max(values))
    both = figure.subplots(1, 2, sharey=True)
    image = None
    for axes, (title, table) in zip(both, tables.items(), strict=True):
        grid = [[100 * value for value in row] for row in [*table.accuracy, found.pixels.accuracy[0]]]
        image = axes.imshow(grid, cmap="viridis", vmin=bounds[0], vmax=bounds[1], aspect="auto")
        _write_cells(axes, grid, bounds)
        axes.axhline(len(layers) - 1.5, color="white", linewidth=3)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(times)), [f"{t:g}" for t in times], fontsize=8)
        axes.set_xlabel("noise level t", fontsize=8)
    both[0].set_yticks(range(len(layers)), layers, fontsize=8)
    if found.chosen.time in times and found.chosen.layer in layers:
        _frame(both[0], times.index(found.chosen.time), layers.index(found.chosen.layer))
    assert image is not None
    bar = figure.colorbar(image, ax=list(both), shrink=0.9, pad=0.02)
    bar.set_label(f"% right on {found.chosen_on} images", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(f"{found.data}: framed is what was chosen, {percent(found.chosen.test)} on test images", fontsize=9)
    return figure


def _write_cells(axes: Axes, grid: Sequence[Sequence[float]], bounds: tuple[float, float]) -> None:
    middle = (bounds[0] + bounds[1]) / 2
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)


def _frame(axes: Axes, column: int, row: int) -> None:
    patches = needs("matplotlib.patches", "report", "drawing a probe")
    box = patches.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d55e00", linewidth=2.2)
    axes.add_patch(box)
