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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .formats import (
    Mutation,
    edit_cifar,
    edit_folder,
    edit_idx,
    edit_npz,
    edit_parquet,
    edit_safetensors,
    edit_torch,
    edit_zip,
    reshape_json,
    reshape_yaml,
    rewrite,
    swap_files,
)

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


OF_FORMAT: dict[str, list[Mutation]] = {
    ".json": [edit_json, edit_json, reshape_json, reshape_json, rewrite],
    ".jsonl": [edit_json, edit_json, reshape_json, reshape_json, rewrite],
    ".yaml": [edit_yaml, reshape_yaml],
    ".safetensors": [edit_safetensors],
    ".pt": [edit_torch],
    ".pth": [edit_torch],
    ".zip": [edit_zip],
    ".npz": [edit_npz],
    ".parquet": [edit_parquet],
    ".gz": [edit_idx],
    ".csv": [rewrite],
    ".txt": [rewrite],
    ".py": [rewrite],
}


def mutate_file(path: Path, draw: random.Random) -> str:
    special = OF_FORMAT.get(path.suffix)
    if path.name.endswith("-ubyte"):
        special = [edit_idx]
    if special is not None and draw.random() < 0.7:
        change = draw.choice(special)
    else:
        change = draw.choice([*ANY, swap_files])
    try:
        return f"{path.name}: {change(path, draw)}"
    except (ValueError, KeyError, StopIteration, zipfile.BadZipFile, struct.error):
        # Damaged already: as any file.
        return f"{path.name}: {draw.choice(ANY)(path, draw)}"


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
    own = draw.random() < 0.6
    if path.is_dir() and path.name == "cifar" and own:
        if draw.random() < 0.6:
            return edit_cifar(path, draw)
        victim = draw.choice(["data_batch_1", "batches.meta"])
        (path / victim).write_bytes(hostile_pickle(draw))
        return f"{victim}: hostile pickle"
    if path.is_dir() and path.name in ("folder", "captions", "columns", "sidecars", "parts") and own:
        return edit_folder(path, draw) if draw.random() < 0.7 else hostile_folder(path, draw)
    if path.suffix == ".npz" and own and draw.random() < 0.4:
        path.write_bytes(hostile_npz(draw))
        return "hostile arrays"
    if path.suffix == ".parquet" and own and draw.random() < 0.4:
        return hostile_table(path, draw)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return mutate_file(draw.choice(files), draw)


# Command lines

WORDS = ["", " ", "-1", "0", "2", "nan", "inf", "1e400", str(2**64), "9" * 400, "x", "κ", "\udcff", "..", "/dev/null"]
WORDS += ["--", "-", "--nonsense", "--help", "[" * 3000, '{"a": [' * 200, "a=b", "=", ":", "os:nothing", "none"]
WORDS += ["cs:", "cs:kappa=", "cs:1,2,3", "ls:x=1", "digits", "digits/", "missing/folder", "data/folder", "run", "\n"]
WORDS += [
    "%s",
    "notes.txt",
    "--out",
    "--out=",
    "--json",
    "--trust",
    "--debug",
    "--quiet",
    "$HOME",
    "~",
    "~nobody/x",
    "*",
]
WORDS += [
    "\x1b[31m",
    "a\tb",
    "٣",
    "½",
    "1_000",
    "0x10",
    "1,5",
    "+2",
    "1e-3",
    "-0",
    "True",
    "None",
    "null",
    "@file",
    ".",
]

