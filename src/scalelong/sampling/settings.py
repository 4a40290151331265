"""How images are made."""

from dataclasses import dataclass

from ..diffusion.sample import require_sampler
from ..errors import InvalidConfigError


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    sampler: str = "dpm++"
    steps: int = 50
    guidance: float = 1.0
    """Classifier-free guidance: 1 uses the condition as it is, more exaggerates it."""

    def __post_init__(self) -> None:
        require_sampler(self.sampler, self.steps)
        if not 0 <= self.guidance <= 1000:
            raise InvalidConfigError(f"guidance must be a number from 0 to 1000, got {self.guidance}")
