"""scalelong report: one HTML file about runs, to look at offline and to send around."""

import argparse
from pathlib import Path

from .options import add_quiet_option


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong report",
        description="Write one self-contained HTML file about runs: curves, long skips, coefficients, samples, tables, "
        "configurations.",
    )
    made.add_argument("folders", nargs="+", metavar="RUN", help="run folders, or folders that hold runs")
    made.add_argument("--out", type=Path, help="the file (default: report.html in the first folder)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..files import require_file_place
    from ..report import write_report

    out = options.out or Path(options.folders[0]) / "report.html"
    require_file_place(out)
    path = write_report(options.folders, out)
    print(f"report: {path}")
