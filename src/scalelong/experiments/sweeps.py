"""Comparisons along an axis: depth, width, batch size, rate, and noise on the input of the trained networks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..errors import InvalidConfigError
from ..runs.config import TrainConfig
from ..runs.load import load_run
from ..theory import noise_gain
from .compare import Comparison, compare
from .curves import mean
from .probing import noisy_probe
from .runs import PlannedRun
from .summary import baseline_of, ratio_text, spread
from .variants import Variant, as_variant

Value = TypeVar("Value", int, float)

AXES = {"depth": "model_options.depth", "width": "model_options.dim", "batch": "batch_size", "rate": "optimizer.lr"}
"""What a sweep changes, and the field of the configuration that holds it."""
PROBE = 32


def at(config: TrainConfig, axis: str, value: float) -> TrainConfig:
    """The configuration with another depth or width of the network, another batch size or another learning rate."""
    if axis not in AXES:
        raise InvalidConfigError(f"a sweep goes along {', '.join(AXES)}, got {axis!r}")
    return Variant(axis, {AXES[axis]: value}).apply(config)


def sweep(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: Path,
    axis: str,
    values: Sequence[Value],
    *,
    every: int | None = None,
    jobs: int | None = None,
) -> dict[Value, Comparison] | None:
    """One comparison per value, each in a folder of its own. None if it was interrupted."""
    for variant in map(as_variant, methods):
        if AXES.get(axis) in variant.changes:
            raise InvalidConfigError(f"{variant.name} has a {axis} of its own, so that a sweep of it changes nothing")
    found: dict[Value, Comparison] = {}
    for value in values:
        print(f"{axis} {value:g}", flush=True)
        comparison = compare(at(config, axis, value), methods, seeds, out / f"{axis}-{value:g}", every=every, jobs=jobs)
        if comparison is None:
            return None
        found[value] = comparison
    return found


def sweep_rows(axis: str, found: dict[Value, Comparison]) -> list[dict[str, str]]:
    base = baseline_of([entry.method for comparison in found.values() for entry in comparison.summaries])
    return [
        {
            axis: f"{value:g}",
            "method": entry.method,
            "held-out loss": spread(entry.held_out_loss, "{:.4f}"),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "O1": spread([score.o1 for score in entry.oscillation if score.valid], "{:.2g}"),
            "collapsed or diverged": f"{len({*entry.collapsed, *entry.diverged})} of {len(entry.seeds)}",
        }
        for value, comparison in found.items()
        for entry in comparison.summaries
    ]


def noise_rows(runs: Sequence[PlannedRun], sigmas: Sequence[float]) -> list[dict[str, str]]:
    """By how much each trained network amplifies extra noise on its input (Figure 3 c); averaged weights, all seeds."""
    gains: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        if run.divergence() is not None:
            continue
        trained = load_run(run.folder)
        x, t, labels = noisy_probe(run.config, PROBE)
        rest = (t,) if labels is None else (t, labels)
        for sigma in sigmas:
            gains.setdefault((run.method, sigma), []).append(noise_gain(trained.model, x, *rest, sigma=sigma))
    methods = list(dict.fromkeys(method for method, _ in gains))
    return [
        {"method": method, **{f"gain at σ = {sigma:g}": f"{mean(gains[method, sigma]):.3f}" for sigma in sigmas}}
        for method in methods
    ]
