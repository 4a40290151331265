"""Damage that knows the format: JSON, YAML, safetensors, torch files, zip, npz, parquet, IDX, CIFAR, images, folders.

Bytes that are flipped at random are mostly found by a checksum or a parser. What is well-formed and wrong goes deeper.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], str]


# Texts


def retype(value: Any, draw: random.Random) -> Any:
    """The same value, or nearly so, as another type: what a hand or another program writes."""
    options: list[Any] = [str(value), [value], {"value": value}, None, not value]
    if isinstance(value, bool):
        options += [str(value).lower(), int(value), "yes"]
    elif isinstance(value, int | float):
        options += [-value, value + 1, value * 1.5, float(value), f" {value} ", f"{value}px", value * 10**6, 1e308, -1]
    elif isinstance(value, str):
        options += [value.upper(), value + " ", value + "\n", value[::-1], value[:-1], value * 300, 7, f"../{value}"]
    elif isinstance(value, list):
        options += [
            value * 2,
            value[:-1],
            value[::-1],
            tuple(value),
            {str(i): v for i, v in enumerate(value)},
            len(value),
        ]
    elif isinstance(value, dict):
        options += [list(value), list(value.items()), {k.upper(): v for k, v in value.items()}, {**value, "extra": 1}]
    return draw.choice(options)


def entries(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of everything inside a value."""
    found: list[tuple[Any, Any]] = []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inner):
        found += [(value, key), *entries(part)]
    return found


def reshape(value: Any, draw: random.Random) -> str:
    """Retype, rename, move or drop entries, in place."""
    known = entries(value)
    if not known:
        return "nothing inside"
    holder, key = draw.choice(known)
    kind = draw.choice(["retype", "retype", "retype", "rename", "swap", "drop all", "nest"])
    if kind == "rename" and isinstance(holder, dict):
        name = draw.choice([f"{key}s", str(key).upper(), f" {key}", str(key)[:-1], "κ", f"{key}\u200b"])
        holder[name] = holder.pop(key)
        return f"{key!r} renamed to {name!r}"
    if kind == "swap":
        other, place = draw.choice(known)
        holder[key], other[place] = other[place], holder[key]
        return f"{key!r} and {place!r} swapped" if json_able(value) else "a circle"
    if kind == "drop all":
        holder.clear()
        return f"all beside {key!r} dropped"
    if kind == "nest":
        holder[key] = {"value": {"value": holder[key]}}
        return f"{key!r} nested"
    holder[key] = retype(holder[key], draw)
    return f"{key!r} = {holder[key]!r:.60}"


def json_able(value: Any) -> bool:
    try:
        json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def reshape_json(path: Path, draw: random.Random) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(max(1, len(lines)))
    try:
        value = json.loads(lines[number])
    except (ValueError, IndexError):
        return rewrite(path, draw)
    said = reshape(value, draw)
    if not json_able(value):
        return rewrite(path, draw)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return said


ROOTS = ["null", "1", '"text"', "[]", "{}", "[1, 2]", "true", "NaN", "[[]]", '{"a": 1, "a": 2}', "-", "'a'", "{a: 1}"]


