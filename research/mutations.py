"""Damage for the campaign: files, values in JSON and YAML, rows of tables, words of a command line.

Each mutation is drawn from a `random.Random` and says in words what it did, so that a failure can be read and repeated.
"""

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], str]


# Any file


def truncate(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    keep = draw.randrange(max(1, len(content)))
    path.write_bytes(content[:keep])
    return f"cut to {keep} of {len(content)} bytes"


def flip(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes() or b"\0")
    places = [draw.randrange(len(content)) for _ in range(draw.choice([1, 1, 4, 32]))]
    for place in places:
        content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"bits flipped at {places[:8]}"


def overwrite(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes() or b"\0" * 8)
    word = draw.choice([b"\0" * 8, b"\xff" * 8, struct.pack("<q", 2**40), struct.pack(">q", 2**40), b"\xff\xfe\xfd"])
    place = draw.randrange(len(content))
    content[place : place + len(word)] = word
    path.write_bytes(content)
    return f"{word.hex()} written at {place}"


def append(path: Path, draw: random.Random) -> str:
    tail = draw.choice(
        [b"\0" * 100, b"\xff\xfe\n", b'{"step": ', b"null\n", b"[" * 50_000, b'{"step": "x"}\n', b"\n\n"]
    )
    with path.open("ab") as file:
        file.write(tail)
    return f"{tail[:20]!r} appended"


def replace(path: Path, draw: random.Random) -> str:
    """Something else under the same name: nothing, a folder, a pipe, a device, a link to nowhere, a sparse giant."""
    kind = draw.choice(["nothing", "folder", "pipe", "zero", "null", "tty", "dangling", "circle", "sparse", "empty"])
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "zero" | "null" | "tty":
            path.symlink_to(f"/dev/{kind}")
        case "dangling":
            path.symlink_to("nowhere")
        case "circle":
            path.symlink_to(path.name)
        case "sparse":
            with path.open("wb") as file:
                file.truncate(60 * 1024**3)
        case "empty":
            path.touch()
    return f"replaced by {kind}"


ANY: list[Mutation] = [truncate, flip, overwrite, append, replace]


# Values of JSON and YAML

DEEP: Any = None
for _ in range(200):
    DEEP = [DEEP]

STRANGE: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, float("inf"), float("nan"), 1e400),
    *("", "x", "\x00", "\ud800", "../../etc/passwd", "/dev/zero", "2024-01-01", "os:system", "<script>", "a" * 5000),
    *([], [[]], {}, {"a": {}}, [None], ["x"] * 3, {"": 1}, DEEP),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def edit_value(value: Any, draw: random.Random) -> str:
    """Change, remove or add one entry, in place."""
    known = list(places(value))
    if not known:
        return "nothing to edit"
    *above, last = draw.choice(known)
    holder = value
    for key in above:
        holder = holder[key]
    match draw.choice(["change", "change", "change", "remove", "add"]):
        case "remove":
            del holder[last]
            return f"{last!r} removed"
        case "add" if isinstance(holder, dict):
            holder[draw.choice(["foreign", "", "model", "step"])] = draw.choice(STRANGE)
            return "a foreign entry added"
    holder[last] = draw.choice(STRANGE)
    return f"{last!r} = {holder[last]!r:.60}"


def edit_json(path: Path, draw: random.Random) -> str:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = draw.randrange(max(1, len(lines)))
    try:
        value = json.loads(lines[number])
    except (ValueError, IndexError):
        return truncate(path, draw)
    said = edit_value(value, draw)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return said


def edit_yaml(path: Path, draw: random.Random) -> str:
    import yaml

    if draw.random() < 0.2:
        text = draw.choice(
            [
                *(
                    "",
                    "null",
                    "[]",
                    "- 1",
                    "a: [",
                    "{",
                    "\t",
                    "a: &a [*a]",
                    "? [1]\n: 2",
                    "%YAML 9.9\n---\na: 1",
                    "[" * 10_000,
                ),
                "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
                + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
                *("model: !!python/name:os.system", "data: 2024-01-01", "steps: 1_000", "steps: 0x10", "seed: 1e3"),
            ]
        )
        path.write_text(text)
        return f"the text {text[:40]!r}"
    value = yaml.safe_load(path.read_text())
    said = edit_value(value, draw)
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return said


def mutate_file(path: Path, draw: random.Random) -> str:
    special = {".json": edit_json, ".jsonl": edit_json, ".yaml": edit_yaml}.get(path.suffix)
    change = special if special is not None and draw.random() < 0.7 else draw.choice(ANY)
    return f"{path.name}: {change(path, draw)}"


# Data sets, made with what does not belong there


def hostile_pickle(draw: random.Random) -> bytes:
    """What an unpickler must not build: calls, memory, arrays of other types."""
    from random import Random

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch hacked",)

    import numpy as np

    array = np.zeros((2, 3072), np.uint8)
    kinds = [
        lambda: pickle.dumps({b"data": Call(), b"labels": [0, 1]}),
        lambda: b"\x80\x02" + b"Nr" + struct.pack("<I", 2**32 - 1) + b".",  # LONG_BINPUT: a memo of 34 GB
        lambda: pickle.dumps({b"data": array.astype(object), b"labels": [0, 1]}, protocol=2),
        lambda: pickle.dumps({b"data": array, b"labels": [0, 1]}, protocol=2).replace(b"u1", b"O8"),
        lambda: pickle.dumps({b"data": array, b"labels": [0, 2**63]}, protocol=2),
        lambda: pickle.dumps({b"data": array, b"labels": [0, 1]}, protocol=2).replace(
            struct.pack("<H", 3072), struct.pack("<H", 65535)
        ),
        lambda: pickle.dumps(Random(0)),
        lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # BINBYTES8: a terabyte
        lambda: b"(" * 100_000 + b"l" * 100_000 + b".",
        lambda: b"]" + b"2a" * 1000 + b".",
    ]
    return draw.choice(kinds)()


