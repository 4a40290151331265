"""Images per second by source: alone, and while training."""

import io
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from scalelong.errors import MissingDependencyError

from ..contender import Contender, interleave, race, turn_of
from ..contenders import TRAINING_ON
from ..record import Result, Spread, Table, ratios
from ..settings import Settings, UViTSize

# The same pictures as a folder, a zip, a parquet file and an .npz.


def write_sources(folder: Path, count: int, size: int) -> dict[str, str]:
    """From a name to what `load_data` takes. Smooth noise gives PNG and JPEG about as much to do as photographs."""
    try:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError(error.name or "pyarrow", "train", "the data benchmark") from error
    coarse = torch.rand(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).byte()
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    sources = {"shapes (drawn)": "shapes"}
    for form in ("png", "jpg"):
        contents = [encoded(image, form) for image in pixels]
        (folder / form).mkdir()
        with zipfile.ZipFile(folder / f"{form}.zip", "w") as archive:
            for number, content in enumerate(contents):
                (folder / form / f"{number:06}.{form}").write_bytes(content)
                archive.writestr(f"{number:06}.{form}", content)
        pq.write_table(pa.table({"image": contents}), folder / f"{form}.parquet", row_group_size=1000)
        sources |= {
            f"folder of {form}": str(folder / form),
            f"zip of {form}": str(folder / f"{form}.zip"),
            f"parquet of {form}": str(folder / f"{form}.parquet"),
        }
    np.savez_compressed(folder / "images.npz", images=pixels)
    return sources | {".npz": str(folder / "images.npz")}


def encoded(image: object, form: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, {"png": "PNG", "jpg": "JPEG"}[form])  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


# Images per second by source: alone, and while training.

BATCH = 128
WORKERS = 2
SETTINGS = ("opened", "in memory", "image cache", "streamed", f"streamed, {WORKERS} workers")
NETWORK = UViTSize(image=64, patch=8, dim=64, depth=4, heads=2, batch=64)
"""Small, so that a step asks for many images a second."""
MEMORY = "in memory"
LONG_TURN = 5.0
"""Seconds: a worker fetches a few batches ahead between two turns, which must not count for much."""


def alone(rounds: int, settings: Settings) -> Result:
    """One epoch is one step; what is reported is images per second."""
    count, size = (32, 16) if settings.quick else (2000, 64)
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder), count, size)
        steps = {
            (name, setting): epoch
            for name, source in sources.items()
            for setting, epoch in _epochs(source, count, size, str(Path(folder) / "cache"), settings).items()
        }
        turns = {f"{name}: {setting}": turn_of(step) for (name, setting), step in steps.items()}
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
    rates = {name: Spread.of([count / value for value in values]) for name, values in seconds.items()}
    rows = [[name, *(rates.get(f"{name}: {setting}") for setting in SETTINGS)] for name in sources]
    columns = {"source": "text", **dict.fromkeys(SETTINGS, "rate")}
    title = f"Images per second of {count} images of {size}x{size}, shuffled batches of {BATCH}, as floats"
    note = "An epoch is short here, so the column of workers includes starting them."
    return Result([Table(title, columns, rows, [note])], {"seconds": seconds})


def _epochs(source: str, count: int, size: int, cache: str, settings: Settings) -> dict[str, Callable[[], object]]:
    import torch

    from scalelong.data import ImageData, batches, to_float

    from ..contenders.ours import load

    torch.set_num_threads(settings.threads)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).split(BATCH)

    def epoch(data: ImageData, workers: int) -> None:
        for batch in batches(data, order, workers):
            to_float(batch.images, torch.ones(len(batch.images), dtype=torch.bool))

    found = {
        SETTINGS[0]: partial(load, source, count, size, streamed=False),
        SETTINGS[1]: partial(epoch, load(source, count, size, streamed=False), 0),
    }
    if not source.endswith(".npz"):  # an array is unpacked as a whole or not at all
        stream = load(source, count, size, streamed=True)
        if stream.decodes:
            found[SETTINGS[2]] = partial(epoch, load(source, count, size, streamed=True, cache=cache), 0)
        found |= {SETTINGS[3]: partial(epoch, stream, 0), SETTINGS[4]: partial(epoch, stream, WORKERS)}
    return found


def training(rounds: int, settings: Settings) -> Result:
    """Steps of a small U-ViT that gets its images from each source."""
    count = 256 if settings.quick else 4096
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder), count, NETWORK.image)
        names = ["folder of png", "parquet of jpg", "shapes (drawn)"][: 1 if settings.quick else None]
        given = {"limit": count, **NETWORK.ours()}
        source = sources[names[0]]
        contenders = [Contender(MEMORY, TRAINING_ON, {**given, "source": source, "streamed": False, "workers": 0})]
        cached = {"streamed": True, "workers": 0, "cache": str(Path(folder) / "cache")}
        contenders += [
            Contender(f"{name}, image cache", TRAINING_ON, {**given, "source": sources[name], **cached})
            for name in names[:2]
        ]
        contenders += [
            Contender(
                f"{name}, {workers} worker(s)",
                TRAINING_ON,
                {**given, "source": sources[name], "streamed": True, "workers": workers},
            )
            for name in names
            for workers in (0, 1)
        ]
        found = race(contenders, settings, rounds, turn_seconds=None if settings.quick else LONG_TURN)
    rows = [
        [
            name,
            Spread.of([NETWORK.batch / value for value in found.seconds[name]]),
            None if name == MEMORY else found.cost(name, MEMORY),
        ]
        for name in found.seconds
    ]
    columns = {"source": "text", "images per second": "rate", "time over in memory": "percent"}
    title = f"Training a U-ViT ({NETWORK.describe()}) on {count} images of {NETWORK.image}x{NETWORK.image}"
    return Result([Table(title, columns, rows)], {"seconds": found.seconds})


def cache(rounds: int, settings: Settings) -> Result:
    """Steps with images in memory, in the image cache and streamed, in turns in one process, by processor time.

    A few percent do not show between processes on a machine that others use as well. Workers are processes, and have
    no place here.
    """
    from ..contenders.ours import training_step_on

    torch.set_num_threads(settings.threads)
    count = 256 if settings.quick else 4096
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder), count, NETWORK.image)
        given = {"limit": count, "workers": 0, **NETWORK.ours()}
        steps = {MEMORY: training_step_on(source=sources["folder of png"], streamed=False, **given)}
        for name in ("folder of png", "parquet of jpg"):
            place = str(Path(folder) / "cache")
            steps[f"{name}, image cache"] = training_step_on(source=sources[name], streamed=True, cache=place, **given)
            steps[f"{name}, streamed"] = training_step_on(source=sources[name], streamed=True, **given)
        turns = {name: turn_of(step, time.process_time) for name, step in steps.items()}
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=settings.turn_seconds)
    rows = [
        [
            name,
            Spread.of([NETWORK.batch / value for value in values]),
            None if name == MEMORY else Spread.of([ratio - 1 for ratio in ratios(values, seconds[MEMORY])]),
        ]
        for name, values in seconds.items()
    ]
    columns = {"source": "text", "images per second of processor time": "rate", "time over in memory": "percent"}
    title = f"Training a U-ViT ({NETWORK.describe()}) on {count} images of {NETWORK.image}x{NETWORK.image}, in turns"
    return Result([Table(title, columns, rows)], {"seconds": seconds})


CASES = {"cache": partial(cache, 15), "alone": partial(alone, 5), "training": partial(training, 3)}
