"""The configuration of a run: frozen dataclasses, converted and checked when they are built, and their way to YAML.

Each field has metadata: `help`, one sentence; `affects`, what a change of it changes; and the values that it may have.

    result    the trained weights: a run that has begun cannot go on with another value
    speed     time and memory, not the mathematics
    nothing   what is recorded, kept, or done in an emergency

Names are unique across the groups, so that each can be a flag. Files, flags and dictionaries come in through
`from_dict` and `with_values`.
"""

import dataclasses
import math
import operator
import os
import types
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import CannotReadError, InvalidConfigError, require
from ..files import read_fields
from ..optional import needs
from . import names
from .names import ADAMS, SAMPLERS, AverageLength, is_snapshot, seconds_of

GIBIBYTE = 1024**3
LARGEST = 2**62
"""The largest number that a field may hold: larger ones fit neither into seeds nor into floats."""

# Fields


def _field(default: Any, text: str, affects: Literal["result", "speed", "nothing"] = "result", **allowed: Any) -> Any:
    """`allowed`: the bounds `low` (inclusive), `above` and `below`, or the `choices` of a text."""
    about = {"help": text, "affects": affects, **allowed}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


class Checked:
    """Brings every field to its type and checks it. YAML knows no tuples and reads 1e-4 as a text."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = _converted(getattr(self, entry.name), _hints(type(self))[entry.name], entry.name)
            object.__setattr__(self, entry.name, value)
            for number in value if isinstance(value, tuple) else (value,):
                _check(number, entry)
        self.check()

    def check(self) -> None:
        """What one field asks of another."""


def _converted(value: Any, hint: Any, name: str) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, hint):  # pyright: ignore[reportArgumentType]
        return value
    if origin in (Union, types.UnionType):
        (inner,) = (option for option in options if option is not type(None))
        return None if value is None else _converted(value, inner, name)
    if origin is Literal:
        if name == "precision" and value in (False, "no"):  # YAML reads accelerate's name for float32 as false
            value = "fp32"
        if value in options:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [options[0]] * len(value) if options[-1] is ... else list(options)
        if len(kinds) == len(value):
            return tuple(_converted(entry, kind, name) for entry, kind in zip(value, kinds, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {str(key): entry for key, entry in value.items()}
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    elif hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    elif name == "output_start" and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    wanted = f"one of {', '.join(options)}" if origin is Literal else getattr(hint, "__name__", str(hint))
    raise InvalidConfigError(f"`{name}` must be {wanted}, got {value!r}")


def _check(value: Any, entry: dataclasses.Field[Any]) -> None:
    name, about = entry.name, entry.metadata
    if "choices" in about and value is not None:
        require(value in about["choices"], f"`{name}` must be one of {', '.join(about['choices'])}, got {value!r}")
    if isinstance(value, str):
        require(bool(value), f"`{name}` must not be empty")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    require(math.isfinite(value) and abs(value) <= LARGEST, f"`{name}` must be a number up to 2^62, got {value!r}")
    for bound, (holds, words) in BOUNDS.items():
        limit = about.get(bound)
        require(limit is None or holds(value, limit), f"`{name}` must be {words} {limit}, got {value!r}")


BOUNDS = {"low": (operator.ge, "at least"), "above": (operator.gt, "above"), "below": (operator.lt, "below")}


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Checked):
    """How the images are read."""

    size: int | None = _field(None, "Height and width; None takes those of the data.", low=1)
    channels: int | None = _field(None, "1 or 3; None takes those of the data.", low=1)
    flip: bool = _field(False, "Mirror every other image, at random.")
    held_out: int = _field(0, "Images kept apart for the held-out loss.", low=0)
    skip_broken: bool = _field(False, "Go on without images that cannot be read, however many they are.")
    workers: int = _field(0, "Background workers that read images which do not fit into memory.", "speed", low=0)
    # Images that fit into memory have another fingerprint than those that do not.
    memory_limit: float = _field(2.0, "GiB of pixels up to which all images are decoded into memory.", low=0)
    image_cache: Literal["auto", "none"] = _field("auto", "Others are decoded once into a file, or when used.", "speed")
    autoencoder: str | None = _field(None, "A folder with diffusers' AutoencoderKL, to train on its latents.")

    def check(self) -> None:
        require(not (self.flip and self.autoencoder), "latents cannot be mirrored: leave out `flip` or `autoencoder`")

    def reading(self) -> dict[str, Any]:
        """The arguments that every call of `load_data` gets: they decide the fingerprint of the images."""
        limit, broken = int(self.memory_limit * GIBIBYTE), True if self.skip_broken else 0.01
        return {"size": self.size, "channels": self.channels, "memory_limit": limit, "skip_broken": broken}


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Checked):
    """The noise process, the objective and the condition."""

    schedule: names.Schedule = _field("vp", "VP-SDE, DDPM's, the cosine, Stable Diffusion's, a flow, or EDM's.")
    prediction: names.Prediction = _field("epsilon", "ε, v or x_0; flow goes with flow and flow-logit, edm with edm.")
    loss_weighting: names.Weighting = _field("none", '"min-snr" weighs each image by its noise level (Min-SNR-γ).')
    min_snr_gamma: float = _field(5.0, "γ of Min-SNR: the largest weight of an error in x_0.", above=0)
    condition: names.Condition = _field("none", '"class" trains on labels, "text" on captions.')
    condition_dropout: float = _field(0.1, "Share of conditions that are dropped, for guidance.", low=0, below=1)

    def check(self) -> None:
        names.require_prediction(self.prediction, self.schedule)
        require(
            self.loss_weighting == "none" or self.prediction in ("epsilon", "v", "x0"),
            f"`loss_weighting` {self.loss_weighting} is for networks that predict epsilon, v or x0; "
            f"{self.prediction} has weights of its own",
        )


@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """How captions become tokens, for the condition "text"."""

    text_encoder: str = _field("words", '"words", which needs nothing, or a folder with an encoder of transformers.')
    text_length: int = _field(16, "Tokens of a text.", low=1)
    text_dim: int = _field(64, "Numbers per token.", low=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """The optimiser, its rate over time, clipping, and the moving average of the weights."""

    optimizer: str = _field("adamw", f"{', '.join(get_args(names.Optimizer))}, or package.module:Class.")
    optimizer_options: dict[str, Any] = _field({}, "Further arguments of the optimiser.")
    lr: float = _field(2e-4, "Learning rate.", low=0)
    weight_decay: float = _field(0.03, "Weight decay.", low=0)
    betas: tuple[float, float] = _field((0.99, 0.999), "The two rates of Adam's averages.", low=0, below=1)
    warmup: int = _field(0, "Steps of linear warm-up.", low=0)
    decay: names.Decay = _field("constant", "After it: constant, to zero, or a schedule of diffusers.")
    decay_options: dict[str, Any] = _field({}, "Arguments of the last three.")
    decay_steps: int | None = _field(None, "Step at which the decay reaches zero; None takes `steps`.", low=1)
    clip: float | None = _field(None, "Largest gradient norm; None does not clip.", above=0)
    base_width: int | None = _field(None, "The width at which lr was tuned, for μP (docs/mup.md).", low=1)
    output_start: str = _field("strict", "Of μP's output layer: strict (1/√m), unit, zero, or so many times strict.")
    ema_rate: float = _field(0.9999, "Share of the moving average that is kept at each step.", low=0, below=1)
    # Of a fixed rate of 0.9999, 37 % of the random start are left after 10,000 steps.
    ema_warmup: bool = _field(True, "Begin with a shorter average: min(ema_rate, (1 + step) / (10 + step)).")
    ema_length: str | None = _field(None, "Instead of ema_rate: a share of the run (10%), 5000steps or 200kimages.")
    ema_lengths: tuple[str, ...] = _field((), "Further averages; of two shares (5% 10%) others can be made afterwards.")

    def check(self) -> None:
        known = get_args(names.Optimizer)
        require(
            ":" in self.optimizer or self.optimizer in known,
            f"`optimizer` must be one of {', '.join(known)}, or package.module:Class, got {self.optimizer!r}",
        )
        names.require_output_start(self.output_start)
        # μP's rule depends on the optimiser; Adam's and Muon's are known here.
        require(
            self.base_width is None or self.optimizer in (*ADAMS, "muon"),
            f"`base_width` scales rates by the rules of Adam and Muon, which do not hold for `optimizer` "
            f"{self.optimizer}: take one of {', '.join(ADAMS)}, muon, or leave `base_width` out",
        )
        require(
            self.base_width is None or self.optimizer in ("adamw", "muon") or self.weight_decay == 0,
            f"`base_width` scales the decay of weights by AdamW's rule; `optimizer` {self.optimizer} adds it to the "
            f"gradient: give `weight_decay` 0, or take adamw",
        )
        simple = self.decay in ("constant", "linear", "cosine")
        require(not (simple and self.decay_options), f"`decay` {self.decay} takes no `decay_options`")
        if self.ema_length is not None:
            AverageLength.parse(self.ema_length)
        lengths = [str(AverageLength.parse(length, "`ema_lengths`")) for length in self.ema_lengths]
        require(len(set(lengths)) == len(lengths), f"`ema_lengths` names a length twice: {', '.join(lengths)}")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Checked):
    """How the same mathematics is carried out."""

    precision: names.Precision = _field("auto", "auto takes bf16 where it is faster here, and the run keeps it.")
    accumulation: int = _field(1, "Parts into which a process divides its batch, to save memory.", "speed", low=1)
    compile: bool = _field(False, "Compile the network with torch.compile.", "speed")
    gradient_checkpointing: bool = _field(False, "Compute activations twice instead of storing them.", "speed")
    channels_last: bool | None = _field(None, "Memory layout; None takes channels-last for diffusers' UNets.")
    cpu: bool = _field(False, "Do not use an accelerator even if there is one.", "speed")
    tf32: bool = _field(False, "On NVIDIA GPUs, let float32 products use TF32: faster, with 10 bits.", "speed")
    cudnn_benchmark: bool = _field(False, "Let cuDNN try its convolutions and keep the fastest.", "speed")
    split_cores: bool | None = _field(None, "On a CPU, a core takes its own images; None: in larger U-ViTs.", "speed")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """When to save, and what to keep."""

    save_every: int = _field(5000, "Steps between checkpoints.", "nothing", low=1)
    keep_last: int = _field(2, "Checkpoints that are kept, besides the exceptions below.", "nothing", low=1)
    keep_every: int | None = _field(None, "Those at multiples of so many steps are kept for good.", "nothing", low=1)
    keep_best: names.KeepBest | None = _field(None, "By what the best is kept as checkpoints/best.", "nothing")
    patience: int = _field(0, "Stop after so many measurements without a better one; 0 never stops.", "nothing", low=0)

    def check(self) -> None:
        require(
            not self.patience or self.keep_best is not None,
            "`patience` waits for a better measurement: say of what, with `keep_best` held-out or frechet",
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Checked):
    """What to record. `metrics.jsonl` is always written."""

    log_every: int = _field(50, "Steps between lines of metrics.", "nothing", low=1)
    trackers: tuple[str, ...] = _field(("tensorboard",), "Trackers of accelerate: tensorboard, wandb, ...", "nothing")
    held_out_every: int | None = _field(None, "Steps between held-out losses; None takes save_every.", "nothing", low=1)
    samples_every: int | None = _field(None, "Between sample grids; None: save_every, 0: none.", "nothing", low=0)
    samples: int = _field(64, "Images in a grid.", "nothing", low=1)
    sampler: str = _field("dpm++", f"Sampler of the grids: {', '.join(SAMPLERS)}.", "nothing", choices=SAMPLERS)
    sampler_steps: int = _field(25, "Steps of the sampler.", "nothing", low=1)
    monitor_every: int | None = _field(None, "Steps between readings; None: 50 or more, 0: none.", "nothing", low=0)
    scores_every: int = _field(0, "Steps between Fréchet distances, precision and recall; 0: none.", "nothing", low=0)
    scores_images: int = _field(500, "Images that are made for the scores.", "nothing", low=10)


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Checked):
    """What to do when the loss collapses, or when the loss or the gradient is no longer finite."""

    on_collapse: names.OnCollapse = _field("stop", "Or go back to a checkpoint with a lower rate, or go on.", "nothing")
    on_nan: names.OnNaN = _field("stop", "The same for numbers that are not finite.", "nothing")
    max_rollbacks: int = _field(3, "Rollbacks of a run, of both kinds together.", "nothing", low=0)
    rollback_factor: float = _field(0.5, "The rate is multiplied by this at each rollback.", "nothing", above=0)

    def check(self) -> None:
        require(self.rollback_factor <= 1, f"`rollback_factor` must be at most 1, got {self.rollback_factor}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """A run: which data, which model, which scaling, how long. The groups hold the rest."""

    data: str = _field("digits", "A folder of images, a file, or the name of a data set.")
    model: str = _field("uvit", "uvit, unet/small, uvit/cifar10-s2, ..., diffusers' config.json, or module:factory.")
    model_options: dict[str, Any] = _field({}, "Arguments of the model. Size, channels and classes come from the data.")
    scaling: str = _field("none", "Of the long skips: none, merge_norm, cs:0.7, ls, ... (docs/methods.md).")
    start_from: str | None = _field(None, "Weights: a run folder, one of diffusers, or the authors' nnet_ema.pth.")
    steps: int = _field(10_000, "Steps of training.", low=1)
    batch_size: int = _field(128, "Images in a step, over all processes.", low=1)
    budget: str | None = _field(None, "Time to train: 30m, 2h (an hour on a CPU, a day on a GPU).", "nothing")
    seed: int = _field(0, "Seed of all random numbers.", low=0)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def check(self) -> None:
        require(self.budget is None or seconds_of(self.budget) > 0, "`budget` must be above zero")
        names.require_sampler(self.logging.sampler, self.logging.sampler_steps, self.diffusion.schedule)
        best = self.checkpoints.keep_best
        require(
            best != "held-out" or self.images.held_out > 0,
            "`keep_best` held-out needs images that are not trained on: give `held_out`, such as 100",
        )
        require(
            best != "frechet" or self.logging.scores_every > 0,
            "`keep_best` frechet needs scores: give `scores_every`, such as 1000",
        )

    @property
    def network(self) -> str:
        """The model and its sizes in words."""
        words = {"dim": "width", "depth": "depth", "patch_size": "patches of", "block_out_channels": "widths"}
        sizes = [f"{word} {self.model_options[name]}" for name, word in words.items() if name in self.model_options]
        return f"{self.model}{' of ' * bool(sizes)}{', '.join(sizes)}"

    def is_due(self, every: int, step: int) -> bool:
        """Whether something that happens every so many steps (0: never), and at the end, follows this step."""
        return every > 0 and (step % every == 0 or step == self.steps)

    def something_is_due(self, step: int) -> bool:
        """Whether metrics, a held-out loss, samples, scores, a snapshot or a checkpoint follow this step."""
        recorded = (self.logging.log_every, self.held_out_every, self.samples_every, self.logging.scores_every)
        if any(self.is_due(every, step) for every in (*recorded, self.monitor_every, self.checkpoints.save_every)):
            return True
        return bool(self.optimizer.ema_lengths) and is_snapshot(step)

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


# From dictionaries and YAML, and back


def from_dict(values: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """A configuration from nested dictionaries. What is left out keeps the values of `base`."""
    rank = values.get("lora", 0)  # a field of earlier versions
    require(
        rank == 0,
        f"`lora` {rank}: adapters are no longer trained or read here; use peft in a loop of your own",
    )
    values = {name: value for name, value in values.items() if name != "lora"}
    return _updated(TrainConfig() if base is None else base, values, "")


RETIRED = {"": {"lora"}, "images": {"image_cache_limit"}}
"""Fields of earlier versions by group: files may have them, and they change nothing."""


def _updated(base: Any, values: dict[str, Any], group: str) -> Any:
    known = _hints(type(base))
    values = {name: value for name, value in values.items() if name not in RETIRED.get(group, ())}
    unknown = sorted(set(map(str, values)) - set(known))
    if unknown:
        where = f" in {group}" if group else ""
        raise InvalidConfigError(f"unknown field {', '.join(unknown)}{where}; known: {', '.join(known)}")
    changes = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(known[name]):
            require(isinstance(value, dict), f"{name} must be a group of fields, got {value!r}")
            value = _updated(getattr(base, name), value, name)
        changes[name] = value
    return dataclasses.replace(base, **changes)


def with_values(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """The configuration with these values, by dotted name: {"optimizer.lr": 0.1, "model_options.depth": 8}."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        group, _, name = path.partition(".")
        if not name:
            nested[group] = value
            continue
        there = getattr(config, group, None)
        nested.setdefault(group, dict(there) if isinstance(there, dict) else {})[name] = value
    return from_dict(nested, config)


