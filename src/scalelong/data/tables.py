"""Tables in parquet files with a column of encoded images, as Hugging Face stores data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataNotFoundError, MetadataError, ScaleLongError, UnknownSplitError, UnreadableDataError
from ..files import in_words, parse_json, read_bytes, read_json, require_regular
from ..optional import needs
from .annotations import CAPTIONS, LABELS, Numbered, check_captions, first_of, image_column, number_labels
from .dataset import Annotations, ImageData, Options
from .decode import UndecodableError
from .files import MAX_MEMBER, by_file, canonical, stamp_of_files
from .source import Source, Stamp, from_source

if TYPE_CHECKING:
    import pyarrow as pa


def find_parquet(folder: Path, split: str) -> list[Path]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))
    return [folder / name for name in by_file(names, split, str(folder))]


def load_parquet(name: str, paths: list[Path], options: Options) -> ImageData:
    """Encoded images that fit in memory stay there; others are read from a memory-mapped copy that `datasets` makes."""
    schema = _schema(paths)
    image = image_column([field.name for field in schema if _holds_images(field.type)], schema.names, str(paths[0]))
    if sum(_stored(path, image) for path in paths) > options.memory_limit:
        return from_source(name, open_parquet(paths, version(paths)), options)
    source = TableSource(paths, image)
    return from_source(name, source, options)


class TableSource(Source):
    def __init__(self, paths: list[Path], image: str) -> None:
        parquet = needs("pyarrow.parquet", "hub", "reading parquet files")
        arrow = needs("pyarrow", "hub", "reading parquet files")
        schema = _schema(paths)
        label, caption = first_of(LABELS, schema.names), first_of(CAPTIONS, schema.names)
        columns = [column for column in (image, label, caption) if column]
        try:
            # One thread: Arrow's thread pool must not be busy when workers are forked.
            tables = [parquet.read_table(path, columns=columns, use_threads=False) for path in paths]
            table = arrow.concat_tables(tables)
            table.validate(full=True)
        except (arrow.ArrowException, OSError) as error:
            raise UnreadableDataError(
                f"{_where(paths)}: cannot read the columns {columns} ({in_words(error)}): write or download it again"
            ) from error
        self.paths = paths
        # Lists, not Arrow: an element of a chunked column costs as much as decoding a small image.
        is_struct = needs("pyarrow.types", "hub", "reading parquet files").is_struct(schema.field(image).type)
        compute = needs("pyarrow.compute", "hub", "reading parquet files")
        fields = {field.name for field in schema.field(image).type} if is_struct else set()
        self.bytes = (compute.struct_field(table[image], "bytes") if is_struct else table[image]).to_pylist()
        self.inner = compute.struct_field(table[image], "path").to_pylist() if "path" in fields else None
        for row, (content, inner) in enumerate(zip(self.bytes, self.inner or (), strict=False)):
            if content is None and inner is not None:
                require_inside(inner, paths[0].parent, f"{_where(paths)}, row {row}")
        self._version = version(paths)
        captions = check_captions(table[caption].to_pylist(), _where(paths)) if caption else None
        labels = table[label].to_pylist() if label else None
        self.annotations = Annotations(*_numbered(labels, label, schema, _where(paths)), captions)

    def __len__(self) -> int:
        return len(self.bytes)

    def name(self, row: int) -> str:
        return f"row {row}" + (f" ({self.inner[row]})" if self.inner and self.inner[row] else "")

    def read(self, row: int) -> bytes:
        return encoded_bytes(self.bytes[row], self.inner and self.inner[row], [self.paths[0].parent])

    def version(self) -> str:
        return self._version

    def stamp(self) -> Stamp:
        rows = zip(self.bytes, self.inner or (), strict=False)
        named = [str(self.paths[0].parent / inner) for content, inner in rows if content is None and inner]
        found = stamp_of_files([*map(str, self.paths), *named])
        return Stamp(f"{self._version} {found.text}", found.newest)


def encoded_bytes(content: bytes | None, path: str | None, folders: Sequence[Path]) -> bytes:
    """The bytes themselves, or those of the file that the row names, in one of these folders."""
    if isinstance(content, bytes):
        return content
    if not isinstance(path, str) or not path or "\0" in path:
        raise UndecodableError("no image in this row")
    for folder in folders:
        if _is_inside(path, folder) and (folder / path).is_file():
            return read_bytes(folder / path, MAX_MEMBER)
    raise UndecodableError(f"neither bytes nor, in the folder of the data, a file {path!r}")


def require_inside(path: str, folder: Path, where: str) -> None:
    """Refuse a row that names a file elsewhere: a data set must not read what is not its own."""
    if "\0" in path or not _is_inside(path, folder):
        raise MetadataError(f"{where}: the image {path!r} must be relative and stay in the folder {folder}")


def _is_inside(path: str, folder: Path) -> bool:
    return (folder / path).resolve().is_relative_to(folder.resolve())


def version(paths: list[Path]) -> str:
    """From names, sizes and footers, which hold the counts and offsets of all row groups."""
    sha = hashlib.sha256()
    for path in paths:
        sha.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            sha.update(file.read())
    return sha.hexdigest()


def _schema(paths: list[Path]) -> pa.Schema:
    """The schema that all files share."""
    arrow, parquet = (
        needs("pyarrow", "hub", "reading parquet files"),
        needs("pyarrow.parquet", "hub", "reading parquet files"),
    )
    schemas = []
    for path in paths:
        require_regular(path)
        try:
            schemas.append(parquet.read_schema(path))
        except (arrow.ArrowException, OSError) as error:
            raise UnreadableDataError(
                f"{path} cannot be read as parquet ({in_words(error)}): download it again"
            ) from error
        if not schemas[-1].equals(schemas[0]):
            raise UnreadableDataError(
                f"{path} has other columns, or columns of other types, than {paths[0].name}: "
                f"{schemas[-1].names} and {schemas[0].names}. Move one of them away"
            )
    return schemas[0]


def _holds_images(kind: pa.DataType) -> bool:
    types = needs("pyarrow.types", "hub", "reading parquet files")
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return types.is_binary(kind) or types.is_large_binary(kind)


def _stored(path: Path, column: str) -> int:
    """Bytes of the column once unpacked."""
    footer = needs("pyarrow.parquet", "hub", "reading parquet files").read_metadata(path)
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] == column)


def _numbered(labels: list[Any] | None, column: str | None, schema: pa.Schema, where: str) -> Numbered:
    if labels is None:
        return None, None
    return number_labels(labels, f"{where}, column {column!r}", _class_names(schema, column))


def _class_names(schema: pa.Schema, column: str | None) -> list[str] | None:
    """The names that Hugging Face keeps in the schema's metadata."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(names, list | dict):
        return None
    return [str(name) for name in (names.values() if isinstance(names, dict) else names)]


