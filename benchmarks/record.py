"""What comes out: numbers with their spread, tables, the machine, a file of results, and pages filled from it."""

import json
import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scalelong._version import __version__
from scalelong.files import write_text

from .settings import BenchmarkError, cores

# The middle and the quartiles of repeated measurements.


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            raise BenchmarkError("there is nothing to take the median of: no round was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round: what disturbed a whole round cancels."""
    if len(numerators) != len(denominators):
        raise BenchmarkError(f"{len(numerators)} and {len(denominators)} rounds cannot be compared")
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


# Tables of numbers with their spread, for people (Markdown) and for programs (plain values).

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


# On what, and how undisturbed, something was measured.

PACKAGES = ("torch", "diffusers", "accelerate", "numpy")
BUSY = 0.25
"""Load per core, before a measurement, from which the machine counts as busy."""


def describe_machine(threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "scalelong": __version__,
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def machine_line(machine: dict[str, Any]) -> str:
    size = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} core(s){size}, {machine['threads']} thread(s), "
        f"torch {machine.get('torch', '?')}, Python {machine['python']}, scalelong {machine['scalelong']}"
    )


def load() -> float | None:
    """Processes that wanted a core in the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def busy_warning(before: float | None) -> str | None:
    if before is None or before <= BUSY * cores():
        return None
    return (
        f"the machine was busy: a load of {before:.2f} on {cores()} core(s) before the measurement; the ratios are "
        f"less certain, and times are longer, than on a quiet one"
    )


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# The file of results: one entry for each case, with the machine that it was measured on.

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """What a case found: tables, and the seconds of every round behind them."""

    tables: list[Table]
    rounds: Mapping[str, Any] = field(default_factory=dict)


def entry(
    result: Result, machine: dict[str, Any], loads: tuple[float | None, float | None], seconds: float, quick: bool
) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_before": loads[0],
        "load_after": loads[1],
        "seconds": seconds,
        "quick": quick,
        "tables": [table.to_dict() for table in result.tables],
        "rounds": dict(result.rounds),
    }


def read(path: Path) -> dict[str, Any]:
    """The entries of a file, by case."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"the results {path} cannot be read: {error}") from error
    except ValueError as error:
        raise BenchmarkError(f"{path} is not a file of `scalelong bench --out`: it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "cases" not in content:
        raise BenchmarkError(f"{path} is not a file of `scalelong bench --out`: it has no format {FORMAT} and cases")
    return content["cases"]


def store(path: Path, case: str, measured: dict[str, Any]) -> None:
    """Put an entry into the file; those of other cases stay."""
    cases = read(path) if path.exists() else {}
    cases[case] = measured
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"format": FORMAT, "cases": cases}, indent=1, ensure_ascii=False) + "\n")


def markdown(case: str, measured: dict[str, Any]) -> str:
    """The tables of one entry, and on what they were measured."""
    tables = [Table.from_dict(values).markdown() for values in measured["tables"]]
    return "\n\n".join([*tables, _footnote(case, measured)])


def _footnote(case: str, measured: dict[str, Any]) -> str:
    loads = [measured["load_before"], measured["load_after"]]
    about = [f"`scalelong bench {case}`", machine_line(measured["machine"])]
    if None not in loads:
        about.append(f"load average {loads[0]:.2f} before and {loads[1]:.2f} after")
    about.append(f"{math.ceil(measured['seconds'])} s, {measured['when'][:10]}")
    if measured["quick"]:
        about.append("--quick: tiny networks, the figures mean little")
    return f"_{'; '.join(about)}_"


# Tables into a Markdown page, between `<!-- bench: CASE -->` and `<!-- end -->`.

PLACE = re.compile(r"(<!-- bench: (?P<case>[\w/-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_page(page: Path, tables: Mapping[str, str]) -> list[str]:
    """Replace what stands at the places of these cases; other places stay as they are. Returns the cases filled."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"the page {page} cannot be read: {error}") from error
    filled: list[str] = []

    def replace(match: re.Match[str]) -> str:
        case = match["case"]
        if case not in tables:
            return match[0]
        filled.append(case)
        return f"{match[1]}{tables[case]}\n"

    write_text(page, PLACE.sub(replace, text))
    return filled