def load_config(path: str | PathLike[str], base: TrainConfig | None = None) -> TrainConfig:
    """Read a YAML file, for example the `config.yaml` of a run folder."""
    if not str(path) or not Path(path).exists():
        raise InvalidConfigError(f"there is no configuration file {str(path)!r}: give the path of a YAML file")
    try:
        values = read_fields(path)
    except CannotReadError as error:
        raise InvalidConfigError(str(error)) from error
    try:
        return from_dict(values, base)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values; tuples become lists, as in YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def dump_config(config: TrainConfig) -> str:
    """The configuration as YAML."""
    yaml = needs("yaml", "train", "reading and writing configurations")
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# What changed between two configurations


def config_fields(kind: Any = TrainConfig, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every field of a configuration by its dotted name; groups themselves are left out."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for entry in dataclasses.fields(kind):
        hint = _hints(kind)[entry.name]
        is_group = dataclasses.is_dataclass(hint)
        found |= config_fields(hint, f"{entry.name}.") if is_group else {f"{prefix}{entry.name}": entry}
    return found


def field_paths() -> dict[str, str]:
    """The dotted name of every field: {"lr": "optimizer.lr", "steps": "steps", ...}."""
    return {path.rpartition(".")[2]: path for path in config_fields()}


def result_values(config: TrainConfig) -> dict[str, Any]:
    """The values that the trained weights depend on, by dotted name."""
    apart = {name for name, entry in config_fields().items() if entry.metadata["affects"] != "result"}
    return {name: value for name, value in flatten(to_dict(config)).items() if name not in apart}


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, by dotted name: {"optimizer.lr": (0.1, 0.2)}."""
    return _differing(flatten(to_dict(before)), flatten(to_dict(after)))


def conflicting_changes(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The differences with which a run cannot go on: it would be a different run."""
    changed = _differing(result_values(before), result_values(after))
    # A decay that ends with the run makes the rate of every step depend on the number of steps.
    if after.optimizer.decay in ("constant", "piecewise_constant") or after.optimizer.decay_steps is not None:
        changed.pop("steps", None)
    return changed


def _differing(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}
