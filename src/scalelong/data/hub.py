"""Data sets of Hugging Face's `datasets`: names on the hub, folders written by `save_to_disk`, and large parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataNotFoundError, UnknownSplitError
from .columns import CAPTIONS, LABELS, check_captions, first_of, image_column
from .dataset import Annotations, ImageData
from .labels import number_labels
from .options import Options, needs
from .parquet import encoded_bytes
from .source import Source, from_source
from .splits import canonical


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_hub(name: str, options: Options) -> ImageData:
    """`hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`."""
    place = name.removeprefix("hf:")
    datasets = needs("datasets", f"loading {name!r}")
    try:
        if Path(place).exists():
            found = load_saved(place) if is_saved(Path(place)) else datasets.load_dataset(place)
        else:
            repository, _, config = place.partition(":")
            found = datasets.load_dataset(repository, config or None)
    # Whatever goes wrong on the way to the hub, in its cache or in its files: it is not to be had.
    except Exception as error:
        raise DataNotFoundError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. Without a network, save it elsewhere with "
            "datasets.load_dataset(...).save_to_disk(folder) and give that folder"
        ) from error
    return from_source(name, HubSource(choose_part(found, options.split, name), name), options)


def load_saved(folder: str | Path) -> Any:
    return needs("datasets", "reading a saved data set").load_from_disk(str(folder))


def open_parquet(paths: list[Path], version: str) -> HubSource:
    """Parquet has no random access; `datasets` copies it once into a memory-mapped file in its cache."""
    datasets = needs("datasets", "streaming parquet files that do not fit in memory")
    files = [str(path.resolve()) for path in paths]
    return HubSource(datasets.load_dataset("parquet", data_files=files, split="train"), str(paths[0].parent), version)


class HubSource(Source):
    def __init__(self, dataset: Any, where: str, version: str | None = None) -> None:
        datasets = needs("datasets", f"loading {where}")
        features = dataset.features
        candidates = [column for column, feature in features.items() if _holds_images(feature)]
        self.image = image_column(candidates, list(features), where)
        if isinstance(features[self.image], datasets.Image):  # decoding is ours: one rule for all sources
            dataset = dataset.cast_column(self.image, datasets.Image(decode=False))
        self.dataset = dataset.select_columns([self.image])
        self._version = version or f"{dataset._fingerprint} {len(dataset)}"
        named = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        label, caption = first_of(LABELS, list(features)) or (named or [None])[0], first_of(CAPTIONS, list(features))
        numbers = classes = captions = None
        if label is not None:
            classes = getattr(features[label], "names", None)
            numbers, classes = number_labels(_values(dataset, label), f"{where}, column {label!r}", classes)
        if caption is not None:
            captions = check_captions(_values(dataset, caption), f"{where}, column {caption!r}")
        self.annotations = Annotations(numbers, classes, captions)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, row: int) -> str:
        return f"row {row}"

    def read(self, row: int) -> bytes:
        value = self.dataset[row][self.image]
        if isinstance(value, dict):
            return encoded_bytes(value.get("bytes"), value.get("path"), Path())
        return encoded_bytes(value, None, Path())

    def version(self) -> str:
        return self._version


def _values(dataset: Any, column: str) -> list[Any]:
    return dataset.select_columns([column])[:][column]


def _holds_images(feature: Any) -> bool:
    datasets = needs("datasets", "loading a data set")
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)


def choose_part(found: Any, split: str, name: str) -> Any:
    parts = found if isinstance(found, dict) else {"train": found}
    wanted = canonical(split) or split
    for part, dataset in parts.items():
        if part == split or (canonical(str(part)) or part) == wanted:
            return dataset
    raise UnknownSplitError(f"{name!r} has no part {split!r}; found: {', '.join(map(str, parts))}")
