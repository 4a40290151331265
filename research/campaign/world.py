"""The small world of a trial: data sets of every kind, a network, runs, a comparison, a range, exports and caches.

It is made once per campaign. A trial works on a copy of the parts that it needs.
"""

import hashlib
import io
import json
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from .forks import Command, Outcome, run
from .library import inputs, unet

TINY = ["--model-options", "patch_size=4", "dim=16", "depth=2", "heads=2", "--batch-size", "4", "--held-out", "4"]
TINY += ["--trackers", "--samples-every", "0"]
SIZED = ["train", "digits", *TINY, "--save-every", "2", "--keep-last", "1"]
"""Times a few sizes before its first step. With --config nothing is left to choose, which is cheaper."""
TRAIN = ["train", "--config", "tiny.yaml", "--save-every", "2", "--keep-last", "1"]
SMALL = ["--config", "tiny.yaml", "--size", "8"]
WORDY = ["train", *SMALL, "--data", "data/captions", "--condition", "text", "--text-length", "4", "--text-dim", "8"]
WORDY += ["--keep-last", "1", "--log-every", "1", "--monitor-every", "1", "--on-nan", "rollback"]
COMPARE = ["compare", "--config", "tiny.yaml", "--seeds", "1", "--scores", "0", "--jobs", "1", "--methods", "none,cs"]
COMPARE += ["--steps", "2"]
RANGE = [
    "range",
    "--config",
    "tiny.yaml",
    "--rates",
    "1e-3,1e-2",
    "--methods",
    "none,cs",
    "--seeds",
    "1",
    "--jobs",
    "1",
]
RANGE += ["--steps", "4"]
AVERAGED = [*TRAIN, "--ema-lengths", "5%", "10%", "--keep-best", "held-out", "--held-out-every", "1"]
"""Keeps averages of several lengths, and the best checkpoint beside the newest."""
SAMPLER = ["--sampler", "ddim", "--steps", "2"]
TUNE = ["tune", "run", "-n", "16", "--trials", "2", *SAMPLER, "--features", "pixels"]
NET = """\
import torch
from diffusers import UNet2DModel


def model():
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )
"""

CHANGES = re.compile(
    r"(metrics\.jsonl|scores.*|config\.yaml|data\.json|environment\.json|README\.md|report\.html|\.lock|checkpoints/.*|\.part)$"
    r"|^cache/|events\.out|^(compared|ranged)/(comparison\.|table\.|command|settings|runs|range|figures|features|curves|results|.*\.png)"
)
"""Files that a command may write anew. All others must stay what they were."""


def make_world(place: Path) -> None:
    if (place / "nnet_ema.pth").exists():  # kept from another campaign
        return
    (place / "data").mkdir(parents=True)
    (place / "notes.txt").write_text("not ours\n")
    (place / "net.py").write_text(NET)

    def must(words: list[str]) -> None:
        outcome = run(Command(words, str(place)))
        if outcome.code != 0:
            raise SystemExit(f"the world of the campaign could not be made:\n{outcome.out}\n{outcome.err}")

    in_a_fork(lambda: make_data(place / "data"))  # so that this process starts no threads of pyarrow
    must([*SIZED, "--steps", "2", "--out", "run"])
    shutil.copy(place / "run" / "config.yaml", place / "tiny.yaml")
    must(["sample", "run", "-n", "4", *SAMPLER, "--out", "made"])
    must([*WORDY, "--steps", "3", "--out", "wordy"])
    must([*AVERAGED, "--steps", "3", "--out", "averaged"])
    must([*TUNE, "--out", "tuned"])
    must(["stats", "data/folder", "--out", "stats.npz"])  # these two fill the cache
    must(["eval", "run", "-n", "12", *SAMPLER])
    shutil.copytree(place / "run", place / "scored")
    (place / "stats.npz").unlink()
    shutil.rmtree(place / "run" / "images")
    (place / "run" / "scores.jsonl").unlink()
    must([*COMPARE, "--out", "compared"])
    must([*RANGE, "--out", "ranged"])
    must(["export", "run", "--out", "exported"])
    must(["export", "run", "--format", "safetensors", "--out", "weights"])
    must(["diagnose", "run", "--out", "run"])
    must(["find", "net.py", "--out", "plan.json"])
    in_a_fork(lambda: make_files(place))


def in_a_fork(work: Any) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the data of the campaign could not be made")


