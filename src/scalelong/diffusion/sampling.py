"""From seeds and prompts to images: classifier-free guidance, the samplers of diffusers, batches that fit into memory.

How images are made is one object, `SampleSettings`, which travels whole from the flags of a command to the protocol of
a score. Each image has its own seed, so it does not depend on the others of its batch.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from ..config import FLOWS, STEPS, Prediction, require_prediction, require_sampler
from ..errors import InvalidConfigError, lacks_memory, require
from ..models import fused
from ..noise import SIGMA_DATA, SIGMA_MAX, SIGMA_MIN, NoiseProcess, Predict
from ..optional import needs
from .conditions import Conditions, Unconditional

if TYPE_CHECKING:
    from .latents import Autoencoder

# Guidance (Ho & Salimans, 2022)

Conditional = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A network that takes x_t, the times and the condition."""


PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that a network may multiply in."""


def in_precision(network: Conditional, precision: str, device: torch.device) -> Conditional:
    """The network under autocast; what it gives is float32 again."""
    if precision == "no":
        return network

    def call(x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        with torch.autocast(device.type, PRECISIONS[precision]):
            return network(x, t, condition).float()

    return call


def guided(network: Conditional, condition: Tensor | None, null: Tensor | None, scale: float) -> Predict:
    """F(x, ∅) + w (F(x, c) - F(x, ∅)). With w = 1 the condition alone is used, with w = 0 it is ignored.

    The U-ViT authors count from there: their scale s is w = 1 + s.
    """
    if condition is None or scale == 1:
        return lambda x, t: network(x, t, condition)
    if null is None:
        raise InvalidConfigError(
            f"guidance {scale:g} needs a model that also knows the null condition; this one was trained with "
            f"condition_dropout 0, so only guidance 1 is possible"
        )
    nulls = null.to(condition.device).expand_as(condition)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        both = network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([condition, nulls]))
        conditional, unconditional = both.chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return predict


# Samplers

_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddpm": ("DDPMScheduler", {}),
    "ddim": ("DDIMScheduler", {"timestep_spacing": "trailing"}),
    # Steps evenly spaced in log-SNR: at 25 steps its error is a tenth of that of evenly spaced times.
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_lu_lambdas": True}),
    "euler": ("EulerDiscreteScheduler", {"timestep_spacing": "linspace"}),
    "heun": ("HeunDiscreteScheduler", {"timestep_spacing": "linspace"}),
    # The authors' Euler-Maruyama: with all 1000 steps this adds the noise of the reverse SDE, β, and does not clip.
    "sde": ("DDPMScheduler", {"variance_type": "fixed_large", "clip_sample": False}),
}
"""From our names to diffusers' classes and their options."""

_FLOW = {"algorithm_type": "dpmsolver++", "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_FLOW_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", _FLOW),
}
"""The same for rectified flows."""

_EDM = {"sigma_min": SIGMA_MIN, "sigma_max": SIGMA_MAX, "sigma_data": SIGMA_DATA}
_EDM_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EDMEulerScheduler", _EDM),
    "dpm++": ("EDMDPMSolverMultistepScheduler", _EDM),
}
"""The same for EDM, on its own levels of noise (ρ = 7)."""

STOCHASTIC = ("ddpm", "sde")
"""Samplers that draw noise on the way."""

# DPM-Solver clips by "dynamic thresholding", which with its largest value of 1 is plain clipping.
_CLIPPING = {"ddpm": "clip_sample", "ddim": "clip_sample", "dpm++": "thresholding"}
_DIFFUSERS_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
assert {*_DIFFUSERS_PREDICTIONS, "flow", "edm"} == set(get_args(Prediction))


def diffusers() -> Any:
    return needs("diffusers", "train", "noise schedules and sampling")


