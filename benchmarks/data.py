"""Images per second by source: opening a set, and fetching shuffled batches from it.

    python benchmarks/data.py [--images 2000] [--size 64] [--rounds 3] [--workers 2]

The same pictures are written as a folder, a zip, a parquet file and an .npz into a temporary folder. The sources take
turns in every round, so that a busy moment of the machine does not fall on one of them; the best round of each is
printed.
"""

import argparse
import io
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from scalelong.data import ImageData, batches, load_data, to_float

BATCH = 128
SETTINGS = ("in memory", "streamed", "workers")


def main() -> None:
    parser = argparse.ArgumentParser(description="Images per second by source.")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        specs = write_sources(Path(folder), arguments.images, arguments.size)
        table: dict[tuple[str, str], float] = {}
        for _ in range(arguments.rounds):
            for name, spec in specs.items():
                for column, seconds in measure(spec, arguments):
                    table[name, column] = min(seconds, table.get((name, column), float("inf")))
    columns = ["open", *(f"fetch, {setting}" for setting in SETTINGS)]
    print(
        f"{arguments.images} images of {arguments.size}×{arguments.size}, batches of {BATCH}, images per second, ",
        end="",
    )
    print(f"best of {arguments.rounds} rounds, {arguments.workers} workers\n")
    print("| source | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name in specs:
        rates = [f"{arguments.images / table[name, c]:,.0f}" if (name, c) in table else "–" for c in columns]
        print(f"| {name} | " + " | ".join(rates) + " |")


def measure(spec: str, arguments: argparse.Namespace) -> list[tuple[str, float]]:
    options = {"limit": arguments.images, "size": arguments.size}
    seconds, data = timed(lambda: load_data(spec, **options))
    results = [("open", seconds), ("fetch, in memory", fetch_all(data, 0))]
    if spec.endswith(".npz"):  # an array is unpacked as a whole or not at all
        return results
    stream = load_data(spec, **options, memory_limit=3 * arguments.images * arguments.size**2 - 1)
    assert not stream.in_memory
    return [
        *results,
        ("fetch, streamed", fetch_all(stream, 0)),
        ("fetch, workers", fetch_all(stream, arguments.workers)),
    ]


def fetch_all(data: ImageData, workers: int) -> float:
    """Seconds for one epoch in a shuffled order, up to the floats that a network takes."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).split(BATCH)

    def epoch() -> None:
        for batch in batches(data, order, workers):
            to_float(batch.images, torch.ones(len(batch.images), dtype=torch.bool))

    return timed(epoch)[0]


def timed(function: Callable):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def write_sources(folder: Path, count: int, size: int) -> dict[str, str]:
    """Smooth noise, so that PNG and JPEG have about as much to do as with photographs."""
    coarse = torch.rand(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).byte()
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    specs = {"shapes (drawn)": "shapes"}
    for form in ("png", "jpg"):
        contents = [encoded(image, form) for image in pixels]
        (folder / form).mkdir()
        with zipfile.ZipFile(folder / f"{form}.zip", "w") as archive:
            for number, content in enumerate(contents):
                (folder / form / f"{number:06}.{form}").write_bytes(content)
                archive.writestr(f"{number:06}.{form}", content)
        pq.write_table(pa.table({"image": contents}), folder / f"{form}.parquet", row_group_size=1000)
        specs |= {
            f"folder of {form}": str(folder / form),
            f"zip of {form}": str(folder / f"{form}.zip"),
            f"parquet of {form}": str(folder / f"{form}.parquet"),
        }
    np.savez_compressed(folder / "images.npz", images=pixels)
    return specs | {".npz": str(folder / "images.npz")}


def encoded(image: np.ndarray, form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, {"png": "PNG", "jpg": "JPEG"}[form])
    return buffer.getvalue()


if __name__ == "__main__":
    main()
