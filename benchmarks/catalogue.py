"""`scalelong lab bench [NAME ...]`: speed on this machine, as ratios against what one would run instead.

NAME is a benchmark, or one of its cases such as step/small; without a name everything is measured, which takes long.
Contenders take turns in one process; shown are medians and [quartiles] over the rounds. Let nothing else run meanwhile.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scalelong.cli.parser import Parser
from scalelong.errors import InvalidConfigError

from .cases import BENCHMARKS
from .harness import Settings, cores, describe_machine, entry, fill_page, markdown, measure, read_results, store


def chosen(names: Sequence[str]) -> list[str]:
    """Cases as "benchmark/case", from names of benchmarks and of cases; all of them if there are no names."""
    found: list[str] = []
    for name in names or list(BENCHMARKS):
        benchmark, _, case = name.partition("/")
        if benchmark not in BENCHMARKS:
            raise InvalidConfigError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
        cases = BENCHMARKS[benchmark].cases
        if case and case not in cases:
            raise InvalidConfigError(f"the benchmark {benchmark!r} has no case {case!r}; it has {', '.join(cases)}")
        found += [f"{benchmark}/{each}" for each in ([case] if case else cases)]
    return list(dict.fromkeys(found))


def parser() -> Parser:
    width = max(map(len, BENCHMARKS))
    listing = "\n".join(f"  {name:<{width}}  {benchmark.purpose}" for name, benchmark in BENCHMARKS.items())
    made = Parser("lab bench", f"{__doc__}\nbenchmarks\n{listing}", usage="[NAME ...] [OPTIONS]")
    made.flag("names", "a benchmark, or BENCHMARK/CASE (default: all)", nargs="*", metavar="NAME")
    made.flag("--list", "print the names of all cases", False)
    made.flag("--quick", "tiny networks and few rounds, to see that it works", False)
    made.flag("--threads", "threads of a step", cores())
    made.flag("--rounds", "rounds of every case, instead of its own number; seeds of quality", kind=int)
    made.flag("--steps", "steps of a training in quality, instead of 1500", kind=int)
    made.flag("--out", "put the results into this JSON file, case by case", kind=Path, metavar="FILE")
    made.flag("--official", "a checkout of the authors' code, to measure it too", kind=Path, metavar="PATH")
    made.flag("--table", "measure nothing; print the tables of a JSON file", kind=Path, metavar="FILE")
    made.flag("--fill", "with --table: put the tables into a Markdown page", kind=Path, metavar="PAGE")
    made.set_defaults(out_is_file=True)
    return made


def run(options: argparse.Namespace) -> int:
    if options.fill and not options.table:
        parser().error("--fill needs --table FILE")
    cases = chosen(options.names)
    if options.list:
        print("\n".join(cases))
    elif options.table:
        found = {case: entry for case, entry in read_results(options.table).items() if case in cases}
        tables = {case: markdown(case, entry) for case, entry in found.items()}
        if options.fill:
            print(f"{options.fill}: filled {', '.join(fill_page(options.fill, tables)) or 'nothing'}")
        else:
            print("\n\n".join(f"### {case}\n\n{text}" for case, text in tables.items()))
    else:
        _measure(cases, options)
    return 0


def _measure(cases: list[str], options: argparse.Namespace) -> None:
    if options.out and options.out.exists():
        read_results(options.out)  # better to know now that it cannot be added to
    settings = Settings(options.threads, options.quick, options.rounds, options.official, options.steps)
    print(describe_machine(settings.threads), flush=True)
    for case in cases:
        benchmark, _, name = case.partition("/")
        make, rounds = BENCHMARKS[benchmark].cases[name]
        made = make(settings)
        found = entry(made if isinstance(made, dict) else measure(made, rounds, settings), settings)
        print(f"\n## {case}\n\n{markdown(case, found)}", flush=True)
        if options.out:
            store(options.out, case, found)
