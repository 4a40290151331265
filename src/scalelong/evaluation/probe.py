"""What the layers of a diffusion network know about classes: linear probes over layers and noise levels.

    found = sl.linear_probe(model, data)        # any model with long skips; data with labels
    print(found); found.plot()

Images are noised to each time t, the network runs once, and a linear classifier is fitted to the pooled features of
each block. Layer, time and penalty are chosen on validation images; the test images are looked at once, and what they
say has an interval. Beside it stand, always, the same network before training and raw pixels, clean and at the same t:
random features and pixels recognise a great deal, and an accuracy without them says nothing.

One draw of noise per image and time is fixed by the seed. `draws` repeats the probe with others and takes the mean.
`protocol="ddae"` is the published one (Xiang et al., arXiv 2303.09769): see `scalelong.evaluation.ddae`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    ConditionError,
    EvaluationError,
    FeatureError,
    InvalidConfigError,
    ScaleLongError,
)
from ..models.call import CONTEXT_ARGUMENTS, LABEL_ARGUMENTS, Denoiser, call_arguments, evaluating, first_tensor
from ..noise import NoiseProcess, alpha_bars, mix
from ..randomness import derived_seed, noise
from ..skips.examples import ExampleInputs
from ..skips.host import unwrap
from ..stability.features import block_names, plan_for
from .ddae import PUBLISHED_TIMES, published_probe
from .linear_classifiers import CLASSIFIERS, PENALTIES
from .parts import Data, Parts, labelled, split
from .probe_result import Cell, LinearProbe, Table, paired
from .scores import share_score

TIMES = (1, 25, 50, 100, 250, 500)
"""Noise levels that are probed, in times of the network (0 to 999)."""
PROTOCOLS = ("ridge", "logistic", "ddae")
POOLS = ("mean", "none")
MOST_IMAGES = 10_000
MOST_NUMBERS = 2**29
"""Features that are held at a time: 2 GiB."""

Advance = Callable[[int, int, str], None]


def linear_probe(
    model: nn.Module,
    data: Data,
    *,
    held_out: Data | None = None,
    times: Sequence[float] | None = None,
    schedule: Any = "vp",
    condition: Tensor | None = None,
    protocol: str = "ridge",
    pool: str = "mean",
    draws: int = 1,
    layers: Sequence[str] | None = None,
    untrained: nn.Module | Callable[[], nn.Module] | None = None,
    images: int | None = MOST_IMAGES,
    penalties: Sequence[float] = PENALTIES,
    augment: bool = True,
    extra_tokens: int | None = None,
    example_inputs: ExampleInputs = None,
    seed: int = 0,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    about: dict[str, Any] | None = None,
    progress: Advance | None = None,
) -> LinearProbe:
    """Accuracy of linear classifiers on the features of each layer at each noise level. The model is left as it was.

    data: images with labels: a data set, its name, or a pair (images, labels); floats are taken to be in [-1, 1].
        Divided into parts to fit (60 %), to choose on and to test (20 % each), class by class.
    held_out: images that the network was not trained on. Then all of `data` is fitted, and one half of these is chosen
        on, the other one tested.
    times: noise levels, 0 to 999. `schedule`: a name, the ᾱ_t, or a scheduler of diffusers.
    condition: the null condition of a conditional network, one for all images. A label would be the answer.
    protocol: "ridge", "logistic", or "ddae": as published, which chooses on the test images.
    pool: "mean" over positions (of tokens: the patches), or "none": all of them, in a row.
    layers: names of modules, or patterns such as "decoder.*"; left out: the blocks at both ends of each long skip, the
        middle, and the last norm.
    untrained: the network before training, or a function that makes it; left out, it is built anew where that can be
        done (U-ViT, and networks whose layers have `reset_parameters`, as torch's do).
    images: fit at most so many, and choose and test on at most so many.
    augment: flips and crops, in the protocol "ddae".
    extra_tokens: leading tokens that are no patches; left out, the model's own `extra_tokens`, or none.
    device: where to run it; left out, where the model is.
    """
    chosen_times = _checked_times(times, protocol)
    _require_choice("protocol", protocol, PROTOCOLS)
    _require_choice("pool", pool, POOLS)
    for name, value in {"draws": draws, "batch_size": batch_size, "images": images or 1}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidConfigError(f"{name} must be a whole number, at least 1, got {value!r}")
    if not penalties or any(not penalty > 0 for penalty in penalties):
        raise InvalidConfigError(f"penalties must be numbers above 0, got {list(penalties)}")
    parts = split(labelled(data), None if held_out is None else labelled(held_out), images, seed)
    noiser, host = Noiser(schedule, parts.x0, seed), unwrap(model)
    told = {
        "model": type(host).__name__,
        "data": parts.name,
        "protocol": protocol,
        "pool": pool,
        "draws": draws,
        "seed": seed,
        "classes": parts.classes,
        "images": {"fit": len(parts.fit), "validation": len(parts.validation), "test": len(parts.test)},
        "seen": not parts.apart,
        "about": about or {},
    }
    with _moved(host, device) as place:
        reader = Reader(host, condition, noiser, layers, pool, extra_tokens, example_inputs, batch_size)
        fresh = _untrained(host, untrained, seed).to(place)
        start = Reader(fresh, condition, noiser, reader.names, pool, reader.extra, example_inputs, batch_size)
        start.axes = reader.axes
        if protocol == "ddae":
            return published_probe(reader, start, noiser, parts, chosen_times, draws, augment, told, progress)
        bench = Bench(parts, CLASSIFIERS[protocol], penalties, noiser.clean_name)
        total = draws * len(chosen_times)
        for draw in range(draws):
            for number, t in enumerate(chosen_times):
                x = noiser.at(t, draw)
                bench.add("pixels", noiser.input_name, t, x.flatten(1))
                for contender, each in (("network", reader), ("untrained", start)):
                    for layer, features in each.read(x, t).items():
                        bench.add(contender, layer, t, features)
                if progress is not None:
                    progress(draw * len(chosen_times) + number + 1, total, f"t = {t:g}")
    bench.add("clean", noiser.clean_name, None, parts.x0.flatten(1))
    return bench.result(reader.names, chosen_times, told)


@contextmanager
def _moved(model: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """The model on this device, and back where it was afterwards."""
    home = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        place = home if device is None else torch.device(device)
        model.to(place)
    except (RuntimeError, AssertionError) as error:
        model.to(home)
        said = str(error).splitlines()[0][:200]
        raise InvalidConfigError(
            f"--device {device} cannot be used ({said}): give cpu, or one that is there"
        ) from error
    try:
        yield place
    finally:
        model.to(home)


# Noise


class Noiser:
    """x_t of all images: one draw for each image, time and number of the draw, whatever the batches."""

    def __init__(self, schedule: Any, x0: Tensor, seed: int) -> None:
        self.x0, self.seed = x0, seed
        self.process = schedule if isinstance(schedule, NoiseProcess) else None
        if isinstance(schedule, str):
            self.process = NoiseProcess(schedule)  # pyright: ignore[reportArgumentType]
        self.bars = None if self.process is not None else alpha_bars(schedule)
        self.input_name, self.clean_name = "pixels", "clean pixels"

    def at(self, t: float, draw: int) -> Tensor:
        drawn = noise(self.seed, draw, range(len(self.x0)), tuple(self.x0.shape[1:]), "cpu", f"probe {t:g}")
        return self.mixed(self.x0, drawn, t)

    def mixed(self, x0: Tensor, drawn: Tensor, t: float) -> Tensor:
        times = torch.full((len(x0),), float(t))
        if self.process is not None:
            return self.process.add_noise(x0, drawn, times)
        assert self.bars is not None
        bar = self.bars[times.long().clamp_max(len(self.bars) - 1)]
        return mix(x0, drawn, bar.sqrt().float(), (1 - bar).sqrt().float())


# Features of a network

LAST_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


class Reader:
    """Runs a network on noisy images and gives the features of its layers: {layer: (N, D)}."""

    def __init__(
        self,
        model: nn.Module,
        condition: Tensor | None,
        noiser: Noiser,
        layers: Sequence[str] | None,
        pool: str,
        extra_tokens: int | None,
        example_inputs: ExampleInputs,
        batch_size: int,
    ) -> None:
        self.model, self.pool, self.batch_size = model, pool, batch_size
        weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
        self.device, self.dtype = weight.device, weight.dtype
        self.condition = None if condition is None else self._placed(_one_condition(condition))
        self.network = Denoiser(model)
        self.extra = int(getattr(model, "extra_tokens", 0)) if extra_tokens is None else extra_tokens
        x = self._placed(noiser.at(500.0, 0)[:2])
        self._try(x)
        self.example = call_arguments(model, x, self._time(x, 500.0), self._given(len(x)))
        self.axes: dict[str, int] = {}
        known = [name for name, _ in model.named_modules() if name]
        if layers is not None and all(name in known for name in layers):
            self.names = self.decoder = tuple(dict.fromkeys(layers))
        else:
            plan = plan_for(model, example_inputs or self.example)
            blocks = block_names(model, plan)
            last = self._last_norm(x, blocks)
            usual = (*blocks, *([last] if last else []))
            self.names = usual if layers is None else _matching(layers, usual, known, type(model).__name__)
            self.axes = dict.fromkeys(usual, plan.sites[0].channel_axis)
            merging = {skip.consumer for skip in plan}
            self.decoder = tuple(name for name in self.names if name in merging) or self.names

    def read(self, x: Tensor, t: float) -> dict[str, Tensor]:
        """Of all images, batch by batch."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for part in x.split(self.batch_size):
            for name, features in self.run(part, t).items():
                if not found[name]:
                    self._require_memory(features.shape[1], len(x))
                found[name].append(features)
        for name, parts in found.items():
            if not parts:
                raise FeatureError(f"the layer {name} of {type(self.model).__name__} does not run: leave it out")
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _require_memory(self, width: int, count: int) -> None:
        held = width * count * len(self.names)
        if held > MOST_NUMBERS:
            raise EvaluationError(
                f"{len(self.names)} layers of {width} features for {count} images are {held * 4 / 2**30:.0f} GiB: "
                f"probe fewer --images or --layers, or pool them (--pool mean)"
            )

    def run(self, x: Tensor, t: float) -> dict[str, Tensor]:
        """Of one batch, pooled, on the CPU."""
        seen: dict[str, Tensor] = {}
        x = self._placed(x)
        with self._watching(seen), evaluating(self.model), torch.no_grad(), _eager():
            self.network(x, self._time(x, t), self._given(len(x)))
        return {name: self._pooled(name, seen[name]).cpu() for name in self.names if name in seen}

    @contextmanager
    def _watching(self, seen: dict[str, Tensor]) -> Iterator[None]:
        def tap(name: str) -> Any:
            def note(_: nn.Module, __: Any, output: Any) -> None:
                tensor = first_tensor(output)
                if tensor is not None:
                    seen[name] = tensor.detach()

            return note

        handles = [self.model.get_submodule(name).register_forward_hook(tap(name)) for name in self.names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pooled(self, name: str, features: Tensor) -> Tensor:
        """(B, D). Of tokens, those that are no patches are left out."""
        features = features.float()
        if features.dim() == 3 and self.extra:
            features = features[:, self.extra :]
        if features.dim() <= 2 or self.pool == "none":
            return features.flatten(1)
        axis = self.axes.get(name, -1 if features.dim() == 3 else 1) % features.dim()
        return features.mean(dim=[at for at in range(1, features.dim()) if at != axis])

    def _placed(self, value: Tensor) -> Tensor:
        """On the network's device and, if it is no label, in its precision."""
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _time(self, x: Tensor, t: float) -> Tensor:
        return torch.full((len(x),), float(t), device=self.device)

    def _given(self, count: int) -> Tensor | None:
        return None if self.condition is None else self.condition.expand(count, *self.condition.shape[1:])

    def _try(self, x: Tensor) -> None:
        """A conditional network that got no condition says so in its own words, of which there are many."""
        try:
            with evaluating(self.model), torch.no_grad():
                self.network(x, self._time(x, 500.0), self._given(len(x)))
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            said = " ".join(str(error).split())[:200]
            conditional = self.network.label_argument or self.network.context_argument
            about = (*LABEL_ARGUMENTS[1:], *CONTEXT_ARGUMENTS, "condition", "label", "NoneType")
            if self.condition is None and conditional and any(word in said for word in about):
                raise ConditionError(
                    f"this {type(self.model).__name__} is conditional ({conditional}), and a probe needs its null "
                    f"condition, one for all images: condition=torch.tensor(NULL_LABEL); a label would be the answer. "
                    f"It said: {said}"
                ) from error
            if isinstance(error, ScaleLongError):
                raise
            raise InvalidConfigError(f"{type(self.model).__name__} cannot be run on these images: {said}") from error

    def _last_norm(self, x: Tensor, blocks: Sequence[str]) -> str | None:
        """The normalisation that runs last, behind all blocks and outside of them."""
        order: list[str] = []
        outside = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, LAST_NORMS) and not any(name.startswith(f"{block}.") for block in blocks)
        }
        watched = {**outside, **{name: self.model.get_submodule(name) for name in blocks}}
        handles = [
            module.register_forward_hook(lambda *_, name=name: order.append(name)) for name, module in watched.items()
        ]
        try:
            with evaluating(self.model), torch.no_grad(), _eager():
                self.network(x, self._time(x, 500.0), self._given(len(x)))
        finally:
            for handle in handles:
                handle.remove()
        return order[-1] if order and order[-1] in outside else None