def rewrite(path: Path, draw: random.Random) -> str:
    """The whole text in another shape: encodings, line ends, orders, other roots, what a crash leaves."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines(keepends=True)
    kind = draw.choice(
        [
            "bom",
            "utf-16",
            "latin",
            "crlf",
            "cr",
            "root",
            "twice",
            "reversed",
            "zeros",
            "html",
            "comment",
            "comma",
            "lines",
            "repeated",
            "blank",
            "joined",
            "tabs",
            "spaces",
        ]
    )
    match kind:
        case "bom":
            content = b"\xef\xbb\xbf" + text.encode()
        case "utf-16":
            content = text.encode("utf-16")
        case "latin":
            content = (text + "# \xe9\n").encode("latin-1", "replace")
        case "crlf":
            content = text.replace("\n", "\r\n").encode()
        case "cr":
            content = text.replace("\n", "\r").encode()
        case "root":
            content = draw.choice(ROOTS).encode()
        case "twice":
            content = (text * 2).encode()
        case "reversed":
            content = "".join(reversed(lines)).encode()
        case "zeros":  # a file whose length was kept by a crash, and its content not
            content = b"\0" * len(text.encode())
        case "html":
            content = b"<!DOCTYPE html><html><body>404: not found</body></html>"
        case "comment":
            content = f"// a comment\n{text}".encode()
        case "comma":
            content = text.replace("}", ",}").encode()
        case "lines":
            content = "".join(lines[: len(lines) // 2]).encode()
        case "repeated":
            content = "".join(line * 3 for line in lines).encode()
        case "blank":
            content = "\n\n".join(lines).encode()
        case "joined":
            content = text.replace("\n", "").encode()
        case "tabs":
            content = text.replace("  ", "\t").encode()
        case _:
            content = (" " * 5000 + text).encode()
    path.write_bytes(content)
    return f"rewritten: {kind}"


def reshape_yaml(path: Path, draw: random.Random) -> str:
    import yaml

    text = path.read_text()
    kind = draw.choice(["reshape", "reshape", "reshape", "text", "rewrite"])
    if kind == "rewrite":
        return rewrite(path, draw)
    if kind == "text":
        added = draw.choice(
            [
                "seed: 1\nseed: 2\n",
                "<<: {steps: 3}\n",
                "---\nsteps: 3\n",
                "optimization: {lr: 1e-3}\n",
                "optimization: {lr: .inf}\n",
                "steps: 1:30\n",
                "steps: 0o10\n",
                "steps: +5\n",
                "seed: yes\n",
                "1: 2\n",
                "null: 1\n",
                "[1, 2]: 3\n",
                "model_options: {1: 2}\n",
                "model_options: !!set {a, b}\n",
                "model: !!binary aGVsbG8=\n",
                "data: !!python/object/apply:os.system [touch hacked]\n",
                "model: [uvit]\n",
                "model: 'os:getcwd'\n",
                "scaling: {method: cs, kappa: 0.7}\n",
                "scaling: cs:0.7\n",
                "scaling: [cs, ls]\n",
                "Steps: 3\n",
                "optimisation: {lr: 1}\n",
                "images:\n",
                "images: {size: 8.5}\n",
                "images: {size: [8, 8]}\n",
                "logging: {trackers: tensorboard}\n",
                "logging: {trackers: [nothing]}\n",
                "diffusion: {condition: class}\n",
                "hardware: {precision: fp64}\n",
                "x" * 100_000,
            ]
        )
        path.write_text(text + added)
        return f"added {added[:50]!r}"
    value = yaml.safe_load(text)
    said = reshape(value, draw)
    if not json_able(value):
        return rewrite(path, draw)
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return said


def swap_files(path: Path, draw: random.Random) -> str:
    """Another file of the same world under this name: the wrong one was copied."""
    world = path
    while world.parent != world and not (world / "notes.txt").exists():
        world = world.parent
    others = sorted(other for other in world.rglob("*") if other.is_file() and other != path and not other.is_symlink())
    other = draw.choice(others)
    content = other.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return f"replaced by {other.relative_to(world)}"


# Weights


def mend_manifest(path: Path) -> None:
    """Whoever edits a checkpoint on purpose also writes its checksum."""
    for manifest in (path.parent / "manifest.json", path.parent.parent / "manifest.json"):
        if manifest.exists() and manifest != path:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            values = json.loads(manifest.read_text())
            for holder, key in entries(values):
                if key == path.name and isinstance(holder[key], str):
                    holder[key] = digest
                elif key == path.name and isinstance(holder[key], dict):
                    holder[key].update({"sha256": digest, "size": path.stat().st_size, "bytes": path.stat().st_size})
            manifest.write_text(json.dumps(values))


def edit_safetensors(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    kind = draw.choice(
        [
            "shape",
            "dtype",
            "offsets",
            "drop",
            "rename",
            "extra",
            "metadata",
            "nan",
            "length",
            "overlap",
            "huge",
            "empty",
            "value",
            "transposed",
        ]
    )
    entry = header[name]
    size = length
    match kind:
        case "shape":
            entry["shape"] = draw.choice(
                [[], [0], [-1], [2**40], entry["shape"][::-1], [*entry["shape"], 1], "x", None]
            )
        case "dtype":
            entry["dtype"] = draw.choice(["F16", "I64", "BOOL", "F8_E4M3", "X", 3, None, "BF16"])
        case "offsets":
            entry["data_offsets"] = draw.choice([[0, 0], [4, 0], [0, 2**63], [-4, 4], "x", [], [0, len(body) + 4]])
        case "overlap":
            header[name] = {**header[draw.choice(names)]}
        case "drop":
            del header[name]
        case "rename":
            header[draw.choice(["", "x", "..", name.upper(), f"module.{name}"])] = header.pop(name)
        case "extra":
            header["zz.extra"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(body), len(body) + 4]}
            body += bytes(4)
        case "metadata":
            said = header.setdefault("__metadata__", {})
            known = list(said) or ["format"]
            said[draw.choice(known)] = draw.choice(
                ["", "{", "null", "[]", '{"a": 1}', "\x00", "x" * 10_000, '{"step": "x"}']
            )
        case "nan":
            start, end = entry["data_offsets"]
            body = body[:start] + struct.pack("<f", float("nan")) * ((end - start) // 4) + body[end:]
        case "value":
            start, end = entry["data_offsets"]
            body = body[:start] + struct.pack("<f", 1e38) * ((end - start) // 4) + body[end:]
        case "transposed":
            entry["shape"] = entry["shape"][::-1]
        case "empty":
            header, body = {}, b""
    text = json.dumps(header).encode()
    size = {"length": draw.choice([0, 1, 2**63, len(text) + 10**6]), "huge": 2**34}.get(kind, len(text))
    path.write_bytes(struct.pack("<Q", size) + text + body)
    mend_manifest(path)
    return f"safetensors of {name}: {kind}"


def edit_torch(path: Path, draw: random.Random) -> str:
    """training.pt and the authors' weights: other objects, other tensors, code."""
    import torch

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch hacked",)

    kind = draw.choice(["code", "list", "none", "value", "drop", "plain pickle", "text", "legacy", "big"])
    value: Any = None
    if kind in ("value", "drop"):
        value = torch.load(path, weights_only=True)
        holder, key = draw.choice(entries(value) or [(value, next(iter(value)))])
        if kind == "drop":
            del holder[key]
        else:
            strange: list[Any] = [None, "x", -1, [], {}, torch.zeros(3), torch.full((2, 2), float("nan")), 2**70]
            holder[key] = draw.choice(strange)
        kind = f"{kind} {key!r}"
    else:
        value = {"code": Call(), "list": [1], "none": None, "text": "x", "legacy": {"a": torch.ones(2)}}.get(
            kind, {"a": 1}
        )
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "legacy":
        torch.save(value, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(value, path)
    mend_manifest(path)
    return f"torch file: {kind}"


# Archives and arrays


def edit_zip(path: Path, draw: random.Random) -> str:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    first, image = next((name, content) for name, content in members.items() if name.endswith(".png"))
    kind = draw.choice(
        [
            "absolute",
            "above",
            "twice",
            "link",
            "encrypted",
            "crc",
            "comment",
            "latin",
            "nested",
            "bomb",
            "method",
            "empty",
            "backslash",
            "directory",
            "prefix",
            "mac",
            "case",
            "long",
            "newline",
            "metadata",
            "stored size",
        ]
    )
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        if kind != "empty":
            for name, content in members.items():
                archive.writestr(name, content)
        import warnings

        warnings.simplefilter("ignore")
        match kind:
            case "absolute":
                archive.writestr("/etc/a.png", image)
            case "above":
                archive.writestr("a/../../b.png", image)
            case "twice":
                archive.writestr(first, image)
            case "link":
                information = zipfile.ZipInfo("link.png")
                information.external_attr = 0o120777 << 16
                archive.writestr(information, "/etc/passwd")
            case "comment":
                archive.comment = b"x" * 60_000
            case "latin":
                archive.writestr("d\xe9j\xe0\x01.png", image)
            case "nested":
                archive.writestr("inner.zip", path.read_bytes())
            case "bomb":
                archive.writestr("bomb.png", bytes(200_000_000))
            case "backslash":
                archive.writestr("a\\b\\c.png", image)
            case "directory":
                archive.writestr("folder.png/", b"")
            case "mac":
                archive.writestr("__MACOSX/._a.png", b"\0\5\x16\7")
                archive.writestr(".DS_Store", b"\0")
            case "case":
                archive.writestr(first.upper(), image)
            case "long":
                archive.writestr("a" * 5000 + ".png", image)
            case "newline":
                archive.writestr("a\nb\r.png", image)
            case "metadata":
                archive.writestr(
                    "metadata.jsonl", draw.choice(["", "null", '{"file_name": "' + first + '"}', "\xff", "[]"])
                )
    content = bytearray(made.getvalue())
    central = content.find(b"PK\x01\x02")
    match kind:
        case "encrypted":
            content[6] |= 1
            content[central + 8] |= 1
        case "crc":
            content[central + 16] ^= 0xFF
        case "method":
            content[8:10] = content[central + 10 : central + 12] = struct.pack("<H", draw.choice([12, 14, 93, 99]))
        case "prefix":
            content = bytearray(b"#!/bin/sh\n" * 10) + content
        case "stored size":
            content[central + 24 : central + 28] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    return f"zip: {kind}"


def edit_npz(path: Path, draw: random.Random) -> str:
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        values: dict[str, Any] = dict(arrays)
    name = draw.choice(sorted(values))
    array = values[name]
    kinds: dict[str, Callable[[], Any]] = {
        "fortran": lambda: np.asfortranarray(array),
        "big-endian": lambda: array.astype(array.dtype.newbyteorder(">")) if array.dtype.kind in "iuf" else array,
        "float": lambda: np.linspace(-1, 1, array.size).reshape(array.shape),
        "half": lambda: np.zeros(array.shape, np.float16),
        "nan": lambda: np.full(array.shape, np.nan),
        "bool": lambda: np.zeros(array.shape, bool),
        "object": lambda: np.array([{"a": 1}] * len(array), dtype=object),
        "structured": lambda: np.zeros(len(array), dtype=[("a", "u1"), ("b", "f4")]),
        "scalar": lambda: np.array(3),
        "empty": lambda: array[:0],
        "date": lambda: np.zeros(len(array), dtype="datetime64[s]"),
        "bytes": lambda: np.array([b"\xff\xfe"] * len(array)),
        "text": lambda: np.array(["\ud800" if draw.random() < 0.5 else "κ"] * len(array)),
        "wide": lambda: np.zeros((*array.shape, 5), np.uint8),
        "longer": lambda: np.concatenate([array, array]),
        "negative": lambda: -np.ones(array.shape, np.int64),
        "large": lambda: np.full(array.shape, 10**12),
    }
    kind = draw.choice([*kinds, "missing", "renamed", "path", "no zip"])
    if kind == "no zip":
        with path.open("wb") as file:
            np.save(file, array)
        return "npz: one array under this name"
    if kind in kinds:
        values[name] = kinds[kind]()
    elif kind in ("missing", "renamed"):
        del values[name]
        values |= {"pictures": array} if kind == "renamed" else {}
    else:
        values[f"a/../{name}"] = array
    np.savez(path, **values)
    return f"npz: {name} {kind}"


def edit_parquet(path: Path, draw: random.Random) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    rows = table.num_rows
    labels: dict[str, Any] = {
        "bool": pa.array([True, False] * (rows // 2)),
        "float": pa.array([0.0, 1.0] * (rows // 2)),
        "huge": pa.array([10**9] * rows),
        "negative": pa.array([-5] * rows),
        "date": pa.array([0] * rows, pa.timestamp("s")),
        "list": pa.array([[1, 2]] * rows),
        "names": pa.array(["<script>", "κ"] * (rows // 2)),
        "nulls": pa.array([None, 1] * (rows // 2)),
        "dictionary": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
        "decimal": pa.array([1] * rows).cast(pa.decimal128(30, 2)),
        "struct": pa.array([{"a": 1}] * rows),
    }
    kind = draw.choice(
        ["label", "label", "texts", "paths", "binary", "empty", "columns", "metadata", "nulls", "twice", "no image"]
    )
    match kind:
        case "label":
            name = draw.choice(sorted(labels))
            kind = f"labels {name}"
            table = table.drop_columns(["label"]).append_column("label", labels[name])
        case "texts":
            text = draw.choice(
                [[None] * rows, [["a", "b"]] * rows, [3] * rows, [""] * rows, ["\x00"] * rows, [b"\xff"] * rows]
            )
            table = table.drop_columns(["text"]).append_column("text", pa.array(text))
        case "paths":
            table = table.set_column(0, "image", pa.array(["a.png"] * rows))
        case "binary":
            content = draw.choice([b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"not an image" * 10, b"%!PS-Adobe"])
            table = table.set_column(0, "image", pa.array([content] * rows))
        case "empty":
            table = table.slice(0, 0)
        case "columns":
            table = table.select(["label"])
        case "metadata":
            said = draw.choice(
                [b"", b"{", b"null", b'{"info": {"features": 3}}', b'{"info": {"features": {"label": {"names": 5}}}}']
            )
            table = table.replace_schema_metadata({b"huggingface": said})
        case "nulls":
            table = table.set_column(0, "image", pa.array([None] * rows, table.schema.field("image").type))
        case "twice":
            table = table.append_column("image", table["image"])
        case "no image":
            table = table.rename_columns(["picture", *table.column_names[1:]])
    pq.write_table(table, path, compression=draw.choice(["snappy", "zstd", "gzip", "none", "brotli"]))
    return f"parquet: {kind}"


def edit_idx(path: Path, draw: random.Random) -> str:
    packed = path.suffix == ".gz"
    content = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    kind = draw.choice(["type", "dimensions", "count", "side", "short", "long", "labels", "zero", "bomb", "magic"])
    match kind:
        case "type":
            content[2] = draw.choice([0x09, 0x0B, 0x0C, 0x0D, 0x0E, 0x00])
        case "dimensions":
            content[3] = draw.choice([0, 1, 2, 4, 255])
        case "count":
            content[4:8] = struct.pack(">I", draw.choice([0, 1, 13, 2**31, 2**32 - 1]))
        case "side":
            content[8:12] = struct.pack(">I", draw.choice([0, 1, 2**31, 2**32 - 1]))
        case "short":
            del content[-3:]
        case "long":
            content += bytes(7)
        case "labels":
            content[8:] = bytes([255] * (len(content) - 8))
        case "zero":
            content = bytearray(len(content))
        case "magic":
            content[:2] = b"PK"
        case "bomb":
            content += bytes(300_000_000 if packed else 1000)
    path.write_bytes(gzip.compress(bytes(content), 1) if packed else bytes(content))
    return f"idx: {kind}"


def edit_cifar(folder: Path, draw: random.Random) -> str:
    import numpy as np

    name = draw.choice(["data_batch_1", "data_batch_5", "batches.meta"])
    array = np.zeros((2, 3072), np.uint8)
    kind = draw.choice(
        [
            "labels",
            "label text",
            "no data",
            "text data",
            "int64",
            "rows",
            "fortran",
            "protocol",
            "names",
            "fine",
            "missing",
            "list data",
            "extra",
            "float labels",
            "short labels",
            "numpy labels",
            "slice",
        ]
    )
    batch: Any = {
        "labels": {b"data": array, b"labels": [3, 99]},
        "label text": {b"data": array, b"labels": ["a", "b"]},
        "no data": {b"labels": [0, 1]},
        "text data": {b"data": "pixels", b"labels": [0, 1]},
        "int64": {b"data": array.astype(np.int64), b"labels": [0, 1]},
        "rows": {b"data": array[:, :3071], b"labels": [0, 1]},
        "fortran": {b"data": np.asfortranarray(array), b"labels": [0, 1]},
        "protocol": {b"data": array, b"labels": [0, 1]},
        "fine": {b"data": array, b"fine_labels": [0, 1]},
        "list data": {b"data": array.tolist(), b"labels": [0, 1]},
        "extra": {
            b"data": array,
            b"labels": [0, 1],
            b"filenames": ["a", "b"],
            b"batch_label": "x",
            b"more": (1, 2.5, None),
        },
        "float labels": {b"data": array, b"labels": [0.5, 1.0]},
        "short labels": {b"data": array, b"labels": [0]},
        "numpy labels": {b"data": array, b"labels": np.array([0, 1])},
        "slice": {b"data": array[::1, ::-1], b"labels": [0, 1]},
    }.get(kind, {})
    if kind == "names":
        name = "batches.meta"
        wrong = draw.choice([[], ["a"], "airplane", [b"\xff"], [1, 2], None, ["x" * 10_000] * 10])
        batch = draw.choice([{"label_names": wrong}, {}, [], {b"label_names": [b"a"] * 10}])
    if kind == "missing":
        (folder / name).unlink()
        return f"{name} removed"
    (folder / name).write_bytes(pickle.dumps(batch, protocol=draw.choice([0, 1, 2, 3, 4, 5])))
    return f"{name}: {kind}"


# Images and their folders


def edit_folder(folder: Path, draw: random.Random) -> str:
    """Strangers in a folder of images, and metadata that does not fit."""
    from PIL import Image

    images = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".jpg", ".gif"))
    some = draw.choice(images)
    kind = draw.choice(
        [
            "empty",
            "wrong end",
            "huge",
            "tiny",
            "deep bits",
            "float",
            "svg",
            "folder",
            "long",
            "newline",
            "hidden",
            "nested",
            "dead link",
            "outside",
            "copies",
            "script",
            "none left",
            "socket",
            "animated",
            "exif",
            "palette",
            "alpha",
            "one left",
            "metadata",
            "metadata",
            "metadata",
            "csv",
            "csv",
            "both",
            "text file",
            "case",
            "profile",
            "named run",
        ]
    )
    match kind:
        case "empty":
            (folder / "a.png").touch()
        case "wrong end":
            some.rename(some.with_suffix(draw.choice([".jpg", ".PNG", ".tiff", ".heic", ".dat"])))
        case "huge":  # a header that promises 10 gigapixels
            header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
            import zlib

            chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
            (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IEND\xaeB`\x82")
        case "tiny":
            Image.new("L", (1, 1)).save(folder / "a.png")
        case "deep bits":
            Image.new("I;16", (8, 8), 40_000).save(folder / "a.png")
        case "float":
            Image.new("F", (8, 8), 0.5).save(folder / "a.tif")
        case "svg":
            (folder / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
            (folder / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n(x) run\n")
        case "folder":
            (folder / "a.png").mkdir()
        case "long":
            shutil.copy(some, folder / ("a" * 250 + ".png"))
        case "newline":
            shutil.copy(some, folder / "a\nb\x1b[31m.png")
        case "hidden":
            shutil.copy(some, folder / ".hidden.png")
            (folder / ".DS_Store").write_bytes(b"\0")
            (folder / "Thumbs.db").write_bytes(b"\0")
        case "nested":
            deep = folder.joinpath(*["d"] * 200)
            deep.mkdir(parents=True)
            shutil.copy(some, deep / "a.png")
        case "dead link":
            (folder / "a.png").symlink_to("nowhere.png")
        case "outside":
            (folder / "a.png").symlink_to("/etc/hostname")
        case "copies":
            for number in range(20):
                shutil.copy(some, some.parent / f"copy{number}.png")
        case "script":
            place = folder / "<img src=x onerror=alert(1)>"
            place.mkdir()
            shutil.copy(some, place / "a.png")
        case "none left":
            for path in images:
                path.unlink()
        case "one left":
            for path in images[1:]:
                path.unlink()
        case "socket":
            import socket

            place = os.getcwd()
            os.chdir(folder)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind("a.png")
            os.chdir(place)
        case "animated":
            frames = [Image.new("L", (8, 8), shade) for shade in (0, 100, 200)]
            frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:])
        case "exif":
            image = Image.new("RGB", (8, 16))
            exif = image.getexif()
            exif[0x0112] = draw.choice([6, 0, 99])
            image.save(folder / "a.jpg", exif=exif)
        case "palette":
            Image.new("P", (8, 8)).save(folder / "a.png", transparency=0)
        case "alpha":
            Image.new("LA", (8, 8)).save(folder / "a.png")
        case "case":
            shutil.copy(some, folder / "A.PNG")
            shutil.copy(some, folder / "a.png")
        case "profile":
            Image.new("CMYK", (8, 8)).save(folder / "a.jpg", icc_profile=b"broken")
        case "named run":
            (folder / "config.yaml").write_text("steps: 1\n")
        case "text file":
            text = draw.choice([b"", b"\0", b"x" * 200_000, b"\xff\xfe", b"a\nb\nc"])
            some.with_suffix(".txt").write_bytes(text)
        case "metadata" | "both":
            rows: list[Any] = [{"file_name": os.path.relpath(path, folder), "text": "x"} for path in images]
            change = draw.choice(
                ["twice", "missing", "extra", "keys", "types", "list", "empty", "label", "names", "null"]
            )
            kind = f"metadata {change}"
            match change:
                case "twice":
                    rows.append(rows[0])
                case "missing":
                    rows.pop()
                case "extra":
                    rows.append({"file_name": "nothing.png", "text": "x"})
                case "keys":
                    rows = [{"file": row["file_name"]} for row in rows]
                case "types":
                    rows[0]["text"] = draw.choice([3, {"a": 1}, ["a", 3], [[]], True])
                case "list":
                    rows[0] = [1, 2]
                case "empty":
                    rows = []
                case "label":
                    rows[0]["label"] = draw.choice(["a", 1.5, -7, 10**30, {}, None, True])
                case "names":
                    rows[0]["file_name"] = draw.choice(
                        ["", ".", "/etc/passwd", "a\x00b.png", None, 5, "./" + rows[0]["file_name"]]
                    )
                case "null":
                    rows[0]["text"] = None
            (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            if draw.random() < 0.2:
                (folder / "metadata.csv").write_text("file_name,text\n")
        case "csv":
            (folder / "metadata.jsonl").unlink(missing_ok=True)
            text = draw.choice(
                [
                    "",
                    "file_name\n",
                    "file_name,text\na.png\n",
                    'file_name,text\n"a.png,x\n',
                    "file_name;text\na.png;x\n",
                    "\ufefffile_name,text\n0.png,x\n",
                    "file_name,text,text\n0.png,x,y\n",
                    "file_name,text\n0.png,x,y,z\n",
                    "file_name,text\r\n0.png,\x00\r\n",
                    "file_name,text\n" + "0.png," + "x" * 200_000 + "\n",
                ]
            )
            (folder / "metadata.csv").write_text(text)
            kind = f"csv {text[:30]!r}"
    return f"in the folder: {kind}"
