"""`scalelong lab reproduce`: the paper's figures and tables again, with a verdict on each."""

import argparse
from pathlib import Path

from scalelong.cli.parser import Parser
from scalelong.cli.shared import add_engine_flags, engine_of, left_to_do
from scalelong.errors import InvalidConfigError
from scalelong.optional import needs

OUT = Path("reproduced")

ITEM_NAMES = ("fig1", "fig3", "fig5", "fig6", "fig7", "table1", "table2", "table3", "table4")
SCALE_NAMES = ("tiny", "paper")
"""The keys of ITEMS, and SCALES, written out: reading them there would import torch."""


def run(options: argparse.Namespace) -> int:
    needs("matplotlib", "report", "drawing the figures")
    # Only here, since these import torch, and --help does not wait for it.
    from .items import ITEMS
    from .pages import summary
    from .run import describe, redraw, reproduce

    if options.redraw:
        names = redraw(options.redraw)
        print(f"redrawn from the raw results: {', '.join(names)} in {options.redraw}")
        return 0
    if not options.item:
        raise InvalidConfigError(f"say what to reproduce: {', '.join(ITEM_NAMES)} or all; or --redraw FOLDER")
    if options.seeds < 1:
        raise InvalidConfigError(f"--seeds must be at least 1, got {options.seeds}")
    names = list(ITEM_NAMES) if options.item == "all" else [options.item]
    engine = engine_of(options)
    if options.dry_run:
        print(describe(names, options.scale, options.seeds, options.out))
        return 0
    engine.check()
    found = reproduce(names, options.scale, options.seeds, options.out, engine=engine)
    if found is None:
        return left_to_do()
    for results in found:
        print(summary(ITEMS[results.item], results))
    print(f"pages: {options.out / 'README.md'}")
    return 0


DESCRIPTION = """\
Reproduce a figure or a table of the paper: train its methods with equal seeds, measure, draw and judge its claims by a
fixed rule. Items share runs; what is finished is not repeated, and the same command continues an interrupted one.
The data set CIFAR-10 is looked for as `scalelong train --data cifar10` does, see docs/data.md."""


def parser() -> Parser:
    made = Parser("lab reproduce", DESCRIPTION, usage="[ITEM] [OPTIONS]")
    made.flag("item", f"{', '.join(ITEM_NAMES)} or all", kind=(*ITEM_NAMES, "all"), nargs="?", metavar="ITEM")
    made.flag("--scale", "tiny: two CPU cores; paper: GPUs", "tiny", kind=SCALE_NAMES)
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    made.flag("--out", "folder of pages and runs", OUT, kind=Path)
    made.flag("--dry-run", "print the plan and stop", False)
    made.flag("--redraw", "make figures and pages from raw results alone", kind=Path, metavar="FOLDER")
    add_engine_flags(made)
    return made
