"""What one has to open to follow a use of the library: files, functions and packages that a call walks through.

    python -m research.walks                  # all walks
    python -m research.walks attach train     # some of them

A profiler counts the functions of the package that run, and the passes from one file or package into another. What runs
while a module is being imported does not count, and neither do comprehensions, which are functions in some versions of
Python and none in others. `python tests/test_architecture.py` shows the packages themselves.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import scalelong
from scalelong.cli import main as command
from scalelong.console import text_table

PACKAGE = Path(scalelong.__file__).resolve().parent
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass
class Walk:
    """Functions by file, and how often control passed between files and between packages."""

    functions: dict[str, set[str]] = field(default_factory=dict)
    between_files: int = 0
    between_packages: int = 0
    _last: str = ""

    def enter(self, frame: FrameType) -> None:
        code = frame.f_code
        if (
            code.co_name in ("<module>", *COMPREHENSIONS)
            or not code.co_filename.startswith(str(PACKAGE))
            or _importing(frame)
        ):
            return
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        self.functions.setdefault(file, set()).add(code.co_qualname)
        if self._last and file != self._last:
            self.between_files += 1
            self.between_packages += package_of(file) != package_of(self._last)
        self._last = file

    def row(self, name: str) -> dict[str, Any]:
        return {
            "walk": name,
            "files": len(self.functions),
            "functions": sum(map(len, self.functions.values())),
            "packages": len({package_of(file) for file in self.functions}),
            "passes between packages": self.between_packages,
            "between files": self.between_files,
        }


def package_of(file: str) -> str:
    return file.split("/")[0]


def _importing(frame: FrameType) -> bool:
    """Whether a module is being imported: its functions run for the import, not for the walk."""
    above = frame.f_back
    while above is not None:
        if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        above = above.f_back
    return False


@contextmanager
def walking() -> Iterator[Walk]:
    walk = Walk()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            walk.enter(frame)

    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def _quietly(*arguments: str) -> None:
    with redirect_stdout(StringIO()):
        code = command([*arguments])
    if code:
        raise SystemExit(f"scalelong {' '.join(arguments)} ended with {code}")


def attach(_: Path) -> list[dict[str, Any]]:
    """One line of the README on a UNet of diffusers, and a forward after it."""
    import torch
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(sample_size=16, block_out_channels=(32, 64), norm_num_groups=8, **blocks)
    inputs = (torch.randn(1, 3, 16, 16), torch.tensor([10]))
    with walking() as scaling:
        scalelong.scale_skips_(unet, "ls", inputs)
    with walking() as forward:
        unet(*inputs)
    return [scaling.row("scale_skips_(UNet2DModel, 'ls', inputs)"), forward.row("one forward after it")]


def train(folder: Path) -> list[dict[str, Any]]:
    """From images to a checkpoint: three steps of digits-tiny with samples."""
    options = (
        "--recipe",
        "digits-tiny",
        "--out",
        str(folder / "run"),
        "--samples-every",
        "3",
        "--no-split-cores",
    )
    with walking() as walk:
        _quietly("train", *options, "--steps", "3", "--log-every", "1")
    return [walk.row("train digits-tiny, 3 steps, samples, checkpoint")]


def compare(folder: Path) -> list[dict[str, Any]]:
    """From a command to a table, and the report of it."""
    out = str(folder / "comparison")
    with walking() as comparing:
        _quietly("compare", "--methods", "none,cs", "--seeds", "1", "--steps", "4", "--jobs", "1", "--out", out)
    with walking() as reporting:
        _quietly("report", out, "--out", str(folder / "report.html"))
    return [comparing.row("compare, 2 methods, 1 seed, 4 steps"), reporting.row("report of it")]


def evaluate(folder: Path) -> list[dict[str, Any]]:
    """From a run to a score."""
    if not (folder / "run").exists():
        train(folder)
    with walking() as walk:
        _quietly("eval", str(folder / "run"), "--n", "20", "--steps", "5")
    return [walk.row("eval of the run, 20 images")]


WALKS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "attach": attach,
    "train": train,
    "compare": compare,
    "eval": evaluate,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.walks", description=__doc__)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)} (default: all)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.walks) - set(WALKS))
    if unknown:
        parser.error(f"unknown walk {', '.join(unknown)}; known: {', '.join(WALKS)}")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in options.walks or WALKS for row in WALKS[name](Path(folder))]
    print(text_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
