"""The export of a run: a folder that diffusers loads, or one safetensors file. Complete or not there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attaching import KEY, fold_, scaling_of, without_records
from ..diffusion import (
    Autoencoder,
    ClassCondition,
    Conditions,
    HashedWords,
    PretrainedTextEncoder,
    TextCondition,
    diffusers,
    scheduler,
)
from ..errors import ExportError, FolderInUseError
from ..files import exclusive, in_words, make_folder, new_folder, write_bytes, write_text
from ..models import output_tensor
from ..noise import NoiseProcess, Prediction
from ..runs import Run, is_uvit, uvit_arguments
from ..scaling import as_scaling
from .card import describe_run, model_card


def copy_code(name: str, folder: Path) -> None:
    """One of the files in `code`, without the remarks for our own tools."""
    text = files("scalelong.export").joinpath("code", name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("# ruff:", "# pyright:"))]
    (folder / name).write_text("".join(lines), encoding="utf-8")


@contextmanager
def export_folder(target: Path) -> Iterator[Path]:
    """A new folder, complete or not there; what prevents it is an ExportError."""
    from safetensors import SafetensorError

    try:
        with new_folder(target) as folder:
            yield folder
    except FolderInUseError as error:
        raise ExportError(f"{error}; choose another one (--out)") from error
    # safetensors reports a full disk as an error of its own.
    except SafetensorError as error:
        raise ExportError(
            f"{target} could not be written: {in_words(error)}; make room, or choose another place"
        ) from error


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights alone: the folder, or the header of the file, says how they are scaled."""
    with without_records():
        return model.state_dict()


# A UNet of diffusers with scaled long skips, as a component of a pipeline that runs without scalelong.


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
        require_same(run.model, folded, _example_inputs(run))
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
    arguments = {name: value for name, value in dict(model.config).items() if not name.startswith("_") and name != KEY}
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
    state = {f"model.{name}": value.contiguous().clone() for name, value in _weights(model).items()}
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    require_same(run.model, load_exported(folder, "scaled_unet", "ScaledUNet"), _example_inputs(run))
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


def load_exported(folder: Path, module_name: str, kind: str) -> nn.Module:
    """Load the folder as its users will."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"scalelong_exported_{module_name}", folder / f"{module_name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return getattr(module, kind).from_pretrained(folder).eval()
    except ValueError as error:
        raise ExportError(f"this model cannot be exported: {error}. Use --format safetensors") from error


def _example_inputs(run: Run) -> dict[str, Any]:
    """Inputs by the names of diffusers."""
    keywords = run.network.keywords(run.shape.example_condition(run.config, 2))
    return {"sample": torch.zeros(2, *run.shape.image), "timestep": torch.tensor([10, 900]), **keywords}


def require_same(
    network: nn.Module, exported: nn.Module, inputs: dict[str, Any], names: dict[str, str] | None = None
) -> None:
    """What is written must compute what the model computes. `names`: what the model calls the inputs."""
    anchor = next(network.parameters())
    generator = torch.Generator().manual_seed(0)

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.to(anchor.device)
        return torch.randn(value.shape, generator=generator).to(anchor)

    placed: dict[str, Any] = {name: pytree.tree_map(place, value) for name, value in inputs.items()}
    # A copy, because a forward of a scaled model notes its coefficients.
    copied, exported = copy.deepcopy(network).eval(), exported.to(anchor).eval()
    named = {(names or {}).get(name, name): value for name, value in placed.items()}
    with torch.no_grad():
        expected, found = output_tensor(copied(**named)).float(), output_tensor(exported(**placed)).float()
    tolerance = 1e-4 if anchor.dtype == torch.float32 else 0.03
    difference = float((found - expected).abs().max())
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise ExportError(
            f"what was written would compute something else than the model (difference {difference:.3g}); use the "
            f"format 'safetensors'"
        )


def require_finite(model: nn.Module) -> None:
    """Weights that diverged are of no use to others."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            raise ExportError(f"{name} has values that are not finite: export an earlier checkpoint")


# A folder that `DiffusionPipeline.from_pretrained` loads.
#
# An unconditional UNet becomes a DDPMPipeline. If its scaling can be put into the weights, or there is none, it has
# only standard classes; if it is constant, a small class in the folder multiplies the skips. Neither needs scalelong.
# Conditional models bring a short pipeline of their own, and a text encoder of transformers its weights; U-ViT brings
# its class, too, which imports scalelong.


def export_diffusers(run: Run, target: str | Path) -> Path:
    path = Path(target)
    require_finite(run.model)
    with export_folder(path) as folder:
        if is_uvit(run.config):
            arguments = uvit_arguments(run.config, run.shape) | {"scaling": as_scaling(run.config.scaling).to_dict()}
            _write_pipeline(run, folder, write_uvit(run.model, arguments, folder / "unet"))
        else:
            _write_unet(run, folder)
        about = describe_run(run)
        (folder / "scalelong.json").write_text(json.dumps(about, indent=2, ensure_ascii=False))
        (folder / "README.md").write_text(model_card(run, "diffusers"))
    return path


