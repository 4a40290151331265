"""One run of a study: build the network of an arm, train it, and return what happened as plain numbers.

A run is a function of its setting, arm, learning rate and seed. Every random number is drawn from (seed, purpose,
step), so that arms with the same seed see the same images, times and noise in the same steps.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.errors import CollapseError
from scalelong.models import fuse_, output_tensor, unet
from scalelong.noise import LEVELS, NoiseProcess, even_fractions, mean_square, noise_levels
from scalelong.randomness import generator
from scalelong.stability import Collapse, CollapseDetector

AUTHORS = {"init_std": 0.0566, "final_start": "authors", "residual_scaling": "none"}
"""The authors' start, at the width of these networks: their 0.02 is for widths of 512 and more."""
AVERAGE = 6.94
"""The exponent of the average of weights (Karras et al. 2024, eq. 123): its width is a tenth of the steps so far."""


@dataclass(frozen=True)
class Setting:
    """What all arms of a cell have in common."""

    data: str = "garments"
    size: int = 16
    images: int = 4000
    held_out: int = 256
    depth: int = 12
    width: int = 64
    patch: int = 4
    heads: int = 4
    batch: int = 8
    steps: int = 1000
    warmup: int = 50
    schedule: str = "constant"
    """After the warm-up: "constant", or "cosine" down to 2 % of the rate."""
    score_every: int = 100
    """Steps between two held-out losses."""
    model: str | None = None
    """Another network than U-ViT: see NETWORKS. `width` is that of its first level, `depth` counts its levels."""


@dataclass(frozen=True)
class Arm:
    """One way to build and to train the network. Every option left out is the authors' network with AdamW."""

    network: dict[str, Any] = field(default_factory=dict)
    """Keywords of `sl.UViT`. `init_std: unit` also starts the last convolution as the identity."""
    start: str | None = None
    """A scaling that is multiplied into the weights before the first step."""
    attach: str | None = None
    """A scaling that stays."""
    norm: str | None = None
    """A norm without parameters in each merge: on "main", "skip", "both" or "concatenation"; "main:rms" is RMS."""
    optimizer: str = "adamw"
    cure: str | None = None
    """What is done to the gradients of a step, with an optional number: see CURES. "guard": `sl.CollapseGuard`."""
    steps: int | None = None
    """Another length than the setting's."""
    warmup: int | None = None
    """Another warm-up than the setting's."""
    momentum: float | None = None
    """Another momentum of Muon than 0.95."""
    rates: tuple[float, ...] | None = None
    """Other rates than the plan's."""
    share: float | None = None
    """The share of the cell's rate that is used."""
    precision: str | None = None
    """"bf16": autocast to bfloat16 and fused blocks, as in the trainer."""


# Data


def load_images(setting: Setting, places: dict[str, str], cache: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out images in [-1, 1], read once and kept as one file in `cache`."""
    path = cache / f"{setting.data}-{setting.size}-{setting.images}-{setting.held_out}.pt"
    if not path.exists():
        whole = load_data(places.get(setting.data, setting.data))
        count, last = (
            min(setting.images, len(whole) - setting.held_out),
            range(len(whole) - setting.held_out, len(whole)),
        )
        parts = [_resized(to_float(whole.fetch(part).images), setting.size) for part in (range(count), last)]
        cache.mkdir(parents=True, exist_ok=True)
        torch.save(parts, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    train, held_out = torch.load(path, weights_only=True)
    return train, held_out


def _resized(images: Tensor, size: int) -> Tensor:
    factor, rest = divmod(images.shape[-1], size)
    if rest:
        raise ValueError(f"images of {images.shape[-1]} pixels have no whole boxes for {size}")
    return F.avg_pool2d(images, factor) if factor > 1 else images


# Networks


class PlainUNet(nn.Module):
    """A UNet of pairs of convolutions without norms, as noise2noise's. The noise level is a channel of its input."""

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_pair(width if level else channels + 1, width) for level in range(depth))
        self.up = nn.ModuleList(_pair(2 * width, width) for _ in range(depth - 1))
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        level = (t / 1000).to(x.dtype).view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        x, skips = torch.cat([x, level], dim=1), []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.last(x)


