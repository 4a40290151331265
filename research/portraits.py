"""Pack the portraits that `portraits.mjs` drew, at 32×32 pixels, as the embedded data set.

python -m research.portraits FOLDER src/scalelong/data/portraits.npz.xz
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from PIL import Image

from scalelong.files import write_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    images, labels = [], []
    for label, style in enumerate(sorted(options.folder.iterdir())):
        for file in sorted(style.iterdir()):
            picture = Image.open(file).convert("RGB").resize((32, 32), Image.Resampling.BOX)
            images.append(np.asarray(picture).transpose(2, 0, 1))
            labels.append(label)
    content = io.BytesIO()
    np.savez(content, images=np.stack(images), labels=np.array(labels, np.uint8))
    write_bytes(options.out, lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{options.out}: {len(images)} pictures, {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
