"""`scalelong bench [NAME ...]`: speed and memory on this machine, as ratios against what one would run instead.

NAME is a benchmark, or one of its cases such as step/small; without a name everything is measured, which takes long.
Contenders take turns, each in a process of its own; shown are medians and [quartiles] over the rounds. Costs of a
percent or less are measured slice by slice in one process, with their [95 % intervals]. Let nothing else run meanwhile.
"""

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidConfigError

from . import record
from .record import busy_warning, describe_machine, entry, fill_page, load, machine_line
from .settings import Settings, cores

# All benchmarks by name, and the measuring of one of their cases.

BENCHMARKS = {
    "step": "a training step against the authors' code and diffusers' script",
    "network": "sl.UViT in a plain loop against a U-ViT of stock modules",
    "sweep": "many runs of a small network, one by one and several at once",
    "overhead": "what scaling the long skips costs, in time and memory",
    "roofline": "the step against the machine's matrix products, and where its time goes",
    "sampling": "images per second to a given Fréchet distance",
    "data": "images per second by source, alone and while training",
    "attach": "finding the long skips of any network, and scaling them from outside",
    "growth": "how time and memory grow with depth, tokens, width, batch and long skips",
    "trainer": "the trainer's own share of a step, its start, two processes",
}


def cases_of(benchmark: str) -> dict[str, Any]:
    return import_module(f"benchmarks.cases.{benchmark}").CASES


def chosen(names: Sequence[str]) -> list[str]:
    """Cases as "benchmark/case", from names of benchmarks and of cases; all of them if there are no names."""
    found: list[str] = []
    for name in names or list(BENCHMARKS):
        benchmark, _, case = name.partition("/")
        if benchmark not in BENCHMARKS:
            raise InvalidConfigError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
        cases = cases_of(benchmark)
        if case and case not in cases:
            raise InvalidConfigError(f"the benchmark {benchmark!r} has no case {case!r}; it has {', '.join(cases)}")
        found += [f"{benchmark}/{name}" for name in ([case] if case else cases)]
    return list(dict.fromkeys(found))


def measure(case: str, settings: Settings) -> dict[str, Any]:
    """The entry of one case, for the file of results."""
    benchmark, _, name = case.partition("/")
    before, began = load(), time.perf_counter()
    result = cases_of(benchmark)[name](settings)
    seconds = time.perf_counter() - began
    return entry(result, describe_machine(settings.threads), (before, load()), seconds, settings.quick)


# `scalelong bench [NAME ...]`: speed and memory on this machine, as ratios against what one would run instead.
#
# NAME is a benchmark, or one of its cases such as step/small; without a name everything is measured, which takes long.
# Contenders take turns, each in a process of its own; shown are medians and [quartiles] over the rounds. Costs of a
# percent or less are measured slice by slice in one process, with their [95 % intervals]. Let nothing else run
# meanwhile.


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
