"""Rows of numbers: as a pandas data frame for those who compute on, as plain text for those who read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from pandas import DataFrame


def data_frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    try:
        import pandas
    except ImportError as error:
        raise MissingDependencyError("pandas", "report", "a data frame of results") from error
    return pandas.DataFrame(list(rows))


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in the order of the first row; numbers to four significant digits."""
    if not rows:
        return "(nothing)"
    columns = list(rows[0])
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[position]) for line in cells) for position in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
