"""What a cache costs and saves: time per image against Fréchet distance, beside fewer steps of the same sampler.

    curve = cache_curve(load_run("runs/x"), steps=20)
    print(curve)
    draw_curve(curve, Path("curve.png"))

A cache makes images faster, and so does a sampler that takes fewer steps. So every setting of the cache stands beside
plain sampling with fewer steps, on the same seeds and the same features. Settings take turns, batch by batch, and what
counts is processor time: other work on the machine slows all of them alike.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..console import html_lines, html_table, silent, text_table
from ..diffusion.images import requests
from ..diffusion.solvers import SampleSettings
from ..errors import InvalidConfigError
from ..evaluation import Score, frechet_score
from ..evaluation.anchors import trusted_features
from ..evaluation.features import features_of
from ..evaluation.judge import evaluation_prompts, reference_data
from ..runs.load import Run
from ..runs.model import example_forward
from ..skips import find_skips
from ..skips.host import host_of
from .figures import colour_of, legend, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVERY = (2, 3, 5)
FEWER = (0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)
"""Shares of the steps that plain sampling is measured with."""


@dataclass(frozen=True)
class Point:
    """One way to sample."""

    steps: int
    cache: str
    seconds: float
    """Of processor time for an image."""
    frechet: Score
    preparation: float = 0.0
    """Seconds that were spent once, on finding and checking the inner part."""

    @property
    def label(self) -> str:
        return f"{self.steps} steps" + (f", cache {self.cache}" if self.cache else "")


@dataclass(frozen=True)
class CacheCurve:
    """Points, the plain ones first, each kind from slow to fast."""

    subject: str
    sampler: str
    images: int
    features: str
    points: tuple[Point, ...]

    @property
    def plain(self) -> list[Point]:
        return sorted((p for p in self.points if not p.cache), key=lambda p: -p.seconds)

    @property
    def cached(self) -> list[Point]:
        return sorted((p for p in self.points if p.cache), key=lambda p: -p.seconds)

    @property
    def whole(self) -> Point:
        """All steps, no cache."""
        return max(self.plain, key=lambda p: p.steps)

    def fewer_steps(self, seconds: float) -> float:
        """The distance of plain sampling in that time: between the two nearest numbers of steps, on a straight line."""
        line = self.plain
        if seconds >= line[0].seconds:
            return line[0].frechet.value
        for slow, fast in pairwise(line):
            if fast.seconds <= seconds:
                share = (slow.seconds - seconds) / max(slow.seconds - fast.seconds, 1e-12)
                return slow.frechet.value + share * (fast.frechet.value - slow.frechet.value)
        return line[-1].frechet.value

    def verdict(self, point: Point) -> str:
        """A setting of the cache against fewer steps in the same time, by the interval of its distance."""
        if not point.cache:
            return ""
        plain = self.fewer_steps(point.seconds)
        return "better" if point.frechet.high < plain else "worse" if point.frechet.low > plain else "no difference"

    def best(self, faster: float) -> Point | None:
        """The setting that loses least among those that are so many times as fast as all steps; None if none is."""
        found = [p for p in self.points if self.whole.seconds / p.seconds >= faster]
        return min(found, key=lambda p: p.frechet.value, default=None)

    def rows(self) -> list[dict[str, str]]:
        whole = self.whole
        return [
            {
                "": point.label,
                "ms per image": f"{1000 * point.seconds:.3g}",
                "times faster": f"{whole.seconds / point.seconds:.2f}",
                "Fréchet distance": str(point.frechet),
                "fewer steps in that time": f"{self.fewer_steps(point.seconds):.3g}" if point.cache else "",
                "the cache is": self.verdict(point),
            }
            for point in [*self.plain, *self.cached]
        ]

    def remarks(self, faster: float = 1.5) -> list[str]:
        lines = [f"{self.images} images each, the same seeds, {self.sampler}, {self.features} features; processor time"]
        verdicts = [self.verdict(point) for point in self.cached]
        counted = ", ".join(f"{kind} {verdicts.count(kind)}" for kind in ("better", "no difference", "worse"))
        lines.append(f"caches against fewer steps in the same time: {counted}")
        best = self.best(faster)
        if best is not None:
            lines.append(f"at least {faster:g} times as fast, and loses least: {best.label}")
        return lines

    def __str__(self) -> str:
        return "\n".join([text_table(self.rows(), left=("",), rule=False), *self.remarks()])

    def _repr_html_(self) -> str:
        return html_table(self.rows()) + html_lines(self.remarks())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "CacheCurve":
        values = json.loads(text)
        points = [Point(**{**point, "frechet": Score(**point["frechet"])}) for point in values["points"]]
        return cls(**{**values, "points": tuple(points)})


def cache_curve(
    run: Run,
    *,
    settings: SampleSettings,
    every: Sequence[int] = EVERY,
    depths: Sequence[int] | None = None,
    fewer: Sequence[int] | None = None,
    n: int = 1000,
    seed: int = 0,
    features: str = "auto",
    feature_weights: str | Path | None = None,
    batch_size: int = 64,
    device: str = "cpu",
    say: Callable[[str], None] = silent,
    progress: Callable[[int, int], None] | None = None,
) -> CacheCurve:
    """Sample with all steps, with fewer, and with each cache. Depths are by default the outermost and a middle one."""
    if n < 2 * batch_size:
        raise InvalidConfigError(
            f"times are measured from the second batch on: -n must be at least {2 * batch_size}, two batches, got {n}"
        )
    count = skip_count(run)
    chosen = sorted({1, (count + 1) // 2}) if depths is None else list(depths)
    if any(not 1 <= depth <= count for depth in chosen):
        raise InvalidConfigError(f"--depths must be from 1 to {count}, the number of long skips, got {chosen}")
    steps = fewer if fewer is not None else sorted({max(2, round(share * settings.steps)) for share in FEWER})
    plain = [replace(settings, steps=number, cache="") for number in sorted({settings.steps, *steps}, reverse=True)]
    caches = [replace(settings, cache=f"every={k},depth={d}") for d in chosen for k in every if k < settings.steps]
    data = reference_data(run.config)
    extractor, reference = trusted_features(features, data, feature_weights, say)
    wanted = requests(n, seed, evaluation_prompts(run.config, data, n)[0])
    points = []
    for setting, (images, seconds, preparation) in zip(
        [*plain, *caches], _in_turns(run, [*plain, *caches], wanted, batch_size, device, progress), strict=True
    ):
        score = frechet_score(reference.moments, features_of(extractor, images))
        points.append(Point(setting.steps, setting.cache, seconds, score, preparation if setting.cache else 0.0))
    return CacheCurve(run.folder.name, settings.sampler, n, extractor.name, tuple(points))


def skip_count(run: Run) -> int:
    host = host_of(run.model)
    plan = host.plan() if host.is_native or host.plan() is not None else None
    if plan is None:
        plan = find_skips(run.model, example_forward(run.model, run.config, run.shape))
    return len(plan)


def _in_turns(
    run: Run,
    settings: Sequence[SampleSettings],
    wanted: Sequence[Any],
    batch_size: int,
    device: str,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[Tensor, float, float]]:
    """Images, seconds per image, and seconds of preparation, of each setting."""
    makers = [run.maker.generate(wanted, each, batch_size=batch_size, device=device) for each in settings]
    images: list[list[Tensor]] = [[] for _ in settings]
    times: list[list[tuple[float, int]]] = [[] for _ in settings]
    batches, done = -(-len(wanted) // batch_size), 0
    for turn in range(batches):
        order = range(len(makers))
        for at in order if turn % 2 else reversed(order):
            began = time.process_time()
            _, made = next(makers[at])
            times[at].append((time.process_time() - began, len(made)))
            images[at].append(made)
            done += 1
            if progress is not None:
                progress(done, batches * len(settings))
    found = []
    for batch_images, ((first, size), *rest) in zip(images, times, strict=True):
        seconds = sum(spent for spent, _ in rest) / sum(number for _, number in rest)
        found.append((torch.cat(batch_images), seconds, max(0.0, first - seconds * size)))
    return found


# The picture


def draw_curves(curves: Sequence[CacheCurve], path: Path) -> None:
    """A panel for each network: to the left is faster, further down is better."""
    figure, axes = panels(len(curves), height=3.3, width=4.2, dpi=120)
    for curve, panel in zip(curves, axes, strict=True):
        _draw(panel, curve)
    save(figure, path)


def _draw(axes: "Axes", curve: CacheCurve) -> None:
    def line(points: Sequence[Point], label: str, color: str, marker: str) -> None:
        x = [1000 * point.seconds for point in points]
        y = [point.frechet.value for point in points]
        low = [point.frechet.value - point.frechet.low for point in points]
        high = [point.frechet.high - point.frechet.value for point in points]
        axes.errorbar(
            x, y, yerr=[low, high], color=color, marker=marker, markersize=4, linewidth=1.2, elinewidth=0.7, label=label
        )

    line(curve.plain, f"fewer steps of {curve.sampler}", colour_of(0), "o")
    for point in curve.plain:
        axes.annotate(
            str(point.steps), (1000 * point.seconds, point.frechet.value), (0, -10), textcoords="offset points", size=6
        )
    depths = sorted({_option(point, "depth") for point in curve.cached})
    for number, depth in enumerate(depths, start=1):
        points = [point for point in curve.cached if _option(point, "depth") == depth]
        line(points, f"{curve.whole.steps} steps, cache around skip {depth}", colour_of(number), "s")
        for point in points:
            axes.annotate(
                f"every {_option(point, 'every')}",
                (1000 * point.seconds, point.frechet.value),
                (4, 4),
                textcoords="offset points",
                size=6,
                color=colour_of(number),
            )
    axes.set(
        xlabel="processor time per image, ms",
        ylabel="Fréchet distance",
        title=f"{curve.subject}, {curve.images} images",
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.tick_params(labelsize=7, which="both")
    legend(axes)


def _option(point: Point, name: str) -> int:
    return int(SampleSettings(steps=point.steps, cache=point.cache).cache_options()[name])
