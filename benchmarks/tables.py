"""Tables of numbers with their spread, for people (Markdown) and for programs (plain values)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .spread import Spread

Cell = str | float | int | None | Spread


def _seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


KINDS: dict[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:.3g}",
    "seconds": _seconds,
    "bytes": lambda value: f"{value / 1e6:,.0f} MB",
    "times": lambda value: f"{value:.3f}",
    "percent": lambda value: f"{100 * value:+.2f} %",
    "share": lambda value: f"{100 * value:.1f} %",
    "rate": _rate,
    "gflops": lambda value: f"{value / 1e9:,.1f}",
}
"""How the numbers of a column are written."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: dict[str, str]
    """From a heading to a kind of number, or "text"."""
    rows: list[list[Any]]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"ragged rows in {self.title!r}"
        assert all(kind == "text" or kind in KINDS for kind in self.columns.values()), self.columns

    def markdown(self) -> str:
        kinds = list(self.columns.values())
        cells = [[show(cell, kind) for cell, kind in zip(row, kinds, strict=True)] for row in self.rows]
        lines = [list(self.columns), *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(kinds))]
        rule = [
            "-" * width if kind == "text" else "-" * (width - 1) + ":"
            for width, kind in zip(widths, kinds, strict=True)
        ]
        text = [_line(lines[0], widths, kinds), _line(rule, widths, kinds)]
        text += [_line(line, widths, kinds) for line in cells]
        return "\n".join([f"**{self.title}**", "", *text, *(f"\n{note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        rows = [[_plain(cell) for cell in row] for row in self.rows]
        return {"title": self.title, "columns": self.columns, "rows": rows, "notes": self.notes}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Table":
        rows = [[Spread(**cell) if isinstance(cell, dict) else cell for cell in row] for row in values["rows"]]
        return cls(values["title"], values["columns"], rows, values["notes"])


def show(cell: Cell, kind: str) -> str:
    """A median with its quartiles, or a number, or "–" for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    write = KINDS[kind]
    if isinstance(cell, Spread):
        return f"{write(cell.median)} [{write(cell.low)}, {write(cell.high)}]"
    return write(cell)


def _plain(cell: Cell) -> Any:
    return vars(cell) if isinstance(cell, Spread) else cell


def _line(cells: Sequence[str], widths: Sequence[int], kinds: Sequence[str]) -> str:
    padded = [
        cell.ljust(width) if kind == "text" else cell.rjust(width)
        for cell, width, kind in zip(cells, widths, kinds, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