def _matching(patterns: Sequence[str], usual: Sequence[str], known: Sequence[str], model: str) -> tuple[str, ...]:
    """Names of modules as they are; * stands for anything, among the layers that are probed by themselves."""
    found: dict[str, None] = {}
    for pattern in patterns:
        fitting = [name for name in usual if fnmatchcase(name, pattern)] or [name for name in known if name == pattern]
        if not fitting:
            raise InvalidConfigError(
                f"{model} has no layer {pattern}; --layers takes names of modules, or patterns for these: "
                f"{', '.join(usual)}"
            )
        found |= dict.fromkeys(fitting)
    return tuple(found)


def _one_condition(condition: Tensor) -> Tensor:
    """(1,) or (1, length, dim): the same for all images."""
    if not isinstance(condition, Tensor):
        condition = torch.as_tensor(condition)
    wanted = 3 if condition.is_floating_point() else 1
    row = condition if condition.dim() == wanted else condition.unsqueeze(0)
    if row.dim() != wanted or len(row) != 1:
        raise ConditionError(
            f"condition must be one for all images, the null label or the empty text, and has the shape "
            f"{tuple(condition.shape)}: a label for each image would be the answer"
        )
    return row


def _eager() -> Any:
    """Compiled blocks run as they are written, so that hooks are called."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _untrained(host: nn.Module, given: Any, seed: int) -> nn.Module:
    """The same network with weights that nothing was learned into."""
    if isinstance(given, nn.Module):
        return unwrap(given)
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "untrained"))
        if given is not None:
            return unwrap(given())
        if callable(getattr(host, "arguments", None)):
            return type(host)(**host.arguments()).eval()  # pyright: ignore[reportCallIssue]
        return _reset(copy.deepcopy(host))  # scaled as the model is


def _reset(model: nn.Module) -> nn.Module:
    left = []
    for name, module in model.named_modules():
        own = [key for key, value in module.named_parameters(recurse=False) if value is not None]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        else:
            left += [f"{name}.{key}".lstrip(".") for key in own]
    if left:
        raise EvaluationError(
            f"a probe needs this {type(model).__name__} before training as well, and {', '.join(left[:3])} "
            f"({len(left)} in all) cannot be drawn anew: pass it, linear_probe(..., untrained=NEW_NETWORK)"
        )
    return model


# Fitting, choosing, testing


class Bench:
    """Accuracies on validation images for every penalty, and hits on test images, which are looked at in the end."""

    def __init__(self, parts: Parts, fit: Any, penalties: Sequence[float], clean: str) -> None:
        self.parts, self.fit, self.penalties, self.clean = parts, fit, tuple(penalties), clean
        self.validation: dict[tuple[str, str, float | None], list[list[float]]] = {}
        """By contender, layer and time: for each draw, the accuracy of each penalty."""
        self.hits: dict[tuple[str, str, float | None], list[Tensor]] = {}
        """(penalties, test images) for each draw."""

    def add(self, contender: str, layer: str, t: float | None, features: Tensor) -> None:
        p = self.parts
        others = [features[p.validation], features[p.test]]
        found = self.fit(features[p.fit], p.labels[p.fit], p.classes, others, self.penalties)
        accuracy = [float((chosen == p.labels[p.validation]).double().mean()) for chosen, _ in found]
        hits = torch.stack([tested == p.labels[p.test] for _, tested in found])
        key = contender, layer, t
        self.validation.setdefault(key, []).append(accuracy)
        self.hits.setdefault(key, []).append(hits)

    def penalty(self, key: tuple[str, str, float | None]) -> int:
        """The one with the highest accuracy over all draws; of equal ones the largest."""
        means = torch.tensor(self.validation[key], dtype=torch.float64).mean(0)
        return int((means == means.max()).nonzero().max())

    def accuracy(self, key: tuple[str, str, float | None]) -> tuple[float, float]:
        """Mean over the draws, and their deviation."""
        own = torch.tensor(self.validation[key], dtype=torch.float64)[:, self.penalty(key)]
        return float(own.mean()), float(own.std()) if len(own) > 1 else 0.0

    def table(self, contender: str, layers: Sequence[str], times: Sequence[float]) -> Table:
        cells = [[self.accuracy((contender, layer, t)) for t in times] for layer in layers]
        return Table(
            layers=tuple(layers),
            times=tuple(times),
            accuracy=[[mean for mean, _ in row] for row in cells],
            deviation=[[spread for _, spread in row] for row in cells],
        )

    def best(self, contender: str, layers: Sequence[str], times: Sequence[float]) -> tuple[str, str, float | None]:
        """The layer and time with the highest accuracy on validation images; of equal ones the first."""
        keys = [(contender, layer, t) for layer in layers for t in times]
        return max(keys, key=lambda key: self.accuracy(key)[0])

    def tested(self, key: tuple[str, str, float | None]) -> Tensor:
        """For each test image, the share of the draws in which it is recognised."""
        chosen = self.penalty(key)
        return torch.stack([hits[chosen] for hits in self.hits[key]]).double().mean(0)

    def cell(self, key: tuple[str, str, float | None], against: Tensor | None = None) -> Cell:
        _, layer, t = key
        shares = self.tested(key)
        return Cell(
            layer=layer,
            time=t,
            penalty=self.penalties[self.penalty(key)],
            validation=self.accuracy(key)[0],
            test=share_score(shares),
            gain=None if against is None else paired(against - shares),
        )

    def result(self, layers: Sequence[str], times: Sequence[float], told: dict[str, Any]) -> LinearProbe:
        pixels = next(layer for contender, layer, _ in self.validation if contender == "pixels")
        chosen = self.best("network", layers, times)
        own = self.tested(chosen)
        t = chosen[2]
        baselines = {
            "untrained network": self.cell(self.best("untrained", layers, times), own),
            "untrained network, same t": self.cell(self.best("untrained", layers, [t] if t is not None else []), own),
            "pixels, same t": self.cell(("pixels", pixels, t), own),
            "clean pixels": self.cell(("clean", self.clean, None), own),
        }
        return LinearProbe(
            network=self.table("network", layers, times),
            untrained=self.table("untrained", layers, times),
            pixels=self.table("pixels", [pixels], times),
            chosen=self.cell(chosen),
            baselines=baselines,
            chosen_on="validation",
            **told,
        )


# Checks


def _checked_times(times: Sequence[float] | None, protocol: str) -> tuple[float, ...]:
    if times is None:
        return tuple(map(float, PUBLISHED_TIMES if protocol == "ddae" else TIMES))
    listed = tuple(float(t) for t in times)
    if not listed or any(not 0 <= t <= 999 for t in listed) or len(set(listed)) != len(listed):
        raise InvalidConfigError(f"times must be different numbers from 0 to 999 (--times 1,100,250), got {listed}")
    return listed


def _require_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
