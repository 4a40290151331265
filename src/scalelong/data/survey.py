"""What size and how many channels a set of images is to have, from what its images are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..errors import BrokenImagesError, MixedSizesError
from .broken import Tally
from .decode import Look
from .options import Options

LISTED = 8  # sizes in a message


@dataclass
class Survey:
    """Sizes and kinds that were seen."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (height, width)
    kinds: set[str] = field(default_factory=set)

    def add(self, seen: Look) -> None:
        self.sizes[seen.height, seen.width] += 1
        self.kinds.add(seen.kind)

    def settles(self, options: Options) -> bool:
        """Whether further images could not change the plan: the size is given and the channels are, or are mixed."""
        return bool(options.shape and (options.channels or "colour" in self.kinds or len(self.kinds) > 1))

    def agrees(self, options: Options) -> bool:
        return options.shape is not None or len(self.sizes) == 1

    def channels(self) -> int:
        """Gray stays gray, RGBA stays RGBA, and any mixture becomes RGB."""
        return 1 if self.kinds == {"gray"} else 4 if self.kinds == {"rgba"} else 3

    def plan(self, options: Options, tally: Tally) -> tuple[int, int, int]:
        """Channels, height and width for all."""
        if not self.kinds:
            raise BrokenImagesError(f"{tally.where}: not one of the images can be read: {tally.names()}")
        if not self.agrees(options):
            sizes = [f"{width}×{height} ({count} images)" for (height, width), count in self.sizes.most_common(LISTED)]
            more = f" and {len(self.sizes) - LISTED} more" if len(self.sizes) > LISTED else ""
            raise MixedSizesError(
                f"{tally.where}: the images have {len(self.sizes)} different sizes (width×height): "
                f"{', '.join(sizes)}{more}. Pass size=, for instance size={min(min(size) for size in self.sizes)}: "
                "the shorter side is resized to it and the middle is kept"
            )
        height, width = options.shape or next(iter(self.sizes))
        return options.channels or self.channels(), height, width
