"""The file of results: one entry for each case, with the machine that it was measured on."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalelong.files import write_text

from .errors import BenchmarkError
from .machine import machine_line
from .tables import Table

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