def make_files(place: Path) -> None:
    """What users exchange: a plan, a scaling, a method, weights of the authors, folders of diffusers."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    import scalelong as sl

    model = sl.scale_skips_(unet(), "ls", inputs())
    sl.save_scaling(model, place / "scaling.safetensors")
    cast(Any, model).save_pretrained(place / "pretrained")
    sl.find_skips(unet(), inputs()).save(place / "plan.json")
    (place / "method.json").write_text(sl.LearnableScaling().to_json())
    (place / "options.json").write_text(json.dumps({"depth": 2}))
    weights = sl.UViT(image_size=8, patch_size=4, dim=16, depth=2, heads=2, channels=1).state_dict()
    torch.save(weights, place / "nnet_ema.pth")
    kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    settings: dict[str, Any] = {
        "in_channels": 1,
        "out_channels": 1,
        "latent_channels": 2,
        "norm_num_groups": 4,
        **kinds,
    }
    AutoencoderKL(**settings, block_out_channels=(8,)).save_pretrained(place / "encoder")


def make_data(folder: Path) -> None:
    import pickle

    import datasets
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = [i % 3 for i in range(12)]
    encoded = []
    for number, image in enumerate(pixels):
        content = io.BytesIO()
        Image.fromarray(image).save(content, "PNG")
        encoded.append(content.getvalue())
        for place in (
            f"folder/class{labels[number]}",
            "captions",
            f"parts/{'test' if number > 8 else 'train'}/c{number % 2}",
        ):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / f"{number}.png").write_bytes(content.getvalue())
        (folder / "sidecars").mkdir(exist_ok=True)
        Image.fromarray(image).save(
            folder / "sidecars" / f"{number}.{['jpg', 'bmp', 'webp', 'tif', 'gif', 'png'][number % 6]}"
        )
        (folder / "sidecars" / f"{number}.txt").write_text(f"a number like {number}\n")
    with (folder / "captions" / "metadata.jsonl").open("w") as file:
        for number in range(12):
            print(
                json.dumps({"file_name": f"{number}.png", "text": f"a number {number}", "label": number % 3}), file=file
            )
    shutil.copytree(folder / "captions", folder / "columns")
    (folder / "columns" / "metadata.jsonl").unlink()
    rows = "".join(f'{number}.png,"a number, {number}"\n' for number in range(12))
    (folder / "columns" / "metadata.csv").write_text(f"file_name,caption\n{rows}")
    shutil.make_archive(str(folder / "images"), "zip", folder / "folder")
    shutil.make_archive(str(folder / "captions"), "zip", folder / "captions")
    names = np.array(["a", "b", "c"])
    np.savez(folder / "images.npz", images=pixels, labels=np.array(labels), classes=names)
    (folder / "idx").mkdir()
    (folder / "idx" / "train-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + b"".join(side.to_bytes(4, "big") for side in pixels.shape) + pixels.tobytes()
    )
    (folder / "idx" / "train-labels-idx1-ubyte").write_bytes(
        b"\0\0\x08\x01" + len(labels).to_bytes(4, "big") + bytes(labels)
    )
    import gzip

    (folder / "packed").mkdir()
    for name in os.listdir(folder / "idx"):
        (folder / "packed" / f"{name}.gz").write_bytes(gzip.compress((folder / "idx" / name).read_bytes()))
    (folder / "cifar").mkdir()
    for number in range(1, 6):
        batch = {b"data": draw.integers(0, 256, (2, 3072), dtype=np.uint8), b"labels": [0, number]}
        (folder / "cifar" / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    known = {"label_names": [f"name {number}" for number in range(10)]}
    (folder / "cifar" / "batches.meta").write_bytes(pickle.dumps(known, protocol=2))
    cells = [{"bytes": content, "path": None} for content in encoded]
    (folder / "table").mkdir()
    table = pa.table({"image": cells, "label": labels, "text": [f"a number {n}" for n in range(12)]})
    pq.write_table(table, folder / "table" / "images.parquet")
    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features).save_to_disk(folder / "saved")


DATA = [
    "folder",
    "captions",
    "columns",
    "sidecars",
    "parts",
    "images.zip",
    "captions.zip",
    "images.npz",
    "idx",
    "packed",
]
DATA += ["cifar", "table/images.parquet", "saved"]


def copy_world(world: Path, place: Path, words: list[str]) -> None:
    """The parts of the world that the words name, and what every command may want."""
    place.mkdir(parents=True)
    text = " ".join(word for word in words)
    for entry in sorted(world.iterdir()):
        large = entry.is_dir() and entry.name != "cache"
        if large and not re.search(rf"(?<![\w-]){re.escape(entry.name)}(?![\w.-])", text):
            continue
        if entry.name == "data":
            (place / "data").mkdir()
            for part in sorted(entry.iterdir()):
                if f"data/{part.name}" in text or part.name == "folder":
                    copy_entry(part, place / "data" / part.name)
            continue
        copy_entry(entry, place / entry.name)


def copy_entry(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


_KNOWN: dict[tuple[str, int, int], str] = {}
"""Digests by name, size and time: copies keep the time, and most files are never changed."""


def contents(world: Path) -> dict[str, str]:
    """Digests of all regular files."""
    found = {}
    for folder, _, names in os.walk(world):
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):
                about = os.stat(path)
                if stat.S_ISREG(about.st_mode) and about.st_size < 10**8:
                    relative = os.path.relpath(path, world)
                    key = (relative, about.st_size, about.st_mtime_ns)
                    if key not in _KNOWN:
                        _KNOWN[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                    found[relative] = _KNOWN[key]
    return found


def lost(before: dict[str, str], after: dict[str, str], touched: str = "") -> list[str]:
    """Files that are gone or changed, and should not be."""
    checked = {name: value for name, value in before.items() if not CHANGES.search(name) and name != touched}
    return sorted(name for name, value in checked.items() if after.get(name) != value)


def require_success(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise SystemExit(f"a command of the campaign fails without any fault:\n{outcome.out}\n{outcome.err}")
