"""Contenders take turns in one process; what is reported are ratios, with their spread over the rounds.

A busy moment of the machine falls on all contenders of a round, so it cancels in their ratio. With one thread the
clock is the processor time of this process, and with more the clock on the wall: threads that wait for each other
spin, which would count as work.
"""

import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scalelong._version import __version__
from scalelong.errors import InvalidConfigError, ScaleLongError
from scalelong.files import write_text

Step = Callable[[], object]


class BenchmarkError(ScaleLongError, RuntimeError):
    """A contender failed, or a file of results cannot be used."""


class OfficialCheckoutError(ScaleLongError, ValueError):
    """The folder given as the authors' code is not a checkout of it, or lacks a package."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    threads: int
    quick: bool = False
    """Tiny networks and few rounds: to see that it works. The figures mean little."""
    rounds: int | None = None
    """Instead of each case's own number."""
    official: Path | None = None
    """A checkout of the authors' code."""
    steps: int | None = None
    """Of a training in `quality`, instead of its own number."""

    def __post_init__(self) -> None:
        for name in ("threads", "rounds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfigError(f"`{name}` must be at least 1, got {value}")
        if self.official is not None:
            from .theirs import checkout

            checkout(self.official)

    @property
    def turn_seconds(self) -> float:
        """The shortest turn. Several steps that are shorter make one."""
        return 0.0 if self.quick else 0.03


@dataclass
class Race:
    """Steps that do the same work. The first is the one that the others are compared with."""

    title: str
    steps: Mapping[str, Callable[[], Step]]
    """From a name to a function that makes the step."""
    images: int | None = None
    """Images of a step: then images per second are shown as well."""
    memory: bool = False
    """Whether to report the most bytes of tensors that are alive in a step, too."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, write: Callable[[float], str]) -> str:
        return f"{write(self.median)} [{write(self.low)}, {write(self.high)}]"


def take_turns(steps: Mapping[str, Step], rounds: int, settings: Settings) -> dict[str, list[float]]:
    """Seconds of a step, by contender and round. The order is reversed in every other round."""
    import torch

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed(step: Step, count: int) -> float:
        start = clock()
        for _ in range(count):
            step()
        return (clock() - start) / count

    counts = {}
    for name, step in steps.items():
        step()  # the first one builds and compiles
        counts[name] = max(1, round(settings.turn_seconds / max(timed(step, 1), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(timed(steps[name], counts[name]))
    return seconds


def measure(race: Race, rounds: int, settings: Settings) -> dict[str, Any]:
    """A title, the rows of a table, notes, and the seconds behind them."""
    import torch

    torch.set_num_threads(settings.threads)
    rounds = settings.rounds or (2 if settings.quick else rounds)
    steps = {name: make() for name, make in race.steps.items()}
    seconds = take_turns(steps, rounds, settings)
    first = next(iter(steps))
    columns = ["", "time", f"time over {first}", f"times as fast as {first}"]
    columns += ["images per second"] if race.images else []
    columns += ["tensors at peak"] if race.memory else []
    rows = []
    for name, values in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(values, seconds[first], strict=True)]
        row = [name, Spread.of(values).text(seconds_text), "–", "–"]
        if name != first:
            row[2] = Spread.of([ratio - 1 for ratio in ratios]).text(lambda value: f"{100 * value:+.2f} %")
            row[3] = Spread.of([1 / ratio for ratio in ratios]).text(lambda value: f"{value:.3f}")
        if race.images:
            images = race.images
            row.append(Spread.of([images / value for value in values]).text(lambda value: f"{value:,.0f}"))
        if race.memory:
            row.append(f"{peak_of_tensors(race.steps[name]) / 1e6:,.0f} MB")
        rows.append(row)
    return {"title": race.title, "columns": columns, "rows": rows, "notes": race.notes, "seconds": seconds}


def seconds_text(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"


def peak_of_tensors(build: Callable[[], Step]) -> int:
    """The most bytes that torch has allocated on the CPU at a time during the second step: some optimisers make their
    moments in the first.

    torch reports the allocations of this thread alone, so that all is done by one thread.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    threads, mark = torch.get_num_threads(), "bench::built"
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step = build()
            step()
            gc.collect()
            with record_function(mark):
                pass
            step()
    finally:
        torch.set_num_threads(threads)
    assert found.profiler is not None
    results = found.profiler.kineto_results
    assert results is not None
    now = most = 0
    for event in sorted(_all(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
        if event.name == mark:
            most = now
        elif event.name == "[memory]":
            now += event.extra_fields.alloc_size
            most = max(most, now)
    return most


def _all(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


# The machine, the file of results, and Markdown


def describe_machine(threads: int) -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    packages = []
    for package in ("torch", "diffusers"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    python = f"Python {platform.python_version()}"
    return ", ".join(
        [name, f"{cores()} core(s)", f"{threads} thread(s)", *packages, python, f"scalelong {__version__}"]
    )


def entry(measured: dict[str, Any], settings: Settings) -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"when": when, "machine": describe_machine(settings.threads), "load": load, "quick": settings.quick}
    return {**measured, **about}


def markdown(case: str, found: Mapping[str, Any]) -> str:
    lines = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    load = f"; load average {found['load']:.2f}" if found["load"] is not None else ""
    quick = "; --quick: tiny networks, the figures mean little" if found["quick"] else ""
    about = f"_`scalelong lab bench {case}`; {found['machine']}{load}; {found['when'][:10]}{quick}_"
    return "\n\n".join([f"**{found['title']}**", table, *found["notes"], about])


def read_results(path: Path) -> dict[str, Any]:
    """The entries of a file, by case."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {case: found for case, found in content["cases"].items() if "columns" in found}
    except OSError as error:
        raise BenchmarkError(f"the results {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(f"{path} is not a file of `scalelong lab bench --out`: {error!r}") from error


def store(path: Path, case: str, found: dict[str, Any]) -> None:
    """Put an entry into the file; those of other cases stay."""
    cases = read_results(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"cases": {**cases, case: found}}, indent=1, ensure_ascii=False) + "\n")


PLACE = re.compile(r"(<!-- bench: (?P<case>[\w/-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_page(page: Path, tables: Mapping[str, str]) -> list[str]:
    """Replace what stands between `<!-- bench: CASE -->` and `<!-- end -->` in a page. Returns the cases filled."""
    filled: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if match["case"] not in tables:
            return match[0]
        filled.append(match["case"])
        return f"{match[1]}{tables[match['case']]}\n"

    write_text(page, PLACE.sub(replace, page.read_text(encoding="utf-8")))
    return filled