def _where(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"


# Data sets of Hugging Face's `datasets`: names on the hub, folders written by `save_to_disk`, and large parquet.


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_hub(name: str, options: Options) -> ImageData:
    """`hf:NAME`, `hf:NAME:CONFIG` or `hf:FOLDER`."""
    place = name.removeprefix("hf:")
    datasets = needs("datasets", "hub", f"loading {name!r}")
    try:
        if Path(place).exists():
            found = load_saved(place) if is_saved(Path(place)) else datasets.load_dataset(place)
        else:
            repository, _, config = place.partition(":")
            found = datasets.load_dataset(repository, config or None)
    # Whatever goes wrong on the way to the hub, in its cache or in its files: it is not to be had.
    except ScaleLongError:
        raise
    except Exception as error:
        raise DataNotFoundError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. Without a network, save it elsewhere with "
            "datasets.load_dataset(...).save_to_disk(folder) and give that folder"
        ) from error
    folders = [place] if Path(place).exists() else None
    return from_source(name, HubSource(choose_part(found, options.split, name), name, folders=folders), options)


def load_saved(folder: str | Path) -> Any:
    """A folder of `save_to_disk`, after a look at all of it: Arrow believes what its files say, down to a crash."""
    datasets = needs("datasets", "hub", "reading a saved data set")
    folder = Path(folder)
    for place in [folder / name for name in _saved_parts(folder)] or [folder]:
        _check_saved(place)
    try:
        return datasets.load_from_disk(str(folder))
    # Its other files are JSON that `datasets` reads without checks.
    except Exception as error:
        raise UnreadableDataError(
            f"{folder} is damaged: {in_words(error)}; write it again with save_to_disk"
        ) from error


