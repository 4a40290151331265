"""Data sets of Hugging Face's `datasets`: names on the hub, folders of `save_to_disk`, parquet files, and objects.

`datasets` finds and opens them. The images are decoded here, by the same rules as files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataNotFoundError, ScaleLongError, UnknownSplitError, UnreadableDataError
from ..files import in_words, read_bytes, read_json
from ..optional import needs
from .annotations import CAPTIONS, LABELS, check_captions, first_of, image_column, number_labels
from .dataset import Annotations, ImageData, Options
from .decode import UndecodableError
from .files import MAX_MEMBER, by_file, canonical, stamp_of_files
from .stream import Source, from_source


def load_hub(name: str, options: Options) -> ImageData:
    """`hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`."""
    place = name.removeprefix("hf:")
    if is_saved(Path(place)):
        return load_saved(name, Path(place), options)
    datasets = needs("datasets", "hub", f"loading {name!r}")
    repository, _, config = (place, "", "") if Path(place).exists() else place.partition(":")
    try:
        found = datasets.load_dataset(repository, config or None)
    # Whatever goes wrong on the way to the hub, in its cache or in its files: the data are not to be had.
    except Exception as error:
        raise DataNotFoundError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. Without a network, save it elsewhere with "
            "datasets.load_dataset(...).save_to_disk(folder) and give that folder"
        ) from error
    return from_table(name, found, options, folders=[place] if Path(place).exists() else None)


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_saved(name: str, folder: Path, options: Options) -> ImageData:
    """A folder written by `save_to_disk`."""
    datasets = needs("datasets", "hub", "reading a saved data set")
    try:
        for state in [*folder.glob("state.json"), *folder.glob("*/state.json")]:
            names = [entry["filename"] for entry in read_json(state)["_data_files"]]
            if any(Path(name).name != name for name in names):
                raise ValueError(f"{state} names files outside of its folder: {names}")
        found = datasets.load_from_disk(str(folder))
        for part in found.values() if isinstance(found, dict) else [found]:
            part.data.validate(full=True)  # Arrow believes what its files say, down to a crash
    # Its files are JSON that `datasets` reads without checks, and Arrow.
    except Exception as error:
        raise UnreadableDataError(
            f"{folder} is damaged: {in_words(error)}; write it again with save_to_disk"
        ) from error
    return from_table(name, found, options, folders=[folder])


def find_parquet(folder: Path, split: str) -> list[Path]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))
    return [folder / name for name in by_file(names, split, str(folder))]


def load_parquet(name: str, paths: list[Path], options: Options) -> ImageData:
    """Files that fit in memory are read into it. Of others `datasets` makes a copy in its cache, which is mapped."""
    datasets = needs("datasets", "hub", "reading parquet files")
    arrow, parquet = (needs(module, "hub", "reading parquet files") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        if sum(path.stat().st_size for path in paths) <= options.memory_limit:
            # One thread: Arrow's thread pool must not be busy when workers are forked.
            table = arrow.concat_tables([parquet.read_table(path, use_threads=False) for path in paths])
            table.validate(full=True)
            found = datasets.Dataset(table)
        else:
            found = datasets.load_dataset("parquet", data_files=[str(path.resolve()) for path in paths], split="train")
    except Exception as error:
        raise UnreadableDataError(
            f"{', '.join(path.name for path in paths)} in {paths[0].parent} cannot be read as one parquet table "
            f"({in_words(error)}): download or write the files again"
        ) from error
    source = TableSource(found, name, options.memory_limit, [paths[0].parent], _version(paths))
    return from_source(name, source, options)


def _version(paths: list[Path]) -> str:
    """From names, sizes and footers, which hold the counts and offsets of all row groups."""
    sha = hashlib.sha256()
    for path in paths:
        sha.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            sha.update(file.read())
    return sha.hexdigest()


def from_table(name: str, found: Any, options: Options, folders: Sequence[str | Path] | None = None) -> ImageData:
    """A `Dataset` or `DatasetDict` of `datasets`; `folders` are the places where its rows may name files."""
    parts = found if isinstance(found, dict) else {"train": found}
    wanted = canonical(options.split) or options.split
    for part, dataset in parts.items():
        if part == options.split or (canonical(str(part)) or part) == wanted:
            return from_source(name, TableSource(dataset, name, options.memory_limit, folders), options)
    raise UnknownSplitError(
        f"{name!r} has no part {options.split!r}; found: {', '.join(map(str, parts))}. Choose one with `split`"
    )


class TableSource(Source):
    """The rows of a table. A row holds an image, or names one below `folders`, by default the cache of `datasets`."""

    def __init__(
        self,
        dataset: Any,
        where: str,
        memory_limit: int,
        folders: Sequence[str | Path] | None = None,
        version: str | None = None,
    ) -> None:
        datasets = needs("datasets", "hub", f"loading {where}")
        cache = [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
        self.folders = [Path(folder) for folder in (cache if folders is None else folders)]
        try:
            self._read_columns(datasets, dataset.with_format(None), where, memory_limit)
        except ScaleLongError:
            raise
        except Exception as error:  # whatever Arrow or `datasets` make of a damaged column
            raise UnreadableDataError(
                f"{where} cannot be read: {in_words(error)}; download or write it again"
            ) from error
        self._version = version or f"{dataset._fingerprint} {len(dataset)}"

    def _read_columns(self, datasets: Any, dataset: Any, where: str, memory_limit: int) -> None:
        features = dataset.features
        candidates = [column for column, feature in features.items() if _holds_images(feature)]
        self.image = image_column(candidates, list(features), where)
        if isinstance(features[self.image], datasets.Image):  # decoding is ours: one rule for all sources
            dataset = dataset.cast_column(self.image, datasets.Image(decode=False))
        self.dataset = dataset.select_columns([self.image])
        # A list, where it fits: an element of an Arrow column costs as much as decoding a small image.
        self._rows = self.dataset[:][self.image] if self.dataset.data.nbytes <= memory_limit else None
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
        value = self._rows[row] if self._rows is not None else None
        path = value.get("path") if isinstance(value, dict) else None
        return f"row {row} ({path})" if path else f"row {row}"

    def read(self, row: int) -> bytes:
        try:
            value = self._rows[row] if self._rows is not None else self.dataset[row][self.image]
        except Exception as error:
            raise UndecodableError(in_words(error)) from error
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(content, bytes):
            return content
        if not isinstance(path, str) or not path or "\0" in path:
            raise UndecodableError("no image in this row")
        for folder in self.folders:  # a data set must not read files that are not its own
            if (folder / path).resolve().is_relative_to(folder.resolve()) and (folder / path).is_file():
                return read_bytes(folder / path, MAX_MEMBER)
        raise UndecodableError(f"neither bytes nor, in the folder of the data, a file {path!r}")

    def version(self) -> str:
        return self._version

    def stamp(self) -> str:
        files = [entry["filename"] for entry in self.dataset.cache_files]
        return f"{self._version} {stamp_of_files(files)}"


def _values(dataset: Any, column: str) -> list[Any]:
    return dataset.select_columns([column])[:][column]


def _holds_images(feature: Any) -> bool:
    datasets = needs("datasets", "hub", "loading a data set")
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)
