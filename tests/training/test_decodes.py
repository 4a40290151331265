"""Images are decoded once per start: sizing and held-out numbers need their headers alone."""

import pytest
from PIL import ImageFile

from scalelong.cli import main
from scalelong.data import load_data
from scalelong.runs import save_png

SMALL = ["--batch-size", "8", "--samples-every", "0", "--trackers", "--steps", "1"]


@pytest.mark.parametrize("flags", [["--recipe", "digits-tiny", "--data"], ["--held-out", "4", "--size", "8", "--data"]])
def test_each_image_is_decoded_once(flags, tmp_path, monkeypatch):
    pngs = tmp_path / "pngs"
    pngs.mkdir()
    for i, image in enumerate(load_data("digits", limit=20).fetch(range(20)).images):
        save_png(pngs / f"{i}.png", image)
    decoded = []
    original = ImageFile.ImageFile.load

    def counted(self):
        if self.tile:  # there is something left to decode
            decoded.append(self.filename)
        return original(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    assert main(["train", *flags, str(pngs), *SMALL, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert len(decoded) == 20
