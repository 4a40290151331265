"""How often one odd image makes noise precise, with the radii of precision and recall as they are and cut down.

    python -m research.radii --data DATA     # a folder of images, a file or the name of a data set

Each draw takes 150 images as the reference, 150 others as if they were generated, and 150 images of uniform noise.
"""

import argparse

import torch

from scalelong.console import show_table
from scalelong.data import load_data
from scalelong.evaluation import load_extractor, precision_recall
from scalelong.evaluation.features import features_of
from scalelong.evaluation.scores import MOST_NOISE, RADIUS_QUANTILE


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m research.radii")
    made.add_argument("--data", required=True)
    made.add_argument("--draws", type=int, default=24)
    made.add_argument("--images", type=int, default=150)
    options = made.parse_args()
    data, count = load_data(options.data, limit=4000), options.images
    extractor = load_extractor("random", data)
    features = features_of(extractor, data.fetch(range(len(data))).images)
    found: dict[str, list[tuple[float, float]]] = {"uncut": [], f"cut at {RADIUS_QUANTILE:.0%}": []}
    for draw in range(options.draws):
        generator = torch.Generator().manual_seed(draw)
        order = torch.randperm(len(features), generator=generator)
        reference, real = features[order[:count]], features[order[count : 2 * count]]
        shape = (count, data.channels, data.height, data.width)
        noise = features_of(extractor, torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
        for name, quantile in zip(found, (1.0, RADIUS_QUANTILE), strict=True):
            of_real, of_noise = (
                float(precision_recall(reference, other, radius_quantile=quantile)[0].double().mean())
                for other in (real, noise)
            )
            found[name].append((of_real, of_noise))
    rows = []
    for name, values in found.items():
        praised = sum(noise >= MOST_NOISE for _, noise in values)
        mean = sum(real for real, _ in values) / len(values)
        rows.append({"radii": name, "precision of real images": f"{mean:.3f}", "noise is precise": f"{praised} draws"})
    print(f"{len(data)} images of {data.name}, {options.draws} draws of {count}, {extractor.name} features")
    show_table(rows, left=("radii",))


if __name__ == "__main__":
    main()
