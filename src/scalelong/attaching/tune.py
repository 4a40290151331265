"""κ chosen after training, for the sampler and the number of steps at hand (Skip-Tuning, arXiv 2402.15170).

    found = tune_skips(model, sampler, score, inputs)   # sampler(model, seeds) -> images, score(images) -> number
    print(found)                                        # what was tried, and the test on other seeds
    scale_skips_(model, found.scaling, inputs)          # a scaling like any other: fold it, save it, export it

κ_i goes in a straight line from 1 at the outermost skip to κ_inner at the innermost, and each κ_inner of a grid is
tried. All trials use the same seeds, so that they differ by κ alone. The best one is then compared with the model as it
is on seeds that the search has never seen, in blocks: the best of many trials looks better than it is.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from statistics import fmean, stdev
from typing import Any

from torch import Tensor, nn

from ..console import text_table
from ..errors import CancelledScalingWarning, InvalidConfigError, ScaleLongError
from ..files import fitting, in_words, parse_json, read_text, write_text
from ..finding import ExampleInputs, find_skips
from ..scaling import CustomScaling, FixedScaling, NoScaling, Scaling, as_scaling
from .api import scale_skips_, unscale_
from .host import scaled_host_of

Sampler = Callable[[nn.Module, Sequence[int]], Tensor]
"""Makes the images of these seeds with the model as it is scaled now."""
Score = Callable[[Tensor], float]
"""Lower is better. A score that is not finite counts as `WORST`."""
Progress = Callable[[int, int, str], None]
WORST = 1e300
KAPPAS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.6)
"""The values of κ_inner that are tried, besides 1."""
BLOCKS = 8
"""The number of blocks of test seeds."""
# Half of the 95 % interval of a mean of n differences is this many standard errors (Student's t, n - 1 degrees).
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 16: 2.13, 32: 2.04}


@dataclass(frozen=True, kw_only=True)
class TunedSkips:
    """What `tune_skips` found. `scaling` is the result; print it; `save` it, and `load` it."""

    base: dict[str, Any]
    """The scaling that the search began with."""
    tuned: dict[str, Any]
    trials: tuple[tuple[tuple[float, ...], float], ...]
    """((κ_inner,), score) of each trial in order; the first is the model as it was."""
    test: tuple[tuple[float, float], ...]
    """Scores of the model as it was and of the tuned one, for each block of other seeds. Empty if nothing was found."""
    images: int
    test_images: int
    about: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to remember: sampler, steps, weights, features."""

    @property
    def scaling(self) -> Scaling:
        return as_scaling(self.tuned)

    @property
    def difference(self) -> tuple[float, float, float]:
        """Tuned minus before on the test seeds: the mean of the blocks, and its 95 % interval. Below zero is better."""
        gaps = [after - before for before, after in self.test]
        if not gaps:
            return 0.0, 0.0, 0.0
        mean, half = fmean(gaps), math.inf
        if len(gaps) > 1:
            half = _T[max(count for count in _T if count <= len(gaps))] * stdev(gaps) / math.sqrt(len(gaps))
        return mean, mean - half, mean + half

    @property
    def verdict(self) -> str:
        """ "better", "worse", "no difference" or "nothing found", by the interval of the test."""
        _, low, high = self.difference
        if not self.test:
            return "nothing found"
        return "better" if high < 0 else "worse" if low > 0 else "no difference"

    def spelled(self) -> str:
        """The scaling in one line, as configurations take it."""
        return f"custom:{','.join(repr(kappa) for kappa in self.tuned['kappas'])}"

    def __str__(self) -> str:
        rows = [{"κ_inner": ", ".join(f"{v:.3g}" for v in values), "score": score} for values, score in self.trials]
        lines = [text_table(rows, rule=False), f"{len(self.trials)} trials of {self.images} images"]
        if not self.test:
            return "\n".join([*lines, "nothing was better than the model as it is"])
        mean, low, high = self.difference
        before = fmean(pair[0] for pair in self.test)
        lines.append(
            f"test on {len(self.test)} x {self.test_images} images of other seeds: {before:.4g} before, "
            f"{mean:+.3g} [{low:+.3g}, {high:+.3g}] with it: {self.verdict}"
        )
        return "\n".join([*lines, f"scaling: {self.spelled()}"])

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, json.dumps({**asdict(self), "verdict": self.verdict}, indent=1, ensure_ascii=False))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "TunedSkips":
        try:
            values = parse_json(read_text(path))
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            known |= {name: as_scaling(values[name]).to_dict() for name in ("base", "tuned")}
            known["trials"] = tuple((tuple(tried), score) for tried, score in values["trials"])
            known["test"] = tuple((before, after) for before, after in values["test"])
            return fitting(cls, known)
        except (KeyError, TypeError, ValueError, ScaleLongError) as error:
            raise InvalidConfigError(
                f"{path} is not a file of tuned long skips ({in_words(error)}): give a file that tuning wrote"
            ) from error


