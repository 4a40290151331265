"""How a score was made. Scores that were made in different ways are not compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ProtocolMismatchError
from .bootstrap import Score


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Everything that must be equal for two scores to be comparable. Which model it was is not part of it."""

    features: str
    features_sha256: str
    data: str
    data_sha256: str
    """The data set's fingerprint."""
    reference_images: int
    images: int
    sampler: str | None = None
    """None where it is not known, as for a folder of images from elsewhere."""
    sampler_steps: int | None = None
    guidance: float | None = None
    weights: str | None = None
    """ "ema" or "raw"."""
    conditions: str = "none"
    """How classes or texts were chosen."""
    neighbours: int = 3


@dataclass(frozen=True)
class Scores:
    """The scores of one set of images, with their protocol and with what was scored."""

    protocol: Protocol
    frechet: Score
    precision: Score
    recall: Score
    subject: dict[str, Any]
    """The run and its step, or the folder."""
    agreement: Score | None = None
    """Share of the images that show the class or the text that was asked for."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scores:
        scores = {name: Score(**values[name]) for name in ("frechet", "precision", "recall")}
        asked = values.get("agreement")
        return cls(
            protocol=Protocol(**values["protocol"]),
            subject=values["subject"],
            agreement=Score(**asked) if asked else None,
            **scores,
        )

    def __str__(self) -> str:
        protocol = self.protocol
        how = f"{protocol.images} images against {protocol.reference_images} of {protocol.data}, {protocol.features}"
        asked = f"shows what was asked for {self.agreement}\n" if self.agreement else ""
        return (
            f"Fréchet distance {self.frechet}\nprecision {self.precision}\nrecall {self.recall}\n{asked}"
            f"95 % intervals; {how} features {protocol.features_sha256[:12]}"
        )


# A path may differ where the fingerprint is equal.
_NAMES_ONLY = ("data",)


def require_comparable(scores: Sequence[Scores]) -> None:
    """Raises ProtocolMismatchError, which shows every difference."""
    for other in scores[1:]:
        differences = protocol_differences(scores[0].protocol, other.protocol)
        if differences:
            shown = "\n".join(f"  {name}: {a!r} and {b!r}" for name, (a, b) in differences.items())
            raise ProtocolMismatchError(
                f"{_title(scores[0])} and {_title(other)} were scored in different ways and cannot be compared:\n"
                f"{shown}\nScore both with the same options"
            )


def protocol_differences(a: Protocol, b: Protocol) -> dict[str, tuple[Any, Any]]:
    names = [field.name for field in fields(Protocol) if field.name not in _NAMES_ONLY]
    return {name: (getattr(a, name), getattr(b, name)) for name in names if getattr(a, name) != getattr(b, name)}


def comparison(scores: Sequence[Scores]) -> str:
    """A table, best Fréchet distance first."""
    require_comparable(scores)
    rows = [("", "Fréchet distance", "precision", "recall")]
    for entry in sorted(scores, key=lambda entry: entry.frechet.value):
        rows.append((_title(entry), str(entry.frechet), str(entry.precision), str(entry.recall)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _title(scores: Scores) -> str:
    subject = scores.subject
    return f"{subject.get('run') or subject.get('folder')}" + (f" step {subject['step']}" if "step" in subject else "")
