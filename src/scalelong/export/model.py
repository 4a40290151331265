"""A bare model for others, without a run: `export_model(model, folder)`.

    diffusers     a UNet of diffusers becomes the folder of that UNet, a U-ViT a pipeline with its class
    safetensors   any model: its weights, with the scaling of its long skips next to them

Constant coefficients go into the weights where that is exact; what cannot go there is written as a scaling. The model
itself is not touched: all is done to a copy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from .._version import __version__
from ..attaching import fold_, is_scaled, summary
from ..diffusion import Autoencoder, ClassCondition, diffusers
from ..errors import ExampleInputsError, ExportError
from ..finding import example_call, unwrap
from ..models import UViT, count_parameters, from_pretrained, unfuse_
from ..noise import SCHEDULE, NoiseProcess, Prediction, Schedule, require_prediction
from ..scaling import ResidualBranch
from .card import escaped
from .diffusers_folder import (
    class_entries,
    export_folder,
    require_finite,
    require_same,
    safetensors_bytes,
    write_pipeline,
    write_safetensors,
    write_uvit,
)

Format = Literal["diffusers", "safetensors"]


def export_model(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    format: Format = "diffusers",  # noqa: A002
    fold: bool = True,
    schedule: Schedule = SCHEDULE,
    prediction: Prediction = "epsilon",
    classes: Sequence[str] | None = None,
    autoencoder: str | PathLike[str] | None = None,
) -> Path:
    """Write a model as a new folder, complete or not at all. Returns the folder.

    `fold=False` leaves the weights as they are and writes the scaling of the long skips next to them.

    The folder of a U-ViT is a pipeline, which must know how the model was trained: the noise `schedule`, what it
    predicts, the names of its `classes` (one less than the model has if the last label is the null label), and the
    folder of the `autoencoder` if it was trained on latents.
    """
    path, network = Path(folder), _network(model)
    if isinstance(network, UViT):
        network = unfuse_(copy.deepcopy(network))
    if format not in get_args(Format):
        raise ExportError(f"unknown format {format!r}; known: {', '.join(get_args(Format))}")
    is_pipeline = format == "diffusers" and type(network) is UViT
    told = (schedule, prediction, classes, autoencoder) != (SCHEDULE, "epsilon", None, None)
    if told and not is_pipeline:
        raise ExportError(
            "schedule, prediction, classes and autoencoder belong to the pipeline that a U-ViT becomes in the format "
            f"'diffusers'; a {type(network).__name__} as {format} is written without one, so leave them out"
        )
    if format == "safetensors":
        written = _prepared(network, fold)
        about = _about(network, written)
        write_safetensors(path, safetensors_bytes(written, about), lambda: _card(network, about, _USE_FILE))
    elif type(network) is UViT:
        process = NoiseProcess(schedule)
        require_prediction(prediction, schedule)
        condition = _condition(network, classes)
        vae = None if autoencoder is None else Autoencoder(Path(autoencoder))
        with export_folder(path) as new:
            about = _write_uvit(network, new, fold)
            write_pipeline(new, ["uvit_model", "UViTModel"], process, prediction, condition, vae)
            _write_about(new, about, _card(network, about, _USE_PIPELINE.format(arguments=_arguments(condition))))
    else:
        _require_diffusers(network)
        with export_folder(path) as new:
            about = _write_diffusers(network, new, fold)
            use = _USE_SCALED if about["scaling"] else _USE_PLAIN
            _write_about(new, about, _card(network, about, use.format(kind=type(network).__name__)))
    return path


def _network(model: nn.Module) -> nn.Module:
    """The model without wrappers, which add no weights of their own."""
    if not isinstance(model, nn.Module):
        raise ExportError(f"an nn.Module can be exported, not a {type(model).__name__}; of a pipeline, give its .unet")
    inner = unwrap(model)
    if {id(p) for p in inner.parameters()} != {id(p) for p in model.parameters()}:
        inner = model
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise ExportError(f"the weights of this {type(inner).__name__} are on the device meta: load them first")
    require_finite(inner)
    return inner


def _prepared(network: nn.Module, fold: bool) -> nn.Module:
    """A copy whose constants are in its weights, all of them; or one that is scaled as the model is."""
    folded = copy.deepcopy(network)
    if fold and is_scaled(folded) and fold_(folded).kept:
        return copy.deepcopy(network)
    return folded


def _about(network: nn.Module, written: nn.Module) -> dict[str, Any]:
    """What the file or folder says about itself."""
    was, now = summary(network), summary(written)
    about: dict[str, Any] = {
        "scalelong": __version__,
        "class": f"{type(network).__module__}.{type(network).__qualname__}",
        "parameters": count_parameters(written),
        "scaling": now.method,
        "in_the_weights": was.method if now.method is None else None,
        "coefficients": list(was.coefficients),
    }
    return about | ({"arguments": written.arguments()} if type(written) is UViT else {})


# A U-ViT: the component of a pipeline.


def _write_uvit(network: UViT, folder: Path, fold: bool) -> dict[str, Any]:
    written = _prepared(network, fold)
    about = _about(network, written)
    try:
        json.dumps(about)
    except TypeError as error:
        raise ExportError(
            f"the scaling {about['scaling']} has options that no file can hold ({error}); give a class of your own "
            f"plain numbers and texts as options, or unscale_ the model"
        ) from error
    write_uvit(written, about["arguments"], folder / "unet", network)
    return about


def _condition(network: UViT, classes: Sequence[str] | None) -> dict[str, Any]:
    """The entries of model_index.json."""
    if network.classes and network.context_dim:
        raise ExportError("a U-ViT with classes and a context has no pipeline; use format='safetensors'")
    if network.classes is None:
        if classes is not None:
            raise ExportError(f"{len(classes)} classes were named, and this U-ViT has none")
        text = {"length": network.context_length, "dim": network.context_dim, "guided": False}
        return {"text": text} if network.context_dim else {}
    names = [str(number) for number in range(network.classes)] if classes is None else list(classes)
    if len(names) not in (network.classes, network.classes - 1) or len(set(names)) != len(names):
        raise ExportError(
            f"this U-ViT has {network.classes} labels, so classes must be {network.classes} different names, or "
            f"{network.classes - 1} if the last label is the null label; got {len(set(names))}"
        )
    return class_entries(ClassCondition(names, guided=len(names) < network.classes))


def _arguments(condition: dict[str, Any]) -> str:
    if "text" in condition:
        return "prompt_embeds=tokens, "
    return "class_labels=[0], " if "classes" in condition else ""


# A model of diffusers: the folder that its own class loads, or, if it is scaled, `scalelong.from_pretrained`.


def _require_diffusers(network: nn.Module) -> None:
    kind = type(network).__name__
    if getattr(diffusers(), kind, None) is not type(network):
        raise ExportError(
            f"{kind} is neither a class of diffusers nor scalelong.UViT, so it has no diffusers folder; use "
            f"format='safetensors', and build the model by its own code before the weights are loaded"
        )
    if any(hasattr(module, "base_layer") for module in network.modules()):
        raise ExportError(
            f"this {kind} has adapters: merge them first, model = model.merge_and_unload() (PEFT), or unet.fuse_lora() "
            f"and unet.unload_lora() (diffusers)"
        )
    if any(isinstance(module, ResidualBranch) for module in network.modules()):
        raise ExportError("residual_scaling is not part of diffusers' classes; use format='safetensors'")


def _write_diffusers(network: nn.Module, folder: Path, fold: bool) -> dict[str, Any]:
    written: Any = _prepared(network, fold)
    about = _about(network, written)
    written.save_pretrained(folder)
    dtype = next(network.parameters()).dtype
    read: Any = from_pretrained if about["scaling"] else type(network).from_pretrained  # pyright: ignore[reportAttributeAccessIssue]
    exported = read(folder, torch_dtype=dtype)
    try:
        _, inputs = example_call(written, None)
    except ExampleInputsError:  # a class whose inputs are not known: its weights are what can be compared
        same = all(
            torch.equal(value.cpu(), exported.state_dict()[name]) for name, value in written.state_dict().items()
        )
        if not same:
            raise ExportError(f"the folder of this {type(network).__name__} does not give its weights back") from None
        return about
    require_same(network, exported, inputs)
    return about


# The card: what the model is and how it is loaded. Nothing is known about its training.

_USE_PLAIN = """\
```python
from diffusers import {kind}

model = {kind}.from_pretrained("THIS FOLDER")
```"""
_USE_SCALED = """\
```python
import scalelong

model = scalelong.from_pretrained("THIS FOLDER")  # a {kind} of diffusers with its scaling; pip install scalelong
```"""
_USE_PIPELINE = """\
```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("THIS FOLDER", trust_remote_code=True)  # needs scalelong
images = pipeline({arguments}num_inference_steps=50).images
```
`trust_remote_code` lets the Python files in this folder run."""
_USE_FILE = """\
```python
import scalelong
from safetensors.torch import load_file

model = ...  # built by its own class; of a U-ViT, the header of the file has the arguments
scalelong.load_scaling_(model, "model.safetensors")  # if the table names a scaling, and the model has none yet
model.load_state_dict(load_file("model.safetensors"))
```"""


def _card(network: nn.Module, about: dict[str, Any], use: str) -> str:
    values = ["depends on the data" if value is None else f"{value:.4g}" for value in about["coefficients"]]
    kind = type(network).__name__
    is_diffusers = type(network).__module__.startswith("diffusers.")
    return f"""\
---
library_name: {"diffusers" if is_diffusers else "scalelong"}
tags: [diffusion, scalelong]
---
# {escaped(kind)}

Written by scalelong {about["scalelong"]}. How and on what it was trained is not recorded here.

{use}

| | |
|---|---|
| model | {escaped(about["class"])}, {about["parameters"] / 1e6:.2f}M parameters |
| scaling of the long skips | {escaped(about["scaling"] or "none")} |
| scaling that is in the weights | {escaped(about["in_the_weights"] or "none")} |
| κ, outermost to innermost | {", ".join(values) or "none"} |
"""


def _write_about(folder: Path, about: dict[str, Any], card: str) -> None:
    (folder / "scalelong.json").write_text(json.dumps(about, indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
