"""A folder of samples: one file per image, and a note that says how they were made. It can be continued.

samples/000000000000.png ...   named by their seeds
        samples.json           weights, sampler, steps, guidance, seeds, wishes
        grid.png               the first images at once
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import to_float
from ..diffusion.images import Request
from ..errors import ScaleLongError
from ..files import write_text
from ..training.grid import image_grid, save_png

NOTE = "samples.json"


class SampleFolderError(ScaleLongError, ValueError):
    """The folder holds other samples, or something else."""


class SampleFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def open(self, about: dict[str, Any], wanted: Sequence[Request]) -> None:
        """Make the folder, or check that it holds samples made in the same way. Their number may grow."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SampleFolderError(f"the folder {self.path} cannot be made: {error}") from error
        if (self.path / NOTE).exists():
            before = self.note()
            kept = {key: value for key, value in before.items() if key != "wishes"}
            if kept != about:
                changes = "\n".join(
                    f"  {key}: {kept.get(key)!r} -> {about.get(key)!r}"
                    for key in {**kept, **about}
                    if kept.get(key) != about.get(key)
                )
                raise SampleFolderError(
                    f"{self.path} holds samples that were made in another way:\n{changes}\n"
                    f"Give the same values to continue, or another folder with --out"
                )
            self._require_same_wishes(before["wishes"], wanted)
            wishes = before["wishes"] | _wishes(wanted)
        elif any(entry for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise SampleFolderError(f"{self.path} is not empty and holds no samples; choose another folder with --out")
        else:
            wishes = _wishes(wanted)
        write_text(self.path / NOTE, json.dumps({**about, "wishes": wishes}, indent=1, ensure_ascii=False))

    def note(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / NOTE).read_text())
        except (OSError, ValueError) as error:
            raise SampleFolderError(f"{self.path / NOTE} cannot be read: {error}") from error

    def missing(self, wanted: Sequence[Request]) -> list[Request]:
        """Those whose file is not there. Files are written whole or not at all."""
        return [request for request in wanted if not self.file(request).exists()]

    def write(self, request: Request, image: Tensor) -> None:
        if image.shape[0] in (1, 3, 4):
            save_png(self.file(request), image)
        else:
            raise SampleFolderError(f"images of {image.shape[0]} channels cannot be PNG files")

    def file(self, request: Request) -> Path:
        return self.path / f"{request.seed:012d}.png"

    def write_grid(self, wanted: Sequence[Request], columns: int | None) -> Path:
        shown = torch.stack(list(self.read(wanted)))
        save_png(self.path / "grid.png", image_grid(to_float(shown), columns))
        return self.path / "grid.png"

    def read(self, wanted: Sequence[Request]) -> Iterator[Tensor]:
        """The images, uint8 (C, H, W)."""
        for request in wanted:
            yield read_png(self.file(request))

    def _require_same_wishes(self, before: dict[str, str | None], wanted: Sequence[Request]) -> None:
        for request in wanted:
            wish = before.get(str(request.seed), request.wish)
            if wish != request.wish:
                raise SampleFolderError(
                    f"{self.file(request)} shows {wish!r}, and {request.wish!r} is asked for now; choose another "
                    f"folder with --out"
                )


def read_png(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            array = np.array(image)
    except OSError as error:
        raise SampleFolderError(f"{path} cannot be read as an image: {error}") from error
    tensor = torch.from_numpy(array)
    return tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1).contiguous()


def _wishes(wanted: Sequence[Request]) -> dict[str, str | None]:
    return {str(request.seed): request.wish for request in wanted}
