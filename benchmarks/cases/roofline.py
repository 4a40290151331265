"""How close a training step comes to the machine's matrix products, and where its time goes."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..contender import Contender, ask_one, interleave, start
from ..contenders import MATMUL, TRAINER
from ..record import Result, Spread, Table
from ..settings import S2_8, S2_32, SMALL, TINY, Settings, UViTSize

SIZES = (1024, 2048, 4096)
"""Square products whose best speed counts as the peak."""
STEP = "training step"
COLUMNS = {"": "text", "time": "seconds", "GFLOP": "gflops", "GFLOP/s": "gflops", "share of the peak": "times"}


def roofline(size: UViTSize, rounds: int, settings: Settings) -> Result:
    size = TINY if settings.quick else size
    products = {f"product of {n}x{n} matrices": n for n in (SIZES[:1] if settings.quick else SIZES)}
    contenders = [Contender(STEP, TRAINER, size.ours())]
    contenders += [Contender(name, MATMUL, {"size": n}) for name, n in products.items()]
    with ExitStack() as stack:
        workers, _ = start(contenders, settings, stack)
        turns = {worker.contender.name: worker.turn for worker in workers}
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=settings.turn_seconds)
        profile = workers[0].ask("profile")
    # Every product is linear in the images.
    counted = size.batch * ask_one(Contender(STEP, TRAINER, replace(size, batch=1).ours()), "flops", settings)
    flops = {STEP: counted, **{name: 2.0 * n**3 for name, n in products.items()}}
    speeds = {name: [flops[name] / value for value in values] for name, values in seconds.items()}
    peak = [max(speeds[name][number] for name in products) for number in range(len(seconds[STEP]))]
    rows = [
        [
            name,
            Spread.of(seconds[name]),
            flops[name],
            Spread.of(speeds[name]),
            Spread.of([speed / best for speed, best in zip(speeds[name], peak, strict=True)]),
        ]
        for name in seconds
    ]
    title = f"U-ViT, {size.describe()}"
    note = "The peak is the best of the square products in the same round; the step is counted without recomputation."
    shares = sorted(profile.items(), key=lambda item: -item[1])
    tables = [
        Table(f"{title}: the step against the peak", COLUMNS, rows, [note]),
        Table(
            f"{title}: where the time goes",
            {"": "text", "share of all cores' time": "share"},
            [list(item) for item in shares],
        ),
    ]
    return Result(tables, {"seconds": seconds, "flops": flops, "profile": profile})


CASES = {
    "small": partial(roofline, SMALL, 15),
    "s2-batch8": partial(roofline, S2_8, 9),
    "s2-batch32": partial(roofline, S2_32, 3),
}
