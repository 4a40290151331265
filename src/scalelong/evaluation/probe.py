"""What the layers of a diffusion network know about classes: linear probes over layers and noise levels.

    found = sl.linear_probe(model, data)        # any model with long skips; data with labels
    print(found); found.plot()

Images are noised to each time t, the network runs once, and a ridge classifier is fitted to the features of each block,
averaged over positions. Layer, time and penalty are chosen on validation images; the test images are looked at once,
and their accuracy has an interval. The controls are the same network before training, and pixels, clean and with the
same noise: random features and pixels recognise a great deal, and an accuracy without them says nothing.

The noise of each image and time is fixed by the seed. `draws` repeats the probe with other noise and takes the mean.
"""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..console import text_table
from ..data import ImageData, load_data, to_float
from ..diffusion import sample_latents
from ..errors import (
    ConditionError,
    DataError,
    EvaluationError,
    FeatureError,
    InvalidConfigError,
    InvalidSamplesError,
    LabelError,
)
from ..files import write_bytes, write_text
from ..finding import ExampleInputs, unwrap
from ..models import Denoiser, call_arguments, evaluating, first_tensor
from ..noise import NoiseProcess, alpha_bars, mix
from ..optional import needs
from ..randomness import derived_seed, generator, noise
from ..runs import build_model, load_run_data
from ..stability import block_names, plan_for
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

Data = ImageData | tuple[Tensor, Tensor] | str
Key = tuple[str, str, float | None]
"""Contender ("network", "untrained", "pixels"), layer, time."""


