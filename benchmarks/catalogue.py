"""All benchmarks by name, and the measuring of one of their cases."""

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from scalelong.errors import InvalidConfigError

from .machine import describe_machine, load
from .record import entry
from .settings import Settings

BENCHMARKS = {
    "step": "a training step against the authors' code and diffusers' script",
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
