"""One run in a process of its own: `python -m scalelong.experiments.one_run`, described on the standard input."""

import json
import sys
from pathlib import Path

from ..runs.config import from_dict
from .runs import PlannedRun, carry_out
from .script import exit_code

INTERRUPTED = 130


def main() -> int:
    given = json.load(sys.stdin)
    config = from_dict(given["config"])
    run = PlannedRun(config.scaling, config.seed, Path(given["folder"]), config)
    return exit_code(lambda: 0 if carry_out(run, given["every"]) else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
