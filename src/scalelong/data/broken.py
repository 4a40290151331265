"""Which images could not be read, and when that is too many."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..errors import BrokenImagesError

SHOWN = 10  # names in a message

log = logging.getLogger("scalelong.data")


@dataclass(frozen=True)
class BrokenImage:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass
class Tally:
    """Counts broken images by name and stops at the first one beyond the allowed number."""

    where: str
    total: int
    allowed: int
    found: dict[str, BrokenImage] = field(default_factory=dict)

    def add(self, broken: BrokenImage) -> None:
        if broken.name in self.found:
            return
        self.found[broken.name] = broken
        if len(self.found) > self.allowed:
            raise BrokenImagesError(
                f"{self.where}: at least {len(self.found)} of {self.total} images cannot be read, "
                f"{self.allowed} are allowed (max_broken): {self.names()}. Repair or remove them, or raise max_broken"
            )

    def names(self) -> str:
        return listed([str(broken) for broken in self.found.values()])

    def warn(self) -> None:
        if self.found:
            log.warning(
                "%s: %d of %d images are broken, skipped: %s", self.where, len(self.found), self.total, self.names()
            )


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
