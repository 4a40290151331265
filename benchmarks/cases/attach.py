"""What it costs to find long skips, and to scale them from outside in each forward."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from ..contender import Contender, interleave, start
from ..contenders import PLANNING, SWITCHED_ATTACHED, UNET_IMPORTS
from ..lockstep import lockstep
from ..record import Result, Spread, Table
from ..settings import Settings

NONE, AGAIN = "as it is", "as it is, again"
METHODS = {"κ = 1": {"scaling": "uniform:1.0"}, "CS": {"scaling": "cs"}, "LS": {"scaling": "ls"}}
FOLDED = {"CS, folded into the weights": {"scaling": "cs", "folded": True}}
"""For networks without a norm behind the merge."""
BATCH = 16


def planning(rounds: int, settings: Settings) -> Result:
    names = ["concatenating"] if settings.quick else ["stable-diffusion-1.5", "unet/cifar10", "concatenating"]
    contenders = [Contender(name, PLANNING, {"network": name}, imports=UNET_IMPORTS) for name in names]
    with ExitStack() as stack:
        workers, _ = start(contenders, settings, stack)
        turns = {worker.contender.name: worker.turn for worker in workers}
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
        about = {worker.contender.name: worker.ask("about") for worker in workers}
    rows = [[name, about[name]["parameters"], about[name]["skips"], Spread.of(seconds[name])] for name in names]
    columns = {"network": "text", "parameters": "count", "long skips": "count", "time": "seconds"}
    title = "Finding the long skips of a network on the meta device (`find_skips`)"
    return Result([Table(title, columns, rows)], {"seconds": seconds})


def forward(network: str, more: dict[str, dict[str, Any]], rounds: int, settings: Settings) -> Result:
    batch = 2 if settings.quick else BATCH
    none = {"scaling": None}
    methods: dict[str, dict[str, Any]] = {NONE: none, AGAIN: none, **METHODS, **more}
    arguments = {"network": network, "methods": methods, "batch": batch}
    found = lockstep(SWITCHED_ATTACHED, arguments, rounds, settings, imports=UNET_IMPORTS)
    rows = [
        [name, found.time(name), *((None, None) if name == NONE else (found.parts[name], found.whole[name]))]
        for name in found.seconds
    ]
    columns = {"": "text", "time": "seconds", "over the network as it is": "percent", "by the whole": "percent"}
    title = f"Forward without gradients on one core, {network} network, batch {batch}"
    return Result([Table(title, columns, rows, found.notes(NONE, AGAIN))], {"seconds": found.seconds})


CASES = {
    "planning": partial(planning, 5),
    "forward-arguments": partial(forward, "unet/cifar10, narrow", {}, 60),
    "forward-concatenated": partial(forward, "concatenating", FOLDED, 60),
}
