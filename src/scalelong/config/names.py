"""Names that several packages share: schedules, samplers, optimisers, lengths of averages, the files of a run.

Nothing here needs torch. The code that carries a name out stands elsewhere and takes the names from here.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import InvalidConfigError

Schedule = Literal["vp", "ddpm", "cosine", "sd", "flow", "flow-logit", "edm"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
SCHEDULE = "vp"
"""The schedule of training and diagnosis where none is given."""
FLOWS = ("flow", "flow-logit")
"""The rectified flows among the schedules."""
STEPS = 1000
"""T of the discrete schedules, and the number of steps into which samplers divide the continuous one."""

Prediction = Literal["epsilon", "v", "x0", "flow", "edm"]
Weighting = Literal["none", "min-snr"]
Condition = Literal["none", "class", "text"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Decay = Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts", "piecewise_constant"]
Optimizer = Literal["adamw", "muon", "adam", "sgd", "rmsprop", "radam", "nadam", "adamax", "adagrad", "adafactor"]
ADAMS = ("adamw", "adam", "radam", "nadam", "adamax")
"""The optimisers whose update has the size of the learning rate, whatever the gradient."""
OnCollapse = Literal["stop", "rollback", "ignore"]
OnNaN = Literal["stop", "rollback"]
KeepBest = Literal["held-out", "frechet"]

SAMPLERS = ("ddpm", "ddim", "dpm++", "euler", "heun", "sde")
FLOW_SAMPLERS = ("euler", "heun", "dpm++")
EDM_SAMPLERS = ("euler", "dpm++")

OutputStart = str | float
"""strict, unit, zero, or a number: that many times strict."""
OUTPUT_STARTS = ("strict", "unit", "zero")


def samplers_of(schedule: str) -> tuple[str, ...]:
    """The samplers that solve the equation of a schedule."""
    return FLOW_SAMPLERS if schedule in FLOWS else EDM_SAMPLERS if schedule == "edm" else SAMPLERS


def require_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise InvalidConfigError(f"unknown noise schedule {schedule!r}; known: {', '.join(SCHEDULES)}")


def require_sampler(sampler: str, steps: int, schedule: str | None = None) -> None:
    if sampler not in SAMPLERS:
        raise InvalidConfigError(f"unknown sampler {sampler!r}; known: {', '.join(SAMPLERS)}")
    if schedule is not None and sampler not in samplers_of(schedule):
        raise InvalidConfigError(
            f"the sampler {sampler!r} is not made for the schedule {schedule!r}; take the `sampler` "
            f"{' or '.join(samplers_of(schedule))}"
        )
    if not 1 <= steps <= STEPS:
        raise InvalidConfigError(f"the number of sampling steps must be from 1 to {STEPS}, got {steps}")


def require_prediction(prediction: str, schedule: str | None = None) -> None:
    """The velocity belongs to flows, and EDM's output to EDM's noise; ε, v and x_0 to all others."""
    if prediction not in get_args(Prediction):
        raise InvalidConfigError(f"unknown prediction {prediction!r}; known: {', '.join(get_args(Prediction))}")
    if schedule is None:
        return
    fitting = ("edm",) if schedule == "edm" else ("flow",) if schedule in FLOWS else ("epsilon", "v", "x0")
    if prediction not in fitting:
        raise InvalidConfigError(
            f"`schedule` {schedule} goes with `prediction` {' or '.join(fitting)}, and {prediction!r} was given; flow "
            f"goes with flow and flow-logit, edm with edm, the others with vp, ddpm, cosine and sd"
        )


def require_output_start(start: Any) -> OutputStart:
    """The start itself, a text with a number as a number; InvalidConfigError if it is neither."""
    if start in OUTPUT_STARTS:
        return start
    try:
        number = float(start)
        if isinstance(start, bool) or not (math.isfinite(number) and number >= 0):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise InvalidConfigError(
            f"`output_start` must be one of {', '.join(OUTPUT_STARTS)} or a number of at least 0 (that many times "
            f"strict), got {start!r}"
        ) from error
    return number


# Times

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(budget: str) -> float:
    """30m, 2h, 1h30m, 0.5d as seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", budget.lower())
    whole = "".join(f"{number}{unit}" for number, unit in parts)
    if not parts or whole != "".join(budget.lower().split()):
        raise InvalidConfigError(f"`budget` must be a time such as 30m, 2h, 1h30m or 1d, got {budget!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


# Lengths of moving averages

_WRITTEN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kM]?)\s*(%|steps?|images?|)")
_SHORTEST, _LONGEST = 0.005, 0.28  # of shares: the mean of all weights so far, γ = 0, has a relative length of 0.29
_WARMUP = 10


