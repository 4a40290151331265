"""Save and load the scaling of a model alone: a safetensors file with configuration and plan in its header."""

import json
import os
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ScalingMismatchError
from ..scaling.base import as_scaling
from .api import plan_of, scale_skips_, scaling_of
from .attach import REGISTERED, attach_, attached, detach_
from .host import native_plan, unwrap
from .plan import SkipPlan

FORMAT = 2


def save_scaling(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the scaling of the model, learned gates included, without the model's own weights."""
    from safetensors.torch import save

    plan, scaling = plan_of(model), scaling_of(model)
    host = unwrap(model)
    state = attached(host)
    description = {
        "format": FORMAT,
        "scaling": scaling.config.to_dict(),
        "plan": plan.to_dict(),
        "folded": sorted(state.folded) if state is not None else [],
        "host": {"class": type(host).__name__, "weights": _weights(host)},
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in scaling.state_dict().items()}
    content = save(tensors, metadata={"scalelong": json.dumps(description)})
    target = Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, target)


def load_scaling_(model: nn.Module, path: str | PathLike[str]) -> nn.Module:
    """Scale the model as the file says. A model that is not built like the saved one is refused."""
    description, tensors = _read(os.fspath(path))
    host = unwrap(model)
    plan = SkipPlan.from_dict(description["plan"])
    native = native_plan(host)
    if native is not None:
        _compare_sites(plan, native)
    _compare_hosts(description["host"], {"class": type(host).__name__, "weights": _weights(host)})
    config = as_scaling(description["scaling"])
    _compare_tensors(tensors, config.build(plan.sites).state_dict())
    scale_skips_(model, config, plan=plan)
    scaling_of(model).load_state_dict(tensors)
    state = attached(host)
    if state is not None and description["folded"]:
        detach_(host)
        state.folded = set(description["folded"])
        attach_(host, state)
    return model


def _read(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        description = json.loads(metadata["scalelong"])
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise ScalingMismatchError(f"{path} was not written by save_scaling: {error}") from error
    if description.get("format") != FORMAT:
        raise ScalingMismatchError(f"{path} has format {description.get('format')}, this version reads {FORMAT}")
    return description, tensors


def _weights(host: nn.Module) -> dict[str, list[int]]:
    """The structure of a model: its parameters and their shapes."""
    named = host.named_parameters()
    return {name: list(p.shape) for name, p in named if not name.startswith(f"{REGISTERED}.")}


def _compare_hosts(saved: dict[str, Any], found: dict[str, Any]) -> None:
    if saved["class"] != found["class"]:
        raise ScalingMismatchError(f"the file scales a {saved['class']}, this model is a {found['class']}")
    theirs, ours = saved["weights"], found["weights"]
    different = [
        f"{name} is {theirs.get(name, 'absent')} in the file and {ours.get(name, 'absent')} here"
        for name in dict.fromkeys((*theirs, *ours))
        if theirs.get(name) != ours.get(name)
    ]
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise ScalingMismatchError(f"the file scales a model of another shape: {'; '.join(different[:3])}{more}")


def _compare_tensors(saved: dict[str, Any], built: dict[str, Any]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in built.items()}
    if theirs != ours:
        raise ScalingMismatchError(f"the file's tensors {theirs} are not those of its scaling, {ours}")


def _compare_sites(saved: SkipPlan, found: SkipPlan) -> None:
    if len(saved) != len(found):
        raise ScalingMismatchError(f"the file scales {len(saved)} long skips and this model has {len(found)}")
    for theirs, ours in zip(saved.sites, found.sites, strict=True):
        old = asdict(theirs)
        if theirs != ours:
            different = {key: (old[key], value) for key, value in asdict(ours).items() if old[key] != value}
            raise ScalingMismatchError(f"long skip {ours.index} differs (in the file, in this model): {different}")
