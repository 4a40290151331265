"""`scalelong stats DATA`: reference statistics of a data set. They are kept, and `scalelong eval` finds them."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .options import DATA, add_feature_options, add_output_options, speaker, whole_number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scalelong stats", description=__doc__)
    made.add_argument("data", help=DATA)
    made.add_argument("--size", type=whole_number, help="resize the images to this side")
    made.add_argument("--channels", type=whole_number, help="1 or 3 (default: those of the data)")
    made.add_argument("--split", default="train", help="split of the data (default: %(default)s)")
    add_feature_options(made)
    made.add_argument("--out", type=Path, help="also write mu and sigma as .npz, as pytorch-fid does")
    add_output_options(made, "what was computed")
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import Progress
    from ..data import load_data
    from ..evaluation import anchors_of, export_npz, trusted_features
    from ..files import require_file_place

    if options.out:
        require_file_place(options.out)
    say = speaker(options)
    data = load_data(
        options.data,
        size=options.size,
        channels=options.channels,
        split=options.split,
        progress=Progress("reading images", enabled=False if options.json or options.quiet else None),
    )
    say(data.describe())
    extractor, reference = trusted_features(options.features, data, options.feature_weights, say)
    found = {
        "data": reference.data,
        "images": reference.moments.n,
        "features": len(reference.moments.mean),
        "extractor": extractor.name,
        "anchors": asdict(anchors_of(data, extractor, reference, 1000)),
        "statistics": str(reference.file),
    }
    if options.out:
        export_npz(reference, options.out)
        found["out"] = str(options.out)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"data {reference.data[:16]}, {found['images']} images, {found['features']} {extractor.name} features")
    print(f"statistics: {reference.file}")
    if options.out:
        print(f"mu and sigma: {options.out}")