@dataclass(frozen=True)
class AverageLength:
    """ "10%", "5000steps" or "200kimages"; `value` is the share, the steps or the images."""

    unit: Literal["share", "steps", "images"]
    value: float

    @classmethod
    def parse(cls, text: str, name: str = "`ema_length`") -> "AverageLength":
        """`name` is how an error calls the text."""
        found = _WRITTEN.fullmatch(str(text).strip())
        number = float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]] if found else 0.0
        ending = found[3] if found else ""
        is_share = ending == "%" or (ending == "" and 0 < number < 1)
        if found is None or number <= 0 or (ending == "" and not is_share) or (is_share and found[2]):
            raise InvalidConfigError(
                f"{name} must be a share of the run (10% or 0.1), steps (5000steps) or images (200kimages), "
                f"got {text!r}"
            )
        if not is_share:
            if number < 1:
                raise InvalidConfigError(f"{name} must be at least 1 step or image, got {text!r}")
            return cls("steps" if ending.startswith("step") else "images", number)
        share = number / 100 if ending == "%" else number
        if not _SHORTEST <= share <= _LONGEST:
            raise InvalidConfigError(
                f"{name} must be from {_SHORTEST:.1%} to {_LONGEST:.0%} of the run, got {text!r}: the mean of all "
                f"weights of a run has a relative length of 28.9%"
            )
        return cls("share", share)

    def __str__(self) -> str:
        return f"{100 * self.value:.6g}%" if self.unit == "share" else f"{self.value:g}{self.unit}"

    def rate(self, step: int, batch_size: int, warmup: bool) -> float:
        """β of the update after step `step`, counted from 0."""
        if self.unit == "share":
            return (1 - 1 / (step + 1)) ** (power(self.value) + 1)
        steps = self.value if self.unit == "steps" else self.value / batch_size
        rate = max(0.0, 1 - 1 / max(steps, 1.0))
        return min(rate, (1 + step) / (_WARMUP + step)) if warmup else rate


def power(length: float) -> float:
    """γ of a relative length: the one root of σ_rel² (γ+2)² (γ+3) = γ + 1 that is at least 0."""
    low, high = 0.0, 1 / length
    for _ in range(200):  # σ_rel falls with γ
        middle = (low + high) / 2
        low, high = (middle, high) if relative_length(middle) > length else (low, middle)
    return (low + high) / 2


def relative_length(gamma: float) -> float:
    """σ_rel of γ."""
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


_RATIO = 1.1  # between the steps of two snapshots: profiles are alike at all scales, so the steps grow by a factor
_FIRST = 10


def is_snapshot(step: int) -> bool:
    """Whether the averages are written to disk after this step: about 24 times in each tenfold of the steps."""
    return step >= _FIRST and math.floor(math.log(step, _RATIO)) != math.floor(math.log(step - 1, _RATIO))


# What a new U-ViT starts as, and what new runs are trained with. The constants NEW are the switch: the evidence decides
# them. EARLIER is what a configuration, a preset or a file means that does not name them, so it never changes.

NEW_UVIT: dict[str, Any] = {"init_std": "unit", "residual_scaling": 0.3}
"""Defaults of `sl.UViT`."""
NEW_RUN: dict[str, Any] = {"optimizer": "muon", "optimizer_options": {"momentum": 0.9}, "lr": 8e-3, "warmup": 20}
"""Fields of the optimiser in runs of U-ViTs below a width of 256 that `scalelong train` sizes."""
EARLIER: dict[str, Any] = {"init_std": "unit", "residual_scaling": "none"}


def new_uvit_options() -> dict[str, Any]:
    """Model options that a new run must name, since its configuration would mean others without them."""
    return {name: value for name, value in NEW_UVIT.items() if value != EARLIER[name]}


# The files of a run folder, and the titles of scores

CONFIG = "config.yaml"
DATA = "data.json"
RUN = "run.json"
ENVIRONMENT = "environment.json"
README = "README.md"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
ROLLBACKS = "rollbacks.json"
SCORES = "scores.jsonl"
TRACKER_ID, MLFLOW_ID = "tracker_id.txt", "mlflow_id.txt"
CHECKPOINTS, SAMPLES, IMAGES, AVERAGES, TENSORBOARD = "checkpoints", "samples", "images", "averages", "tensorboard"

VARIANT, DIVERGED = "variant.json", "diverged.json"
"""What `compare` adds: which variant a run is, and why it ended early."""

SCORE_TITLES = {
    "frechet": "Fréchet distance",
    "precision": "precision",
    "recall": "recall",
    "copies": "near-copies",
}
"""By the name that files and metrics use. The first one decides the order of a comparison: lower is better."""

ANCHOR_TITLES = {
    "real": "held-out real images",
    "blurred": "blurred images",
    "shuffled": "images with shuffled patches",
}
