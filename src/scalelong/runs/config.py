"""Everything that defines a run, as plain data. Names are unique across the groups, so that they serve as flags."""

import dataclasses
import math
import re
import types
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..diffusion.solvers import SAMPLERS, require_sampler
from ..errors import CannotReadError, InvalidConfigError
from ..files import read_fields
from ..mup import require_output_start
from ..noise import NoiseProcess, Prediction, Schedule, Weighting, require_prediction
from ..optional import needs
from ..scaling import as_scaling
from .averages import AverageLength, is_snapshot

Decay = Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts", "piecewise_constant"]
Optimizer = Literal[
    "adamw", "adam", "sgd", "rmsprop", "radam", "nadam", "adamax", "adagrad", "adafactor", "schedule-free"
]
ADAMS = ("adamw", "adam", "radam", "nadam", "adamax")
"""Those whose update has the size of the rate, whatever the gradient."""
Precision = Literal["no", "bf16", "fp16"]
Condition = Literal["none", "class", "text"]
OnCollapse = Literal["stop", "rollback", "ignore"]
KeepBest = Literal["held-out", "frechet"]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidConfigError(message)


LARGEST = 2**62
"""Of any number: larger ones fit neither into seeds nor into floats."""


def require_at_least(low: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            require(not value > LARGEST, f"{name} must be at most 2^62, got a number beyond that")
            require(math.isfinite(value) and value >= low, f"{name} must be at least {low}, got {value!r}")


def require_choice(name: str, value: Any, choices: Any) -> None:
    known = get_args(choices)
    require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(budget: str) -> float:
    """30m, 2h, 1h30m, 0.5d as seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", budget.lower())
    whole = "".join(f"{number}{unit}" for number, unit in parts)
    if not parts or whole != "".join(budget.lower().split()):
        raise InvalidConfigError(f"--budget must be a time such as 30m, 2h, 1h30m or 1d, got {budget!r}")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


GIBIBYTE = 1024**3


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """How the images are read."""

    size: int | None = None
    """Height and width; None takes those of the data."""
    channels: int | None = None
    """1 or 3; None takes those of the data."""
    flip: bool = False
    """Mirror every other image, at random."""
    held_out: int = 0
    """Images kept apart for the held-out loss."""
    workers: int = 0
    """Background workers that read images which do not fit into memory."""
    memory_limit: float = 2.0
    """GiB of pixels up to which all images are decoded into memory."""
    image_cache: str = "auto"
    """Images beyond that are decoded once into a file, which is mapped: "auto" for one in the cache (SCALELONG_CACHE),
    a folder, or "none" to decode them at every step."""
    image_cache_limit: float | None = None
    """Largest such file in GiB; None takes half of what is free on the disk."""
    autoencoder: str | None = None
    """A folder with diffusers' AutoencoderKL: train on its latents. The images are encoded once."""

    def __post_init__(self) -> None:
        require(not (self.flip and self.autoencoder), "latents cannot be mirrored: leave out flip or the autoencoder")
        require_at_least(1, size=self.size, channels=self.channels)
        require_at_least(0, held_out=self.held_out, workers=self.workers, memory_limit=self.memory_limit)
        require_at_least(0, image_cache_limit=self.image_cache_limit)
        require(bool(self.image_cache), "image_cache must be 'auto', 'none' or a folder")

    def reading(self) -> dict[str, Any]:
        """What `load_data` is to know in any case. Whether the images fit into memory decides their fingerprint."""
        return {"size": self.size, "channels": self.channels, "memory_limit": int(self.memory_limit * GIBIBYTE)}


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The noise process, the objective and the condition."""

    schedule: Schedule = "vp"
    """The authors' continuous-time VP-SDE, DDPM's linear, the cosine, (for latents) Stable Diffusion's; a rectified
    flow with uniform or logit-normal times, or EDM's."""
    prediction: Prediction = "epsilon"
    """ε, v or x_0; "flow", the velocity, with the schedules flow and flow-logit; "edm" with edm."""
    loss_weighting: Weighting = "none"
    """"min-snr" weighs the loss of each image by its noise level (Min-SNR-γ)."""
    min_snr_gamma: float = 5.0
    """γ of Min-SNR: the largest weight of an error in x_0."""
    condition: Condition = "none"
    """"class" trains on labels, "text" on captions."""
    condition_dropout: float = 0.1
    """Share of the images whose condition is dropped, for classifier-free guidance. 0 leaves no null class."""

    def __post_init__(self) -> None:
        NoiseProcess(self.schedule)
        require_prediction(self.prediction, self.schedule)
        require_choice("loss_weighting", self.loss_weighting, Weighting)
        require_at_least(0, min_snr_gamma=self.min_snr_gamma)
        require(self.min_snr_gamma > 0, "min_snr_gamma must be above 0")
        require(
            self.loss_weighting == "none" or self.prediction in ("epsilon", "v", "x0"),
            f"--loss-weighting {self.loss_weighting} is for networks that predict epsilon, v or x0; "
            f"{self.prediction} has weights of its own",
        )
        require_choice("condition", self.condition, Condition)
        require(0 <= self.condition_dropout < 1, f"condition_dropout must be in [0, 1), got {self.condition_dropout}")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How captions become tokens, for the condition "text"."""

    text_encoder: str = "words"
    """"words", which needs nothing, or a folder with a text encoder of transformers, such as CLIP's."""
    text_length: int = 16
    """Tokens of a text."""
    text_dim: int = 64
    """Numbers per token."""

    def __post_init__(self) -> None:
        require_at_least(1, text_length=self.text_length, text_dim=self.text_dim)
        require(bool(self.text_encoder), "text_encoder must be 'words' or a folder")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser, its rate over time, clipping, and the moving average of the weights."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, rmsprop, radam, nadam, adamax, adagrad, adafactor, schedule-free (of the package schedulefree),
    or package.module:Class. It gets lr, and betas and weight_decay if it takes them."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimiser."""
    lr: float = 2e-4
    weight_decay: float = 0.03
    betas: tuple[float, float] = (0.99, 0.999)
    warmup: int = 0
    """Steps of linear warm-up."""
    decay: str = "constant"
    """After the warm-up: constant, linear, cosine, polynomial, cosine_with_restarts, piecewise_constant, or a scheduler
    of torch's, torch.optim.lr_scheduler:StepLR."""
    decay_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the last four."""
    decay_steps: int | None = None
    """Step at which the decay reaches zero; None takes `steps`."""
    clip: float | None = None
    """Largest gradient norm."""
    base_width: int | None = None
    """The width at which lr was tuned: μP takes it to the width of the network, so that it serves there as well
    (docs/mup.md). None is the standard parametrisation; so is the network's own width."""
    output_start: str = "strict"
    """With base_width, how the output layer starts: strict (1/√m, m = width / base_width), unit (as drawn), zero, or a
    number, that many times strict."""
    ema_rate: float = 0.9999
    ema_warmup: bool = True
    """Begin with a shorter average, min(ema_rate, (1 + step) / (10 + step)), so that the random start is forgotten: of
    a fixed rate of 0.9999, 37 % of it are left after 10,000 steps."""
    ema_length: str | None = None
    """Length of the average, instead of ema_rate: a share of the run so far (10%), steps (5000steps) or images
    (200kimages)."""
    ema_lengths: tuple[str, ...] = ()
    """Averages of other lengths that are kept beside it. Of two shares or more (5% 10%) snapshots are written, from
    which `scalelong ema` makes any other share after training."""

    def __post_init__(self) -> None:
        require_at_least(0, lr=self.lr, weight_decay=self.weight_decay, warmup=self.warmup, clip=self.clip)
        require_at_least(1, decay_steps=self.decay_steps)
        require(self.clip is None or self.clip > 0, "clip must be above 0; leave it out (None) for no clipping")
        require(all(0 <= beta < 1 for beta in self.betas), f"betas must be in [0, 1), got {self.betas}")
        require(0 <= self.ema_rate < 1, f"ema_rate must be in [0, 1), got {self.ema_rate}")
        if ":" not in self.decay:
            require_choice("decay", self.decay, Decay)
        if ":" not in self.optimizer:
            require_choice("optimizer", self.optimizer, Optimizer)
        require_at_least(1, base_width=self.base_width)
        require_output_start(self.output_start)
        if self.base_width is not None:
            self._require_adam()
        simple = self.decay in ("constant", "linear", "cosine")
        require(not (simple and self.decay_options), f"--decay {self.decay} takes no --decay-options")
        if self.ema_length is not None:
            AverageLength.parse(self.ema_length)
        names = [str(AverageLength.parse(length, "--ema-lengths")) for length in self.ema_lengths]
        require(len(set(names)) == len(names), f"--ema-lengths names a length twice: {', '.join(names)}")

    def _require_adam(self) -> None:
        """The rule of μP depends on the optimiser, and the one that is known here is Adam's."""
        require(
            self.optimizer in ADAMS,
            f"--base-width scales rates by Adam's rule, which does not hold for --optimizer {self.optimizer}: take "
            f"one of {', '.join(ADAMS)}, or leave --base-width out",
        )
        require(
            self.optimizer == "adamw" or self.weight_decay == 0,
            f"--base-width scales the decay of weights by AdamW's rule; --optimizer {self.optimizer} adds it to the "
            f"gradient: give --weight-decay 0, or take adamw",
        )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """How the same mathematics is carried out."""

    precision: Precision = "no"
    """Mixed precision; "no" is float32."""
    accumulation: int = 1
    """Parts into which each process divides its share of a batch, to save memory."""
    compile: bool = False
    gradient_checkpointing: bool = False
    channels_last: bool | None = None
    """Memory layout; None takes channels-last for diffusers' UNets."""
    cpu: bool = False
    """Do not use an accelerator even if there is one."""
    split_cores: bool | None = None
    """On a CPU, let each core take its own images through the whole network, in chunks that fit its cache, instead of
    sharing every operation; None does so for a U-ViT that is not small. Not for networks that mix images (batch norm)
    or draw numbers."""

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, Precision)
        require_at_least(1, accumulation=self.accumulation)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    save_every: int = 5000
    keep_last: int = 2
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are kept for good."""
    keep_best: KeepBest | None = None
    """Keep the checkpoint with the best held-out loss or Fréchet distance as checkpoints/best; both are measured with
    the averaged weights (--held-out-every, --scores-every)."""
    patience: int = 0
    """Stop after so many measurements without a better one; 0 never stops."""

    def __post_init__(self) -> None:
        require_at_least(1, save_every=self.save_every, keep_last=self.keep_last, keep_every=self.keep_every)
        require_at_least(0, patience=self.patience)
        if self.keep_best is not None:
            require_choice("keep_best", self.keep_best, KeepBest)
        require(
            not self.patience or self.keep_best is not None,
            "--patience waits for a better measurement: say of what, with --keep-best held-out or --keep-best frechet",
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What to record. `metrics.jsonl` is always written."""

    log_every: int = 50
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers of accelerate: tensorboard, wandb, ..."""
    held_out_every: int | None = None
    """Steps between held-out losses; None takes save_every."""
    samples_every: int | None = None
    """Steps between sample grids; None takes save_every, 0 makes none."""
    samples: int = 64
    """Images in a grid."""
    sampler: str = "dpm++"
    sampler_steps: int = 25
    monitor_every: int | None = None
    """Steps between readings of κ, features, gradients and updates, with alarms; None takes 50, and more in long runs,
    which costs less than 1 %. 0 for none."""
    scores_every: int = 0
    """Steps between Fréchet distance, precision and recall; 0 for none."""
    scores_images: int = 500
    """Images that are made for them."""

    def __post_init__(self) -> None:
        require_at_least(1, log_every=self.log_every, held_out_every=self.held_out_every, samples=self.samples)
        require_at_least(0, samples_every=self.samples_every, scores_every=self.scores_every)
        require_at_least(0, monitor_every=self.monitor_every)
        require_at_least(10, scores_images=self.scores_images)
        require_at_least(1, sampler_steps=self.sampler_steps)
        require(self.sampler in SAMPLERS, f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r}")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What to do when the loss collapses, or when the loss or the gradient is no longer finite."""

    on_collapse: OnCollapse = "stop"
    """When the loss goes back to that of an output of zero and stays there: stop with a diagnosis, go back to the last
    checkpoint from before the trouble and on with a lower rate, or say so and go on."""
    on_nan: Literal["stop", "rollback"] = "stop"
    """The same for numbers that are not finite, whose update is never applied."""
    max_rollbacks: int = 3
    """Rollbacks of a run, of both kinds together."""
    rollback_factor: float = 0.5
    """The rate is multiplied by this at each rollback."""

    def __post_init__(self) -> None:
        require_choice("on_collapse", self.on_collapse, OnCollapse)
        require_choice("on_nan", self.on_nan, Literal["stop", "rollback"])
        require_at_least(0, max_rollbacks=self.max_rollbacks)
        require(0 < self.rollback_factor <= 1, f"rollback_factor must be in (0, 1], got {self.rollback_factor}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: which data, which model, which scaling, how long. The groups hold the rest."""

    data: str = "digits"
    """A folder of images, a file, or the name of a data set."""
    model: str = "uvit"
    """"uvit", a preset ("uvit/cifar10-s2", "unet/cifar10"), diffusers' config.json, or "package.module:factory"."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model. Size, channels and classes come from the data."""
    scaling: str = "none"
    """Scaling of the long skips: none, uniform, cs, cs:0.6, ls, ..."""
    start_from: str | None = None
    """Weights to begin with (also --from): a run folder, a folder of diffusers, or nnet_ema.pth of U-ViT's authors."""
    lora: int = 0
    """Rank of LoRA adapters, with --from: they are trained instead of the weights. 0 for none."""
    steps: int = 10_000
    batch_size: int = 128
    """Images in a step, over all processes."""
    budget: str | None = None
    """Time for which `scalelong train` chooses what is not given: 30m, 2h, 1d. Left out, an hour on a CPU and a day on
    a GPU. A recipe keeps its sizes and gets the steps."""
    seed: int = 0
    images: ImagesConfig = field(default_factory=ImagesConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        require_at_least(1, steps=self.steps, batch_size=self.batch_size)
        require_at_least(0, seed=self.seed)
        require(self.budget is None or seconds_of(self.budget) > 0, "--budget must be above zero")
        as_scaling(self.scaling)
        require_at_least(0, lora=self.lora)
        require(
            not self.lora or self.optimizer.base_width is None,
            "--base-width is for networks that are trained whole: leave it or --lora out",
        )
        require(self.start_from != "", "--from must name weights, got an empty text")
        require(
            not self.lora or self.start_from is not None, "--lora adapts weights that exist: say which, with --from"
        )
        require_sampler(self.logging.sampler, self.logging.sampler_steps, self.diffusion.schedule)
        best = self.checkpoints.keep_best
        require(
            best != "held-out" or self.images.held_out > 0,
            "--keep-best held-out needs images that are not trained on: give --held-out, such as 100",
        )
        require(
            best != "frechet" or self.logging.scores_every > 0,
            "--keep-best frechet needs scores: give --scores-every, such as 1000",
        )
        require(bool(self.data), "data must name a folder, a file or a data set")
        require(bool(self.model), "model must name a model")

    def something_is_due(self, step: int) -> bool:
        """Whether metrics, a held-out loss, samples, scores or a checkpoint follow this step."""
        intervals = (
            self.logging.log_every,
            self.held_out_every,
            self.samples_every,
            self.logging.scores_every,
            self.monitor_every,
            self.checkpoints.save_every,
        )
        if self.optimizer.ema_lengths and is_snapshot(step):
            return True
        return step == self.steps or any(every and step % every == 0 for every in intervals)

    @property
    def held_out_every(self) -> int:
        return self.logging.held_out_every or self.checkpoints.save_every

    @property
    def monitor_every(self) -> int:
        """0 for no monitor. A long run has a thousand readings."""
        every = self.logging.monitor_every
        return max(50, self.steps // 1000) if every is None else every

    @property
    def samples_every(self) -> int:
        """0 for no samples."""
        every = self.logging.samples_every
        return self.checkpoints.save_every if every is None else every


# A configuration as YAML, and what changed between two of them

MAY_CHANGE = (
    "steps",
    "budget",
    "images.workers",
    "images.image_cache",
    "hardware.accumulation",
    "hardware.compile",
    "hardware.gradient_checkpointing",
    "hardware.cpu",
    "hardware.split_cores",
    "checkpoints.",
    "logging.",
    "guard.",
)
"""Fields that may change while a run goes on: the mathematics of the steps already done stays the same."""


FORMER_DEFAULTS: dict[str, Any] = {"optimizer.ema_warmup": False}
"""Defaults of earlier versions. A run that began with one goes on with it."""


ADDED: dict[str, Any] = {
    "start_from": None,
    "lora": 0,
    "optimizer.optimizer": "adamw",
    "optimizer.ema_length": None,
    "optimizer.ema_lengths": [],
    "optimizer.base_width": None,
    "optimizer.output_start": "strict",
    "diffusion.loss_weighting": "none",
    "diffusion.min_snr_gamma": 5.0,
    "images.memory_limit": 2.0,
}
"""Fields that earlier versions did not have, with the values at which nothing is new: a run keeps its folder's name."""


def with_former_defaults(config: TrainConfig, before: TrainConfig | None = None) -> TrainConfig:
    """The configuration with former defaults where it has today's; given that of a run, where the run has them."""
    today, now = flatten(to_dict(TrainConfig())), flatten(to_dict(config))
    began = FORMER_DEFAULTS if before is None else flatten(to_dict(before))
    for name, former in FORMER_DEFAULTS.items():
        if now[name] == today[name] and began[name] == former:
            config = with_values(config, {name: former})
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values; tuples become lists, as in YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def from_dict(values: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """A configuration from nested dictionaries. What is left out keeps the values of `base`."""
    return _update(TrainConfig() if base is None else base, values, "")


def load_config(path: str | PathLike[str], base: TrainConfig | None = None) -> TrainConfig:
    """Read a YAML file, for example the `config.yaml` of a run folder."""
    if not str(path) or not Path(path).exists():
        raise InvalidConfigError(f"there is no configuration file {str(path)!r}: give --config the path of a YAML file")
    try:
        values = read_fields(path)
    except CannotReadError as error:
        raise InvalidConfigError(str(error)) from error
    try:
        return from_dict(values, base)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error}") from error


def dump_config(config: TrainConfig) -> str:
    return _yaml().safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, by dotted name: {"optimizer.lr": (0.1, 0.2)}."""
    old, new = flatten(to_dict(before)), flatten(to_dict(after))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def conflicting_changes(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The differences with which a run cannot go on: it would be a different run."""
    changed = differences(before, after)
    # A decay that ends with the run makes the rate of every step depend on the number of steps.
    ends = after.optimizer.decay not in ("constant", "piecewise_constant") and ":" not in after.optimizer.decay
    tied = ends and after.optimizer.decay_steps is None
    return {
        name: pair for name, pair in changed.items() if not name.startswith(MAY_CHANGE) or (name == "steps" and tied)
    }


def _update(base: Any, values: dict[str, Any], prefix: str) -> Any:
    hints = get_type_hints(type(base))
    unknown = sorted(set(map(str, values)) - set(hints))
    if unknown:
        where = f" in {prefix[:-1]}" if prefix else ""
        raise InvalidConfigError(f"unknown field {', '.join(unknown)}{where}; known: {', '.join(hints)}")
    changes = {}
    for name, value in values.items():
        current = getattr(base, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise InvalidConfigError(f"{prefix}{name} must be a group of fields, got {value!r}")
            changes[name] = _update(current, value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(value, hints[name], f"{prefix}{name}")
    return dataclasses.replace(base, **changes)


NUMBERS_TOO = ("optimizer.output_start",)
"""Texts that may be a number, which YAML reads as one."""


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value as the type that the field asks for; YAML knows no tuples and reads 1e-4 as a string."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (inner,) = (option for option in options if option is not type(None))
        return _convert(value, inner, name)
    if origin is Literal:
        if value is False and "no" in options:  # YAML reads a bare `no` as false
            value = "no"
        if value in options:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [options[0]] * len(value) if options[-1] is ... else list(options)
        if len(kinds) == len(value):
            return tuple(_convert(entry, kind, name) for entry, kind in zip(value, kinds, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {str(key): entry for key, entry in value.items()}
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    elif name in NUMBERS_TOO and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    wanted = " or ".join(map(repr, options)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise InvalidConfigError(f"{name} must be {wanted}, got {value!r}")


def field_paths() -> dict[str, str]:
    """The dotted name of every field: {"lr": "optimizer.lr", "steps": "steps", ...}."""
    # Dictionaries are empty by default, and flattened to nothing.
    empty = ("model_options", "optimizer.optimizer_options", "optimizer.decay_options")
    flat = flatten(to_dict(TrainConfig())) | dict.fromkeys(empty)
    return {path.rpartition(".")[2]: path for path in flat}


def with_values(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """The configuration with these values, by dotted name."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return from_dict(nested, config)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _yaml() -> Any:
    return needs("yaml", "train", "reading and writing configurations")
