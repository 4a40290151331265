"""What an estimator answers: a κ, the range that it comes from, and why."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..scaling.constant import ConstantScaling


@dataclass(frozen=True, kw_only=True)
class KappaChoice:
    """`kappa` is the pick, `low` and `high` the range that the estimator would accept."""

    kappa: float
    low: float
    high: float
    method: str
    skips: int
    reasons: tuple[str, ...]
    """How it was found, and every limit that was met, in words."""
    details: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it: targets, sensitivities, or the pilot's runs and their cost."""

    def scaling(self) -> ConstantScaling:
        """CS with this κ, for `scale_skips_`."""
        return ConstantScaling(self.kappa)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        head = f"κ = {self.kappa:.3f}, range {self.low:.3f} to {self.high:.3f} ({self.method}, {self.skips} long skips)"
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])
