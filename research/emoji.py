"""Make the embedded pictures of emoji from two packages of the npm registry.

    npm pack @lobehub/fluent-emoji-3d@1.1.0 emoji-datasource-google@16.0.0
    python -m research.emoji lobehub-fluent-emoji-3d-1.1.0.tgz emoji-datasource-google-16.0.0.tgz emoji.npz

People, flags, signs and letters are left out: what remains can be told apart at 32×32 pixels.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from scalelong.files import write_bytes

SIZE = 32
CLASSES = {
    "animal": "animal-mammal animal-bird animal-reptile animal-marine animal-bug animal-amphibian",
    "building": "place-building place-religious place-other place-geographic",
    "clothing": "clothing",
    "face": "face-smiling face-affection face-tongue face-hand face-neutral-skeptical face-sleepy face-unwell face-hat "
    "face-glasses face-concerned face-negative face-costume cat-face monkey-face",
    "food": "food-fruit food-vegetable food-prepared food-asian food-sweet drink",
    "hand": "hand-fingers-open hand-fingers-partial hand-single-finger hand-fingers-closed hands hand-prop",
    "heart": "heart",
    "instrument": "musical-instrument sound",
    "plant": "plant-flower plant-other",
    "sky": "sky+&+weather",
    "sport": "sport award-medal game event",
    "tool": "tool household office computer phone light+&+video book-paper money writing lock science medical dishware "
    "mail",
    "vehicle": "transport-ground transport-water transport-air",
}
"""Classes, and the sub-categories of Unicode that each takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pictures", "names", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    label_of = {group.replace("+", " "): n for n, groups in enumerate(CLASSES.values()) for group in groups.split()}
    found: dict[tuple[int, str], np.ndarray] = {}
    with tarfile.open(options.pictures) as pictures, tarfile.open(options.names) as names:
        there = {Path(name).stem: name for name in pictures.getnames() if name.endswith(".webp")}
        for entry in json.load(_member(names, "package/emoji.json")):
            codes = [entry["unified"].lower(), (entry["non_qualified"] or "").lower()]
            code = next((code for code in codes if code in there), None)
            if entry["subcategory"] in label_of and code is not None:
                found[label_of[entry["subcategory"]], code] = _pixels(_member(pictures, there[code]))
    images = np.stack([found[key] for key in sorted(found)])
    content = io.BytesIO()
    np.savez_compressed(content, images=images, labels=np.array([label for label, _ in sorted(found)], np.uint8))
    write_bytes(options.out, content.getvalue())
    print(f"{options.out}: {len(images)} pictures")


def _member(archive: tarfile.TarFile, name: str) -> io.BytesIO:
    file = archive.extractfile(name)
    assert file is not None
    return io.BytesIO(file.read())


def _pixels(file: io.BytesIO) -> np.ndarray:
    """Channels, height, width; on white."""
    picture = Image.open(file).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    return np.asarray(white.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)).transpose(2, 0, 1)


if __name__ == "__main__":
    main()
