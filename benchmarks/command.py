"""`scalelong bench [NAME ...]`: speed and memory on this machine, as ratios against what one would run instead.

NAME is a benchmark, or one of its cases such as step/small; without a name everything is measured, which takes long.
Contenders take turns, each in a process of its own; shown are medians and [quartiles] over the rounds. Costs of a
percent or less are measured slice by slice in one process, with their [95 % intervals]. Let nothing else run meanwhile.
"""

import argparse
from pathlib import Path

from benchmarks import record
from benchmarks.catalogue import BENCHMARKS, chosen, measure
from benchmarks.fill import fill_page
from benchmarks.machine import busy_warning, describe_machine, machine_line
from benchmarks.settings import Settings, cores


def parser() -> argparse.ArgumentParser:
    width = max(map(len, BENCHMARKS))
    listing = "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in BENCHMARKS.items())
    made = argparse.ArgumentParser(
        prog="scalelong bench",
        description=__doc__,
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="a benchmark, or BENCHMARK/CASE (default: all)")
    made.add_argument("--list", action="store_true", help="print the names of all cases")
    made.add_argument("--quick", action="store_true", help="tiny networks and few rounds, to see that it works")
    made.add_argument("--threads", type=int, default=cores(), help="threads of each contender (default: all cores)")
    made.add_argument("--rounds", type=int, help="rounds of every case, instead of its own number")
    made.add_argument("--out", type=Path, metavar="FILE", help="put the results into this JSON file, case by case")
    made.add_argument(
        "--official", type=Path, metavar="PATH", help="a checkout of the authors' code, to measure it too"
    )
    made.add_argument("--run", type=Path, help="sampling: a trained run (default: a short one on digits)")
    made.add_argument("--target", type=float, help="sampling: the Fréchet distance to reach (default: near the best)")
    made.add_argument("--table", type=Path, metavar="FILE", help="measure nothing; print the tables of a JSON file")
    made.add_argument("--fill", type=Path, metavar="PAGE", help="with --table: put the tables into a Markdown page")
    return made


def main(arguments: list[str]) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if options.fill and not options.table:
        made.error("--fill needs --table FILE")
    cases = chosen(options.names)
    if options.list:
        print("\n".join(cases))
    elif options.table:
        _show(options.table, cases, options.fill)
    else:
        _measure(cases, options)
    return 0


def _measure(cases: list[str], options: argparse.Namespace) -> None:
    if options.out and options.out.exists():
        record.read(options.out)  # better to know now that it cannot be added to
    settings = Settings(
        threads=options.threads,
        quick=options.quick,
        rounds=options.rounds,
        official=options.official,
        run=options.run,
        target=options.target,
    )
    print(machine_line(describe_machine(settings.threads)), flush=True)
    for case in cases:
        print(f"\n## {case}", flush=True)
        measured = measure(case, settings)
        print(f"\n{record.markdown(case, measured)}", flush=True)
        warning = busy_warning(measured["load_before"])
        if warning:
            print(f"\nwarning: {warning}", flush=True)
        if options.out:
            record.store(options.out, case, measured)


def _show(file: Path, cases: list[str], page: Path | None) -> None:
    entries = {case: measured for case, measured in record.read(file).items() if case in cases}
    tables = {case: record.markdown(case, measured) for case, measured in entries.items()}
    if page:
        print(f"{page}: filled {', '.join(fill_page(page, tables)) or 'nothing'}")
    else:
        print("\n\n".join(f"### {case}\n\n{text}" for case, text in tables.items()))