def _pair(inputs: int, width: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, a=0.1)
        layer.bias.data.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    return nn.Sequential(layers[0], nn.LeakyReLU(0.1), layers[1], nn.LeakyReLU(0.1))


def plain_unet(setting: Setting, channels: int) -> nn.Module:
    return PlainUNet(channels, setting.width, setting.depth)


def adm_unet(setting: Setting, channels: int) -> nn.Module:
    """A small UNet of diffusers in the form of ADM's and LDM's: GroupNorm, and attention below the first level."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    deeper = setting.depth - 1
    sizes: dict[str, Any] = {
        "sample_size": setting.size,
        "in_channels": channels,
        "out_channels": channels,
        "block_out_channels": [setting.width * min(2**level, 2) for level in range(setting.depth)],
        "down_block_types": ["DownBlock2D"] + ["AttnDownBlock2D"] * deeper,
        "up_block_types": ["AttnUpBlock2D"] * deeper + ["UpBlock2D"],
    }
    return UNet2DModel(**sizes, norm_num_groups=8, layers_per_block=2, attention_head_dim=16)


def small_unet(setting: Setting, channels: int) -> nn.Module:
    """What `scalelong train FOLDER` begins with. It has sizes of its own."""
    return unet("small", sample_size=setting.size, in_channels=channels, out_channels=channels)


NETWORKS: dict[str, Callable[[Setting, int], nn.Module]] = {"plain": plain_unet, "adm": adm_unet, "small": small_unet}


def build(setting: Setting, arm: Arm, channels: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if setting.model is not None:
        model = NETWORKS[setting.model](setting, channels)
        inputs = (torch.randn(2, channels, setting.size, setting.size), torch.tensor([10.0, 500.0]))
        if arm.start:
            sl.start_skips_(model, arm.start, inputs)
        if arm.attach:
            sl.scale_skips_(model, arm.attach, inputs)
        return model
    start = {} if arm.network.get("init_std") == "unit" else AUTHORS
    sizes = {"image_size": setting.size, "patch_size": setting.patch, "channels": channels}
    model = sl.UViT(**sizes, dim=setting.width, depth=setting.depth, heads=setting.heads, **{**start, **arm.network})
    if arm.start:
        sl.fold_(sl.scale_skips_(model, arm.start))
    if arm.attach:
        sl.scale_skips_(model, arm.attach)
    if arm.norm:
        operands, _, kind = arm.norm.partition(":")
        for block in model.decoder:
            block.register_forward_pre_hook(
                partial(_normalised, operands, F.rms_norm if kind == "rms" else F.layer_norm)
            )
    return model


def _normalised(operands: str, norm: Callable[..., Tensor], _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs (main, skip, ...) of a decoder block, normalised over the channels before they are merged."""
    main, skip, *rest = inputs
    dim = main.shape[-1]
    if operands == "concatenation":
        main, skip = norm(torch.cat([main, skip], dim=-1), (2 * dim,)).split(dim, dim=-1)
    elif operands not in ("main", "skip", "both"):
        raise ValueError(f"unknown operands of a norm: {operands}")
    else:
        main = norm(main, (dim,)) if operands in ("main", "both") else main
        skip = norm(skip, (dim,)) if operands in ("skip", "both") else skip
    return (main, skip, *rest)


# Optimisers: name -> the optimisers of a model


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=0.03, fused=True)


def muon(model: nn.Module, momentum: float = 0.95) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on the rest, with one nominal rate."""
    named = dict(model.named_parameters())
    blocks = [name for name, p in named.items() if p.ndim == 2 and name.startswith(("encoder.", "middle.", "decoder."))]
    hidden = [named.pop(name) for name in blocks]
    first = torch.optim.Muon(hidden, lr=0.0, momentum=momentum, weight_decay=0.03, adjust_lr_fn="match_rms_adamw")
    return [first, adamw(named.values())]


def muon_of_all(model: nn.Module, momentum: float = 0.95) -> list[torch.optim.Optimizer]:
    """This library's Muon, which takes convolutions as well."""
    groups = sl.muon_groups(model, lr=0.0, weight_decay=0.03)
    return [sl.Muon(groups, betas=(0.9, 0.99), momentum=momentum, products="float32")]


