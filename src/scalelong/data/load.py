"""MNIST, Fashion-MNIST and CIFAR-10 by name: the places where they usually are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import DataNotFoundError, UnknownSplitError, UnreadableDataError
from ..files import at_home
from .annotations import annotate
from .arrays import (
    CIFAR10_CLASSES,
    find_cifar,
    find_idx,
    is_idx,
    load_captioned,
    load_cifar,
    load_digits,
    load_garments,
    load_idx,
    load_npz,
)
from .dataset import Annotations, ImageData, Options, Progress
from .decode import SUFFIXES
from .files import FileTree, Folder, TreeSource, ZipTree, by_folder, canonical, split_in
from .index import indexed, stamp_of_file
from .mapped import decoded_once
from .shapes import load_shapes
from .source import from_source
from .tables import HubSource, choose_part, find_parquet, is_saved, load_hub, load_parquet, load_saved

VARIABLE = "SCALELONG_DATA"  # folders to search first, separated as in PATH


@dataclass(frozen=True)
class Known:
    folders: tuple[str, ...]  # below a place where data sets are kept
    classes: tuple[str, ...]
    where_from: str


KNOWN = {
    "mnist": Known(
        ("mnist", "MNIST/raw", "MNIST"),
        tuple("0123456789"),
        "download its four IDX files (train-images-idx3-ubyte.gz, ...)",
    ),
    "fashion-mnist": Known(
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist"),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        "on Debian and Ubuntu: apt-get install dataset-fashion-mnist; elsewhere download its four IDX files",
    ),
    "cifar10": Known(
        ("cifar10", "cifar-10-batches-py", "CIFAR10", "cifar-10"),
        CIFAR10_CLASSES,
        "download its Python version (the folder cifar-10-batches-py) or its parquet files",
    ),
}


def find_known(name: str) -> Path:
    """The folder of a data set that is known by name."""
    known = KNOWN[name]
    candidates = [root / folder for root in _roots() for folder in known.folders]
    candidates += [root for root in _roots() if root.name in known.folders]
    for folder in candidates:
        if folder.is_dir() and any(folder.iterdir()):
            return folder
    raise DataNotFoundError(
        f"{name} is not on this machine. Looked for {' or '.join(known.folders)} in "
        f"{', '.join(map(str, _roots()))}. To get it, {known.where_from}; "
        f"put it in one of these places, name its parent folder in {VARIABLE}, or give its path instead of {name!r}"
    )


def _roots() -> list[Path]:
    listed = [at_home(place, VARIABLE) for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    beside = [Path("data"), at_home("~/data", "HOME")]
    return [*listed, *beside, Path("/usr/share/datasets")]


# One function for every source: a name, a path, or "hf:NAME".

DATASETS = ("digits", "garments", "shapes", "captioned-digits", "captioned-garments", *KNOWN)


def load_data(
    spec: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    split: str = "train",
    memory_limit: int = 2 * 1024**3,
    max_broken: int | float = 0.01,
    limit: int | None = None,
    progress: Progress | None = None,
    image_cache: str | os.PathLike[str] = "none",
    image_cache_limit: int | None = None,
    say: Callable[[str], None] | None = None,
) -> ImageData:
    """Opens a data set.

    spec: "digits", "garments" or "shapes", which come with the package, and the first two with captions as
        "captioned-digits" and "captioned-garments"; "mnist", "fashion-mnist" or "cifar10", searched
        for; the path of a folder of images, of parquet, IDX or CIFAR-10 files or of a saved Hugging Face data set; the
        path of a .zip, .parquet, .npz or IDX file; or "hf:NAME" for a data set of the Hugging Face hub.
    size: a side or (height, width); the shorter side is resized, the middle kept. Needed if the images differ in size.
    channels: 1, 3 or 4. By default 1 if all images are gray, 4 if all are RGBA, and 3 otherwise.
    split: "train", "test" or "validation".
    memory_limit: bytes of pixels up to which all is decoded into memory; above it images are decoded when fetched, or
        once into a file (image_cache).
    max_broken: how many unreadable images are skipped before it is an error, as a number or as a share.
    limit: at most this many images, evenly spread over the set.
    progress: called with (done, total) while headers are read and while images are decoded.
    image_cache: for what does not fit into memory. "auto" decodes it once into a file of the cache, which is mapped;
        a folder does so there; "none" decodes images when they are fetched.
    image_cache_limit: bytes of such a file; by default half of what is free on the disk.
    say: called with a line about that file; by default it goes to the log.
    """
    options = Options(
        size=size,
        channels=channels,
        split=split,
        memory_limit=memory_limit,
        max_broken=max_broken,
        limit=limit,
        progress=progress,
        image_cache=os.fspath(image_cache),
        image_cache_limit=image_cache_limit,
        say=say,
    )
    spec = os.fspath(spec)
    if not spec.isprintable() and any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in spec):
        raise DataNotFoundError(f"the data {spec!r} have a name that is no text: rename the folder or file")
    data = _opened(spec, options)
    place = at_home(spec, "--data")
    return decoded_once(data, str(place.resolve()) if place.exists() else spec, options)


def _opened(spec: str, options: Options) -> ImageData:
    if spec == "digits":
        return load_digits(spec, options)
    if spec == "garments":
        return load_garments(spec, options)
    if spec == "shapes":
        return load_shapes(spec, options)
    if spec in ("captioned-digits", "captioned-garments"):
        return load_captioned(spec, options)
    if spec in KNOWN:
        return _load_known(spec, options)
    if spec.startswith("hf:"):
        return load_hub(spec, options)
    path = at_home(spec, "--data")
    if path.is_dir():
        return _load_folder(spec, path, options)
    if path.is_file():
        return _load_file(spec, path, options)
    raise DataNotFoundError(
        f"no data at {spec!r}: it is neither a folder nor a file, seen from {Path.cwd()}, nor one of the names "
        f"{', '.join(DATASETS)} or hf:NAME"
    )


def _load_known(name: str, options: Options) -> ImageData:
    data = _load_folder(name, find_known(name), options)
    classes, about = KNOWN[name].classes, data.annotations
    if about.labels is not None and int(about.labels.max()) < len(classes):
        data.annotations = Annotations(about.labels, classes, about.captions)
    return data


def _load_folder(name: str, path: Path, options: Options) -> ImageData:
    cifar = find_cifar(path)
    if cifar is not None:
        return load_cifar(name, cifar, options)
    if is_saved(path):
        part = choose_part(load_saved(path), options.split, name)
        return from_source(name, HubSource(part, name, folders=[path]), options)
    tree = Folder(path)
    suffixes = {f".{end}".lower() for end in {file.rpartition(".")[2] for file in tree.names}}
    if suffixes & SUFFIXES:
        stamp = tree.times(tree.names)
        return indexed(name, path, stamp, options, lambda: tree, lambda: _load_tree(name, tree, options))
    if ".parquet" in suffixes:
        return load_parquet(name, find_parquet(path, options.split), options)
    places = {Path(file).parent for file in tree.names if is_idx(file)}
    if len(places) == 1:  # the folder itself, or MNIST/raw in it
        return load_idx(name, find_idx(path / places.pop(), options.split), options)
    return _load_tree(name, tree, options)  # which says what it found instead of images


def _load_file(name: str, path: Path, options: Options) -> ImageData:
    kind = path.suffix.lower()
    if kind == ".zip":
        # Opened only if need be: to list a hundred thousand members takes longer than to read what was found in them.
        archive = cache(lambda: ZipTree(path))
        stamp = stamp_of_file(path)
        return indexed(name, path, stamp, options, archive, lambda: _load_tree(name, archive(), options))
    if kind == ".npz":
        return load_npz(name, path, options)
    if kind not in (".parquet", ".pq") and not is_idx(path.name):
        raise UnreadableDataError(
            f"{path} is not a data set: it must be a folder, a .zip, .parquet or .npz file, or an IDX file (…-ubyte)"
            + (f"; for one image give its folder, {path.parent}" if kind in SUFFIXES else "")
        )
    part = canonical(options.split) or options.split
    if part not in ("train", split_in(path.name)):
        raise UnknownSplitError(
            f"{path} is one file without parts, so it has no {options.split!r}; give the other file"
        )
    return load_idx(name, path, options) if is_idx(path.name) else load_parquet(name, [path], options)


def _load_tree(name: str, tree: FileTree, options: Options) -> ImageData:
    images = by_folder(tree.images(), options.split, tree.where)
    data = from_source(name, TreeSource(tree, images, annotate(tree, images)), options)
    data.unread = tree.unread()
    return data
