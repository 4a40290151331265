"""What the layers of a diffusion network know about classes: linear probes over layers and noise levels.

    found = sl.linear_probe(model, data)        # any model with long skips; data with labels
    print(found)

Images are noised to each time t, the network runs once, and a ridge classifier is fitted to the features of each block,
averaged over positions. Layer, time and penalty are chosen on validation images; the test images are looked at once,
and their accuracy has an interval. The controls are the same network before training, and pixels, clean and with the
same noise: random features and pixels recognise a great deal, and an accuracy without them says nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..console import Progress, text_table
from ..data import ImageData, load_data, to_float
from ..diffusion import sample_latents
from ..errors import ConditionError, EvaluationError, InvalidConfigError, MetadataError
from ..files import write_text
from ..finding import unwrap
from ..models import Denoiser, call_arguments, evaluating, first_tensor
from ..noise import NoiseProcess, alpha_bars, mix
from ..randomness import derived_seed, generator, noise
from ..runs import build_model, load_run_data
from ..stability import block_names, eager, plan_for
from .scores import Score, Z, share_score

if TYPE_CHECKING:
    from ..runs import Run

TIMES = (1, 25, 50, 100, 250, 500)
"""Noise levels that are probed, in times of the network (0 to 999)."""
PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""λ. At the largest one every weight is a few hundredths of that of least squares."""
MOST_IMAGES = 10_000
LEAST_IMAGES = 30
"""Images of each class."""
CLEAN = "clean pixels"


def linear_probe(
    model: nn.Module,
    data: Any,
    *,
    held_out: Any = None,
    times: Sequence[float] = TIMES,
    schedule: Any = "vp",
    condition: Tensor | None = None,
    layers: Sequence[str] | None = None,
    untrained: nn.Module | Callable[[], nn.Module] | None = None,
    images: int = MOST_IMAGES,
    seed: int = 0,
    batch_size: int = 256,
    about: dict[str, Any] | None = None,
) -> LinearProbe:
    """Accuracy of linear classifiers on the features of each layer at each noise level. The model is left as it was.

    data: images with labels, as `load_data` takes them. Divided into parts to fit (60 %), to choose on and to test
        (20 % each), class by class.
    held_out: images that the network was not trained on. Then all of `data` is fitted, and one half of these is chosen
        on, the other one tested.
    times: noise levels, 0 to 999. `schedule`: a name, the ᾱ_t, or a scheduler of diffusers.
    condition: the null condition of a conditional network, one for all images. A label would be the answer.
    layers: names of modules, or patterns such as "decoder.*"; left out: the blocks at both ends of each long skip, and
        the middle.
    untrained: the network before training, or a function that makes it; left out, it is made where that can be done
        (U-ViT, and networks whose layers have `reset_parameters`, as torch's do).
    images: fit at most so many, and choose and test on at most so many.
    """
    times = tuple(float(t) for t in times)
    if not times or any(not 0 <= t <= 999 for t in times) or len(set(times)) != len(times):
        raise InvalidConfigError(f"`times` must be different numbers from 0 to 999, got {times}")
    if min(batch_size, images) < 1:
        raise InvalidConfigError("`batch_size` and `images` must be at least 1")
    parts = Parts.of(load_data(data), None if held_out is None else load_data(held_out), images, seed)
    host, fits = unwrap(model), dict[Key, Fit]()
    reader = Reader(host, condition, layers, batch_size, parts.x0)
    start = copy.copy(reader)
    start.model = _untrained(host, untrained, seed).to(reader.device, reader.dtype).eval()
    with Progress("noise levels", len(times)) as progress:
        for number, t in enumerate(times, start=1):
            x = noised(parts.x0, t, schedule, seed)
            fits["pixels", "pixels", t] = fit(x.flatten(1), parts)
            for contender, each in (("network", reader), ("untrained", start)):
                for layer, features in each.read(x, t).items():
                    fits[contender, layer, t] = fit(features, parts)
            progress(number)
    fits["pixels", CLEAN, None] = fit(parts.x0.flatten(1), parts)
    counts = {"fit": len(parts.fit), "validation": len(parts.validation), "test": len(parts.test)}
    facts = {"model": type(host).__name__, "data": parts.name, "classes": parts.classes, "images": counts}
    return judged(fits, reader.names, times, seed=seed, seen=held_out is None, about=about or {}, **facts)