def hostile_npz(draw: random.Random) -> bytes:
    import numpy as np

    content = io.BytesIO()
    images = np.zeros((3, 8, 8), np.uint8)
    labels = draw.choice([[0, 1, 2**63], [0.5, 1, 2], ["a", "b", "c"], [-1, -1, -1], [-2, 0, 1], [0, 1], [[0, 1, 2]]])
    array = np.array(labels, dtype=np.uint64 if 2**63 in labels else None)
    np.savez(content, images=draw.choice([images, images[:0], images.astype(complex), images[0]]), labels=array)
    if draw.random() < 0.5:
        return content.getvalue()
    # A header that lies about the shape of what follows.
    header = draw.choice(["(999999999, 8, 8)", "(-3, 8, 8)", "(3, 8, 8, 8)", "('x', 8)", "(3, 8, 2**62)"])
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {header}, }}".ljust(117) + "\n"
    lying = io.BytesIO()
    with zipfile.ZipFile(lying, "w") as archive:
        npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"\0" * 192
        archive.writestr("images.npy", npy)
    return lying.getvalue()


def hostile_table(path: Path, draw: random.Random) -> str:
    """Parquet rows that name other files, labels and texts that are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images: list[Any] = pq.read_table(path)["image"].to_pylist()
    outside = draw.choice(["/etc/passwd", "../secret.png", "/dev/zero", "a/../../secret.png", "\x00"])
    columns: dict[str, Any] = {"image": images}
    match draw.choice(["path", "label", "text", "none"]):
        case "path":
            columns["image"] = [{"bytes": None, "path": outside} for _ in images]
        case "label":
            value = draw.choice([2**63, 0.5, None, "x", [1]])
            columns["label"] = pa.array([value] * len(images), type=pa.uint64() if value == 2**63 else None)
        case "text":
            raw = pa.array([b"\xff\xfe"] * len(images), type=pa.binary())
            columns["text"] = pa.Array.from_buffers(pa.string(), len(images), raw.buffers())
        case "none":
            columns["image"] = [None for _ in images]
    pq.write_table(pa.table(columns), path)
    return f"rows {outside!r}: {sorted(columns)}"


def hostile_folder(folder: Path, draw: random.Random) -> str:
    """A folder of images with a stranger among them."""
    kind = draw.choice(["pipe", "zero", "tty", "sparse", "name", "metadata", "captions", "circle", "class"])
    match kind:
        case "pipe":
            os.mkfifo(folder / "a.png")
        case "zero" | "tty":
            (folder / "a.png").symlink_to(f"/dev/{kind}")
        case "sparse":
            with (folder / "a.png").open("wb") as file:
                file.truncate(60 * 1024**3)
        case "name":
            shutil.copy(next(folder.rglob("*.png")), folder / os.fsdecode(b"\xff.png"))
        case "circle":
            (folder / "loop").symlink_to(".")
        case "class":
            moved = folder / os.fsdecode(b"\xff")
            moved.mkdir()
            shutil.copy(next(folder.rglob("*.png")), moved / "x.png")
        case "captions":
            next(folder.rglob("*.png")).with_suffix(".txt").write_bytes(b"\xff\xfe")
        case "metadata":
            name = next(folder.rglob("*.png")).relative_to(folder).as_posix()
            row = draw.choice([{"file_name": name, "label": 2**63}, {"file_name": "../x.png"}, {"file_name": 3}])
            text = draw.choice([json.dumps(row), "[" * 50_000, json.dumps({"file_name": name, "text": None}), "\x00"])
            (folder / "metadata.jsonl").write_text(text)
    return f"a stranger: {kind}"


def mutate_data(path: Path, draw: random.Random) -> str:
    """One data set, damaged as its kind allows or as any file can be."""
    own = draw.random() < 0.5
    if path.is_dir() and path.name == "cifar" and own:
        victim = draw.choice(["data_batch_1", "batches.meta"])
        (path / victim).write_bytes(hostile_pickle(draw))
        return f"{victim}: hostile pickle"
    if path.is_dir() and path.name == "folder" and own:
        return hostile_folder(path, draw)
    if path.suffix == ".npz" and own:
        path.write_bytes(hostile_npz(draw))
        return "hostile arrays"
    if path.suffix == ".parquet" and own:
        return hostile_table(path, draw)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return mutate_file(draw.choice(files), draw)


# Command lines

WORDS = ["", " ", "-1", "0", "2", "nan", "inf", "1e400", str(2**64), "9" * 400, "x", "κ", "\udcff", "..", "/dev/null"]
WORDS += [
    "--",
    "-",
    "--nonsense",
    "--help",
    "[" * 3000,
    '{"a": [' * 200,
    "a=b",
    "=",
    ":",
    "os:nothing",
    "none",
    "notes.txt",
]
WORDS += [
    "cs:",
    "cs:kappa=",
    "cs:1,2,3",
    "ls:x=1",
    "digits",
    "digits/",
    "missing/folder",
    "data/folder",
    "run",
    "\n",
    "%s",
]


def mutate_words(words: list[str], draw: random.Random) -> list[str]:
    made = list(words)
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.randrange(1, len(made) + 1) if len(made) > 1 else 1
        match draw.choice(["change", "change", "change", "drop", "insert", "repeat"]):
            case "change" if at < len(made):
                made[at] = draw.choice(WORDS)
            case "drop" if at < len(made):
                del made[at]
            case "repeat" if at < len(made):
                made.insert(at, made[at])
            case _:
                made.insert(at, draw.choice(WORDS))
    return made
