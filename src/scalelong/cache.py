"""What is expensive to compute and a pure function of its inputs: kept on disk under the hash of those inputs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

VARIABLE = "SCALELONG_CACHE"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalelong" / kind


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: the first one computes, the others find what it left."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_array(
    kind: str,
    about: dict[str, Any],
    shape: tuple[int, ...],
    dtype: str,
    compute: Callable[[], Iterable[np.ndarray]],
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is not there or damaged."""
    import numpy as np

    folder = cache_folder(kind) / key_of(about)
    with locked(folder):
        fault = _fault(folder)
        if fault is not None:
            say(f"{kind}: {fault}; computing {shape[0]} rows into {folder}")
            _write(folder, about, shape, dtype, compute())
        return np.load(folder / "array.npy", mmap_mode="r", allow_pickle=False)


def _fault(folder: Path) -> str | None:
    """Why the array of this folder cannot be used."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return "not computed yet"
    try:
        good = json.loads(manifest.read_text())["sha256"] == file_digest(folder / "array.npy")
    except (OSError, ValueError, KeyError) as error:
        return f"damaged ({error})"
    return None if good else "damaged (its checksum is another one)"


def _write(
    folder: Path, about: dict[str, Any], shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> None:
    import numpy as np

    (folder / "manifest.json").unlink(missing_ok=True)
    part = folder / "array.part"
    array: Any = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
    row = 0
    for chunk in chunks:
        array[row : row + len(chunk)] = chunk
        row += len(chunk)
    assert row == shape[0], f"{row} rows instead of {shape[0]}"
    array.flush()
    del array
    os.replace(part, folder / "array.npy")
    manifest = {"about": about, "shape": list(shape), "dtype": dtype, "sha256": file_digest(folder / "array.npy")}
    temporary = folder / "manifest.part"
    temporary.write_text(json.dumps(manifest, indent=2))
    os.replace(temporary, folder / "manifest.json")
