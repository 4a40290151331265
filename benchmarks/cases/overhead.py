"""What scaling the long skips costs, in time and memory, against none."""

from dataclasses import replace
from functools import partial
from typing import Any

from ..contender import Contender
from ..contenders import INFERENCE, SWITCHED_INFERENCE, SWITCHED_TRAINING, TRAINER, UNET_IMPORTS
from ..lockstep import Lockstepped, Memory, lockstep, memory_of
from ..record import Result, Table
from ..settings import S2_8, SMALL, SMALL_UNET, TINY, TINY_UNET, Settings, UNetSize, UViTSize

NONE, AGAIN = "none", "none, again"
CONSTANT = {"uniform": "uniform", "CS": "cs"}
CHANNEL_GATES = {
    "LS (se, channel)": "ls:module=se,gate=channel",
    "LS (ie, channel)": "ls:module=ie,gate=channel",
    "LS (scalar)": "ls:module=scalar",
}
TOKEN_GATES = {"LS (se, token)": "ls:module=se,gate=token", "LS (ie, token)": "ls:module=ie,gate=token"}
COLUMNS = {
    "": "text",
    "time": "seconds",
    "time over none": "percent",
    "by the whole": "percent",
    "tensors at peak": "bytes",
    "tensors over none": "percent",
    "process at peak": "bytes",
}


def training(size: UViTSize | UNetSize, methods: dict[str, str], rounds: int, settings: Settings) -> Result:
    size = _size(size, settings)
    methods = {NONE: "none", AGAIN: "none", **methods}
    imports = _imports(size)
    found = lockstep(SWITCHED_TRAINING, {**size.ours(), "methods": methods}, rounds, settings, imports=imports)
    contenders = [
        Contender(name, TRAINER, {**size.ours(), "scaling": method}, imports=imports)
        for name, method in methods.items()
        if name != AGAIN
    ]
    notes = found.notes(NONE, AGAIN, besides=", and at the optimiser")
    return _result(f"Training step on one core, {size.describe()}", found, memory_of(contenders, settings), notes)


def inference(size: UViTSize | UNetSize, rounds: int, settings: Settings) -> Result:
    size = _size(size, settings)
    none, folded = {"scaling": "none"}, {"scaling": "cs", "folded": True}
    methods: dict[str, dict[str, Any]] = {
        NONE: none,
        AGAIN: none,
        "CS": {"scaling": "cs"},
        "CS, folded into the weights": folded,
    }
    imports = _imports(size)
    found = lockstep(SWITCHED_INFERENCE, {**size.ours(), "methods": methods}, rounds, settings, imports=imports)
    contenders = [
        Contender(name, INFERENCE, {**size.ours(), **method}, imports=imports)
        for name, method in methods.items()
        if name != AGAIN
    ]
    title = f"Forward without gradients on one core, {size.describe()}"
    return _result(title, found, memory_of(contenders, settings), found.notes(NONE, AGAIN))


def _size(size: UViTSize | UNetSize, settings: Settings) -> UViTSize | UNetSize:
    if not settings.quick:
        return size
    return TINY if isinstance(size, UViTSize) else TINY_UNET


def _imports(size: UViTSize | UNetSize) -> tuple[str, ...]:
    return UNET_IMPORTS if isinstance(size, UNetSize) else ("accelerate",)


def _result(title: str, found: Lockstepped, memory: dict[str, Memory], notes: list[str]) -> Result:
    rows = [
        [
            name,
            found.time(name),
            None if name == NONE else found.parts[name],
            None if name == NONE else found.whole[name],
            memory[name].tensors if name in memory else None,
            memory[name].tensors / memory[NONE].tensors - 1 if name in memory and name != NONE else None,
            memory[name].process if name in memory else None,
        ]
        for name in found.seconds
    ]
    rounds = {"seconds": found.seconds, "memory": {name: vars(value) for name, value in memory.items()}}
    return Result([Table(title, COLUMNS, rows, notes)], rounds)


FEW = {"CS": "cs", "LS (se, token)": TOKEN_GATES["LS (se, token)"]}
# At most as many images as a core takes at once in training: more would be more of the same.
CASES = {
    "uvit-small": partial(training, replace(SMALL, batch=16), {**CONSTANT, **TOKEN_GATES, **CHANNEL_GATES}, 18),
    "uvit-s2": partial(training, replace(S2_8, batch=2), FEW, 8),
    "unet": partial(training, replace(SMALL_UNET, batch=8), {**CONSTANT, **CHANNEL_GATES}, 24),
    "folded-uvit": partial(inference, replace(SMALL, batch=16), 60),
}