def _write_unet(run: Run, folder: Path) -> None:
    component = write_unet(run, folder / "unet")
    whole_times = run.process.time_map == (1.0, 0.0)
    standard = run.config.diffusion.condition == "none" and whole_times and run.autoencoder is None
    if not standard:
        _write_pipeline(run, folder, component)
        return
    scheduler(run.process, run.config.diffusion.prediction, "ddpm").save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "DDPMPipeline",
        "_diffusers_version": diffusers().__version__,
        "unet": component,
        "scheduler": ["diffusers", "DDPMScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def write_uvit(
    model: nn.Module, arguments: dict[str, Any], folder: Path, original: nn.Module | None = None
) -> list[str]:
    """Writes the component; its entry in model_index.json: the module and the class.

    It must compute what `original` does: the model before its coefficients went into the weights.
    """
    from safetensors.torch import save_file

    config: dict[str, Any] = {
        "_class_name": "UViTModel",
        "_diffusers_version": diffusers().__version__,
        "sample_size": arguments["image_size"],
        "in_channels": arguments["channels"],
        "arguments": arguments,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    state = {f"model.{name}": value.cpu().contiguous().clone() for name, value in _weights(model).items()}
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    copy_code("uvit_model.py", folder)
    exported = load_exported(folder, "uvit_model", "UViTModel")
    require_same(original or model, exported, _uvit_inputs(arguments), UVIT_NAMES)
    return ["uvit_model", "UViTModel"]


UVIT_NAMES = {"sample": "x", "timestep": "t", "class_labels": "y", "encoder_hidden_states": "context"}


def _uvit_inputs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Inputs by the names of diffusers."""
    size = arguments["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    inputs: dict[str, Any] = {
        "sample": torch.zeros(2, arguments["channels"], height, width),
        "timestep": torch.tensor([10, 900]),
    }
    if arguments.get("classes"):
        inputs["class_labels"] = torch.zeros(2, dtype=torch.long)
    if arguments.get("context_dim"):
        inputs["encoder_hidden_states"] = torch.zeros(2, arguments["context_length"] or 0, arguments["context_dim"])
    return inputs


def _write_pipeline(run: Run, folder: Path, model: list[str]) -> None:
    condition = _write_condition(run.conditions, folder)
    write_pipeline(folder, model, run.process, run.config.diffusion.prediction, condition, run.autoencoder)


def write_pipeline(
    folder: Path,
    model: list[str],
    process: NoiseProcess,
    prediction: Prediction,
    condition: dict[str, Any],
    autoencoder: Autoencoder | None,
) -> None:
    """The pipeline around the component `model`. `condition`: its entries in model_index.json."""
    solver = scheduler(process, prediction, "dpm++", clip=autoencoder is None)
    solver.save_pretrained(folder / "scheduler")
    if autoencoder is not None:
        autoencoder.model.save_pretrained(folder / "vae")
    copy_code("pipeline.py", folder)
    scale, shift = process.time_map
    times = {} if (scale, shift) == (1.0, 0.0) else {"time_scale": scale, "time_shift": shift}
    index = {
        "_class_name": ["pipeline", "ExportedPipeline"],
        "_diffusers_version": diffusers().__version__,
        "unet": model,
        "scheduler": ["diffusers", type(solver).__name__],
        "vae": ["diffusers", "AutoencoderKL"] if autoencoder is not None else [None, None],
        **condition,
        **times,
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")


def class_entries(conditions: ClassCondition) -> dict[str, Any]:
    # No list: diffusers takes every list for the module and the class of a component when it reads the hub.
    classes = {name: number for number, name in enumerate(conditions.classes)}
    null = conditions.null()
    return {"classes": classes, "null_label": None if null is None else int(null)}


def _write_condition(conditions: Conditions, folder: Path) -> dict[str, Any]:
    """What the pipeline must know to turn classes or texts into what the network takes: entries of model_index.json."""
    if isinstance(conditions, ClassCondition):
        return class_entries(conditions)
    if not isinstance(conditions, TextCondition):
        return {}
    encoder = conditions.encoder
    text: dict[str, Any] = {"length": encoder.length, "dim": encoder.dim, "guided": conditions.guided}
    if isinstance(encoder, HashedWords):
        known = encoder.vocabulary
        return {"text": {**text, "vocabulary": None if known is None else sorted(known)}}
    if not isinstance(encoder, PretrainedTextEncoder):
        raise ExportError(f"a {type(encoder).__name__} has no diffusers folder; use --format safetensors")
    tokenizer, model = encoder.loaded
    tokenizer.save_pretrained(folder / "tokenizer")
    model.save_pretrained(folder / "text_encoder")
    parts = {"tokenizer": tokenizer, "text_encoder": model}
    return {"text": text, **{name: ["transformers", type(part).__name__] for name, part in parts.items()}}


# One safetensors file whose header says what the weights are.


def export_safetensors(run: Run, target: str | Path) -> Path:
    """Load it with `safetensors.torch.load_file` into a model built as the header's `config` says.

    `target` is a folder, which gets model.safetensors and a card, complete or not at all; or a file of that kind.
    """
    path = Path(target)
    require_finite(run.model)
    write_safetensors(path, safetensors_bytes(run.model, describe_run(run)), lambda: model_card(run, "safetensors"))
    return path if path.suffix == ".safetensors" else path / "model.safetensors"


def write_safetensors(path: Path, content: bytes, card: Callable[[], str]) -> None:
    """A folder with model.safetensors and a card; or the file alone, if the path is that of one."""
    if path.suffix != ".safetensors":
        with export_folder(path) as folder:
            write_bytes(folder / "model.safetensors", content)
            write_text(folder / "README.md", card())
        return
    with exclusive(make_folder(path.parent)):  # of two exports to one place one is refused
        if path.exists():
            raise ExportError(f"{path} exists already; choose another place (--out)")
        write_bytes(path, content)


def safetensors_bytes(model: nn.Module, about: dict[str, Any]) -> bytes:
    from safetensors.torch import save

    tensors, seen = {}, set()
    for name, value in model.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        # Tied weights share memory, which the format refuses.
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    # One entry, since several would be written in random order and the same export would not be the same file.
    return save(tensors, metadata={"scalelong": json.dumps(about, sort_keys=True)})