def noised(x0: Tensor, t: float, schedule: Any, seed: int) -> Tensor:
    """x_t of all images. The noise of each image and time is fixed by the seed."""
    drawn = noise(seed, 0, range(len(x0)), tuple(x0.shape[1:]), "cpu", f"probe {t:g}")
    if isinstance(schedule, str | NoiseProcess):
        process = NoiseProcess(schedule) if isinstance(schedule, str) else schedule  # pyright: ignore[reportArgumentType]
        return process.add_noise(x0, drawn, torch.full((len(x0),), t))
    bars = alpha_bars(schedule)
    bar = bars[min(int(t), len(bars) - 1)].expand(len(x0))
    return mix(x0, drawn, bar.sqrt().float(), (1 - bar).sqrt().float())


# Labelled images in three parts


@dataclass(frozen=True)
class Parts:
    """All images, and the rows of each part."""

    name: str
    x0: Tensor
    labels: Tensor
    classes: int
    fit: Tensor
    validation: Tensor
    test: Tensor

    @classmethod
    def of(cls, data: ImageData, held_out: ImageData | None, most: int, seed: int) -> Parts:
        """Class by class, so that every part has all of them in their proportions."""
        given = [data] if held_out is None else [data, held_out]
        pairs = [_images_and_labels(each) for each in given]
        if given[-1].classes != data.classes:
            raise MetadataError(f"the held-out images have other classes than {data.name}: {given[-1].classes}")
        x0, labels = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        classes = len(data.classes or ())
        counts = torch.bincount(labels, minlength=classes)
        if classes < 2 or int(counts.min()) < LEAST_IMAGES:
            raise EvaluationError(
                f"a probe needs two classes and {LEAST_IMAGES} images of each, and {data.name} has {counts.tolist()}"
            )
        source, rows = generator(seed, "probe split"), torch.arange(len(labels))
        if held_out is None:
            split = _divided(rows, labels, (0.6, 0.2, 0.2), source)
        else:
            split = _divided(rows[: len(data)], labels, (1.0,), source)
            split += _divided(rows[len(data) :], labels, (0.5, 0.5), source)
        kept = [part[:most] for part in split]
        used = torch.cat(kept)  # what no part uses is not run through the network
        fitted, validation, test = torch.arange(len(used)).split([len(part) for part in kept])
        found = cls(data.name, x0[used], labels[used], classes, fitted, validation, test)
        if any(len(found.labels[part].unique()) < classes for part in (fitted, validation, test)):
            raise EvaluationError("a part of the images lacks a class: give more images, or a larger `images`")
        return found


def _images_and_labels(data: ImageData) -> tuple[Tensor, Tensor]:
    batch = data.fetch(torch.arange(len(data)))
    if batch.labels is None:
        raise MetadataError(
            f"a probe needs labels, and {data.name!r} has none: put the images of each class in a folder of its own, "
            f"or give `data` with labels"
        )
    # Of latents the means are taken.
    x0 = sample_latents(batch.images) if batch.images.is_floating_point() else to_float(batch.images)
    return x0, batch.labels


def _divided(rows: Tensor, labels: Tensor, shares: Sequence[float], source: torch.Generator) -> list[Tensor]:
    """Rows in parts of these shares. Within a part the classes alternate in their proportions."""
    parts: list[list[tuple[float, int]]] = [[] for _ in shares]
    for label in labels[rows].unique():
        own = rows[labels[rows] == label]
        own = own[torch.randperm(len(own), generator=source)]
        bounds = [round(sum(shares[:number]) * len(own)) for number in range(1, len(shares))]
        for part, piece in zip(parts, own.tensor_split(bounds), strict=True):
            # The k-th image of a class of n stands at (k + ½) / n.
            part += [((k + 0.5) / len(piece), row) for k, row in enumerate(piece.tolist())]
    return [torch.tensor([row for _, row in sorted(part)], dtype=torch.long) for part in parts]


# Features of a network