NUMBERS = ["", "0", "-1", "1.5", "x", "nan", "inf", str(2**31), str(2**63), str(2**64), "1e3", "٣", "1_0", " 2 ", "0x2"]
LISTS = ["", ",", "1e-3,", ",1e-3", "a,b", "1e-3;2e-3", "-1e-3", "0", "nan", "1e-3,1e-3", "1e400", "1e-3 2e-3", "inf"]
PLACES = [
    "",
    ".",
    "..",
    "/",
    "notes.txt",
    "notes.txt/x",
    "missing/deep/place",
    "/dev/null",
    "/dev/full",
    "run",
    "data/folder",
]
PLACES += ["a" * 300, "x\x1by", "/proc/nothing", "~nobody/x", "-x", "κ", "net.py", "plan.json", "weights", " "]
SCALINGS = [
    "",
    "cs:0",
    "cs:-1",
    "cs:2",
    "cs:nan",
    "cs:kappa=0.5,kappa=0.6",
    "cs:0.7:0.8",
    "custom",
    "CS",
    "uniform:x",
    "ls:",
]
SCALINGS += [
    "start:cs",
    "start:",
    "start:start:cs",
    "none,",
    "none,none",
    "cs;ls",
    "norm:x=1",
    "freeu",
    "freeu:b=9",
    "balanced",
]
SCALINGS += [
    "cs:behind_norms=maybe",
    "ls:bound=-1",
    "magnitude_preserving:t=7",
    '{"method": "cs"}',
    '{"method": 3}',
    "cs:{",
    "[]",
]
CHANGED = ["", "x", ": lr=1", "a:", "a: lr", "a: lr=", "a: =1", "a: nothing=1", "a: lr=x", "a: model_options.depth=x"]
CHANGED += ["a: model_options.=1", "a: seed=1", "a: a.b.c.d=1", "a: data=nowhere", "a/../b: lr=1e-3", "../x: lr=1e-3"]
CHANGED += [
    "a\n: lr=1e-3",
    "a: model_options=3",
    "a: optimization=1",
    "a: scaling=nonsense",
    "a: steps=-1",
    "none: lr=1e-3",
]
CHANGED += [
    "a: model_options.depth=3",
    "a: batch_size=0",
    "a: out=x",
    "a: images.size=x",
    "a: model=os:system",
    "a: trust=1",
]
FIELDS = [text.partition(": ")[2] for text in CHANGED if ": " in text] + ["=", "lr", "lr=", "x=1", "depth=3", "..=1"]

