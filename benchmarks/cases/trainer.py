"""What the trainer adds to the network's work, how fast it starts, and how well two processes share a step."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ..contender import Contender, interleave, package_environment, race, start, turn_of
from ..contenders import MONITORED, PAIR, SWITCHED_MONITOR, TRAINER, WATCHED
from ..lockstep import lockstep
from ..record import Result, Spread, Table, ratios
from ..settings import S2_8, S2_32, SMALL, TINY, Settings, UViTSize

MONITOR_EVERY = 10
"""Steps between two readings of the monitor, by default."""
NEVER = 1_000_000_000
WITHOUT, AGAIN = "without a monitor", "without, again"
WAITING, READING = "between two readings", "with a reading"
ONE, APART, DDP = "one process", "two processes on their own", "two processes together (DDP)"


def parts(size: UViTSize, rounds: int, settings: Settings) -> Result:
    """The share of all that is not the network. A monitor that reads at every step shows what a reading costs."""
    size = TINY if settings.quick else size
    contenders = [
        Contender("step", WATCHED, size.ours()),
        Contender("monitored", MONITORED, {**size.ours(), "every": 1}),
    ]
    with ExitStack() as stack:
        workers, _ = start(contenders, settings, stack)
        turns = {worker.contender.name: worker.turn for worker in workers}
        workers[0].ask("forget")
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=settings.turn_seconds)
        found: dict[str, float] = workers[0].ask("parts")
    step = Spread.of(seconds["step"])
    reading = Spread.of([ratio - 1 for ratio in ratios(seconds["monitored"], seconds["step"])])
    shares: dict[str, float] = {name: value / step.median for name, value in found.items()}
    shares["monitoring"] = max(0.0, reading.median) / MONITOR_EVERY
    rows: list[list[Any]] = [[name, share] for name, share in shares.items()]
    rows.append(["together", sum(shares.values())])
    notes = [
        f"A step takes {step.median:.3g} s. Data include flips, noise and times; logging is a line every 50 steps.",
        f"A reading of the monitor costs {100 * reading.median:.1f} % of a step [{100 * reading.low:.1f} %, "
        f"{100 * reading.high:.1f} %], and is made every {MONITOR_EVERY} steps.",
    ]
    title = f"The trainer's own share of a step, U-ViT, {size.describe()}"
    table = Table(title, {"part": "text", "share of the step": "percent"}, rows, notes)
    return Result([table], {"seconds": seconds, "parts": found})


def monitor(size: UViTSize, rounds: int, settings: Settings) -> Result:
    """A step at which the monitor reads, and one at which it waits, against one without it."""
    size = TINY if settings.quick else size
    readings = {WITHOUT: None, AGAIN: None, WAITING: NEVER, READING: 1}
    arguments = {**size.ours(), "readings": readings}
    found = lockstep(SWITCHED_MONITOR, arguments, rounds, settings, imports=("accelerate",))
    rows: list[list[Any]] = [
        [name, found.time(name), *((None, None) if name == WITHOUT else (found.parts[name], found.whole[name]))]
        for name in found.seconds
    ]
    rows.append([f"one reading every {MONITOR_EVERY} steps", None, _every(found.parts), _every(found.whole)])
    columns = {"": "text", "time per step": "seconds", "over without": "percent", "by the whole": "percent"}
    notes = found.notes(WITHOUT, AGAIN, besides=", and at the optimiser")
    notes.append(f"The last row is one step with a reading and {MONITOR_EVERY - 1} between two, by {MONITOR_EVERY}.")
    table = Table(f"The stability monitor on one core, U-ViT, {size.describe()}", columns, rows, notes)
    return Result([table], {"seconds": found.seconds})


def _every(costs: dict[str, Spread]) -> Spread:
    """Of one reading in so many steps."""
    waiting, reading = costs[WAITING], costs[READING]

    def mean(one: float, other: float) -> float:
        return (one + (MONITOR_EVERY - 1) * other) / MONITOR_EVERY

    return Spread(
        mean(reading.median, waiting.median), mean(reading.low, waiting.low), mean(reading.high, waiting.high)
    )


def starting(rounds: int, settings: Settings) -> Result:
    """New processes of Python, as a shell starts them."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "import torch": ["-c", "import torch"],
        "import scalelong": ["-c", "import torch, scalelong"],
        "scalelong --help": ["-m", "scalelong", "--help"],
    }
    environment = package_environment(settings.threads)

    def begin(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)

    turns = {name: turn_of(partial(begin, arguments)) for name, arguments in commands.items()}
    seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
    beyond = [a - b for a, b in zip(seconds["import scalelong"], seconds["import torch"], strict=True)]
    rows = [[name, Spread.of(values)] for name, values in seconds.items()]
    rows.append(["import scalelong, beyond torch", Spread.of(beyond)])
    return Result([Table("Starting, in new processes", {"": "text", "time": "seconds"}, rows)], {"seconds": seconds})


def processes(size: UViTSize, rounds: int, settings: Settings) -> Result:
    """Two processes on two cores, one thread each, against twice what one process does alone."""
    size = TINY if settings.quick else size
    contenders = [
        Contender(ONE, TRAINER, size.ours()),
        Contender(APART, PAIR, {**size.ours(), "together": False}),
        Contender(DDP, PAIR, {**size.ours(), "together": True}),
    ]
    found = race(contenders, replace(settings, threads=1), rounds)
    rows = []
    for name in found.seconds:
        images = size.batch * (1 if name == ONE else 2)
        rate = Spread.of([images / value for value in found.seconds[name]])
        # Twice the images in the time t2 against one share in t1: 2b / t2 over 2 b / t1.
        rows.append([name, rate, None if name == ONE else found.speed(name, ONE)])
    columns = {"": "text", "images per second": "rate", "share of twice one process": "times"}
    notes = [
        "One thread for each process. Two processes on their own share memory and caches but say nothing to each "
        "other: what they lose is the machine's, not the communication's.",
    ]
    title = f"Two processes, U-ViT, {size.describe()} for each"
    return Result([Table(title, columns, rows, notes)], {"seconds": found.seconds})


CASES = {
    "parts": partial(parts, S2_32, 2),
    "monitor": partial(monitor, SMALL, 16),
    "start": partial(starting, 9),
    "processes": partial(processes, S2_8, 3),
}
