"""Write one self-contained HTML file about runs: curves, long skips, coefficients, samples, tables, configurations."""

import argparse
from pathlib import Path

from .options import add_quiet_option
from .parser import Parser

EXAMPLES = """\
  scalelong report runs/mine
  scalelong report runs/compare-digits-tiny --out comparison.html
"""


def parser() -> Parser:
    made = Parser("report", __doc__ or "", EXAMPLES, "RUN ... [OPTIONS]")
    made.add_argument("folders", nargs="+", metavar="RUN", help="run folders, or folders that hold runs")
    made.add_argument("--out", type=Path, help="the file (default: report.html in the first folder)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..files import require_file_place
    from ..report import write_report

    out = options.out or Path(options.folders[0]) / "report.html"
    require_file_place(out)
    print(f"report: {write_report(options.folders, out)}")
