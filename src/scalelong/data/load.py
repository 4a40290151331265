"""`load_data`: one function for every source. A name, a path, "hf:NAME", or a data set object.

Names are of sets that come with the package, or of public ones, which are searched for where data usually are, and else
loaded from the Hugging Face hub. Folders and zips of images are read here; Hugging Face's `datasets` opens parquet
files, folders of `save_to_disk` and the hub, and the images are decoded here, by the same rules as files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import DataNotFoundError, InvalidConfigError, UnreadableDataError
from ..files import at_home, digest, in_words, read_json
from ..optional import needs
from .builtin import DIGITS, EMBEDDED, GARMENTS, WORDINGS, load_embedded, load_shapes
from .dataset import ImageData, Options, Progress
from .decode import suffixes
from .folders import FileTree, Folder, TreeSource, ZipTree, canonical, choose_part, split_in, stamp_of_files
from .objects import ObjectSource, TableSource
from .stream import decoded_once, from_source

VARIABLE = "SCALELONG_DATA"  # folders to search first, separated as in PATH


# Public sets: their folders below a place where data sets are kept, their classes, and their name on the hub.
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
KNOWN = {
    "mnist": (("mnist", "MNIST"), DIGITS, "ylecun/mnist"),
    "fashion-mnist": (("fashion-mnist", "fashion_mnist"), GARMENTS, "zalando-datasets/fashion_mnist"),
    "cifar10": (("cifar10", "CIFAR10", "cifar-10"), CIFAR10_CLASSES, "uoft-cs/cifar10"),
}
BUILTIN = {**dict.fromkeys(EMBEDDED, load_embedded), "shapes": load_shapes, **dict.fromkeys(WORDINGS, load_embedded)}
DATASETS = (*BUILTIN, *KNOWN)


def load_data(
    spec: Any,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    split: str = "train",
    memory_limit: int = 2 * 1024**3,
    skip_broken: bool | int | float = 0.01,
    limit: int | None = None,
    progress: Progress | None = None,
    image_cache: str = "none",
) -> ImageData:
    """Open a data set. The last one is kept: opening it again does not decode it again, unless its files changed.

    spec: a name of DATASETS: sets that come with the package, and "mnist", "fashion-mnist" and "cifar10", searched for
        on this machine and then on the Hugging Face hub; a folder of images, of parquet files, or of `save_to_disk`; a
        .zip or a .parquet file; "hf:NAME" or "hf:NAME:CONFIG" for a data set of the hub; or an object: a Dataset of
        torch or `datasets`, with images as described in `scalelong.data.objects`.
    size: a side or (height, width); the shorter side is resized, the middle kept. Needed if the images differ in size.
    channels: 1, 3 or 4. By default 1 if all images are gray, 4 if all are RGBA, and 3 otherwise.
    split: "train", "test" or "validation".
    memory_limit: bytes of pixels up to which all is decoded into memory.
    skip_broken: how many unreadable images are skipped before it is an error: a number, a share, or True for any.
    limit: at most this many images, evenly spread over the set.
    progress: called with (done, total) while headers are read and while images are decoded.
    image_cache: for what does not fit into memory. "auto" decodes it once into a file of the cache, which is mapped;
        "none" decodes images when they are fetched.
    """
    options = Options(
        size=size,
        channels=channels,
        split=split,
        memory_limit=memory_limit,
        skip_broken=skip_broken,
        limit=limit,
        progress=progress,
        image_cache=image_cache,
    )
    if not isinstance(spec, str | os.PathLike):
        return decoded_once(_from_object(spec, options), "object", options)
    spec = os.fspath(spec)
    path = _find_known(spec) if spec in KNOWN else at_home(spec, "data")
    stamp = _stamp(path) if path is not None and spec not in BUILTIN and path.exists() else ""
    key = (spec, os.getcwd(), stamp, replace(options, progress=None, image_cache="none"))
    if key not in _LAST:
        _LAST.clear()  # before the next one takes its memory
        _LAST[key] = _opened(spec, path, options)
    return decoded_once(_LAST[key], stamp, options)


_LAST: dict[tuple[str, str, str, Options], ImageData] = {}
"""The data set that was opened last. A start of training asks for it several times."""


def _stamp(path: Path) -> str:
    """Changes when the place or the files of the data do."""
    files = [path / name for name in Folder(path).names] if path.is_dir() else [path]
    return digest(f"{path.resolve()} {stamp_of_files(files)}".encode("utf-8", "surrogateescape"))


def _opened(spec: str, path: Path | None, options: Options) -> ImageData:
    if spec in BUILTIN:
        return BUILTIN[spec](spec, options)
    if spec in KNOWN:
        return _load_known(spec, path, options)
    if spec.startswith("hf:"):
        return _load_hub(spec, options)
    if path is not None and path.is_dir():
        return _load_folder(spec, path, options)
    if path is not None and path.is_file():
        return _load_file(spec, path, options)
    raise DataNotFoundError(
        f"no data at {spec!r}: it is neither a folder nor a file, seen from {Path.cwd()}, nor one of the names "
        f"{', '.join(DATASETS)} or hf:NAME"
    )


def _from_object(given: Any, options: Options) -> ImageData:
    if isinstance(given, ImageData):
        found = (given.channels, given.height, given.width)
        if (options.channels or found[0], *(options.shape or found[1:])) != found:
            raise InvalidConfigError(
                f"{given.name} is open already with {found[0]}×{found[1]}×{found[2]}; give `size` and `channels` to "
                "load_data when you open it"
            )
        return given
    module = type(given).__module__
    if module.startswith("datasets.") and type(given).__name__ in ("Dataset", "DatasetDict"):
        return _from_table(f"{module}.{type(given).__name__}", given, options)
    source = ObjectSource(given, options)
    return from_source(source.where, source, options)


# Public data sets by name


def _roots() -> list[Path]:
    given = [at_home(place, VARIABLE) for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    return [*given, Path("data"), at_home("~/data", "HOME")]


def _find_known(name: str) -> Path | None:
    """The folder of a data set that is known by name; None if it is not on this machine."""
    candidates = [root / folder for root in _roots() for folder in KNOWN[name][0]]
    return next((folder for folder in candidates if folder.is_dir() and any(folder.iterdir())), None)


def _load_known(name: str, folder: Path | None, options: Options) -> ImageData:
    folders, classes, hub = KNOWN[name]
    try:
        data = _load_hub(f"hf:{hub}", options) if folder is None else _load_folder(name, folder, options)
    except (DataNotFoundError, ImportError) as error:
        raise DataNotFoundError(
            f"{name} is not on this machine. Looked for {' or '.join(folders)} in "
            f"{', '.join(map(str, _roots()))}, and on the hub ({error}). Name its parent folder in {VARIABLE}, or "
            f"give its path instead of {name!r}"
        ) from error
    about = data.annotations
    if about.labels is not None and int(about.labels.max()) < len(classes):
        data.annotations = replace(about, classes=classes)
    return data


# Folders and files


def _load_folder(name: str, path: Path, options: Options) -> ImageData:
    if _is_saved(path):
        return _load_saved(name, path, options)
    tree = Folder(path)
    endings = {os.path.splitext(file)[1].lower() for file in tree.names}
    if ".parquet" in endings and not endings & suffixes():
        parts: dict[str, list[str]] = {}
        for file in tree.names:
            if file.endswith(".parquet"):
                parts.setdefault(split_in(file) or "train", []).append(file)
        return _load_parquet(name, [path / file for file in choose_part(parts, options.split, str(path))], options)
    return _load_tree(name, tree, options)


def _load_file(name: str, path: Path, options: Options) -> ImageData:
    kind = path.suffix.lower()
    if kind == ".zip":
        return _load_tree(name, ZipTree(path), options)
    if kind not in (".parquet", ".pq"):
        one = f"; for one image give its folder, {path.parent}" if kind in suffixes() else ""
        raise UnreadableDataError(f"{path} is not a data set: it must be a folder, a .zip or a .parquet file{one}")
    if canonical(options.split) not in ("train", split_in(path.name)):
        raise DataNotFoundError(f"{path} is one file, so it has no part {options.split!r}; give the other file")
    return _load_parquet(name, [path], options)


def _load_tree(name: str, tree: FileTree, options: Options) -> ImageData:
    data = from_source(name, TreeSource(tree, options.split), options)
    data.unread = tree.unread()
    return data


# Hugging Face's `datasets`: names on the hub, folders of `save_to_disk`, parquet files, and objects


def _load_hub(name: str, options: Options) -> ImageData:
    """`hf:NAME` or `hf:NAME:CONFIG`."""
    datasets = needs("datasets", "hub", f"loading {name!r}")
    repository, _, config = name.removeprefix("hf:").partition(":")
    try:
        found = datasets.load_dataset(repository, config or None)
    except Exception as error:  # of the network, the hub, its cache or its files
        raise DataNotFoundError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}. Without a network, save it elsewhere with "
            "datasets.load_dataset(...).save_to_disk(folder) and give that folder"
        ) from error
    return _from_table(name, found, options)


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_saved(name: str, folder: Path, options: Options) -> ImageData:
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
    except Exception as error:  # `datasets` reads its JSON without checks
        raise UnreadableDataError(
            f"{folder} is damaged: {in_words(error)}; write it again with save_to_disk"
        ) from error
    return _from_table(name, found, options, folders=[folder])


def _load_parquet(name: str, paths: list[Path], options: Options) -> ImageData:
    """`datasets` makes a copy in its cache, which is mapped: parquet has no random access."""
    datasets = needs("datasets", "hub", "reading parquet files")
    try:
        found = datasets.load_dataset("parquet", data_files=[str(path.resolve()) for path in paths], split="train")
    except Exception as error:
        raise UnreadableDataError(
            f"{', '.join(path.name for path in paths)} in {paths[0].parent} cannot be read as one parquet table "
            f"({in_words(error)}): download or write the files again"
        ) from error
    version = digest(" ".join(f"{path.name} {path.stat().st_size}" for path in paths).encode())
    return from_source(name, TableSource(found, name, [paths[0].parent], version), options)


def _from_table(name: str, found: Any, options: Options, folders: Sequence[str | Path] | None = None) -> ImageData:
    """A `Dataset` or `DatasetDict` of `datasets`; `folders` are the places where its rows may name files."""
    parts = found if isinstance(found, dict) else {"train": found}
    rows = choose_part({canonical(str(part)): rows for part, rows in parts.items()}, options.split, repr(name))
    return from_source(name, TableSource(rows, name, folders), options)
