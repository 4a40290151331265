"""The evidence for the recipe: curves of comparisons as small JSON files, and a page with tables and figures from them.

python -m research.recipe gather RUNS docs/evidence/recipe/NAME.json --title TITLE
python -m research.recipe redraw docs/evidence/recipe
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scalelong.experiments.runs import exit_code
from scalelong.files import write_text

from .gather import gather
from .page import redraw


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.recipe", description=__doc__)
    commands = parser.add_subparsers(dest="command_name", required=True)
    gathering = commands.add_parser("gather")
    gathering.add_argument("runs", type=Path)
    gathering.add_argument("out", type=Path)
    gathering.add_argument("--title", required=True)
    gathering.add_argument("--command", help="default: what `scalelong compare` noted beside the runs")
    commands.add_parser("redraw").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    return exit_code(lambda: carry_out(options))


def carry_out(options: argparse.Namespace) -> None:
    if options.command_name == "redraw":
        redraw(options.folder)
    else:
        found = gather(options.runs, options.title, options.command)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(found, indent=None, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
