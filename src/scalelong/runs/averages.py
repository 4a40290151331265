"""How long the moving average of the weights is: said before training, or chosen after it.

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
                 manifest.json                 sizes and checksums
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import AverageLength, power
from ..errors import CheckpointError
from ..files import file_digest, in_words, make_folder, sync, write_text


def shares(lengths: Iterable[str]) -> list[AverageLength]:
    """The tracks of which snapshots are written: two shares or more. With one there is nothing to choose from later."""
    found = [length for length in map(AverageLength.parse, lengths) if length.unit == "share"]
    return found if len(found) > 1 else []


# Combining snapshots to another length


@dataclass(frozen=True)
class Combination:
    """The coefficients of the snapshots, and how far their profile is from the one that was wanted."""

    coefficients: list[float]
    error: float
    """The sum over all steps of |weight - wanted weight|; the wanted weights have the sum 1."""


def combine(tracks: Sequence[tuple[int, float]], step: int, length: float) -> Combination:
    """The least-squares combination of averages (step, relative length) that is nearest to `length` at `step`.

    The coefficients have the sum 1, so that weights that stand still are reproduced exactly.
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
    return Combination(found.tolist(), float(error))


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

MANIFEST = "manifest.json"
OLDEST = 0.1
"""Snapshots older than this share of the run are removed: an average of 20 % has 0.15 % of its weights before it."""
Weights = Mapping[str, Tensor]


def write_snapshot(folder: Path, step: int, tracks: Mapping[str, Weights], run: str | None) -> None:
    """The tracks of a step, in half precision where the numbers allow it. The manifest last."""
    from safetensors.torch import save_file

    make_folder(folder)
    path, part = snapshot_file(folder, step), folder / f".step-{step:08d}.part"
    about = {"scalelong": json.dumps({"step": step, "lengths": list(tracks), "run": run})}
    save_file({f"{length}/{name}": _halved(value) for length, name, value in _entries(tracks)}, part, metadata=about)
    sync(part)
    part.replace(path)
    entries = _manifest(folder)
    entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_digest(path), "run": run}
    for old in [name for name in entries if _step_of(name) < OLDEST * step]:
        (folder / old).unlink(missing_ok=True)
        del entries[old]
    write_text(folder / MANIFEST, json.dumps(entries, indent=1))


def forget_snapshots_after(folder: Path, step: int) -> None:
    """The run comes to these steps again, after a kill or a rollback."""
    if not folder.exists():
        return
    for leftover in folder.glob(".step-*.part"):
        leftover.unlink(missing_ok=True)
    entries = _manifest(folder)
    kept = {name: entry for name, entry in entries.items() if _step_of(name) <= step}
    if kept != entries:
        write_text(folder / MANIFEST, json.dumps(kept, indent=1))
    for path in folder.glob("step-*.safetensors"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def snapshot_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _entries(tracks: Mapping[str, Weights]) -> Iterable[tuple[str, str, Tensor]]:
    return ((length, name, value) for length, weights in tracks.items() for name, value in weights.items())


def _halved(value: Tensor) -> Tensor:
    half = value.half()
    return half if bool(torch.isfinite(half).all()) else value


def _manifest(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {name: entry for name, entry in found.items() if re.fullmatch(r"step-\d+\.safetensors", str(name))}
    return {}


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


# Any length, from a checkpoint and the snapshots before it


@dataclass(frozen=True)
class Reconstructed:
    weights: dict[str, Tensor]
    error: float
    """Of the profile (see `Combination`); 0 for a length that the run kept."""
    snapshots: int


def reconstruct(
    folder: Path, step: int, length: AverageLength, kept: Mapping[str, Weights], run: str | None
) -> Reconstructed:
    """The average of a run at a step. `kept` are the averages of its checkpoint there, by length."""
    if str(length) in kept:
        return Reconstructed(dict(kept[str(length)]), 0.0, 1)
    tracks = [AverageLength.parse(name) for name in kept]
    tracks = [track for track in tracks if track.unit == "share"]
    if length.unit != "share" or len(tracks) < 2:
        there = ", ".join(kept) or "none"
        raise CheckpointError(
            f"an average of {length} was not kept, and cannot be made afterwards: shares of the run can (10%), if two "
            f"or more were kept in training, as --ema-lengths 5% 10% does. This run kept: {there}"
        )
    steps = [at for at in snapshot_steps(folder, run) if at < step]
    points = [(at, track) for at in [*steps, step] for track in tracks]
    mix = combine([(at, track.value) for at, track in points], step, length.value)
    total: dict[str, Tensor] = {name: torch.zeros_like(value).double() for name, value in kept[str(tracks[0])].items()}
    for at in [*steps, step]:
        factors = {str(t): c for (i, t), c in zip(points, mix.coefficients, strict=True) if i == at}
        weights = kept if at == step else _read_snapshot(folder, at)
        try:
            for name, value in total.items():
                for track, factor in factors.items():
                    value.add_(weights[track][name].double(), alpha=factor)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{snapshot_file(folder, at)} does not fit the checkpoint ({in_words(error)}): remove it, "
                f"or restore it from a copy"
            ) from error
    return Reconstructed({name: value.float() for name, value in total.items()}, mix.error, len(steps) + 1)


def snapshot_steps(folder: Path, run: str | None) -> list[int]:
    """The steps of whole snapshots of this run. One that is damaged is an error: without it the length is another."""
    found = []
    for name, entry in sorted(_manifest(folder).items()):
        path = folder / name
        try:
            if path.stat().st_size != entry["bytes"] or file_digest(path) != entry["sha256"]:
                raise CheckpointError(
                    f"{path} does not match the checksum of its manifest; restore it, or remove it and its entry in "
                    f"{folder / MANIFEST} to do without it"
                )
            if entry["run"] != run:
                raise CheckpointError(f"{path} belongs to another run; move it away")
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({in_words(error)}); remove its entry in {folder / MANIFEST}"
            ) from error
        found.append(_step_of(name))
    return found


def _read_snapshot(folder: Path, step: int) -> dict[str, dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return by_length(load_file(snapshot_file(folder, step)))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{snapshot_file(folder, step)} cannot be read ({in_words(error)}); restore it from a copy"
        ) from error


def by_length(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{"5%/name": tensor} as {"5%": {"name": tensor}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        length, _, name = key.partition("/")
        found.setdefault(length, {})[name] = value
    return found