def _schedulers_of(schedule: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return _FLOW_SCHEDULERS if schedule in FLOWS else _EDM_SCHEDULERS if schedule == "edm" else _SCHEDULERS


def scheduler(process: NoiseProcess, prediction: Prediction, sampler: str, *, clip: bool = True) -> Any:
    """A scheduler of diffusers for this noise process. `clip` keeps its estimates of x_0 in [-1, 1], where it can."""
    require_prediction(prediction, process.schedule)
    require_sampler(sampler, 1, process.schedule)
    kind, options = _schedulers_of(process.schedule)[sampler]
    options = {"num_train_timesteps": STEPS, **options}
    if process.is_diffusion:
        options["trained_betas"] = process.betas.float().tolist()
        options["prediction_type"] = _DIFFUSERS_PREDICTIONS[prediction]
        options |= {_CLIPPING[sampler]: clip} if sampler in _CLIPPING else {}
    elif sampler == "dpm++":  # Euler's and Heun's schedulers of flows and EDM have no clipping
        options["thresholding"] = clip
    return _clipping_plainly(getattr(diffusers(), kind)(**options))


def _clipping_plainly(made: Any) -> Any:
    """Dynamic thresholding sorts the pixels of every image at every step for a bound that lies between 1 and
    `sample_max_value`. Where both are 1 the same comes out of a clamp, bit for bit."""
    if made.config.get("thresholding") and made.config.get("sample_max_value") == 1.0:
        made._threshold_sample = lambda sample: sample.clamp(-1, 1)
    return made


@torch.no_grad()
def sample(
    predict: Predict,
    process: NoiseProcess,
    prediction: Prediction,
    shape: Sequence[int],
    seeds: Sequence[int],
    *,
    sampler: str = "dpm++",
    steps: int = 50,
    device: torch.device | str = "cpu",
    clip: bool = True,
) -> Tensor:
    """One image of shape (C, H, W) for each seed: (len(seeds), C, H, W). Global random numbers are not touched.

    `clip` keeps images, and what the solver takes for them on the way, in [-1, 1]; latents have no such bounds.
    """
    require_sampler(sampler, steps, process.schedule)
    solver = scheduler(process, prediction, sampler, clip=clip)
    solver.set_timesteps(steps)
    if hasattr(solver, "set_begin_index"):
        solver.set_begin_index(0)  # whole timesteps may repeat where the noise changes fast, so do not search by them
    # On the CPU, so that a seed means the same image on every device.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators]).to(device)
    # A flow begins with noise of unit size, and its schedulers neither scale it nor what the network sees.
    x = x * getattr(solver, "init_noise_sigma", 1.0)
    scaled = getattr(solver, "scale_model_input", lambda value, _: value)
    options = {"generator": generators} if sampler in STOCHASTIC else {}
    for step in solver.timesteps:
        times = process.network_time(step).expand(len(seeds)).to(device)
        output = predict(scaled(x, step), times)
        x = solver.step(output, step, x, **options).prev_sample
    return x.clamp(-1, 1) if clip else x


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How images are made, all but their seeds and prompts."""

    sampler: str = "dpm++"
    steps: int = 50
    guidance: float = 1.0
    """Classifier-free guidance: 1 uses the condition as it is, more exaggerates it."""
    precision: str = "no"
    """Of the network's products: "bf16", "fp16", or "no" for float32. The sampler itself is always in float32."""

    def __post_init__(self) -> None:
        require_sampler(self.sampler, self.steps)
        known = ", ".join(PRECISIONS)
        require(self.precision in PRECISIONS, f"precision must be one of {known}, got {self.precision!r}")
        require(0 <= self.guidance <= 1000, f"guidance must be a number from 0 to 1000, got {self.guidance}")


# Images from seeds and prompts

CPU_MULTIPLE = 8
"""Batches on a CPU are filled up to a multiple of this: the kernels for matrices then treat every row alike, and an
image does not change in its last bits with the number of its neighbours."""


@dataclass(frozen=True)
class Request:
    """One image: its seed, and what it is to show, a class or a text (None without conditions)."""

    seed: int
    prompt: str | None = None


def requests(count: int, seed: int, prompts: Sequence[str] = ()) -> list[Request]:
    """Image i has the seed `seed + i`; several prompts take turns."""
    require(count >= 1, f"the number of images must be at least 1, got {count}")
    require(0 <= seed <= 2**62, f"the seed must be from 0 to 2^62, got {seed}")
    return [Request(seed + i, prompts[i % len(prompts)] if prompts else None) for i in range(count)]


@dataclass(frozen=True)
class ImageMaker:
    """A trained network with all that it needs to make images."""

    model: nn.Module
    network: Conditional
    process: NoiseProcess
    prediction: Prediction
    shape: tuple[int, int, int]
    conditions: Conditions
    autoencoder: Autoencoder | None

    def generate(
        self,
        wanted: Sequence[Request],
        settings: SampleSettings,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Iterator[tuple[list[Request], Tensor]]:
        """Batches of requests and their images, uint8 (B, C, H, W). A batch too large for the memory is halved."""
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        self._check(wanted)
        self.model.to(device)
        start = 0
        while start < len(wanted):
            part = list(wanted[start : start + batch_size])
            try:
                with fused(self.model):
                    images = self._batch(part, settings, torch.device(device))
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                # On a CPU, torch raises RuntimeError for it.
                if batch_size == 1 or not (isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)):
                    raise
                batch_size = (batch_size + 1) // 2
                continue
            yield part, images
            start += len(part)

    def all(
        self,
        wanted: Sequence[Request],
        settings: SampleSettings,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The same as one tensor."""
        batches = self.generate(wanted, settings, batch_size=batch_size, device=device)
        return torch.cat([images for _, images in batches])

    def _check(self, wanted: Sequence[Request]) -> None:
        """A prompt that the network cannot draw is an error now, not after an hour."""
        prompts = {request.prompt for request in wanted if request.prompt is not None}
        self.conditions.check(sorted(prompts))
        complete = isinstance(self.conditions, Unconditional) or all(r.prompt is not None for r in wanted)
        require(complete, "this model draws what it is asked for: give texts or classes, as `prompts`")

    def _batch(self, part: list[Request], settings: SampleSettings, device: torch.device) -> Tensor:
        filled = part + [part[-1]] * (-len(part) % CPU_MULTIPLE if device.type == "cpu" else 0)
        condition = self.conditions.from_prompts([request.prompt for request in filled if request.prompt is not None])
        condition = None if condition is None else condition.to(device)
        network = in_precision(self.network, settings.precision, device)
        x = sample(
            guided(network, condition, self.conditions.null(), settings.guidance),
            self.process,
            self.prediction,
            self.shape,
            [request.seed for request in filled],
            sampler=settings.sampler,
            steps=settings.steps,
            device=device,
            clip=self.autoencoder is None,
        )
        return to_bytes(x if self.autoencoder is None else self.autoencoder.decode(x))[: len(part)]


def to_bytes(images: Tensor) -> Tensor:
    """[-1, 1] to uint8, on the CPU. What is not finite is an error, not a colour."""
    finite = bool(torch.isfinite(images).all())
    require(finite, "the model gave images that are not finite: it is broken, or the sampler needs more steps")
    return ((images.float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# Images side by side

GAP = 2
SMALLEST_SIDE = 64
"""Smaller images are enlarged by a whole factor: thumbnails of 8 pixels cannot be judged."""


def image_grid(images: Tensor, columns: int | None = None, titles: Sequence[str] = ()) -> Tensor:
    """(B, C, H, W), uint8 or in [-1, 1], to one uint8 image (C, H', W'); `titles` stand above the columns."""
    pixels = images.cpu()
    if pixels.dtype != torch.uint8:
        pixels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    enlarge = max(1, math.ceil(SMALLEST_SIDE / min(pixels.shape[2:])))
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    count, channels, height, width = pixels.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    head = _titles(titles, width + GAP, columns) if titles else torch.empty(0, columns * (width + GAP) + GAP)
    top = len(head) + GAP
    grid = torch.full((channels, top + rows * (height + GAP), columns * (width + GAP) + GAP), 255, dtype=torch.uint8)
    grid[:3, : len(head)] = head
    for i, image in enumerate(pixels):
        down, left = top + (i // columns) * (height + GAP), GAP + (i % columns) * (width + GAP)
        grid[:, down : down + height, left : left + width] = image
    return grid


def prompted_grid(images: Tensor, prompts: Sequence[str | None]) -> Tensor:
    """A grid with the prompts above its columns, where few of them take turns; else a plain square."""
    names = list(dict.fromkeys(prompts))
    in_turn = all(prompt == names[i % len(names)] for i, prompt in enumerate(prompts))
    if None in names or len(names) > MOST_TITLES or not in_turn:
        return image_grid(images)
    columns = len(names) * max(1, round(math.sqrt(len(images)) / len(names)))
    return image_grid(images, columns, [str(names[i % len(names)]) for i in range(columns)])


MOST_TITLES = 16
LINE, LETTER = 12, 6  # height of a line and width of a letter of Pillow's own font, in pixels


def _titles(titles: Sequence[str], width: int, columns: int) -> Tensor:
    """A strip with a title for each column, (h, W); one that is the same for all is written once."""
    needs("PIL.Image", "train", "sample grids")
    from PIL import Image, ImageDraw, ImageFont

    if len(set(titles)) == 1:
        titles, width = titles[:1], width * columns
    wrapped = [textwrap.wrap(title, max(4, width // LETTER - 1))[:3] for title in titles]
    strip = Image.new("L", (len(titles) * width + GAP, LINE * max(map(len, wrapped)) + GAP), 255)
    font, draw = ImageFont.load_default_imagefont(), ImageDraw.Draw(strip)
    for i, lines in enumerate(wrapped):
        text = "\n".join(lines).encode("latin-1", "replace").decode("latin-1")  # all that this font has
        draw.multiline_text((GAP + i * width, 1), text, 0, font, spacing=1)
    return torch.frombuffer(bytearray(strip.tobytes()), dtype=torch.uint8).view(strip.height, strip.width)


def as_picture(image: Tensor) -> Any:
    """A uint8 image (C, H, W) with 1, 3 or 4 channels as one of Pillow, which notebooks show; of others, the first."""
    pillow = needs("PIL.Image", "train", "sample grids")
    array = image.permute(1, 2, 0).contiguous().numpy()
    return pillow.fromarray(array if array.shape[2] in (3, 4) else array[:, :, 0])