def tune_skips(
    model: nn.Module,
    sampler: Sampler,
    score: Score,
    example_inputs: ExampleInputs = None,
    *,
    kappas: Sequence[float] = KAPPAS,
    seeds: Sequence[int] = range(512),
    test_seeds: Sequence[Sequence[int]] | None = None,
    test_score: Score | None = None,
    progress: Progress | None = None,
) -> TunedSkips:
    """Find the κ_inner with the lowest score. The model is left as it was.

    seeds: of the search. `test_seeds`: blocks of others; by default eight, each half as large as `seeds`.
    test_score: for the test, if it is not `score`: with statistics of other real images, say.
    progress: called with (trials done, trials in all, a note).

    A model that is scaled by constants already is tuned from there: its κ_i are multiplied.
    """
    if not kappas or not seeds:
        raise InvalidConfigError(f"a search needs some kappas and some seeds, got {len(kappas)} and {len(seeds)}")
    first, size = max(seeds) + 1, max(1, len(seeds) // 2)
    blocks = test_seeds or [range(first + i * size, first + (i + 1) * size) for i in range(BLOCKS)]
    shared = set(seeds) & {seed for block in blocks for seed in block}
    if shared:
        raise InvalidConfigError(f"the test needs other seeds than the search, and {min(shared)} is in both")
    host = scaled_host_of(model)
    base = host.scaling.config if host.scaling is not None else NoScaling()
    if not isinstance(base, FixedScaling) or host.folded:
        raise InvalidConfigError(
            f"the long skips are scaled by {base}: only constant ones (none, cs, uniform, custom) that are not folded "
            f"can be tuned after training"
        )
    before = host.detach() if host.is_scaled else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CancelledScalingWarning)  # the score shows what a norm cancels
            plan = (host.plan() if host.is_native else None) or find_skips(model, example_inputs)
            curve = base.curve(len(plan))

            def scaling(inner: float) -> CustomScaling:
                line = [1 + (inner - 1) * i / max(len(curve) - 1, 1) for i in range(len(curve))]
                return CustomScaling(tuple(round(k * factor, 6) for k, factor in zip(curve, line, strict=True)))

            def measured(inner: float, seeds: Sequence[int], score: Score) -> float:
                unscale_(model)
                scale_skips_(model, scaling(inner), plan=plan)
                found = float(score(sampler(model, seeds)))
                return found if math.isfinite(found) else WORST

            # Verified once, with factors that are not 1; afterwards the coefficients alone change.
            scale_skips_(model, scaling(0.9), example_inputs, plan=plan)
            tried: dict[float, float] = {}
            for inner in dict.fromkeys((1.0, *kappas)):
                if progress is not None:
                    note = f"best {min(tried.values()):.4g}" if tried else ""
                    progress(len(tried), 1 + len(kappas), note)
                tried[inner] = measured(inner, seeds, score)
            best = min(tried, key=lambda inner: tried[inner])
            pairs = []
            for number, block in enumerate(blocks if best != 1.0 else (), start=1):
                pairs.append((measured(1.0, block, test_score or score), measured(best, block, test_score or score)))
                if progress is not None:
                    progress(len(tried), len(tried), f"test {number} of {len(blocks)}")
    finally:
        if host.is_scaled:
            host.detach()
        if before is not None:
            host.attach(before)
    return TunedSkips(
        base=base.to_dict(),
        tuned=scaling(best).to_dict(),
        trials=tuple(((inner,), score) for inner, score in tried.items()),
        test=tuple(pairs),
        images=len(seeds),
        test_images=len(blocks[0]),
    )
