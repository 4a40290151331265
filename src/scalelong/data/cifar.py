"""CIFAR-10 as its authors (and torchvision) store it: pickles. They are read without running what they contain."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors import LabelError, UnknownSplitError, UnreadableDataError
from .arrays import from_array
from .dataset import Annotations, ImageData
from .labels import number_labels
from .options import Options, needs
from .splits import canonical

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def find_cifar(folder: Path) -> Path | None:
    """The folder of the batches: this one, or `cifar-10-batches-py` in it."""
    for place in (folder, folder / "cifar-10-batches-py"):
        if (place / "data_batch_1").is_file() or (place / "test_batch").is_file():
            return place
    return None


def load_cifar(name: str, folder: Path, options: Options) -> ImageData:
    part = canonical(options.split) or options.split
    if part not in FILES:
        raise UnknownSplitError(f"{folder} has no part {options.split!r}; CIFAR-10 has 'train' and 'test'")
    pixels, labels = [], []
    for file in FILES[part]:
        batch = _read(folder / file)
        pixels.append(_pixels(batch, folder / file))
        labels.extend(_labels(batch, folder / file, len(pixels[-1])))
    meta = _read(folder / "batches.meta") if (folder / "batches.meta").is_file() else {}
    names = [_text(word) for word in meta.get("label_names", CLASSES)]
    images = torch.cat(pixels).view(-1, 3, 32, 32)
    return from_array(name, images, Annotations(*number_labels(labels, str(folder), names)), options)


def _pixels(batch: dict[str, Any], path: Path) -> torch.Tensor:
    np = needs("numpy", "reading CIFAR-10")
    data: Any = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise UnreadableDataError(f"{path}: 'data' must be uint8 (N, 3072), found {found}")
    return torch.from_numpy(np.array(data))


def _labels(batch: dict[str, Any], path: Path, count: int) -> list[int]:
    labels = batch.get("labels")
    if not isinstance(labels, list) or len(labels) != count:
        found = (
            f"{len(labels)} of them" if isinstance(labels, list) else f"no list of them; its keys are {sorted(batch)}"
        )
        raise LabelError(f"{path} needs {count} 'labels', found {found}")
    return labels


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except UnreadableDataError as error:
        raise UnreadableDataError(f"{path} is refused: {error}") from error
    # A damaged pickle can fail in any of these ways.
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:
        raise UnreadableDataError(f"{path} cannot be read as a CIFAR-10 batch: {error}") from error
    if not isinstance(content, dict):
        raise UnreadableDataError(f"{path} holds a {type(content).__name__}, not the dictionary of a CIFAR-10 batch")
    return {_text(key): value for key, value in content.items()}


class _Unpickler(pickle.Unpickler):
    """Builds lists, dictionaries, texts and numpy arrays. Every other name is refused, so nothing foreign can run."""

    def find_class(self, module: str, name: str) -> Any:
        np = needs("numpy", "reading CIFAR-10")
        multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in allowed:
            raise UnreadableDataError(f"it asks for {module}.{name}, which a CIFAR-10 batch does not need")
        return allowed[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old pickles."""
    if encoding != "latin1":
        raise UnreadableDataError(f"it asks for the encoding {encoding!r}, which a CIFAR-10 batch does not need")
    return text.encode("latin1")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
