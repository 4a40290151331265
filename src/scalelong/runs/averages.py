"""Moving averages of any length, chosen after training.

A length is the standard deviation of the ages of the weights that are averaged:

    "10%"           a share of the run so far: a power-function average (Karras et al., 2024, arXiv:2312.02696)
    "5000steps"     an exponential average of that many steps, the rate 1 - 1/5000
    "200kimages"    the same in images: the batch size may change, the length does not

The power-function average at step t weighs the weights θ(τ) of earlier steps τ by τ^γ. It needs neither a
warm-up nor the length of the run, and of the random start nothing is left in it. A relative length σ_rel belongs to
each γ (their appendix C):

    θ̂_γ(t) = β_γ(t) θ̂_γ(t-1) + (1 - β_γ(t)) θ(t),     β_γ(t) = (1 - 1/t)^(γ+1)
    σ_rel² = (γ + 1) / ((γ + 2)² (γ + 3))

A run that keeps two such averages ("tracks") and writes them down now and then can have the average of any other length
afterwards: the combination of the snapshots whose profile is nearest, in the sense of least squares, to the one wanted.

    RUN/averages/step-00000512.safetensors     both tracks, in half precision; the newest are in the checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config import AverageLength, power
from ..errors import CheckpointError
from ..files import below, in_words, make_folder, sync
from .checkpoint import read_tensors

OLDEST = 0.1
"""Snapshots older than this share of the run are removed: an average of 20 % has 0.15 % of its weights before it."""
Weights = Mapping[str, Tensor]


def shares(lengths: Iterable[str]) -> list[AverageLength]:
    """The tracks of which snapshots are written: two shares or more. With one there is nothing to choose from later."""
    found = [length for length in map(AverageLength.parse, lengths) if length.unit == "share"]
    return found if len(found) > 1 else []


def reconstruct(
    folder: Path, step: int, length: AverageLength, kept: Mapping[str, Weights], run: str | None
) -> tuple[dict[str, Tensor], float, int]:
    """The average of a run at a step, the error of its profile (see `combine`), and how many snapshots it is made of.

    `kept` are the averages of its checkpoint there, by length.
    """
    if str(length) in kept:
        return dict(kept[str(length)]), 0.0, 1
    tracks = [track for track in map(AverageLength.parse, kept) if track.unit == "share"]
    if length.unit != "share" or len(tracks) < 2:
        raise CheckpointError(
            f"an average of {length} was not kept, and cannot be made afterwards: shares of the run can (10%), if two "
            f"or more were kept in training, as --ema-lengths 5% 10% does. This run kept: {', '.join(kept) or 'none'}"
        )
    steps = [at for at in snapshot_steps(folder, run) if at < step]
    points = [(at, track) for at in [*steps, step] for track in tracks]
    coefficients, error = combine([(at, track.value) for at, track in points], step, length.value)
    total = {name: torch.zeros_like(value).double() for name, value in kept[str(tracks[0])].items()}
    for at in [*steps, step]:
        weights = kept if at == step else by_length(read_tensors(snapshot_file(folder, at)))
        factors = {str(track): c for (i, track), c in zip(points, coefficients, strict=True) if i == at}
        try:
            for name, value in total.items():
                for track, factor in factors.items():
                    value.add_(weights[track][name].double(), alpha=factor)
        except (KeyError, RuntimeError) as fault:
            raise CheckpointError(
                f"{snapshot_file(folder, at)} does not fit the checkpoint ({in_words(fault)}): remove it, or restore "
                f"it from a copy"
            ) from fault
    return {name: value.float() for name, value in total.items()}, error, len(steps) + 1


# Combining snapshots to another length


def combine(tracks: Sequence[tuple[int, float]], step: int, length: float) -> tuple[list[float], float]:
    """The least-squares combination of averages (step, relative length) that is nearest to `length` at `step`.

    Returns the coefficients and the sum over all steps of |weight - wanted weight|; the wanted weights have the sum 1.
    So have the coefficients: weights that stand still are reproduced exactly.
    """
    powers = torch.tensor([power(each) for _, each in tracks], dtype=torch.float64)
    times = torch.tensor([time for time, _ in tracks], dtype=torch.float64)
    wanted, now = torch.tensor(power(length), dtype=torch.float64), torch.tensor(float(step), dtype=torch.float64)
    products = _inner(powers[:, None], times[:, None], powers[None], times[None])
    target = _inner(powers, times, wanted, now)
    count = len(tracks)
    # The side condition by a Lagrange multiplier: one more row and column.
    system = torch.ones(count + 1, count + 1, dtype=torch.float64)
    system[:count, :count], system[count, count] = products, 0.0
    right = torch.cat([target, torch.ones(1, dtype=torch.float64)])
    found = torch.linalg.lstsq(system, right[:, None], rcond=1e-13, driver="gelsd").solution[:count, 0]
    profiles = torch.stack([profile(float(gamma), int(time), step) for gamma, time in zip(powers, times, strict=True)])
    error = (found @ profiles - profile(float(wanted), step, step)).abs().sum()
    return found.tolist(), float(error)


def profile(gamma: float, time: int, steps: int) -> Tensor:
    """The weight of each step 1 ... `steps` in the average at step `time`: (τ^(γ+1) - (τ-1)^(γ+1)) / t^(γ+1)."""
    reached = (torch.arange(steps + 1, dtype=torch.float64) / time).clamp(max=1) ** (gamma + 1)
    return reached.diff()


def _inner(first: Tensor, at_first: Tensor, second: Tensor, at_second: Tensor) -> Tensor:
    """∫ p_a p_b over time, of the profiles p(τ) = (γ+1) τ^γ / t^(γ+1) for τ up to t (their appendix C)."""
    both = first + second + 1
    log = both * torch.minimum(at_first, at_second).log()
    log = log - (first + 1) * at_first.log() - (second + 1) * at_second.log()
    return (first + 1) * (second + 1) / both * log.exp()


# Snapshots on disk


def write_snapshot(folder: Path, step: int, tracks: Mapping[str, Weights], run: str | None) -> None:
    """The tracks of a step, in half precision where the numbers allow it. Snapshots that are too old are removed."""
    from safetensors.torch import save_file

    make_folder(folder)
    part = folder / f".step-{step:08d}.part"
    about = {"scalelong": json.dumps({"step": step, "lengths": list(tracks), "run": run})}
    tensors = {f"{length}/{name}": _halved(v) for length, weights in tracks.items() for name, v in weights.items()}
    save_file(tensors, part, metadata=about)
    sync(part)
    part.replace(snapshot_file(folder, step))
    for old in _saved(folder):
        if old < OLDEST * step:
            below(folder).remove(snapshot_file(folder, old).name)


def forget_snapshots_after(folder: Path, step: int) -> None:
    """The run comes to these steps again, after a kill or a rollback."""
    names = [snapshot_file(folder, later).name for later in _saved(folder) if later > step]
    for name in [*names, *(name for name in below(folder).names() if re.fullmatch(r"\.step-\d+\.part", name))]:
        below(folder).remove(name)


def snapshot_steps(folder: Path, run: str | None) -> list[int]:
    """The steps with a snapshot of this run. One that is damaged is an error: without it the length is another."""
    from safetensors import SafetensorError, safe_open

    for step in _saved(folder):
        path = snapshot_file(folder, step)
        try:
            with safe_open(path, "pt") as file:
                owner = json.loads(file.metadata()["scalelong"])["run"]
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({in_words(error)}); restore it, or remove it") from error
        if owner != run:
            raise CheckpointError(f"{path} belongs to another run; restore that of this run, or remove it")
    return _saved(folder)


def snapshot_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _saved(folder: Path) -> list[int]:
    found = [re.fullmatch(r"step-(\d{8,})\.safetensors", name) for name in below(folder).names()]
    return sorted(int(match[1]) for match in found if match)


def _halved(value: Tensor) -> Tensor:
    half = value.half()
    return half if bool(torch.isfinite(half).all()) else value


def by_length(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{"5%/name": tensor} as {"5%": {"name": tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        length, _, name = key.partition("/")
        found.setdefault(length, {})[name] = value
    return found
