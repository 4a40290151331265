"""A training step of ours, against what a user would run instead."""

from dataclasses import replace
from functools import partial

from ..contender import Contender, Race, ask_one, race
from ..contenders import DIFFUSERS, OFFICIAL, OFFICIAL_CHECK, TRAINER, UNET_IMPORTS
from ..record import Result, Table
from ..settings import CIFAR_UNET, DEMO, DIGITS, S2_8, S2_32, SMALL, TINY, TINY_UNET, BenchmarkError, Settings, UViTSize

OURS, COMPILED, THEIRS, SCRIPT = "ours", "ours, compiled", "authors", "diffusers' script"
LOW = "{}, bf16"
COLUMNS = {
    "": "text",
    "time per step": "seconds",
    "times as fast": "times",
    "peak memory": "bytes",
    "memory ratio": "times",
}
TOLERANCE = 1e-4
"""Largest difference between the outputs of both networks, as a share of the largest output."""
MOST_COMPILED = 64 * 65
"""Tokens of a batch up to which a compiled network is tried as well: that takes long."""


def uvit(size: UViTSize, rounds: int, settings: Settings) -> Result:
    size = TINY if settings.quick else size
    contenders, notes = _in_both_precisions(Contender(OURS, TRAINER, size.ours())), []
    if settings.official is None:
        notes.append("The authors' code was not measured: give a checkout of it with --official PATH.")
    else:
        arguments = {"path": str(settings.official), "batch": size.batch, **size.official()}
        difference = ask_one(Contender("the check of both networks", OFFICIAL_CHECK, arguments), "difference", settings)
        if not difference <= TOLERANCE:
            raise BenchmarkError(
                f"the authors' network and ours differ by {difference:.1e} of the largest output with the same "
                f"weights, more than {TOLERANCE:.0e}: their speeds cannot be compared"
            )
        notes.append(f"With the same weights both networks' outputs differ by {difference:.0e} of the largest.")
        theirs = Contender(THEIRS, OFFICIAL, arguments, imports=("accelerate", "einops"))
        contenders = [*_in_both_precisions(theirs), *contenders]
    if size.batch * size.tokens <= MOST_COMPILED and not settings.quick:
        contenders.append(Contender(COMPILED, TRAINER, {**size.ours(), "compiled": True}, optional=True))
    found = race(contenders, settings, rounds)
    notes += [*_drop_slower(found, COMPILED, OURS), *_drop_slow_bf16(found, THEIRS)]
    return _result(f"Training step of U-ViT, {size.describe()}", found, notes)


def unet(rounds: int, settings: Settings) -> Result:
    size = TINY_UNET if settings.quick else CIFAR_UNET
    ours = {**size.ours(), "schedule": "ddpm", "clip": 1.0}
    contenders = [
        *_in_both_precisions(Contender(SCRIPT, DIFFUSERS, size.theirs(), imports=UNET_IMPORTS)),
        *_in_both_precisions(Contender(OURS, TRAINER, ours, imports=UNET_IMPORTS)),
    ]
    found = race(contenders, settings, rounds)
    return _result(f"Training step of {size.describe()}", found, _drop_slow_bf16(found, SCRIPT))


def _in_both_precisions(contender: Contender) -> list[Contender]:
    low = {**contender.arguments, "precision": "bf16"}
    return [contender, replace(contender, name=LOW.format(contender.name), arguments=low)]


def _drop_slow_bf16(found: Race, theirs: str) -> list[str]:
    """Mixed precision is reported only where it helps, and then beside the other side's."""
    low, other = LOW.format(OURS), LOW.format(theirs)
    speed = found.speed(low, OURS).median
    if speed <= 1.0:
        for name in {low, other} & set(found.seconds):
            del found.seconds[name]
        return [f"In bf16 it is {speed:.2f} times as fast as in float32 on this processor, so it is left out."]
    if other not in found:
        return [f"In bf16 it is {speed:.2f} times as fast as in float32."]
    ratio, memory = found.speed(low, other), found.memory_ratio(low, other)
    times = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times as fast as '{other}'"
    return [f"In bf16 it is {speed:.2f} times as fast as in float32, and {times}, in {memory:.3f} of its memory."]


def _drop_slower(found: Race, name: str, than: str) -> list[str]:
    """Compilation is reported only where it helps."""
    if name in found.missing:
        return [f"{name}: not measured ({found.missing[name].splitlines()[0]})."]
    if name not in found:
        return []
    speed = found.speed(name, than).median
    if speed > 1.0:
        return []
    del found.seconds[name]
    return [f"Compiled it is {speed:.2f} times as fast as uncompiled, so it is left out."]


def _result(title: str, found: Race, notes: list[str]) -> Result:
    baseline = next(iter(found.seconds))
    rows = [
        [
            name,
            found.time(name),
            None if name == baseline else found.speed(name, baseline),
            found.memory[name],
            None if name == baseline else found.memory_ratio(name, baseline),
        ]
        for name in found.seconds
    ]
    return Result([Table(title, COLUMNS, rows, notes)], {"seconds": found.seconds, "memory": found.memory})


CASES = {
    "small": partial(uvit, SMALL, 15),
    "s2-batch8": partial(uvit, S2_8, 5),
    "s2-batch32": partial(uvit, S2_32, 3),
    "unet": partial(unet, 9),
    "demo": partial(uvit, DEMO, 25),
    "digits": partial(uvit, DIGITS, 25),
}