VALUES: dict[str, list[str]] = {
    **dict.fromkeys(["--rates", "--noise", "--depths", "--widths", "--batch-sizes"], LISTS),
    **dict.fromkeys(["--methods", "--scaling"], SCALINGS),
    "--variants": CHANGED,
    "--set": FIELDS,
    "--budget": [
        "",
        "0",
        "0m",
        "-5m",
        "5",
        "5 m",
        "m",
        "1h30m",
        "nan",
        "infm",
        "½h",
        "٣m",
        "1e400d",
        "5x",
        "5mm",
        "m5",
        "1,5h",
    ],
    "--cache": [
        "",
        "every",
        "every=",
        "every=0",
        "every=x",
        "depth=1",
        "every=3,depth=99",
        "every=3,depth=-1",
        "a=b",
        "every=2,every=3",
        "every=3;depth=1",
        "every=1.5,depth=1",
        "every=3,depth=1,x=2",
        "=,=",
        "every=3,depth=",
        "every=-1",
    ],
    "--input": [
        "",
        "1",
        "1,3",
        "1,3,8,x",
        "-1,3,8,8",
        "0,0,0,0",
        "1,1,8,8:nonsense",
        "1:long:long",
        "1" + ",1" * 40,
        "9" * 30,
        "1,1,8,8",
        "1e3",
        ":",
        "99999999,99999999",
    ],
    "--model-options": [
        "",
        "depth",
        "depth=",
        "=2",
        "depth=x",
        "depth=-1",
        "depth=0",
        "heads=3",
        "dim=0",
        "nothing=1",
        "dim=1e3",
        "depth=[",
        "depth={}",
        "depth=None",
        "patch_size=3",
        "patch_size=99",
        "dim=99999999999",
        "heads=1.5",
        "depth=2.0",
    ],
    **dict.fromkeys(["--seed", "-n", "--size", "--channels", "--seeds", "--first-seed", "--warmup", "--jobs"], NUMBERS),
    **dict.fromkeys(
        ["--batch-size", "--checkpoint", "--skips", "--every", "--scores", "--workers", "--held-out"], NUMBERS
    ),
    **dict.fromkeys(["--accumulation", "--decay-steps", "--text-length", "--text-dim", "--samples"], NUMBERS),
    **dict.fromkeys(["--save-every", "--keep-last", "--keep-every", "--log-every", "--held-out-every"], NUMBERS),
    **dict.fromkeys(["--monitor-every", "--sampler-steps", "--max-rollbacks"], NUMBERS),
    **{
        key: [*NUMBERS, "1e400", "-1e-3"]
        for key in ["--guidance", "--lr", "--weight-decay", "--clip", "--ema-rate", "--rollback-factor"]
    },
    **{key: [*NUMBERS, "1.0", "-0.1"] for key in ["--condition-dropout"]},
    "--betas": ["0.9", "x y", "1 1", "-1 0.9", "nan 0.9", "0.9 0.99 0.999"],
    **dict.fromkeys(["--out", "--config", "--data", "--autoencoder", "--text-encoder", "--feature-weights"], PLACES),
    "--recipe": [
        "",
        "nonsense",
        "digits",
        "DIGITS-TINY",
        "cifar10-uvit-s2",
        "mscoco256-uvit-s2",
        "shapes-text-tiny",
        "../x",
    ],
    "--model": [
        "",
        "uvit/",
        "uvit/nothing",
        "unet",
        "unet/cifar10",
        "os:system",
        "os:",
        ":",
        "nothing:x",
        "net.py",
        "net.py:none",
        "pretrained/config.json",
        "tiny.yaml",
        "json:loads",
        "torch.nn:Identity",
        "UViT",
        "plan.json",
    ],
    "--features": [
        "",
        "nonsense",
        "inception",
        "efficientnet",
        "os:getcwd",
        "nothing:x",
        ":",
        "pixels",
        "random",
        "json:loads",
    ],
    "--device": ["", "gpu", "cuda", "cuda:99", "meta", "mps", "cpu:7", "x"],
    "--split": ["", "nothing", "TEST", "../x", "train ", "0"],
    "--class": ["", "unicorn", "-1", "99", "3", "κ"],
    "--prompt": ["", " ", "a" * 10_000, "κ", "\x00", "a number 3"],
    "--trackers": ["", "nonsense", "wandb", "tensorboard", "all"],
    "--sampler": ["", "nonsense", "DDIM"],
    "--precision": ["fp64", "", "bf16"],
    "--condition": ["nonsense", "class", "text"],
    "--schedule": ["linear", ""],
    "--method": ["nothing", "network", ""],
    "--include": ["", "[", "*", "\\"],
    "--exclude": ["*", "[", ""],
    "--push-to-hub": ["", "x", "a/b/c", "../x"],
    "--format": ["onnx", ""],
    "--weights": ["best", ""],
}
"""Values for flags: what a hand may type."""

FLAGS: dict[str, str] = {
    "train": "--scaling --steps --batch-size --budget --seed --size --channels --held-out --workers "
    "--autoencoder --schedule "
    "--condition --condition-dropout --text-encoder --text-length --text-dim --lr --weight-decay --betas --warmup "
    "--decay-steps --clip --ema-rate --precision --accumulation --save-every --keep-last --keep-every "
    "--log-every --trackers "
    "--held-out-every --samples --sampler --sampler-steps --monitor-every --max-rollbacks --rollback-factor --out "
    "--config --data --recipe --model --model-options",
    "compare": "--methods --variants --seeds --recipe --config --data --out --every --jobs --depths "
    "--widths --batch-sizes "
    "--rates --scores --noise",
    "range": "--recipe --config --set --rates --methods --variants --seeds --first-seed --warmup --jobs --out",
    "sample": "-n --class --prompt --seed --sampler --guidance --weights --checkpoint --batch-size --device "
    "--cache --out",
    "eval": "-n --seed --sampler --guidance --weights --checkpoint --batch-size --device --features "
    "--feature-weights --data "
    "--size",
    "stats": "--size --channels --split --features --feature-weights --out",
    "export": "--format --weights --checkpoint --out --push-to-hub",
    "diagnose": "--recipe --config --data --model --size --out",
    "find": "--config --input --include --exclude --out",
    "kappa": "--data --skips --model --method --schedule --seeds --out",
    "report": "--out",
    "models": "--out",
}