class Reader:
    """Runs a network on noisy images and gives the features of its layers: {layer: (N, D)}."""

    def __init__(
        self, model: nn.Module, condition: Tensor | None, layers: Sequence[str] | None, batch_size: int, x0: Tensor
    ) -> None:
        self.model, self.batch_size = model, batch_size
        weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
        self.device, self.dtype = weight.device, weight.dtype
        self.condition = None if condition is None else self._one_condition(torch.as_tensor(condition))
        x = x0[:2].to(self.device, self.dtype)
        self._try(x)
        modules, blocks = dict(model.named_modules()), list[str]()
        if layers is None or not all(name in modules for name in layers):
            given = call_arguments(model, x, torch.full((len(x),), 500.0, device=self.device), self._given(len(x)))
            blocks = block_names(model, plan_for(model, given))
        chosen: list[str] = []
        for pattern in layers or ("*",):
            found = [name for name in blocks if fnmatchcase(name, pattern)]
            if not found and pattern not in modules:
                raise InvalidConfigError(
                    f"{type(model).__name__} has no layer {pattern}; `layers` takes names of modules, or patterns for "
                    f"these: {', '.join(blocks)}"
                )
            chosen += found or [pattern]
        self.names = tuple(dict.fromkeys(chosen))

    def read(self, x: Tensor, t: float) -> dict[str, Tensor]:
        """The features of all images, averaged over positions, on the CPU."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for part in x.split(self.batch_size):
            for name, features in self._run(part.to(self.device, self.dtype), t).items():
                found[name].append(self._pooled(features.float()).cpu())
        silent = [name for name, parts in found.items() if not parts]
        if silent:
            raise EvaluationError(f"the layer {silent[0]} of {type(self.model).__name__} does not run: leave it out")
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _run(self, x: Tensor, t: float) -> dict[str, Tensor]:
        """The outputs of the layers in one forward pass; of one that runs several times, the last."""
        seen: dict[str, Tensor | None] = {}

        def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
            seen[name] = first_tensor(output)

        with ExitStack() as stack, evaluating(self.model), torch.no_grad(), eager():
            for name in self.names:
                stack.callback(self.model.get_submodule(name).register_forward_hook(partial(note, name)).remove)
            Denoiser(self.model)(x, torch.full((len(x),), float(t), device=self.device), self._given(len(x)))
        return {name: tensor for name, tensor in seen.items() if tensor is not None}

    def _pooled(self, features: Tensor) -> Tensor:
        """The mean over positions, (B, D): of (B, D, H, W), or of the tokens (B, L, D) that are patches."""
        if features.dim() == 3:
            return features[:, int(getattr(self.model, "extra_tokens", 0)) :].mean(dim=1)
        return features.flatten(2).mean(dim=2) if features.dim() > 3 else features

    def _given(self, count: int) -> Tensor | None:
        return None if self.condition is None else self.condition.expand(count, *self.condition.shape[1:])

    def _one_condition(self, condition: Tensor) -> Tensor:
        """(1,) or (1, length, dim): the same for all images."""
        is_text = condition.is_floating_point()
        row = condition if condition.dim() == (3 if is_text else 1) else condition.unsqueeze(0)
        if row.dim() != (3 if is_text else 1) or len(row) != 1:
            raise ConditionError(
                f"`condition` must be one for all images, the null label or the empty text, and has the shape "
                f"{tuple(condition.shape)}: a label for each image would be the answer"
            )
        return row.to(self.device, self.dtype if is_text else row.dtype)

    def _try(self, x: Tensor) -> None:
        self.names = ()
        network = Denoiser(self.model)
        try:
            self._run(x, 500.0)
        except Exception as error:  # of any network
            if self.condition is not None or not (network.label_argument or network.context_argument):
                raise
            raise ConditionError(
                f"this {type(self.model).__name__} is conditional, and a probe needs its null condition, one for all "
                f"images: condition=torch.tensor(NULL_LABEL); a label would be the answer"
            ) from error


def _untrained(host: nn.Module, given: Any, seed: int) -> nn.Module:
    """The same network with new weights."""
    if isinstance(given, nn.Module):
        return unwrap(given)
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "untrained"))
        if given is not None:
            return unwrap(given())
        if callable(getattr(host, "arguments", None)):
            return type(host)(**host.arguments())  # pyright: ignore[reportCallIssue]
        model, left = copy.deepcopy(host), []
        for name, module in model.named_modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
            else:
                left += [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
    if left:
        raise EvaluationError(
            f"a probe needs this {type(model).__name__} before training as well, and {', '.join(left[:3])} "
            f"({len(left)} in all) cannot be drawn again: pass it, linear_probe(..., untrained=NEW_NETWORK)"
        )
    return model


# Fitting, choosing, testing


def ridge(features: Tensor, labels: Tensor, classes: int, others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Labels predicted for the other features: by penalty, then by set.

    min_W ‖X W - Y‖² / n + λ ‖W‖² with one-hot labels Y and an intercept that is not penalised: scikit-learn's
    `RidgeClassifier(alpha=n λ)` after `StandardScaler`. One eigenvalue problem serves all λ; with more features than
    images, that of the n × n side. In float64: the smallest λ leaves the problem close to singular.
    """
    x = features.double()
    if not bool(torch.isfinite(x).all()):
        raise EvaluationError("the features of a layer are not all finite, so nothing can be fitted to them")
    mean, deviation = x.mean(0), x.std(0, unbiased=False)
    # A feature that is the same for all images becomes zero: rounding alone is left of it.
    flat = deviation <= 1e-9 * mean.abs().clamp_min(1e-12)
    gain = torch.where(flat, torch.zeros_like(deviation), 1 / deviation.clamp_min(1e-300))
    x, rest = (x - mean) * gain, [(other.double() - mean) * gain for other in others]
    n = len(x)
    one_hot = F.one_hot(labels, classes).double()
    share = one_hot.mean(0)
    if x.shape[1] <= n:
        values, vectors = torch.linalg.eigh(x.T @ x / n)
        projected = vectors.T @ (x.T @ (one_hot - share)) / n
        sides = [other @ vectors for other in rest]
    else:
        values, vectors = torch.linalg.eigh(x @ x.T / n)
        projected = vectors.T @ (one_hot - share)
        sides = [other @ x.T @ vectors / n for other in rest]
    values = values.clamp_min(0)[:, None]
    return [[(side @ (projected / (values + λ)) + share).argmax(1) for side in sides] for λ in PENALTIES]


