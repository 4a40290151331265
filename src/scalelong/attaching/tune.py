"""κ chosen after training, for the sampler and the number of steps at hand (Skip-Tuning, arXiv 2402.15170).

    found = tune_skips(model, sampler, score, inputs)   # sampler(model, seeds) -> images, score(images) -> number
    print(found)                                        # what was tried, and the test on other seeds
    scale_skips_(model, found.scaling, inputs)          # a scaling like any other: fold it, save it, export it

The search is a pattern search: one parameter after the other goes up and down by a step, which is halved when nothing
helps. All trials use the same seeds, so that they differ by the parameters alone. What was found is then compared with
the model as it is on seeds that the search has never seen, in blocks: the best of many trials looks better than it is.

    linear   κ_i goes in a straight line from 1 at the outermost skip to κ_inner at the innermost: one parameter
    free     κ_1 ... κ_N, one by one
    freeu    b1, b2, s1, s2 of FreeU, from 1 (nothing) on: needs features of images at the merges
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from torch import Tensor, nn

from ..console import html_lines, html_table, text_table
from ..errors import CancelledScalingWarning, CannotReadError, InvalidConfigError
from ..files import in_words, parse_json, read_text, write_text
from ..finding import ExampleInputs, SkipPlan, find_skips
from ..scaling import CustomScaling, FixedScaling, FreeUScaling, NoScaling, Scaling, as_scaling
from .api import is_scaled, scale_skips_, scaling_of, unscale_
from .host import host_of

Sampler = Callable[[nn.Module, Sequence[int]], Tensor]
"""Images of these seeds, by the model as it is scaled now."""
Score = Callable[[Tensor], float]
"""Lower is better. What is not finite counts as worst."""
Advance = Callable[[int, int, str], None]

KINDS = {"linear": "one parameter, κ_inner", "free": "every κ_i", "freeu": "b1, b2, s1, s2 of FreeU"}
BLOCKS = 8
"""Blocks of test seeds."""
FORMAT = 1

# Half of the 95 % interval of a mean of n differences is this many standard errors (Student's t, n - 1 degrees).
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20, 16: 2.13, 32: 2.04}


def tune_skips(
    model: nn.Module,
    sampler: Sampler,
    score: Score,
    example_inputs: ExampleInputs = None,
    *,
    kind: str = "linear",
    seeds: Sequence[int] = range(512),
    test_seeds: Sequence[Sequence[int]] | None = None,
    test_score: Score | None = None,
    trials: int = 16,
    seconds: float | None = None,
    progress: Advance | None = None,
) -> "TunedSkips":
    """Search the scaling of the long skips with the lowest score. The model is left as it was.

    kind: "linear", "free" or "freeu", as the text of this module says.
    seeds: of the search. `test_seeds`: blocks of others; by default eight, each half as large as `seeds`.
    test_score: for the test, if it is not `score`: with statistics of other real images, say.
    trials, seconds: the search ends after so many trials, or when the time is over.
    progress: called with (trials done, trials at most, a note).

    A model that is scaled by constants already is tuned from there: its κ_i are multiplied.
    """
    blocks = _checked(kind, trials, seconds, seeds, test_seeds)
    base = _base(model)
    bench = _Bench(model, sampler, base, example_inputs, kind)
    search = _Search(bench.names, lambda values: _finite(score(bench.images(values, seeds))), trials, seconds, progress)
    try:
        best = search.run()
        pairs = []
        if best.values != search.trials[0].values:
            judge = test_score or score
            for number, block in enumerate(blocks, start=1):
                before, after = (_finite(judge(bench.images(v, block))) for v in (search.trials[0].values, best.values))
                pairs.append((before, after))
                if progress is not None:
                    progress(len(search.trials), len(search.trials), f"test {number} of {len(blocks)}")
    finally:
        bench.restore()
    return TunedSkips(
        kind=kind,
        model=type(host_of(model).model).__name__,
        base=base.to_dict(),
        tuned=bench.scaling(best.values).to_dict(),
        names=tuple(bench.names),
        trials=tuple(search.trials),
        test=tuple(pairs),
        images=len(seeds),
        test_images=len(blocks[0]),
    )


@dataclass(frozen=True)
class Trial:
    values: tuple[float, ...]
    score: float


@dataclass(frozen=True, kw_only=True)
class TunedSkips:
    """What `tune_skips` found. `scaling` is the result; print it; `save` it, and `load` it."""

    kind: str
    model: str
    base: dict[str, Any]
    """The scaling that the search began with."""
    tuned: dict[str, Any]
    names: tuple[str, ...]
    """Of the parameters."""
    trials: tuple[Trial, ...]
    """In their order; the first is the model as it was."""
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
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.score)

    @property
    def difference(self) -> tuple[float, float, float]:
        """Tuned minus before on the test seeds: the mean of the blocks, and its 95 % interval. Below zero is better."""
        gaps = [after - before for before, after in self.test]
        if not gaps:
            return 0.0, 0.0, 0.0
        mean = math.fsum(gaps) / len(gaps)
        if len(gaps) < 2 or not math.isfinite(mean):
            return mean, -math.inf, math.inf
        error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
        half = _T[max(count for count in _T if count <= len(gaps))] * error
        return mean, mean - half, mean + half

    @property
    def verdict(self) -> str:
        """ "better", "worse", "no difference" or "nothing found", by the interval of the test."""
        _, low, high = self.difference
        if not self.test:
            return "nothing found"
        return "better" if high < 0 else "worse" if low > 0 else "no difference"

    def spelled(self) -> str:
        """The scaling in one line, as `--scaling` and configurations take it."""
        if self.tuned["method"] == CustomScaling.name:
            return f"custom:{','.join(repr(kappa) for kappa in self.tuned['kappas'])}"
        options = ",".join(f"{name}={value!r}" for name, value in self.tuned.items() if name != "method")
        return self.tuned["method"] + (f":{options}" if options else "")

    def rows(self) -> list[dict[str, Any]]:
        """The trials that were the best so far, and the test."""
        rows, lowest = [], math.inf
        for number, trial in enumerate(self.trials, start=1):
            if trial.score < lowest:
                lowest = trial.score
                rows.append({"trial": str(number), **self._cells(trial.values), "score": trial.score})
        return rows

    def remarks(self) -> list[str]:
        """The test in words."""
        lines = [f"{len(self.trials)} trials of {self.images} images"]
        if not self.test:
            return [*lines, "nothing was better than the model as it is"]
        mean, low, high = self.difference
        before = math.fsum(pair[0] for pair in self.test) / len(self.test)
        return [
            *lines,
            f"test on {len(self.test)} x {self.test_images} images of other seeds: {before:.4g} before, "
            f"{mean:+.3g} [{low:+.3g}, {high:+.3g}] with it: {self.verdict}",
            f"scaling: {self.spelled()}",
        ]

    def _cells(self, values: Sequence[float]) -> dict[str, str]:
        return {name: f"{value:.3g}" for name, value in zip(self.names, values, strict=True)}

    def __str__(self) -> str:
        return "\n".join([text_table(self.rows(), rule=False), *self.remarks()])

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + html_lines(self.remarks())

    def to_dict(self) -> dict[str, Any]:
        told = {"difference": self.difference, "verdict": self.verdict}
        return {"format": FORMAT, **_written({**asdict(self), **told})}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TunedSkips":
        if not isinstance(values, dict) or values.get("format") != FORMAT or "tuned" not in values:
            raise InvalidConfigError(
                f"not a file of tuned long skips in format {FORMAT}: give one that `scalelong lab tune` wrote"
            )
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        try:
            trials = tuple(Trial(tuple(trial["values"]), _read(trial["score"])) for trial in values["trials"])
            pairs = tuple((_read(before), _read(after)) for before, after in values["test"])
            scalings = {name: as_scaling(values[name]).to_dict() for name in ("base", "tuned")}
            found = cls(**{**known, **scalings, "names": tuple(values["names"]), "trials": trials, "test": pairs})
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidConfigError(
                f"the file of tuned long skips is damaged ({in_words(error)}): restore it, or tune again"
            ) from error
        return found

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "TunedSkips":
        try:
            return cls.from_dict(parse_json(read_text(path)))
        except CannotReadError as error:
            raise InvalidConfigError(f"the file of tuned long skips is missing: {error}") from error
        except ValueError as error:
            if isinstance(error, InvalidConfigError):
                raise
            raise InvalidConfigError(
                f"{path} is not JSON ({error}): restore it, or run `scalelong lab tune` again"
            ) from error


def _written(value: Any) -> Any:
    """JSON has no word for infinity, the score of what is worst."""
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(score: float | None) -> float:
    return math.inf if score is None else float(score)


# The model with other coefficients


class _Bench:
    """A model whose scaling is exchanged, and put back in the end."""

    def __init__(
        self, model: nn.Module, sampler: Sampler, base: FixedScaling, example_inputs: ExampleInputs, kind: str
    ) -> None:
        self.model, self.sampler, self.base, self.kind = model, sampler, base, kind
        self.was_scaled = is_scaled(model)
        self.plan: SkipPlan | None = None
        if self.was_scaled:
            unscale_(model)
        try:
            host = host_of(model)
            self.plan = host.plan() if host.is_native else find_skips(model, example_inputs)
            assert self.plan is not None
            self.kappas = base.curve(len(self.plan))
            self.names = self._names()
            if self.kind == "freeu" and not isinstance(base, NoScaling):
                raise InvalidConfigError(f"FreeU is tuned on a model that is not scaled, and this one is, by {base}")
            # Once with the check that every scaling gets; then the coefficients alone change.
            self._scale(self.scaling([0.9] * len(self.names)), example_inputs)
        except BaseException:
            self.restore()
            raise

    def _names(self) -> list[str]:
        assert self.plan is not None
        if self.kind == "freeu":
            return ["b1", "b2", "s1", "s2"]
        return ["κ_inner"] if self.kind == "linear" else [f"κ_{i}" for i in range(1, len(self.plan) + 1)]

    def scaling(self, values: Sequence[float]) -> Scaling:
        if self.kind == "freeu":
            return FreeUScaling(**dict(zip(self.names, values, strict=True)))
        count = len(self.kappas)
        if self.kind == "linear":
            values = [1 + (values[0] - 1) * (i / (count - 1) if count > 1 else 1) for i in range(count)]
        return CustomScaling(tuple(round(k * factor, 6) for k, factor in zip(self.kappas, values, strict=True)))

    def images(self, values: Sequence[float], seeds: Sequence[int]) -> Tensor:
        self._scale(self.scaling(values), None)
        return self.sampler(self.model, seeds)

    def _scale(self, scaling: Scaling, example_inputs: ExampleInputs) -> None:
        if is_scaled(self.model):
            unscale_(self.model)
        with warnings.catch_warnings():
            # Whether a norm cancels a constant is seen by the score here.
            warnings.simplefilter("ignore", CancelledScalingWarning)
            scale_skips_(self.model, scaling, example_inputs, plan=self.plan, verify=example_inputs is not None)

    def restore(self) -> None:
        if is_scaled(self.model):
            unscale_(self.model)
        if self.was_scaled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CancelledScalingWarning)
                scale_skips_(self.model, self.base, plan=self.plan, verify=False)


def _base(model: nn.Module) -> FixedScaling:
    config = scaling_of(model).config if is_scaled(model) else NoScaling()
    if not isinstance(config, FixedScaling):
        raise InvalidConfigError(
            f"the long skips are scaled by {config}, whose coefficients are learned or depend on the data: only "
            f"constant ones (none, cs, uniform, custom) can be tuned after training"
        )
    if host_of(model).folded:
        raise InvalidConfigError("some coefficients are in the weights already (fold_): tune the model before folding")
    return config


# The search

FIRST_STEP, LAST_STEP = 0.2, 0.02
MOST = 3.0


class _Search:
    def __init__(
        self,
        names: Sequence[str],
        score: Callable[[tuple[float, ...]], float],
        trials: int,
        seconds: float | None,
        progress: Advance | None,
    ) -> None:
        self.names, self.score, self.most, self.progress = names, score, trials, progress
        self.ends = math.inf if seconds is None else time.monotonic() + seconds
        self.trials: list[Trial] = []

    def run(self) -> Trial:
        best = self._try((1.0,) * len(self.names))
        assert best is not None
        step, signs = FIRST_STEP, [-1] * len(self.names)
        while step >= LAST_STEP and not self._over():
            start = best
            for at in range(len(self.names)):
                for sign in (signs[at], -signs[at]):
                    moved = best.values[at] + sign * step
                    found = self._try((*best.values[:at], round(min(max(moved, 0.0), MOST), 4), *best.values[at + 1 :]))
                    if found is not None and found.score < best.score:
                        best, signs[at] = found, sign
                        break
            step = step if best is not start else step / 2
        return best

    def _try(self, values: tuple[float, ...]) -> Trial | None:
        """None if it was tried before, or the budget is used up."""
        if self.trials and (self._over() or any(trial.values == values for trial in self.trials)):
            return None
        self.trials.append(Trial(values, self.score(values)))
        if self.progress is not None:
            best = min(trial.score for trial in self.trials)
            self.progress(len(self.trials), self.most, f"best {best:.4g}")
        return self.trials[-1]

    def _over(self) -> bool:
        return len(self.trials) >= self.most or time.monotonic() > self.ends


def _finite(score: float) -> float:
    return float(score) if math.isfinite(score) else math.inf


def _checked(
    kind: str,
    trials: int,
    seconds: float | None,
    seeds: Sequence[int],
    test_seeds: Sequence[Sequence[int]] | None,
) -> list[Sequence[int]]:
    """The blocks of test seeds."""
    if kind not in KINDS:
        raise InvalidConfigError(f"unknown kind {kind!r} of tuning; known: {', '.join(KINDS)}")
    if trials < 2 or (seconds is not None and not seconds > 0):
        raise InvalidConfigError(f"a search needs at least 2 trials and some seconds, got {trials} and {seconds}")
    if not seeds:
        raise InvalidConfigError("a search needs seeds, got none")
    first, size = max(seeds) + 1, max(1, len(seeds) // 2)
    blocks = test_seeds or [range(first + i * size, first + (i + 1) * size) for i in range(BLOCKS)]
    shared = set(seeds).intersection(*[[seed for block in blocks for seed in block]])
    if shared:
        raise InvalidConfigError(f"the test needs other seeds than the search, and {min(shared)} is in both")
    return list(blocks)
