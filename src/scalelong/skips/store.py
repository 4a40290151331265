"""Save and load the scaling of a model alone: one safetensors file with the configuration as JSON in its header."""

import json
import os
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ScalingMismatchError
from ..scaling.registry import as_scaling
from .api import _host, _scaled_host, scale_skips_

FORMAT = 1


def save_scaling(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the scaling of the model, learned gates included, without the model's own weights."""
    from safetensors.torch import save

    host = _scaled_host(model)
    scaling = host.skip_scaling
    description = {
        "format": FORMAT,
        "scaling": scaling.config.to_dict(),
        "host": {"class": type(host).__name__, "skips": [asdict(site) for site in scaling.sites]},
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in scaling.state_dict().items()}
    content = save(tensors, metadata={"scalelong": json.dumps(description)})
    target = Path(path)
    temporary = target.with_name(target.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, target)


def load_scaling_(model: nn.Module, path: str | PathLike[str]) -> nn.Module:
    """Scale the model as the file says. A model whose long skips are others is refused."""
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    if "scalelong" not in metadata:
        raise ScalingMismatchError(f"{os.fspath(path)} was not written by save_scaling")
    description = json.loads(metadata["scalelong"])
    host = _host(model)
    _compare(description["host"]["skips"], [asdict(site) for site in host.skip_sites()])
    scale_skips_(model, as_scaling(description["scaling"]))
    host.skip_scaling.load_state_dict(tensors)
    return model


def _compare(saved: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    if len(saved) != len(found):
        raise ScalingMismatchError(f"the file scales {len(saved)} long skips and this model has {len(found)}")
    for theirs, ours in zip(saved, found, strict=True):
        if theirs != ours:
            different = {key: (theirs.get(key), value) for key, value in ours.items() if theirs.get(key) != value}
            raise ScalingMismatchError(f"long skip {ours['index']} differs (in the file, in this model): {different}")