Key = tuple[str, str, float | None]
"""Contender ("network", "untrained", "pixels"), layer, and time; no time for clean pixels."""


@dataclass(frozen=True)
class Fit:
    """The classifier whose penalty is best on validation images; of equal ones the largest penalty."""

    penalty: float
    validation: float
    """Its accuracy there."""
    hits: Tensor
    """Which test images it recognises."""


def fit(features: Tensor, parts: Parts) -> Fit:
    others = [features[parts.validation], features[parts.test]]
    found = ridge(features[parts.fit], parts.labels[parts.fit], parts.classes, others)
    accuracies = [float((chosen == parts.labels[parts.validation]).double().mean()) for chosen, _ in found]
    best = max(range(len(PENALTIES)), key=lambda number: (accuracies[number], number))
    return Fit(PENALTIES[best], accuracies[best], (found[best][1] == parts.labels[parts.test]).double())


def judged(fits: dict[Key, Fit], layers: Sequence[str], times: Sequence[float], **about: Any) -> LinearProbe:
    """The layer and time of the network that are best on validation images, tested, next to its baselines."""

    def table(contender: str) -> dict[str, list[float]]:
        return {layer: [fits[contender, layer, t].validation for t in times] for layer in layers}

    def best(contender: str) -> Key:
        keys: list[Key] = [(contender, layer, t) for layer in layers for t in times]
        return max(keys, key=lambda key: fits[key].validation)

    def cell(key: Key, against: Tensor | None = None) -> Cell:
        found = fits[key]
        gain = None if against is None else _paired(against - found.hits)
        return Cell(key[1], key[2], found.penalty, found.validation, share_score(found.hits), gain)

    chosen = best("network")
    t = chosen[2]
    baselines: dict[str, Key] = {
        "untrained network": best("untrained"),
        "pixels, same t": ("pixels", "pixels", t),
        CLEAN: ("pixels", CLEAN, None),
    }
    return LinearProbe(
        times=tuple(times),
        network=table("network"),
        untrained=table("untrained"),
        pixels=[fits["pixels", "pixels", t].validation for t in times],
        chosen=cell(chosen),
        baselines={name: cell(key, fits[chosen].hits) for name, key in baselines.items()},
        **about,
    )


def _paired(differences: Tensor) -> Score:
    """The mean difference over the same test images, ± 1.96 standard errors."""
    mean = float(differences.mean())
    error = Z * float(differences.std() / len(differences) ** 0.5) if len(differences) > 1 else 0.0
    return Score(mean, mean - error, mean + error)