def mutate_words(words: list[str], draw: random.Random) -> list[str]:
    flags = FLAGS.get(words[0] if words else "", "").split()
    if flags and draw.random() < 0.6:
        made = list(words)
        for flag in draw.sample(flags, min(len(flags), draw.choice([1, 1, 2]))):
            value = draw.choice(VALUES.get(flag, WORDS))
            text = (
                [f"{flag}={value}"]
                if draw.random() < 0.15
                else [flag, *(value.split(" ") if flag == "--betas" else [value])]
            )
            if flag in made and draw.random() < 0.8:  # in place of the one that is there
                at = made.index(flag)
                made[at : at + 2] = text
            else:
                made += text
        return made
    made = list(words)
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.randrange(1, len(made) + 1) if len(made) > 1 else 1
        match draw.choice(["change", "change", "change", "drop", "insert", "repeat", "swap", "join"]):
            case "change" if at < len(made):
                made[at] = draw.choice(WORDS)
            case "drop" if at < len(made):
                del made[at]
            case "repeat" if at < len(made):
                made.insert(at, made[at])
            case "swap" if 1 < at < len(made):
                made[at], made[at - 1] = made[at - 1], made[at]
            case "join" if 1 < at < len(made):
                made[at - 1 : at + 1] = [made[at - 1] + made[at]]
            case _:
                made.insert(at, draw.choice(WORDS))
    return made


# Variables of the environment, and the state in which a shell or a scheduler starts a command

VARIABLES: dict[str, list[str | None]] = {
    "SCALELONG_CACHE": [
        "",
        "notes.txt",
        "notes.txt/x",
        "/proc/nothing",
        "/dev/null",
        "missing/deep",
        "~nobody/x",
        "a" * 300,
    ],
    "SCALELONG_DATA": ["", ":", "notes.txt", "/nothing:", "/dev/zero", "data"],
    "SCALELONG_TRUST": ["0", "no", ""],
    "SCALELONG_COMMAND": ["", "x\ny", "rm -rf /"],
    "HOME": [None, "", "/nothing", "notes.txt", "~"],
    "XDG_CACHE_HOME": ["", "notes.txt", "relative"],
    "TMPDIR": ["/nothing", "notes.txt", ""],
    "COLUMNS": ["0", "1", "x", "-5", "99999999999"],
    "LINES": ["0", "x"],
    "TERM": [None, "dumb", "", "x"],
    "NO_COLOR": ["1", ""],
    "RANK": ["x", "", "5", "-1", "1"],
    "WORLD_SIZE": ["x", "0", "-1", "2.5", ""],
    "LOCAL_RANK": ["x", "99", ""],
    "MASTER_PORT": ["x", "99999999", "0"],
    "ACCELERATE_MIXED_PRECISION": ["fp64", "", "x"],
    "ACCELERATE_USE_CPU": ["x", "maybe"],
    "ACCELERATE_USE_FSDP": ["x", "true"],
    "CUDA_VISIBLE_DEVICES": ["99", "x", None],
    "OMP_NUM_THREADS": ["0", "x", "-1", None],
    "PYTHONIOENCODING": ["ascii", "latin-1", "utf-16", "nonsense"],
    "LC_ALL": ["C", "x", "POSIX"],
    "PYTHONWARNINGS": ["error", "ignore"],
    "PYTHONHASHSEED": ["0"],
    "PYTHONOPTIMIZE": ["2"],
    "PYTHONUNBUFFERED": ["1"],
    "SOURCE_DATE_EPOCH": ["x"],
    "MPLBACKEND": ["nonsense", "TkAgg"],
    "MPLCONFIGDIR": ["notes.txt", "/nothing"],
    "HF_HOME": ["notes.txt", "/nothing"],
    "TORCH_HOME": ["notes.txt"],
    "TZ": ["x", "America/Nowhere"],
}


def mutate_environment(draw: random.Random) -> dict[str, str | None]:
    names = draw.sample(sorted(VARIABLES), draw.choice([1, 1, 1, 2]))
    return {name: draw.choice(VARIABLES[name]) for name in names}