def linear_probe(
    model: nn.Module,
    data: Data,
    *,
    held_out: Data | None = None,
    times: Sequence[float] = TIMES,
    schedule: Any = "vp",
    condition: Tensor | None = None,
    draws: int = 1,
    layers: Sequence[str] | None = None,
    untrained: nn.Module | Callable[[], nn.Module] | None = None,
    images: int = MOST_IMAGES,
    example_inputs: ExampleInputs = None,
    seed: int = 0,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    about: dict[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> LinearProbe:
    """Accuracy of linear classifiers on the features of each layer at each noise level. The model is left as it was.

    data: images with labels: a data set, its name, or a pair (images, labels); floats are taken to be in [-1, 1].
        Divided into parts to fit (60 %), to choose on and to test (20 % each), class by class.
    held_out: images that the network was not trained on. Then all of `data` is fitted, and one half of these is chosen
        on, the other one tested.
    times: noise levels, 0 to 999. `schedule`: a name, the ᾱ_t, or a scheduler of diffusers.
    condition: the null condition of a conditional network, one for all images. A label would be the answer.
    layers: names of modules, or patterns such as "decoder.*"; left out: the blocks at both ends of each long skip, the
        middle, and the last norm.
    untrained: the network before training, or a function that makes it; left out, it is made where that can be done
        (U-ViT, and networks whose layers have `reset_parameters`, as torch's do).
    images: fit at most so many, and choose and test on at most so many.
    device: where to run it; left out, where the model is.
    """
    times = tuple(float(t) for t in times)
    if not times or any(not 0 <= t <= 999 for t in times) or len(set(times)) != len(times):
        raise InvalidConfigError(f"`times` must be different numbers from 0 to 999, got {times}")
    if min(draws, batch_size, images) < 1:
        raise InvalidConfigError("`draws`, `batch_size` and `images` must be at least 1")
    parts = Parts.of(_labelled(data), None if held_out is None else _labelled(held_out), images, seed)
    host = unwrap(model)
    home = next((value.device for value in host.parameters()), torch.device("cpu"))
    scorer = Scorer(parts)
    try:
        host.to(device or home)
        reader = Reader(host, condition, layers, example_inputs, batch_size, parts.x0)
        start = copy.copy(reader)
        start.model = _untrained(host, untrained, seed).to(reader.device, reader.dtype).eval()
        for draw in range(draws):
            for number, t in enumerate(times, start=1):
                x = noised(parts.x0, t, schedule, seed, draw)
                scorer.add(("pixels", "pixels", t), x.flatten(1))
                for contender, each in (("network", reader), ("untrained", start)):
                    for layer, features in each.read(x, t).items():
                        scorer.add((contender, layer, t), features)
                if progress is not None:
                    progress(draw * len(times) + number, draws * len(times), f"t = {t:g}")
    finally:
        host.to(home)
    scorer.add(("pixels", "clean pixels", None), parts.x0.flatten(1))
    counts = {"fit": len(parts.fit), "validation": len(parts.validation), "test": len(parts.test)}
    facts = {"model": type(host).__name__, "data": parts.name, "classes": parts.classes, "images": counts}
    return scorer.result(reader.names, times, draws=draws, seed=seed, seen=held_out is None, about=about or {}, **facts)


def noised(x0: Tensor, t: float, schedule: Any, seed: int, draw: int) -> Tensor:
    """x_t of all images: one draw of noise for each image, time and number of the draw."""
    drawn = noise(seed, draw, range(len(x0)), tuple(x0.shape[1:]), "cpu", f"probe {t:g}")
    if isinstance(schedule, str | NoiseProcess):
        process = NoiseProcess(schedule) if isinstance(schedule, str) else schedule  # pyright: ignore[reportArgumentType]
        return process.add_noise(x0, drawn, torch.full((len(x0),), t))
    bars = alpha_bars(schedule)
    bar = bars[min(int(t), len(bars) - 1)].expand(len(x0))
    return mix(x0, drawn, bar.sqrt().float(), (1 - bar).sqrt().float())


# Labelled images in three parts


class Labelled(NamedTuple):
    name: str
    x0: Tensor
    labels: Tensor
    classes: tuple[str, ...]


def _labelled(data: Data) -> Labelled:
    data = load_data(data) if isinstance(data, str) else data
    if isinstance(data, ImageData):
        if data.annotations.labels is None or data.classes is None:
            raise LabelError(
                f"a probe needs labels, and {data.name!r} has none: put the images of each class in a folder of its "
                f"own, or give `data` with labels"
            )
        batch = data.fetch(torch.arange(len(data)))
        assert batch.labels is not None
        # Of latents the means are taken.
        x0 = sample_latents(batch.images) if batch.images.is_floating_point() else to_float(batch.images)
        return Labelled(data.name, x0, batch.labels.long(), data.classes)
    images, labels = data
    if labels.shape != images.shape[:1] or labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
        raise LabelError(f"labels must be whole numbers from 0, one for each of the {len(images)} images")
    x0 = to_float(images.cpu()) if images.dtype == torch.uint8 else images.cpu().float()
    count = int(labels.max()) + 1 if len(labels) else 0
    return Labelled("the given images", x0, labels.long().cpu(), tuple(map(str, range(count))))


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
    def of(cls, data: Labelled, held_out: Labelled | None, most: int, seed: int) -> Parts:
        """Class by class, so that every part has all of them in their proportions."""
        if held_out is not None and held_out.classes != data.classes:
            raise LabelError(f"the held-out images have other classes than {data.name}: {', '.join(held_out.classes)}")
        labels = data.labels if held_out is None else torch.cat([data.labels, held_out.labels])
        counts = torch.bincount(labels, minlength=len(data.classes))
        if len(data.classes) < 2 or int(counts.min()) < LEAST_IMAGES:
            raise InvalidSamplesError(
                f"a probe needs two classes and {LEAST_IMAGES} images of each, and {data.name} has {counts.tolist()}"
            )
        source = generator(seed, "probe split")
        rows = torch.arange(len(labels))
        if held_out is None:
            fit, validation, test = _divided(rows, labels, (0.6, 0.2, 0.2), source)
        else:
            (fit,) = _divided(rows[: len(data.labels)], labels, (1.0,), source)
            validation, test = _divided(rows[len(data.labels) :], labels, (0.5, 0.5), source)
        kept = [part[:most] for part in (fit, validation, test)]
        x0 = data.x0 if held_out is None else torch.cat([data.x0, held_out.x0])
        places = torch.arange(sum(map(len, kept))).split([len(part) for part in kept])
        used = torch.cat(kept)  # what no part uses is not run through the network
        found = cls(data.name, x0[used], labels[used], len(data.classes), *places)
        for part in places:
            if len(found.labels[part].unique()) < len(data.classes):
                raise InvalidSamplesError("a part of the images lacks a class: give more images, or a larger `images`")
        return found


def _divided(rows: Tensor, labels: Tensor, shares: Sequence[float], source: torch.Generator) -> list[Tensor]:
    """Rows in parts of these shares. Within a part the classes alternate in their proportions."""
    rows = rows[torch.randperm(len(rows), generator=source)]
    parts: list[list[tuple[float, int]]] = [[] for _ in shares]
    for label in labels[rows].unique():
        own = rows[labels[rows] == label]
        bounds = [round(sum(shares[: number + 1]) * len(own)) for number in range(len(shares))]
        for part, piece in zip(parts, own.tensor_split(bounds[:-1]), strict=True):
            # The k-th image of a class of n stands at (k + ½) / n.
            part += [((k + 0.5) / len(piece), row) for k, row in enumerate(piece.tolist())]
    return [torch.tensor([row for _, row in sorted(part)], dtype=torch.long) for part in parts]


# Features of a network

LAST_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class Reader:
    """Runs a network on noisy images and gives the features of its layers: {layer: (N, D)}."""

    def __init__(
        self,
        model: nn.Module,
        condition: Tensor | None,
        layers: Sequence[str] | None,
        example_inputs: ExampleInputs,
        batch_size: int,
        x0: Tensor,
    ) -> None:
        self.model, self.batch_size = model, batch_size
        weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
        self.device, self.dtype = weight.device, weight.dtype
        self.condition = None if condition is None else _one_condition(condition).to(self.device)
        if self.condition is not None and self.condition.is_floating_point():
            self.condition = self.condition.to(self.dtype)
        self.axes: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        x = x0[:2].to(self.device, self.dtype)
        self._try(x)
        modules = dict(model.named_modules())
        usual: list[str] = []
        if layers is None or not all(name in modules for name in layers):
            given = call_arguments(model, x, torch.full((len(x),), 500.0, device=self.device), self._given(len(x)))
            plan = plan_for(model, example_inputs or given)
            blocks = block_names(model, plan)
            usual = [*blocks, *self._last_norm(x, blocks)]
            self.axes = dict.fromkeys(usual, plan.sites[0].channel_axis)
        chosen: list[str] = []
        for pattern in layers or ("*",):
            found = [name for name in usual if fnmatchcase(name, pattern)]
            if not found and pattern not in modules:
                raise InvalidConfigError(
                    f"{type(model).__name__} has no layer {pattern}; `layers` takes names of modules, or patterns for "
                    f"these: {', '.join(usual)}"
                )
            chosen += found or [pattern]
        self.names = tuple(dict.fromkeys(chosen))

    def read(self, x: Tensor, t: float) -> dict[str, Tensor]:
        """The features of all images, averaged over positions, on the CPU."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for part in x.split(self.batch_size):
            seen = self._run(part.to(self.device, self.dtype), t, self.names)
            for name, features in seen.items():
                found[name].append(self._pooled(name, features).cpu())
        silent = [name for name, parts in found.items() if not parts]
        if silent:
            raise FeatureError(f"the layer {silent[0]} of {type(self.model).__name__} does not run: leave it out")
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _run(self, x: Tensor, t: float, names: Sequence[str]) -> dict[str, Tensor]:
        """The outputs of modules in one forward pass, in the order in which they ran."""
        seen: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def note(_: nn.Module, __: Any, output: Any) -> None:
                tensor = first_tensor(output)
                if tensor is not None:
                    seen.pop(name, None)
                    seen[name] = tensor.detach()

            return note

        # Compiled blocks run as they are written, so that hooks are called.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with ExitStack() as stack, evaluating(self.model), torch.no_grad(), eager:
            for name in names:
                stack.callback(self.model.get_submodule(name).register_forward_hook(hook(name)).remove)
            Denoiser(self.model)(x, torch.full((len(x),), float(t), device=self.device), self._given(len(x)))
        return seen

    def _pooled(self, name: str, features: Tensor) -> Tensor:
        """(B, D). Tokens that are not patches are left out."""
        features = features.float()
        if features.dim() == 3:
            features = features[:, int(getattr(self.model, "extra_tokens", 0)) :]
        if features.dim() <= 2:
            return features
        axis = self.axes.get(name, -1 if features.dim() == 3 else 1) % features.dim()
        return features.mean(dim=[at for at in range(1, features.dim()) if at != axis])

    def _given(self, count: int) -> Tensor | None:
        return None if self.condition is None else self.condition.expand(count, *self.condition.shape[1:])

    def _try(self, x: Tensor) -> None:
        network = Denoiser(self.model)
        conditional = network.label_argument or network.context_argument
        try:
            self._run(x, 500.0, ())
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            message = " ".join(str(error).split())[:200]
            if self.condition is None and conditional:
                raise ConditionError(
                    f"this {type(self.model).__name__} is conditional ({conditional}), and a probe needs its null "
                    f"condition, one for all images: condition=torch.tensor(NULL_LABEL); a label would be the answer. "
                    f"Its error: {message}"
                ) from error
            raise InvalidConfigError(f"{type(self.model).__name__} cannot be run on these images: {message}") from error

    def _last_norm(self, x: Tensor, blocks: Sequence[str]) -> list[str]:
        """The normalisation that runs last, after all blocks and outside of them."""
        norms = [name for name, module in self.model.named_modules() if isinstance(module, LAST_NORMS)]
        outside = [name for name in norms if not any(name.startswith(f"{block}.") for block in blocks)]
        order = list(self._run(x, 500.0, [*outside, *blocks]))
        return order[-1:] if order and order[-1] in outside else []


def _one_condition(condition: Tensor) -> Tensor:
    """(1,) or (1, length, dim): the same for all images."""
    condition = torch.as_tensor(condition)
    wanted = 3 if condition.is_floating_point() else 1
    row = condition if condition.dim() == wanted else condition.unsqueeze(0)
    if row.dim() != wanted or len(row) != 1:
        raise ConditionError(
            f"`condition` must be one for all images, the null label or the empty text, and has the shape "
            f"{tuple(condition.shape)}: a label for each image would be the answer"
        )
    return row


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
        raise FeatureError("the features of a layer are not all finite, so nothing can be fitted to them")
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


class Scorer:
    """Hits on validation and test images for every penalty, layer and time. Test images are looked at in the end."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.hits: dict[Key, list[tuple[Tensor, Tensor]]] = {}
        """For each draw: (penalties, validation images) and (penalties, test images)."""

    def add(self, key: Key, features: Tensor) -> None:
        p = self.parts
        found = ridge(features[p.fit], p.labels[p.fit], p.classes, [features[p.validation], features[p.test]])
        validation = torch.stack([chosen == p.labels[p.validation] for chosen, _ in found]).double()
        test = torch.stack([tested == p.labels[p.test] for _, tested in found]).double()
        self.hits.setdefault(key, []).append((validation, test))

    def _validation(self, key: Key) -> tuple[int, float]:
        """The penalty that is best on validation images (of equal ones the largest), and its accuracy there."""
        means = torch.stack([validation.mean(1) for validation, _ in self.hits[key]]).mean(0)
        best = int((means == means.max()).nonzero().max())
        return best, float(means[best])

    def tested(self, key: Key) -> Tensor:
        """For each test image, the share of the draws in which it is recognised."""
        best, _ = self._validation(key)
        return torch.stack([test[best] for _, test in self.hits[key]]).mean(0)

    def best(self, contender: str, layers: Sequence[str], times: Sequence[float]) -> Key:
        """The layer and time with the highest accuracy on validation images; of equal ones the first."""
        keys: list[Key] = [(contender, layer, t) for layer in layers for t in times]
        return max(keys, key=lambda key: self._validation(key)[1])

    def _cell(self, key: Key, against: Tensor | None = None) -> Cell:
        shares = self.tested(key)
        gain = None if against is None else _paired(against - shares)
        penalty, validation = self._validation(key)
        return Cell(key[1], key[2], PENALTIES[penalty], validation, share_score(shares), gain)

    def result(self, layers: Sequence[str], times: Sequence[float], **about: Any) -> LinearProbe:
        def table(contender: str, names: Sequence[str]) -> Table:
            cells = [[self._validation((contender, layer, t))[1] for t in times] for layer in names]
            return Table(tuple(names), tuple(times), cells)

        chosen = self.best("network", layers, times)
        own, t = self.tested(chosen), chosen[2]
        assert t is not None
        baselines = {
            "untrained network": self.best("untrained", layers, times),
            "untrained network, same t": self.best("untrained", layers, [t]),
            "pixels, same t": ("pixels", "pixels", t),
            "clean pixels": ("pixels", "clean pixels", None),
        }
        return LinearProbe(
            network=table("network", layers),
            untrained=table("untrained", layers),
            pixels=table("pixels", ["pixels"]),
            chosen=self._cell(chosen),
            baselines={name: self._cell(key, own) for name, key in baselines.items()},
            **about,
        )


def _paired(differences: Tensor) -> Score:
    """The mean difference over the same test images, ± 1.96 standard errors."""
    mean = float(differences.mean())
    error = Z * float(differences.std() / len(differences) ** 0.5) if len(differences) > 1 else 0.0
    return Score(mean, mean - error, mean + error)


# The result


@dataclass(frozen=True)
class Table:
    """Accuracy on validation images by layer and time, the mean over the draws."""

    layers: tuple[str, ...]
    times: tuple[float, ...]
    accuracy: list[list[float]]
    """[layer][time]"""


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
    """Print it, `plot` it, `save` it as JSON. `chosen.test` is the number to quote, next to `baselines`."""

    model: str
    data: str
    draws: int
    seed: int
    classes: int
    images: dict[str, int]
    """To fit, to choose on, to test."""
    seen: bool
    """No images were given as held out: the network may have been trained on those that are tested."""
    network: Table
    untrained: Table
    pixels: Table
    chosen: Cell
    baselines: dict[str, Cell]
    about: dict[str, Any]
    """What the caller wants to remember: run, step, weights."""

    def rows(self) -> list[dict[str, str]]:
        """A row per layer, a column per time: accuracies in per cent. Baselines below."""
        best = [max(column) for column in zip(*self.untrained.accuracy, strict=True)]
        named = dict(zip(self.network.layers, self.network.accuracy, strict=True))
        named |= {"untrained network, best layer": best, "pixels, same noise": self.pixels.accuracy[0]}
        columns = [f"t = {t:g}" for t in self.network.times]
        return [
            {"": name, **{c: f"{100 * value:.1f}" for c, value in zip(columns, values, strict=True)}}
            for name, values in named.items()
        ]

    def remarks(self) -> list[str]:
        lines = [
            f"accuracy in % on {self.images['validation']} validation images of {self.data}; chance "
            f"{100 / self.classes:.1f}; ridge, {self.draws} draw(s) of noise, seed {self.seed}",
            f"chosen: {self.chosen.place}: {_percent(self.chosen.test)} on {self.images['test']} test images",
        ]
        for name, cell in self.baselines.items():
            gain = "" if cell.gain is None else f"; the network is {_percent(cell.gain)} above it"
            lines.append(f"  {name} ({cell.place}): {_percent(cell.test)}{gain}")
        if self.seen:
            lines.append("all images are of one data set: the network may have been trained on the tested ones")
        return [*lines, *self.about.get("remarks", [])]

    def __str__(self) -> str:
        return "\n".join([text_table(self.rows(), left=("",), rule=False), *self.remarks()])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, self.to_json())

    def plot(self) -> Any:
        """A figure of matplotlib: network and untrained network as heat maps in one scale, pixels as their last row."""
        layers, times = [*self.network.layers, "pixels, same noise"], self.network.times
        size = (2 + 0.085 * max(map(len, layers)) + 1.3 * len(times), 1.7 + 0.3 * len(layers))
        figures = needs("matplotlib.figure", "report", "drawing a probe")
        figure = figures.Figure(figsize=size, layout="constrained", dpi=120)
        panels = figure.subplots(1, 2, sharey=True)
        grids = [[*table.accuracy, self.pixels.accuracy[0]] for table in (self.network, self.untrained)]
        cells = [[[100 * value for value in row] for row in grid] for grid in grids]
        least, most = (pick(value for grid in cells for row in grid for value in row) for pick in (min, max))
        for axes, grid, title in zip(panels, cells, (f"{self.model}, trained", "before training"), strict=True):
            image = axes.imshow(grid, cmap="viridis", vmin=least, vmax=most, aspect="auto")
            for row, column in product(range(len(layers)), range(len(times))):
                colour = "black" if grid[row][column] > (least + most) / 2 else "white"
                axes.text(column, row, f"{grid[row][column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
            axes.set_title(title, fontsize=9)
            axes.set_xticks(range(len(times)), [f"{t:g}" for t in times], fontsize=8)
            axes.set_xlabel("noise level t", fontsize=8)
            if axes is panels[0]:
                axes.set_yticks(range(len(layers)), layers, fontsize=8)
                figure.colorbar(image, ax=list(panels), shrink=0.9, pad=0.02).set_label("% right on validation images")
        figure.suptitle(f"{self.data}; chosen {self.chosen.place}: {_percent(self.chosen.test)}", fontsize=9)
        return figure

    def save_plot(self, path: str | PathLike[str]) -> None:
        """Write the picture whole, or not at all. The suffix of the file is its format."""
        content = io.BytesIO()
        self.plot().savefig(content, format=Path(path).suffix.removeprefix(".") or "png")
        write_bytes(path, content.getvalue())


def _percent(score: Score) -> str:
    return f"{100 * score.value:.1f} % [{100 * score.low:.1f}, {100 * score.high:.1f}]"


# The probe of a run


def probe_run(run: Run, *, data: str | None = None, split: str | None = None, **options: Any) -> LinearProbe:
    """Fit on the images that the run was trained on, choose and test on those that it held out.

    split: choose and test on another part of the data set, such as "test". `data`: other images for all three parts.
    Other options are those of `linear_probe`.
    """
    null = run.conditions.null()
    if null is None and run.config.diffusion.condition != "none":
        raise ConditionError(
            f"{run.folder} was trained without a null condition (`condition_dropout` 0): a probe would have to give "
            f"away the answer. Train with dropout, such as 0.1"
        )
    fitted, held_out = _images(run, data, split)
    about = {"run": str(run.folder), "step": run.step, "weights": run.weights, "scaling": run.config.scaling}
    return linear_probe(
        run.model,
        fitted,
        held_out=held_out,
        schedule=run.process,
        condition=null,
        untrained=lambda: build_model(run.config, run.shape, adapters=False),
        about=about,
        **options,
    )


def _images(run: Run, data: str | None, split: str | None) -> tuple[ImageData, ImageData | None]:
    config, latents = run.config, run.config.images.autoencoder is not None
    if latents and (data or split):
        raise InvalidConfigError("`data` and `split` are for runs on pixels, and this one was trained on latents")
    size = config.images.size or (run.shape.height, run.shape.width)
    options: dict[str, Any] = {"size": size, "channels": config.images.channels or run.shape.channels}
    if data is not None:
        return load_data(data, split=split or "train", **options), None
    found = load_run_data(config)
    if split is None and found.held_out is not None:
        return found.train, found.held_out
    try:
        if latents:
            raise DataError("it is trained on latents")
        return found.train, load_data(config.data, split=split or "test", **options)
    except DataError as error:
        raise InvalidConfigError(
            f"{run.folder} held no images out, and the network was trained on all others ({error}): give `data`, or "
            "train with `held_out`"
        ) from error