def _saved_parts(folder: Path) -> list[str]:
    """The names of the parts (train, test), each a folder of its own; none for a single set."""
    file = folder / "dataset_dict.json"
    if not file.is_file():
        return []
    about = read_json(file)
    parts = about.get("splits") if isinstance(about, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise UnreadableDataError(f"{file} must list its 'splits'; write the folder again with save_to_disk")
    for part in parts:
        require_inside(part, folder, str(file))
    return parts


def _check_saved(folder: Path) -> None:
    """Every table of the folder is whole, and none lies elsewhere."""
    arrow = needs("pyarrow", "hub", "reading a saved data set")
    state = read_json(folder / "state.json")
    lists = (
        [state.get(name) or [] for name in ("_data_files", "_indices_data_files")] if isinstance(state, dict) else []
    )
    listed = [entry for entries in lists if isinstance(entries, list) for entry in entries]
    if not listed or not all(isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed):
        raise UnreadableDataError(
            f"{folder / 'state.json'} must list its '_data_files'; write the folder again with save_to_disk"
        )
    for entry in listed:
        require_inside(entry["filename"], folder, str(folder / "state.json"))
        path = folder / entry["filename"]
        require_regular(path)
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
                for batch in batches:
                    batch.validate(full=True)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise UnreadableDataError(
                f"{path} is damaged: {in_words(error)}; write it again with save_to_disk"
            ) from error


def open_parquet(paths: list[Path], version: str) -> HubSource:
    """Parquet has no random access; `datasets` copies it once into a memory-mapped file in its cache."""
    datasets = needs("datasets", "hub", "streaming parquet files that do not fit in memory")
    files = [str(path.resolve()) for path in paths]
    folder = paths[0].parent
    return HubSource(datasets.load_dataset("parquet", data_files=files, split="train"), str(folder), version, [folder])


class HubSource(Source):
    """`folders` are where its rows may name files; what was downloaded is in the cache of `datasets`."""

    def __init__(
        self, dataset: Any, where: str, version: str | None = None, folders: Sequence[str | Path] | None = None
    ) -> None:
        datasets = needs("datasets", "hub", f"loading {where}")
        cache = [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
        self.folders = [Path(folder) for folder in (cache if folders is None else folders)]
        try:
            self._read_annotations(datasets, dataset, where, version)
        except ScaleLongError:
            raise
        except Exception as error:
            raise UnreadableDataError(
                f"{where} cannot be read: {in_words(error)}; write it again with save_to_disk"
            ) from error

    def _read_annotations(self, datasets: Any, dataset: Any, where: str, version: str | None) -> None:
        features = dataset.features
        candidates = [column for column, feature in features.items() if _feature_holds_images(feature)]
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
        try:
            value = self.dataset[row][self.image]
        except Exception as error:  # whatever Arrow or `datasets` make of a damaged row
            raise UndecodableError(f"{in_words(error)}") from error
        if isinstance(value, dict):
            return encoded_bytes(value.get("bytes"), value.get("path"), self.folders)
        return encoded_bytes(value, None, self.folders)

    def version(self) -> str:
        return self._version

    def stamp(self) -> Stamp:
        files = [entry["filename"] for entry in self.dataset.cache_files]
        named = [str(folder / path) for path in self._named() for folder in self.folders]
        found = stamp_of_files([*files, *named])
        return Stamp(f"{self._version} {found.text}", found.newest)

    def _named(self) -> list[str]:
        """The files that rows name instead of holding an image."""
        types = needs("pyarrow.types", "hub", "loading a data set")
        compute = needs("pyarrow.compute", "hub", "loading a data set")
        column = self.dataset.data.column(self.image)
        if not types.is_struct(column.type) or column.type.get_field_index("path") < 0:
            return []
        without = compute.is_null(compute.struct_field(column, "bytes"))
        paths = compute.struct_field(column.filter(without), "path").to_pylist() if compute.any(without).as_py() else []
        return [path for path in paths if path]


def _values(dataset: Any, column: str) -> list[Any]:
    return dataset.select_columns([column])[:][column]


def _feature_holds_images(feature: Any) -> bool:
    datasets = needs("datasets", "hub", "loading a data set")
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)


def choose_part(found: Any, split: str, name: str) -> Any:
    parts = found if isinstance(found, dict) else {"train": found}
    wanted = canonical(split) or split
    for part, dataset in parts.items():
        if part == split or (canonical(str(part)) or part) == wanted:
            return dataset
    raise UnknownSplitError(
        f"{name!r} has no part {split!r}; found: {', '.join(map(str, parts))}. Choose one with --split"
    )
