"""`scalelong stats DATA`: reference statistics of a data set. They are kept, and `scalelong eval` finds them."""

import argparse
from pathlib import Path

from ..data import load_data
from ..evaluation import export_npz, load_extractor, reference_of
from .eval import add_feature_options


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scalelong stats", description=__doc__)
    parser.add_argument("data", help="a folder of images, a file, or the name of a data set")
    parser.add_argument("--size", type=int, help="resize the images to this side")
    parser.add_argument("--channels", type=int, help="1 or 3 (default: those of the data)")
    parser.add_argument("--split", default="train", help="part of the data (default: %(default)s)")
    add_feature_options(parser)
    parser.add_argument("--out", type=Path, help="also write mu and sigma as .npz, as pytorch-fid does")
    options = parser.parse_args(arguments)
    data = load_data(options.data, size=options.size, channels=options.channels, split=options.split)
    print(data.describe())
    extractor = load_extractor(options.features, data, options.feature_weights)
    reference = reference_of(data, extractor)
    print(f"data {reference.data[:16]}, {reference.moments.n} images, {len(reference.moments.mean)} features")
    print(f"statistics: {reference.file}")
    if options.out:
        export_npz(reference, options.out)
        print(f"mu and sigma: {options.out}")
    return 0
