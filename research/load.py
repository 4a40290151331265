"""What large runs and large data sets cost before anything happens: processor time and memory of whole commands.

    python -m research.load metrics     resume and report of a run with a million lines of metrics
    python -m research.load folder      first and second start on a folder of 65,001 images
    python -m research.load zip         the same on a zip of 100,000 images

Each command is a process of its own; user and system time are added, on one core. A start on `digits` stands beside
them: it is what the imports alone cost.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from scalelong.console import show_table

LINES, IMAGES, MEMBERS = 1_000_000, 65_001, 100_000
TRAIN = "train --recipe digits-tiny --model-options patch_size=4 dim=16 depth=2 heads=2 --batch-size 8 --log-every 1 "
TRAIN += "--save-every 1000000 --samples-every 0 --trackers"
"""By a recipe, so that no sizes are timed."""


def measured(arguments: Sequence[str], cache: Path) -> dict[str, str]:
    """A row: seconds of processor time and the peak of memory of one command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SCALELONG_CACHE": str(cache)}
    process = subprocess.Popen(
        [sys.executable, "-m", "scalelong", *arguments], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"scalelong {' '.join(arguments)} failed:\n{output}")
    return {"processor s": f"{used.ru_utime + used.ru_stime:.2f}", "memory MB": f"{used.ru_maxrss / 1024:.0f}"}


def metrics(folder: Path, lines: int) -> list[dict[str, str]]:
    """A run that recorded each of a million steps, made from a short one."""
    run, cache = folder / "run", folder / "cache"
    start = [*TRAIN.split(), "--out", str(run)]
    measured([*start, "--steps", "2"], cache)
    path = run / "metrics.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    with open(path, "w", encoding="utf-8") as file:
        for step in range(lines):
            # Up to the step of the checkpoint, so that all are kept.
            print(json.dumps({**line, "step": step * 2 // lines, "loss": 1 + step / lines}), file=file)
            if step % 1000 == 0:
                print(json.dumps({"step": step * 2 // lines, "held_out_loss": 1 + step / lines}), file=file)
    size = path.stat().st_size / 1e6
    rows = [{"what": "a start on no metrics", **measured([*start[:-1], str(folder / "new"), "--steps", "1"], cache)}]
    rows += [{"what": f"resume, {lines:,} lines, {size:.0f} MB", **measured([*start, "--steps", "3"], cache)}]
    with open(path, "w", encoding="utf-8") as file:
        for step in range(1, lines + 1):
            print(json.dumps({**line, "step": step, "loss": 1 + step / lines}), file=file)
            if step % 1000 == 0:
                print(json.dumps({"step": step, "held_out_loss": 1 + step / lines}), file=file)
    rows += [{"what": f"report, {lines:,} lines, {size:.0f} MB", **measured(["report", str(run)], cache)}]
    return rows


def starts(folder: Path, data: Path, count: int) -> list[dict[str, str]]:
    flags = [*TRAIN.split(), "--steps", "1", "--data", str(data), "--out"]
    base = measured([*flags[:-3], "--data", "digits", "--out", str(folder / "digits")], folder / "cache")
    rows = [{"what": "digits, for comparison", **base}]
    for number, name in enumerate(("first", "second", "third"), start=1):
        used = measured([*flags, str(folder / f"run{number}")], folder / "cache")
        rows.append({"what": f"{name} start on {count:,} images of {data.name}", **used})
    return rows


def pictures(count: int) -> list[bytes]:
    """A few PNG files of 32x32, which are written again and again."""
    import numpy as np
    from PIL import Image

    dice, found = np.random.default_rng(0), []
    for _ in range(min(count, 256)):
        content = BytesIO()
        Image.fromarray(dice.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((32, 32)).save(content, "PNG")
        found.append(content.getvalue())
    return found


def many_files(folder: Path, count: int) -> Path:
    known = pictures(count)
    for number in range(count):
        place = folder / "folder" / f"class{number % 10}" / f"{number // 1000:03d}"
        if number % 1000 < 10:
            place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.png").write_bytes(known[number % len(known)])
    return folder / "folder"


def many_members(folder: Path, count: int) -> Path:
    known = pictures(count)
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for number in range(count):
            archive.writestr(f"class{number % 10}/{number:06d}.png", known[number % len(known)])
    return folder / "images.zip"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["metrics", "folder", "zip"])
    parser.add_argument("--count", type=int, help="lines or images, in place of the numbers above")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.what == "metrics":
            rows = metrics(folder, options.count or LINES)
        elif options.what == "folder":
            count = options.count or IMAGES
            rows = starts(folder, many_files(folder, count), count)
        else:
            count = options.count or MEMBERS
            rows = starts(folder, many_members(folder, count), count)
    show_table(rows, left=True)


if __name__ == "__main__":
    main()
