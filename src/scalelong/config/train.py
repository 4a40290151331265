"""The configuration of a run: frozen dataclasses, checked when they are built.

Each field has metadata: `help`, one sentence, and `affects`, what a change of it changes.

    result    the trained weights: a run that has begun cannot go on with another value
    speed     time and memory, not the mathematics
    nothing   what is recorded, kept, or done in an emergency

Names are unique across the groups, so that each can be a flag.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import InvalidConfigError
from .names import (
    ADAMS,
    SAMPLERS,
    AverageLength,
    Condition,
    Decay,
    KeepBest,
    OnCollapse,
    OnNaN,
    Optimizer,
    Precision,
    Prediction,
    Schedule,
    Weighting,
    is_snapshot,
    require_output_start,
    require_prediction,
    require_sampler,
    require_schedule,
    seconds_of,
)

Affects = Literal["result", "speed", "nothing"]
GIBIBYTE = 1024**3
LARGEST = 2**62
"""The largest number that a field may hold: larger ones fit neither into seeds nor into floats."""


def _field(default: Any, text: str, affects: Affects = "result") -> Any:
    about = {"help": text, "affects": affects}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidConfigError(message)


def require_at_least(low: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            require(not value > LARGEST, f"`{name}` must be at most 2^62, got a number beyond that")
            require(math.isfinite(value) and value >= low, f"`{name}` must be at least {low}, got {value!r}")


def require_choice(name: str, value: Any, choices: Any) -> None:
    known = get_args(choices)
    require(value in known, f"`{name}` must be one of {', '.join(known)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """How the images are read."""

    size: int | None = _field(None, "Height and width; None takes those of the data.")
    channels: int | None = _field(None, "1 or 3; None takes those of the data.")
    flip: bool = _field(False, "Mirror every other image, at random.")
    held_out: int = _field(0, "Images kept apart for the held-out loss.")
    skip_broken: bool = _field(False, "Go on without images that cannot be read, however many they are.")
    workers: int = _field(0, "Background workers that read images which do not fit into memory.", "speed")
    # Images that fit into memory have another fingerprint than those that do not.
    memory_limit: float = _field(2.0, "GiB of pixels up to which all images are decoded into memory.")
    image_cache: str = _field(
        "auto",
        'Images beyond the memory limit are decoded once into a file, which is mapped: "auto" for one in the cache '
        '(SCALELONG_CACHE), a folder, or "none" to decode them at every step.',
        "speed",
    )
    image_cache_limit: float | None = _field(
        None, "Largest such file in GiB; None takes half of what is free on the disk.", "speed"
    )
    autoencoder: str | None = _field(
        None, "A folder with diffusers' AutoencoderKL: train on its latents. The images are encoded once."
    )

    def __post_init__(self) -> None:
        require(not (self.flip and self.autoencoder), "latents cannot be mirrored: leave out `flip` or `autoencoder`")
        require_at_least(1, size=self.size, channels=self.channels)
        require_at_least(0, held_out=self.held_out, workers=self.workers, memory_limit=self.memory_limit)
        require_at_least(0, image_cache_limit=self.image_cache_limit)
        require(bool(self.image_cache), "`image_cache` must be 'auto', 'none' or a folder")

    def reading(self) -> dict[str, Any]:
        """The arguments that every call of `load_data` gets: they decide the fingerprint of the images."""
        return {
            "size": self.size,
            "channels": self.channels,
            "memory_limit": int(self.memory_limit * GIBIBYTE),
            "skip_broken": True if self.skip_broken else 0.01,
        }


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The noise process, the objective and the condition."""

    schedule: Schedule = _field(
        "vp",
        "The authors' continuous-time VP-SDE, DDPM's linear, the cosine, (for latents) Stable Diffusion's; a rectified "
        "flow with uniform or logit-normal times, or EDM's.",
    )
    prediction: Prediction = _field(
        "epsilon", 'ε, v or x_0; "flow", the velocity, with the schedules flow and flow-logit; "edm" with edm.'
    )
    loss_weighting: Weighting = _field(
        "none", '"min-snr" weighs the loss of each image by its noise level (Min-SNR-γ).'
    )
    min_snr_gamma: float = _field(5.0, "γ of Min-SNR: the largest weight of an error in x_0.")
    condition: Condition = _field("none", '"class" trains on labels, "text" on captions.')
    condition_dropout: float = _field(
        0.1, "Share of the images whose condition is dropped, for classifier-free guidance. 0 leaves no null class."
    )

    def __post_init__(self) -> None:
        require_schedule(self.schedule)
        require_prediction(self.prediction, self.schedule)
        require_choice("loss_weighting", self.loss_weighting, Weighting)
        require_at_least(0, min_snr_gamma=self.min_snr_gamma)
        require(self.min_snr_gamma > 0, "`min_snr_gamma` must be above 0")
        require(
            self.loss_weighting == "none" or self.prediction in ("epsilon", "v", "x0"),
            f"`loss_weighting` {self.loss_weighting} is for networks that predict epsilon, v or x0; "
            f"{self.prediction} has weights of its own",
        )
        require_choice("condition", self.condition, Condition)
        require(0 <= self.condition_dropout < 1, f"`condition_dropout` must be in [0, 1), got {self.condition_dropout}")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How captions become tokens, for the condition "text"."""

    text_encoder: str = _field(
        "words", '"words", which needs nothing, or a folder with a text encoder of transformers, such as CLIP\'s.'
    )
    text_length: int = _field(16, "Tokens of a text.")
    text_dim: int = _field(64, "Numbers per token.")

    def __post_init__(self) -> None:
        require_at_least(1, text_length=self.text_length, text_dim=self.text_dim)
        require(bool(self.text_encoder), "`text_encoder` must be 'words' or a folder")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser, its rate over time, clipping, and the moving average of the weights."""

    optimizer: str = _field(
        "adamw",
        "adamw, muon (hidden matrices by Muon, the rest by AdamW), adam, sgd, rmsprop, radam, nadam, adamax, adagrad, "
        "adafactor, schedule-free (of the package schedulefree), or package.module:Class. It gets lr, and betas and "
        "weight_decay if it takes them.",
    )
    optimizer_options: dict[str, Any] = _field({}, "Further arguments of the optimiser.")
    lr: float = _field(2e-4, "Learning rate.")
    weight_decay: float = _field(0.03, "Weight decay.")
    betas: tuple[float, float] = _field((0.99, 0.999), "The two rates of Adam's averages.")
    warmup: int = _field(0, "Steps of linear warm-up.")
    decay: str = _field(
        "constant",
        "The rate after the warm-up: constant, linear, cosine, polynomial, cosine_with_restarts, piecewise_constant, "
        "or a scheduler of torch's, torch.optim.lr_scheduler:StepLR.",
    )
    decay_options: dict[str, Any] = _field({}, "Arguments of the last four.")
    decay_steps: int | None = _field(None, "Step at which the decay reaches zero; None takes `steps`.")
    clip: float | None = _field(None, "Largest gradient norm.")
    base_width: int | None = _field(
        None,
        "The width at which lr was tuned: μP takes it to the width of the network (docs/mup.md). None is the standard "
        "parametrisation; so is the network's own width.",
    )
    output_start: str = _field(
        "strict",
        "With base_width, how the output layer starts: strict (1/√m, m = width / base_width), unit (as drawn), zero, "
        "or a number, that many times strict.",
    )
    ema_rate: float = _field(0.9999, "Share of the moving average that is kept at each step.")
    # Of a fixed rate of 0.9999, 37 % of the random start are left after 10,000 steps.
    ema_warmup: bool = _field(
        True,
        "Begin with a shorter average, min(ema_rate, (1 + step) / (10 + step)), so that the random start is forgotten.",
    )
    ema_length: str | None = _field(
        None,
        "Length of the average, instead of ema_rate: a share of the run so far (10%), steps (5000steps) or images "
        "(200kimages).",
    )
    ema_lengths: tuple[str, ...] = _field(
        (),
        "Further averages of other lengths. Of two shares or more (5% 10%) snapshots are written, from which any other "
        "share can be made after training.",
    )

    def __post_init__(self) -> None:
        require_at_least(0, lr=self.lr, weight_decay=self.weight_decay, warmup=self.warmup, clip=self.clip)
        require_at_least(1, decay_steps=self.decay_steps, base_width=self.base_width)
        require(self.clip is None or self.clip > 0, "`clip` must be above 0; leave it out (None) for no clipping")
        require(all(0 <= beta < 1 for beta in self.betas), f"`betas` must be in [0, 1), got {self.betas}")
        require(0 <= self.ema_rate < 1, f"`ema_rate` must be in [0, 1), got {self.ema_rate}")
        if ":" not in self.decay:
            require_choice("decay", self.decay, Decay)
        if ":" not in self.optimizer:
            require_choice("optimizer", self.optimizer, Optimizer)
        require_output_start(self.output_start)
        if self.base_width is not None:
            self._require_adam()
        simple = self.decay in ("constant", "linear", "cosine")
        require(not (simple and self.decay_options), f"`decay` {self.decay} takes no `decay_options`")
        if self.ema_length is not None:
            AverageLength.parse(self.ema_length)
        names = [str(AverageLength.parse(length, "`ema_lengths`")) for length in self.ema_lengths]
        require(len(set(names)) == len(names), f"`ema_lengths` names a length twice: {', '.join(names)}")

    def _require_adam(self) -> None:
        """μP's rule depends on the optimiser; Adam's and Muon's are known here."""
        require(
            self.optimizer in (*ADAMS, "muon"),
            f"`base_width` scales rates by the rules of Adam and Muon, which do not hold for `optimizer` "
            f"{self.optimizer}: take one of {', '.join(ADAMS)}, muon, or leave `base_width` out",
        )
        require(
            self.optimizer in ("adamw", "muon") or self.weight_decay == 0,
            f"`base_width` scales the decay of weights by AdamW's rule; `optimizer` {self.optimizer} adds it to the "
            f"gradient: give `weight_decay` 0, or take adamw",
        )


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """How the same mathematics is carried out."""

    precision: Precision = _field(
        "auto",
        "fp32, or mixed precision: bf16, fp16. auto takes bf16 where this network is faster with it on this machine, "
        "else fp32, and the run keeps what was chosen.",
    )
    accumulation: int = _field(
        1, "Parts into which each process divides its share of a batch, to save memory.", "speed"
    )
    compile: bool = _field(False, "Compile the network with torch.compile.", "speed")
    gradient_checkpointing: bool = _field(False, "Compute activations twice instead of storing them.", "speed")
    channels_last: bool | None = _field(None, "Memory layout; None takes channels-last for diffusers' UNets.")
    cpu: bool = _field(False, "Do not use an accelerator even if there is one.", "speed")
    tf32: bool = _field(False, "On NVIDIA GPUs, let float32 products use TF32: faster, with 10 bits.", "speed")
    cudnn_benchmark: bool = _field(
        False, "On NVIDIA GPUs, let cuDNN try its convolutions and keep the fastest.", "speed"
    )
    split_cores: bool | None = _field(
        None,
        "On a CPU, let each core take its own images through the whole network instead of sharing every operation; "
        "None does so for a U-ViT that is not small. Not for networks that mix images (batch norm) or draw numbers.",
        "speed",
    )

    def __post_init__(self) -> None:
        if self.precision == "no":  # accelerate's name for float32, and that of earlier run folders
            object.__setattr__(self, "precision", "fp32")
        require_choice("precision", self.precision, Precision)
        require_at_least(1, accumulation=self.accumulation)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    save_every: int = _field(5000, "Steps between checkpoints.", "nothing")
    keep_last: int = _field(2, "Checkpoints that are kept, besides the exceptions below.", "nothing")
    keep_every: int | None = _field(None, "Checkpoints at multiples of this many steps are kept for good.", "nothing")
    keep_best: KeepBest | None = _field(
        None,
        "Keep the checkpoint with the best held-out loss or Fréchet distance as checkpoints/best; both are measured "
        "with the averaged weights (`held_out_every`, `scores_every`).",
        "nothing",
    )
    patience: int = _field(0, "Stop after so many measurements without a better one; 0 never stops.", "nothing")

    def __post_init__(self) -> None:
        require_at_least(1, save_every=self.save_every, keep_last=self.keep_last, keep_every=self.keep_every)
        require_at_least(0, patience=self.patience)
        if self.keep_best is not None:
            require_choice("keep_best", self.keep_best, KeepBest)
        require(
            not self.patience or self.keep_best is not None,
            "`patience` waits for a better measurement: say of what, with `keep_best` held-out or frechet",
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What to record. `metrics.jsonl` is always written."""

    log_every: int = _field(50, "Steps between lines of metrics.", "nothing")
    trackers: tuple[str, ...] = _field(("tensorboard",), "Trackers of accelerate: tensorboard, wandb, ...", "nothing")
    held_out_every: int | None = _field(None, "Steps between held-out losses; None takes save_every.", "nothing")
    samples_every: int | None = _field(
        None, "Steps between sample grids; None takes save_every, 0 makes none.", "nothing"
    )
    samples: int = _field(64, "Images in a grid.", "nothing")
    sampler: str = _field("dpm++", f"Sampler of the grids: {', '.join(SAMPLERS)}.", "nothing")
    sampler_steps: int = _field(25, "Steps of the sampler.", "nothing")
    monitor_every: int | None = _field(
        None,
        "Steps between readings of κ, features, gradients and updates, with alarms; None takes 50, and more in long "
        "runs, which costs less than 1 %. 0 for none.",
        "nothing",
    )
    scores_every: int = _field(0, "Steps between Fréchet distance, precision and recall; 0 for none.", "nothing")
    scores_images: int = _field(500, "Images that are made for the scores.", "nothing")

    def __post_init__(self) -> None:
        require_at_least(1, log_every=self.log_every, held_out_every=self.held_out_every, samples=self.samples)
        require_at_least(0, samples_every=self.samples_every, scores_every=self.scores_every)
        require_at_least(0, monitor_every=self.monitor_every)
        require_at_least(10, scores_images=self.scores_images)
        require_at_least(1, sampler_steps=self.sampler_steps)
        require(self.sampler in SAMPLERS, f"`sampler` must be one of {', '.join(SAMPLERS)}, got {self.sampler!r}")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What to do when the loss collapses, or when the loss or the gradient is no longer finite."""

    on_collapse: OnCollapse = _field(
        "stop",
        "When the loss goes back to that of an output of zero and stays there: stop with a diagnosis, go back to the "
        "last checkpoint from before the trouble and on with a lower rate, or say so and go on.",
        "nothing",
    )
    on_nan: OnNaN = _field(
        "stop", "The same for numbers that are not finite, whose update is never applied.", "nothing"
    )
    max_rollbacks: int = _field(3, "Rollbacks of a run, of both kinds together.", "nothing")
    rollback_factor: float = _field(0.5, "The rate is multiplied by this at each rollback.", "nothing")

    def __post_init__(self) -> None:
        require_choice("on_collapse", self.on_collapse, OnCollapse)
        require_choice("on_nan", self.on_nan, OnNaN)
        require_at_least(0, max_rollbacks=self.max_rollbacks)
        require(0 < self.rollback_factor <= 1, f"`rollback_factor` must be in (0, 1], got {self.rollback_factor}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: which data, which model, which scaling, how long. The groups hold the rest."""

    data: str = _field("digits", "A folder of images, a file, or the name of a data set.")
    model: str = _field(
        "uvit",
        '"uvit", a preset ("uvit/cifar10-s2", "unet/cifar10"), diffusers\' config.json, or "package.module:factory".',
    )
    model_options: dict[str, Any] = _field({}, "Arguments of the model. Size, channels and classes come from the data.")
    scaling: str = _field("none", "Scaling of the long skips: none, uniform, cs, cs:0.6, ls, ...")
    start_from: str | None = _field(
        None, "Weights to begin with: a run folder, a folder of diffusers, or nnet_ema.pth of U-ViT's authors."
    )
    lora: int = _field(
        0, "Rank of LoRA adapters, with start_from: they are trained instead of the weights. 0 for none."
    )
    steps: int = _field(10_000, "Steps of training.")
    batch_size: int = _field(128, "Images in a step, over all processes.")
    budget: str | None = _field(
        None,
        "Time for which `scalelong train` chooses what is not given: 30m, 2h, 1d. Left out, an hour on a CPU and a day "
        "on a GPU. A recipe keeps its sizes and gets the steps.",
        "nothing",
    )
    seed: int = _field(0, "Seed of all random numbers.")
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
        require_at_least(0, seed=self.seed, lora=self.lora)
        require(self.budget is None or seconds_of(self.budget) > 0, "`budget` must be above zero")
        require(bool(self.scaling), "`scaling` must name a method, such as none or cs")
        require(
            not self.lora or self.optimizer.base_width is None,
            "`base_width` is for networks that are trained whole: leave it or `lora` out",
        )
        require(self.start_from != "", "`start_from` must name weights, got an empty text")
        require(
            not self.lora or self.start_from is not None,
            "`lora` adapts weights that exist: say which, with `start_from`",
        )
        require_sampler(self.logging.sampler, self.logging.sampler_steps, self.diffusion.schedule)
        best = self.checkpoints.keep_best
        require(
            best != "held-out" or self.images.held_out > 0,
            "`keep_best` held-out needs images that are not trained on: give `held_out`, such as 100",
        )
        require(
            best != "frechet" or self.logging.scores_every > 0,
            "`keep_best` frechet needs scores: give `scores_every`, such as 1000",
        )
        require(bool(self.data), "`data` must name a folder, a file or a data set")
        require(bool(self.model), "`model` must name a model")

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