# The result


@dataclass(frozen=True)
class Cell:
    """One layer at one time, as it was chosen, and its accuracy on the test images."""

    layer: str
    time: float | None
    """None for clean pixels."""
    penalty: float
    validation: float
    test: Score
    """The accuracy with its 95 % interval (Wilson's)."""
    gain: Score | None = None
    """Of a baseline: how much higher the network's accuracy is on the same test images, with a 95 % interval."""

    @property
    def place(self) -> str:
        return self.layer if self.time is None else f"{self.layer}, t = {self.time:g}"


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """Print it, or `save` it as JSON. `chosen.test` is the number to quote, next to `baselines`."""

    model: str
    data: str
    seed: int
    classes: int
    images: dict[str, int]
    """To fit, to choose on, to test."""
    seen: bool
    """No images were given as held out: the network may have been trained on those that are tested."""
    times: tuple[float, ...]
    network: dict[str, list[float]]
    """Accuracy on validation images, by layer, then by time; next, that of the untrained network and of pixels."""
    untrained: dict[str, list[float]]
    pixels: list[float]
    chosen: Cell
    baselines: dict[str, Cell]
    about: dict[str, Any]
    """What the caller wants to remember: run, step, weights."""

    def rows(self) -> list[dict[str, str]]:
        """A row per layer, a column per time: accuracies in per cent. Baselines below."""
        best = [max(column) for column in zip(*self.untrained.values(), strict=True)]
        named = self.network | {"untrained network, best layer": best, "pixels, same noise": self.pixels}
        columns = [f"t = {t:g}" for t in self.times]
        return [
            {"": name, **{c: f"{100 * value:.1f}" for c, value in zip(columns, values, strict=True)}}
            for name, values in named.items()
        ]

    def remarks(self) -> list[str]:
        lines = [
            f"accuracy in % on {self.images['validation']} validation images of {self.data}; chance "
            f"{100 / self.classes:.1f}; ridge, seed {self.seed}",
            f"chosen: {self.chosen.place}: {_percent(self.chosen.test)} on {self.images['test']} test images",
        ]
        for name, cell in self.baselines.items():
            gain = "" if cell.gain is None else f"; the network is {_percent(cell.gain)} above it"
            lines.append(f"  {name} ({cell.place}): {_percent(cell.test)}{gain}")
        if self.seen:
            lines.append("all images are of one data set: the network may have been trained on the tested ones")
        return lines

    def __str__(self) -> str:
        return "\n".join([text_table(self.rows(), left=("",), rule=False), *self.remarks()])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, self.to_json())


def _percent(score: Score) -> str:
    return f"{100 * score.value:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


# The probe of a run


def probe_run(run: Run, *, data: str | None = None, split: str | None = None, **options: Any) -> LinearProbe:
    """Fit on the images that the run was trained on, choose and test on those that it held out.

    split: choose and test on a different part of the data set, such as "test". `data`: other images for all parts.
    Other options are those of `linear_probe`.
    """
    config, null = run.config, run.conditions.null()
    if null is None and config.diffusion.condition != "none":
        raise ConditionError(
            f"{run.folder} was trained without a null condition (`condition_dropout` 0): a probe would have to give "
            f"away the answer. Train with dropout, such as 0.1"
        )
    if config.images.autoencoder is not None and (data or split):
        raise InvalidConfigError("`data` and `split` are for runs on pixels, and this one was trained on latents")
    size = config.images.size or (run.shape.height, run.shape.width)
    read = partial(load_data, size=size, channels=config.images.channels or run.shape.channels)
    if data is not None:
        fitted, held_out = read(data, split=split or "train"), None
    else:
        own = load_run_data(config)
        fitted, held_out = own.train, own.held_out if split is None else read(config.data, split=split)
        if held_out is None:
            raise InvalidConfigError(
                f"{run.folder} held no images out, and the network was trained on all others: give `split`, such as "
                "test, or `data`, or train with `held_out`"
            )
    return linear_probe(
        run.model,
        fitted,
        held_out=held_out,
        schedule=run.process,
        condition=null,
        untrained=lambda: build_model(config, run.shape),
        about={"run": str(run.folder), "step": run.step, "weights": run.weights, "scaling": config.scaling},
        **options,
    )