OPTIMIZERS: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {
    "adamw": lambda model: [adamw(model.parameters())],
    "muon": muon,
    "muon of all": muon_of_all,
}


# Cures: each makes a function that may change the gradients and says whether the step is taken


def clip(parameters: Sequence[Tensor], largest: float = 1.0) -> Callable[[], bool]:
    """Clipping of the norm of all gradients."""

    def cure() -> bool:
        nn.utils.clip_grad_norm_(parameters, largest)
        return True

    return cure


def agc(parameters: Sequence[Tensor], share: float = 0.01) -> Callable[[], bool]:
    """Adaptive gradient clipping, row by row against the size of the weights (Brock et al. 2021)."""

    def cure() -> bool:
        for p in parameters:
            if p.grad is None:
                continue
            axes = tuple(range(1, p.ndim)) or (0,)
            size = torch.linalg.vector_norm(p.detach(), dim=axes, keepdim=True).clamp_min(1e-3)
            gradient = torch.linalg.vector_norm(p.grad, dim=axes, keepdim=True).clamp_min(1e-6)
            p.grad.mul_((share * size / gradient).clamp_max(1.0))
        return True

    return cure


class _ZScore:
    """The norm of the gradient in deviations of its own past; both moments are exponential averages."""

    def __init__(self, parameters: Sequence[Tensor], memory: float = 0.97, first: int = 25) -> None:
        self.parameters, self.memory, self.first = parameters, memory, first
        self.mean, self.square, self.count = 0.0, 0.0, 0

    def read(self) -> tuple[float, float]:
        norm = float(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        deviation = math.sqrt(max(self.square - self.mean**2, 1e-16))
        return norm, (norm - self.mean) / deviation if self.count >= self.first else 0.0

    def add(self, norm: float) -> None:
        self.count += 1
        weight = max(1 - self.memory, 1 / self.count)
        self.mean += weight * (norm - self.mean)
        self.square += weight * (norm**2 - self.square)


def zclip(parameters: Sequence[Tensor], most: float = 2.5) -> Callable[[], bool]:
    """ZClip (Kumar et al. 2025): a norm z > `most` deviations above its mean is clipped to most² / z of them."""
    score = _ZScore(parameters)

    def cure() -> bool:
        norm, z = score.read()
        if z > most:
            norm = score.mean + (norm - score.mean) * (most / z) ** 2
            nn.utils.clip_grad_norm_(parameters, norm)
        score.add(norm)
        return True

    return cure


def skip(parameters: Sequence[Tensor], most: float = 3.0) -> Callable[[], bool]:
    """No step whose gradient is `most` deviations above the mean; it counts as one of that size."""
    score = _ZScore(parameters)

    def cure() -> bool:
        norm, z = score.read()
        score.add(min(norm, score.mean + (norm - score.mean) * most / z) if z > most else norm)
        return z <= most

    return cure


CURES: dict[str, Callable[..., Callable[[], bool]]] = {"clip": clip, "agc": agc, "zclip": zclip, "skip": skip}


def cure_of(spec: str | None, parameters: Sequence[Tensor]) -> Callable[[], bool]:
    """The cure of a text such as "agc" or "agc:0.04"."""
    if spec is None or spec == "guard":
        return lambda: True
    name, _, number = spec.partition(":")
    return CURES[name](parameters, *([float(number)] if number else []))


# Training


def rate_share(setting: Setting, steps: int, step: int) -> float:
    """The share of the full rate in a step, counted from 1."""
    warm = min(1.0, step / max(setting.warmup, 1))
    if setting.schedule == "constant":
        return warm
    if setting.schedule != "cosine":
        raise ValueError(f"unknown schedule {setting.schedule!r}: constant or cosine")
    done = max(0.0, (step - setting.warmup) / max(steps - setting.warmup, 1))
    return warm * (0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


class Scores:
    """The held-out loss of the averaged weights: the same images, times and noise for every run of a data set."""

    def __init__(self, images: Tensor, process: NoiseProcess) -> None:
        self.t = process.times(even_fractions(len(images)))
        self.noise = torch.randn(images.shape, generator=generator(0, "held-out noise"))
        self.x = process.add_noise(images, self.noise, self.t)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        parts = zip(self.x.split(64), self.t.split(64), self.noise.split(64), strict=True)
        return float(torch.cat([mean_square(output_tensor(model(x, t)) - noise) for x, t, noise in parts]).mean())


def train(setting: Setting, arm: Arm, rate: float, seed: int, images: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Train until the end or the collapse. Losses are those of ε: an answer of zero costs 1."""
    process, steps, began = NoiseProcess(), arm.steps or setting.steps, time.process_time()
    setting = setting if arm.warmup is None else replace(setting, warmup=arm.warmup)
    rate *= arm.share or 1.0
    model = build(setting, arm, images.shape[1], seed)
    low = partial(torch.autocast, "cpu", torch.bfloat16) if arm.precision == "bf16" else nullcontext
    if arm.precision == "bf16":
        fuse_(model)
    average = copy.deepcopy(model).requires_grad_(False)
    parameters, averaged = list(model.parameters()), list(average.parameters())
    momentum = {} if arm.momentum is None else {"momentum": arm.momentum}
    optimizers, cure = OPTIMIZERS[arm.optimizer](model, **momentum), cure_of(arm.cure, parameters)
    detector, scores = CollapseDetector(levels=LEVELS), Scores(held_out, process)
    guard = sl.CollapseGuard(model, optimizers[0], zero_loss=1.0, extra=[average]) if arm.cure == "guard" else None
    curve: list[list[float]] = []
    skipped, smoothed, collapsed = 0, math.nan, None
    for step in range(1, steps + 1):
        draws = generator(seed, "batch", step)
        x0 = images[torch.randint(len(images), (setting.batch,), generator=draws)]
        t = process.times(torch.rand(setting.batch, generator=draws))
        noise = torch.randn(x0.shape, generator=draws)
        with low():
            output = output_tensor(model(process.add_noise(x0, noise, t), t))
        losses = mean_square(output.float() - noise)
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_share(setting, steps, step)
        losses.mean().backward()
        if cure():
            for optimizer in optimizers:
                optimizer.step()
        else:
            skipped += 1
        with torch.no_grad():
            for mean, value in zip(averaged, parameters, strict=True):
                mean.lerp_(value, 1 - (1 - 1 / step) ** (AVERAGE + 1))
        loss = float(losses.detach().mean())
        smoothed = loss if step == 1 else smoothed + 0.05 * (loss - smoothed)
        if _collapsed(detector, step, process, t, losses.detach(), noise):
            collapsed = step
            if guard is None:
                break
        if guard is not None:
            try:
                if guard.step(loss) is not None:  # it went back: the run is alive again
                    collapsed = None
                    detector.reset()
            except CollapseError:
                collapsed = step
                break
        if step % setting.score_every == 0 or step == steps:
            curve.append([step, round(smoothed, 5), round(scores.loss(average), 6)])
    return {
        "collapsed": collapsed,
        "held_out": curve[-1][2] if curve and collapsed is None else None,
        "curve": curve,
        "skipped": skipped,
        **({} if guard is None else {"rollbacks": len(guard.rollbacks)}),
        "seconds": round(time.process_time() - began, 1),
    }


def _collapsed(
    detector: CollapseDetector, step: int, process: NoiseProcess, t: Tensor, losses: Tensor, noise: Tensor
) -> bool:
    """The library's rule, with losses by noise level."""
    levels, zeros = noise_levels(process, t), mean_square(noise)
    sums = [torch.zeros(LEVELS).index_add_(0, levels, v).tolist() for v in (torch.ones_like(losses), losses, zeros)]
    return isinstance(detector.add_levels(step, *sums), Collapse)
