"""A UNet of diffusers with scaled long skips, as a component of a pipeline that runs without scalelong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..noise import diffusers
from ..runs.load import Run
from ..skips import fold_
from ..skips.api import scaling_of
from .place import copy_code


def write_unet(run: Run, folder: Path) -> list[str]:
    """Writes the component; its entry in model_index.json: the module and the class."""
    kind = type(run.model).__name__
    if getattr(diffusers(), kind, None) is not type(run.model):
        raise ExportError(
            f"{kind} is not a class of diffusers, so it has no diffusers folder; use --format safetensors"
        )
    if run.config.model_options.get("residual_scaling", "none") != "none":
        raise ExportError("residual_scaling is not part of diffusers' classes; use --format safetensors")
    folded = copy.deepcopy(run.model)
    kept = fold_(folded).kept
    if not kept:
        _require_same(run, folded, f"a standard {kind}")
        folded.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
        return ["diffusers", kind]
    return _write_scaled(run, folder, kept)


def _write_scaled(run: Run, folder: Path, kept: dict[int, str]) -> list[str]:
    """Constants that a normalisation keeps out of the weights go with a small class."""
    from safetensors.torch import save_file

    factors = _factors(run.model)
    if factors is None:
        reasons = "; ".join(f"long skip {index}: {reason}" for index, reason in kept.items())
        raise ExportError(
            f"the scaling {run.config.scaling!r} cannot be put into the weights of a {type(run.model).__name__} "
            f"({reasons}), nor is it constant. Use --format safetensors"
        )
    model: Any = run.model
    arguments = {name: value for name, value in dict(model.config).items() if not name.startswith("_")}
    config = {
        "_class_name": "ScaledUNet",
        "_diffusers_version": diffusers().__version__,
        "sample_size": model.config.sample_size,
        "in_channels": model.config.in_channels,
        "kind": type(model).__name__,
        "arguments": arguments,
        "factors": factors,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    copy_code("scaled_unet.py", folder)
    state = {f"model.{name}": value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    _require_same(run, _load(folder), "the small class that carries the scaling")
    return ["scaled_unet", "ScaledUNet"]


def _factors(model: nn.Module) -> list[tuple[int, float, float]] | None:
    """(channels of the main path, its factor, the skip's factor) in the order of merging: the innermost skip first."""
    scaling = scaling_of(model)
    found = []
    for site in reversed(scaling.sites):
        constants = scaling.constants(site.index)
        if constants is None or site.main_channels is None:
            return None
        found.append((site.main_channels, float(constants.main), float(constants.skip)))
    return found


def _load(folder: Path) -> nn.Module:
    """As whoever gets the folder will load it."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("scalelong_exported_unet", folder / "scaled_unet.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.ScaledUNet.from_pretrained(folder).eval()
    except ValueError as error:
        raise ExportError(f"this model cannot be exported: {error}. Use --format safetensors") from error


def _require_same(run: Run, exported: nn.Module, what: str) -> None:
    """What is written must compute what was trained."""
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn((2, *run.shape.image), generator=generator), torch.tensor([10.0, 900.0])
    keywords = run.network.keywords(run.shape.example_condition(run.config, 2))
    with torch.no_grad():
        expected = run.network(x, t, *keywords.values())
        found: Tensor = exported(x, t, **keywords).sample
    if not torch.allclose(found, expected, atol=1e-4, rtol=1e-3):
        raise ExportError(
            f"{what} would compute something else (difference {float((found - expected).abs().max()):.3g}); "
            f"use --format safetensors"
        )
