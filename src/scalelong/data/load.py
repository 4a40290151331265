"""`load_data`: one function for every source. A name, a path, "hf:NAME", or a data set object.

MNIST, Fashion-MNIST and CIFAR-10 are known by name: they are searched for where data usually are, and else loaded from
the Hugging Face hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DataNotFoundError, InvalidConfigError, UnknownSplitError, UnreadableDataError
from ..files import at_home, digest
from .annotations import annotate
from .builtin import GARMENTS, load_captioned, load_digits, load_garments, load_shapes
from .dataset import Annotations, ImageData, Options, Progress, logger
from .decode import suffixes
from .files import FileTree, Folder, TreeSource, ZipTree, by_folder, canonical, split_in, stamp_of_files
from .mapped import decoded_once
from .objects import from_dataset
from .stream import from_source
from .tables import find_parquet, from_table, is_saved, load_hub, load_parquet, load_saved

VARIABLE = "SCALELONG_DATA"  # folders to search first, separated as in PATH


@dataclass(frozen=True)
class Known:
    """A public data set that is known by name."""

    folders: tuple[str, ...]  # below a place where data sets are kept
    classes: tuple[str, ...]
    hub: str


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
KNOWN = {
    "mnist": Known(("mnist", "MNIST"), tuple("0123456789"), "ylecun/mnist"),
    "fashion-mnist": Known(("fashion-mnist", "fashion_mnist"), GARMENTS, "zalando-datasets/fashion_mnist"),
    "cifar10": Known(("cifar10", "CIFAR10", "cifar-10"), CIFAR10_CLASSES, "uoft-cs/cifar10"),
}
EMBEDDED = {
    "digits": load_digits,
    "garments": load_garments,
    "shapes": load_shapes,
    "captioned-digits": load_captioned,
    "captioned-garments": load_captioned,
}
DATASETS = (*EMBEDDED, *KNOWN)


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
    image_cache: str | os.PathLike[str] = "none",
    image_cache_limit: int | None = None,
) -> ImageData:
    """Opens a data set. The last one is kept: opening it again does not decode it again, unless its files changed.

    spec: "digits", "garments" or "shapes", which come with the package, and the first two with captions as
        "captioned-digits" and "captioned-garments"; "mnist", "fashion-mnist" or "cifar10", searched for on this machine
        and then on the Hugging Face hub; the path of a folder of images or of parquet files, of a folder written by
        `save_to_disk`, of a .zip or a .parquet file; "hf:NAME" for a data set of the hub; or an object: a Dataset of
        torch or `datasets`, with images as described in `scalelong.data.objects`.
    size: a side or (height, width); the shorter side is resized, the middle kept. Needed if the images differ in size.
    channels: 1, 3 or 4. By default 1 if all images are gray, 4 if all are RGBA, and 3 otherwise.
    split: "train", "test" or "validation".
    memory_limit: bytes of pixels up to which all is decoded into memory; above it images are decoded when fetched, or
        once into a file (image_cache).
    skip_broken: how many unreadable images are skipped before it is an error: a number, a share, or True for any.
    limit: at most this many images, evenly spread over the set.
    progress: called with (done, total) while headers are read and while images are decoded.
    image_cache: for what does not fit into memory. "auto" decodes it once into a file of the cache, which is mapped;
        a folder does so there; "none" decodes images when they are fetched.
    image_cache_limit: bytes of all such files; by default half of what is free on the disk. The oldest make room.
    """
    options = Options(
        size=size,
        channels=channels,
        split=split,
        memory_limit=memory_limit,
        skip_broken=skip_broken,
        limit=limit,
        progress=progress,
        image_cache=os.fspath(image_cache),
        image_cache_limit=image_cache_limit,
    )
    if not isinstance(spec, str | os.PathLike):
        return decoded_once(_from_object(spec, options), "object", options)
    spec = os.fspath(spec)
    if any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in spec):
        raise DataNotFoundError(f"the data {spec!r} have a name that is no text: rename the folder or file")
    path = at_home(spec, "data")
    place = str(path.resolve()) if path.exists() else spec
    key = (place, _stamp(spec, path), replace(options, progress=None, image_cache="none", image_cache_limit=None))
    if key not in _LAST:
        _LAST.clear()  # before the next one takes its memory
        _LAST[key] = _opened(spec, path, options)
    return decoded_once(_LAST[key], place, options)


_LAST: dict[tuple[str, str, Options], ImageData] = {}
"""The data set that was opened last. A start of training asks for it several times."""


def _stamp(spec: str, path: Path) -> str:
    """Changes when the files of the data do."""
    found = _find_known(spec) if spec in KNOWN else path
    if spec in EMBEDDED or spec.startswith("hf:") or found is None or not found.exists():
        return os.environ.get(VARIABLE, "")
    if found.is_file():
        return stamp_of_files([str(found)])
    tree = Folder(found)
    return digest(f"{tree.times(tree.names)}".encode())


def _opened(spec: str, path: Path, options: Options) -> ImageData:
    if spec in EMBEDDED:
        return EMBEDDED[spec](spec, options)
    if spec in KNOWN:
        return _load_known(spec, options)
    if spec.startswith("hf:"):
        return load_hub(spec, options)
    if path.is_dir():
        return _load_folder(spec, path, options)
    if path.is_file():
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
        return from_table(f"{module}.{type(given).__name__}", given, options)
    return from_dataset(given, options)


# Public data sets by name


def _find_known(name: str) -> Path | None:
    """The folder of a data set that is known by name; None if it is not on this machine."""
    candidates = [root / folder for root in _roots() for folder in KNOWN[name].folders]
    candidates += [root for root in _roots() if root.name in KNOWN[name].folders]
    return next((folder for folder in candidates if folder.is_dir() and any(folder.iterdir())), None)


def _roots() -> list[Path]:
    given = [at_home(place, VARIABLE) for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    return [*given, Path("data"), at_home("~/data", "HOME")]


def _load_known(name: str, options: Options) -> ImageData:
    known, folder = KNOWN[name], _find_known(name)
    if folder is not None:
        data = _load_folder(name, folder, options)
    else:
        logger.info("%s is not in %s: loading it from the Hugging Face hub", name, ", ".join(map(str, _roots())))
        try:
            data = load_hub(f"hf:{known.hub}", options)
        except (DataNotFoundError, ImportError) as error:
            raise DataNotFoundError(
                f"{name} is not on this machine. Looked for {' or '.join(known.folders)} in "
                f"{', '.join(map(str, _roots()))}, and on the hub ({error}). Name its parent folder in {VARIABLE}, or "
                f"give its path instead of {name!r}"
            ) from error
    about = data.annotations
    if about.labels is not None and int(about.labels.max()) < len(known.classes):
        data.annotations = Annotations(about.labels, known.classes, about.captions)
    return data


# Folders and files


def _load_folder(name: str, path: Path, options: Options) -> ImageData:
    if is_saved(path):
        return load_saved(name, path, options)
    tree = Folder(path)
    endings = {os.path.splitext(file)[1].lower() for file in tree.names}
    if ".parquet" in endings and not endings & suffixes():
        return load_parquet(name, find_parquet(path, options.split), options)
    if any(Path(file).name == "data_batch_1" or file.endswith("-ubyte") for file in tree.names):
        raise UnreadableDataError(
            f"{path} holds CIFAR-10 as pickles or MNIST as IDX files, which are not read: give 'cifar10', 'mnist' or "
            "'fashion-mnist', which are loaded from the Hugging Face hub, or torchvision's Dataset in Python"
        )
    return _load_tree(name, tree, options)


def _load_file(name: str, path: Path, options: Options) -> ImageData:
    kind = path.suffix.lower()
    if kind == ".zip":
        return _load_tree(name, ZipTree(path), options)
    if kind not in (".parquet", ".pq"):
        one = f"; for one image give its folder, {path.parent}" if kind in suffixes() else ""
        raise UnreadableDataError(f"{path} is not a data set: it must be a folder, a .zip or a .parquet file{one}")
    if (canonical(options.split) or options.split) not in ("train", split_in(path.name)):
        raise UnknownSplitError(
            f"{path} is one file without parts, so it has no {options.split!r}; give the other file"
        )
    return load_parquet(name, [path], options)


def _load_tree(name: str, tree: FileTree, options: Options) -> ImageData:
    images = by_folder(tree.images(), options.split, tree.where)
    data = from_source(name, TreeSource(tree, images, annotate(tree, images)), options)
    data.unread = tree.unread()
    return data
