"""What scaling the long skips costs, in time and memory, against none."""

from functools import partial
from typing import Any

from ..contender import Contender, race
from ..contenders.names import INFERENCE, TRAINER, UNET_IMPORTS
from ..networks import S2_8, SMALL, SMALL_UNET, TINY, TINY_UNET, UNetSize, UViTSize
from ..record import Result
from ..settings import Settings
from ..tables import Table

NONE, AGAIN = "none", "none, again"
CONSTANT = {"uniform": "uniform", "CS": "cs"}
CHANNEL_GATES = {
    "LS (se, channel)": "ls:module=se,gate=channel",
    "LS (ie, channel)": "ls:module=ie,gate=channel",
    "LS (scalar)": "ls:module=scalar",
}
TOKEN_GATES = {"LS (se, token)": "ls:module=se,gate=token", "LS (ie, token)": "ls:module=ie,gate=token"}
NOTE = f'"{AGAIN}" is the same network in another process: how far it is from zero is the noise of the measurement.'
COLUMNS = {
    "": "text",
    "time": "seconds",
    "time over none": "percent",
    "peak memory": "bytes",
    "memory over none": "percent",
}


def training(size: UViTSize | UNetSize, methods: dict[str, str], rounds: int, settings: Settings) -> Result:
    size = _size(size, settings)
    contenders = [_contender(name, TRAINER, size, "none") for name in (NONE, AGAIN)]
    contenders += [_contender(name, TRAINER, size, method) for name, method in methods.items()]
    return _result(f"Training step, {size.describe()}", contenders, rounds, settings)


def inference(size: UViTSize | UNetSize, rounds: int, settings: Settings) -> Result:
    size = _size(size, settings)
    contenders = [_contender(name, INFERENCE, size, "none") for name in (NONE, AGAIN)]
    contenders.append(_contender("CS", INFERENCE, size, "cs"))
    contenders.append(_contender("CS, folded into the weights", INFERENCE, size, "cs", folded=True))
    return _result(f"Forward without gradients, {size.describe()}", contenders, rounds, settings)


def _size(size: UViTSize | UNetSize, settings: Settings) -> UViTSize | UNetSize:
    if not settings.quick:
        return size
    return TINY if isinstance(size, UViTSize) else TINY_UNET


def _contender(name: str, factory: str, size: UViTSize | UNetSize, scaling: str, **more: Any) -> Contender:
    imports = UNET_IMPORTS if isinstance(size, UNetSize) else ("accelerate",)
    return Contender(name, factory, {**size.ours(), "scaling": scaling, **more}, imports=imports)


def _result(title: str, contenders: list[Contender], rounds: int, settings: Settings) -> Result:
    found = race(contenders, settings, rounds)
    rows = [
        [
            name,
            found.time(name),
            None if name == NONE else found.cost(name, NONE),
            found.memory[name],
            None if name == NONE else found.memory_ratio(name, NONE) - 1,
        ]
        for name in found.seconds
    ]
    return Result([Table(title, COLUMNS, rows, [NOTE])], {"seconds": found.seconds, "memory": found.memory})


FEW = {"CS": "cs", "LS (se, token)": TOKEN_GATES["LS (se, token)"]}
CASES = {
    "uvit-small": partial(training, SMALL, {**CONSTANT, **TOKEN_GATES, **CHANNEL_GATES}, 21),
    "uvit-s2": partial(training, S2_8, FEW, 15),
    "unet": partial(training, SMALL_UNET, {**CONSTANT, **CHANNEL_GATES}, 21),
    "folded-uvit": partial(inference, SMALL, 31),
    "folded-unet": partial(inference, SMALL_UNET, 31),
}
