"""scalelong progress: how far a sweep is, from its folder alone."""

import argparse
import time
from pathlib import Path

from ..errors import InvalidConfigError
from .options import add_output_options, whole_number


def run(options: argparse.Namespace) -> int:
    from ..experiments.progress import read_progress, to_json

    if options.follow is not None and options.follow < 1:
        raise InvalidConfigError(f"--follow must be at least 1 second, got {options.follow}")
    while True:
        found = read_progress(options.folder)
        if options.json:
            print(to_json(found), flush=True)
        else:
            lines = list(found.lines(options.all))
            print("\n".join(lines[-1:] if options.quiet else lines), flush=True)
        if options.follow is None or found.finished:
            return 0
        time.sleep(options.follow)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong progress",
        description="Show how far the runs of compare, range, reproduce or train are: done, running, queued, failed or "
        "lost, steps, and the time left. Everything is read from the folder, so that any machine which sees it can "
        "ask, whatever engine carries out the runs.",
    )
    made.add_argument("folder", type=Path, help="the folder of the sweep, which --out named; or of any runs")
    made.add_argument("--all", action="store_true", help="every run, also where there are many")
    made.add_argument("--follow", type=whole_number, metavar="SECONDS", help="again every so many, until all is done")
    add_output_options(made, "the progress")
    return made
