"""A trained model for others: a folder that diffusers loads, or one safetensors file. Complete or not there.

    export_run(run, folder)          a pipeline that `DiffusionPipeline.from_pretrained` loads, or with
                                     format="safetensors" the weights in one file whose header says what they are
    export_model(model, folder)      a bare model without a run, in either form

An unconditional UNet of a run becomes a DDPMPipeline. If its scaling can be put into the weights, or there is none, it
has only standard classes; if it is constant, a small class in the folder multiplies the skips. Neither needs scalelong.
Conditional models bring a short pipeline of their own, and a text encoder of transformers its weights; U-ViT brings its
class, which imports scalelong. What is written is loaded again and must compute what the model computes. The model
itself is not touched.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attaching import KEY, fold_, is_scaled, scaling_of, without_records
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
from ..errors import ExampleInputsError, ExportError, FolderInUseError
from ..files import exclusive, in_words, make_folder, new_folder, write_bytes, write_text
from ..finding import example_call, unwrap
from ..models import UViT, from_pretrained, output_tensor, unfuse_
from ..noise import SCHEDULE, NoiseProcess, Prediction, Schedule, require_prediction
from ..runs import Run
from ..scaling import ResidualBranch
from .card import PICTURE, USE, bare_card, describe_model, model_card, picture_of, run_facts

Format = Literal["diffusers", "safetensors"]


# Runs


def export_run(run: Run, target: str | Path, format: Format = "diffusers") -> Path:  # noqa: A002
    """The weights that `load_run` chose, with a model card, complete or not at all. Returns the folder or the file.

    "diffusers": the folder of a pipeline. "safetensors": a folder with model.safetensors, or a `target` that ends in
    .safetensors. Load it with `safetensors.torch.load_file` into a model built as the header's `config` says.
    """
    model, path = run.model, Path(target)
    _require_format(format)
    require_finite(model)
    if format == "safetensors":
        return _write_file(path, model, run_facts(run), lambda: model_card(run, "safetensors"), picture_of(run))
    prediction, plain_times = run.config.diffusion.prediction, run.process.time_map == (1.0, 0.0)
    with _new_folder(path) as folder:
        if type(model) is UViT:
            component = _write_uvit(model, model, folder / "unet")
        else:
            component = _write_unet(run, folder / "unet")
        is_plain = run.config.diffusion.condition == "none" and plain_times and run.autoencoder is None
        if type(model) is not UViT and is_plain:
            scheduler(run.process, prediction, "ddpm").save_pretrained(folder / "scheduler")
            _write_index(folder, "DDPMPipeline", {"unet": component, "scheduler": ["diffusers", "DDPMScheduler"]})
        else:
            condition = _write_condition(run.conditions, folder)
            _write_pipeline(folder, component, run.process, prediction, condition, run.autoencoder)
        _write_about(folder, run_facts(run), model_card(run, "diffusers"), picture_of(run))
    return path


# Bare models


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
    path, network = Path(folder), _bare(model)
    _require_format(format)
    kind, is_uvit = type(network).__name__, type(network) is UViT
    told = (schedule, prediction, classes, autoencoder) != (SCHEDULE, "epsilon", None, None)
    if told and not (format == "diffusers" and is_uvit):
        raise ExportError(
            "schedule, prediction, classes and autoencoder belong to the pipeline that a U-ViT becomes in the format "
            f"'diffusers'; a {kind} as {format} is written without one, so leave them out"
        )
    if format == "diffusers" and not is_uvit:
        _require_diffusers(network)
    written = copy.deepcopy(network)
    if fold and is_scaled(written) and fold_(written).kept:  # all constants are in the weights, or none
        written = copy.deepcopy(network)
    about = describe_model(network, written)
    if format == "safetensors":
        _write_file(path, written, about, lambda: bare_card(about, USE["file"]))
    elif is_uvit:
        process, condition = NoiseProcess(schedule), _bare_condition(network, classes)
        require_prediction(prediction, schedule)
        vae = None if autoencoder is None else Autoencoder(Path(autoencoder))
        argument = "prompt_embeds=tokens, " if "text" in condition else "class_labels=[0], " if condition else ""
        with _new_folder(path) as new:
            component = _write_uvit(written, network, new / "unet")
            _write_pipeline(new, component, process, prediction, condition, vae)
            _write_about(new, about, bare_card(about, USE["diffusers"].format(arguments=argument)))
    else:
        with _new_folder(path) as new:
            _write_diffusers(written, network, new)
            use = USE["scaled" if about["scaling"] else "plain"].format(kind=kind)
            _write_about(new, about, bare_card(about, use))
    return path


def _bare(model: nn.Module) -> nn.Module:
    """The model without wrappers, which add no weights of their own."""
    if not isinstance(model, nn.Module):
        raise ExportError(f"an nn.Module can be exported, not a {type(model).__name__}; of a pipeline, give its .unet")
    inner = unwrap(model)
    if {id(p) for p in inner.parameters()} != {id(p) for p in model.parameters()}:
        inner = model
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise ExportError(f"the weights of this {type(inner).__name__} are on the device meta: load them first")
    require_finite(inner)
    return unfuse_(copy.deepcopy(inner)) if isinstance(inner, UViT) else inner


def _bare_condition(network: Any, classes: Sequence[str] | None) -> dict[str, Any]:
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
    return _class_entries(ClassCondition(names, guided=len(names) < network.classes))


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


def _write_diffusers(written: Any, network: nn.Module, folder: Path) -> None:
    """The folder that a class of diffusers loads, or, if the model is scaled, `scalelong.from_pretrained`."""
    written.save_pretrained(folder)
    read: Any = from_pretrained if is_scaled(written) else type(network).from_pretrained  # pyright: ignore[reportAttributeAccessIssue]
    exported = read(folder, torch_dtype=next(network.parameters()).dtype)
    try:
        _, inputs = example_call(written, None)
    except ExampleInputsError:  # a class whose inputs are not known: its weights are what can be compared
        found = exported.state_dict()
        if not all(torch.equal(value.cpu(), found[name]) for name, value in written.state_dict().items()):
            raise ExportError(f"the folder of this {type(network).__name__} does not give its weights back") from None
    else:
        _require_same(network, exported, inputs)


# Components: the network of a pipeline, and its entry in model_index.json (the module and the class)

UVIT_NAMES = {"sample": "x", "timestep": "t", "class_labels": "y", "encoder_hidden_states": "context"}


def _write_uvit(model: UViT | nn.Module, original: nn.Module, folder: Path) -> list[str]:
    """It must compute what `original` does: the model before its coefficients went into the weights."""
    assert isinstance(model, UViT)
    arguments = model.arguments()
    config = {"sample_size": arguments["image_size"], "in_channels": arguments["channels"], "arguments": arguments}
    _write_component(model, folder, "uvit_model", "UViTModel", config)
    height, width = model.image_size
    inputs: dict[str, Any] = {"sample": torch.zeros(2, model.channels, height, width)}
    inputs["timestep"] = torch.tensor([10, 900])
    if model.classes:
        inputs["class_labels"] = torch.zeros(2, dtype=torch.long)
    if model.context_dim:
        inputs["encoder_hidden_states"] = torch.zeros(2, model.context_length or 0, model.context_dim)
    _require_same(original, _load_component(folder, "uvit_model", "UViTModel"), inputs, UVIT_NAMES)
    return ["uvit_model", "UViTModel"]


def _write_unet(run: Run, folder: Path) -> list[str]:
    """A UNet of diffusers. Constants that a normalisation keeps out of the weights go with a small class."""
    model: Any = run.model
    _require_diffusers(model)
    kind, folded = type(model).__name__, copy.deepcopy(model)
    keywords = run.network.keywords(run.shape.example_condition(run.config, 2))
    inputs = {"sample": torch.zeros(2, *run.shape.image), "timestep": torch.tensor([10, 900]), **keywords}
    kept = fold_(folded).kept
    if not kept:
        _require_same(model, folded, inputs)
        folded.save_pretrained(folder)
        return ["diffusers", kind]
    factors = _factors(model)
    if factors is None:
        reasons = "; ".join(f"long skip {index}: {reason}" for index, reason in kept.items())
        raise ExportError(
            f"the scaling {run.config.scaling!r} cannot be put into the weights of a {kind} ({reasons}), nor is it "
            f"constant. Use the format 'safetensors'"
        )
    arguments = {name: value for name, value in dict(model.config).items() if not name.startswith("_") and name != KEY}
    config = {"sample_size": model.config.sample_size, "in_channels": model.config.in_channels, "kind": kind}
    _write_component(model, folder, "scaled_unet", "ScaledUNet", config | {"arguments": arguments, "factors": factors})
    _require_same(model, _load_component(folder, "scaled_unet", "ScaledUNet"), inputs)
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


def _write_component(model: nn.Module, folder: Path, module: str, kind: str, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    config = {"_class_name": kind, "_diffusers_version": diffusers().__version__, **config}
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise ExportError(
            f"the scaling has options that no file can hold ({error}); give a class of your own plain numbers and "
            f"texts as options, or unscale_ the model"
        ) from error
    folder.mkdir()
    (folder / "config.json").write_text(text)
    _copy_code(f"{module}.py", folder)
    with without_records():  # the folder says how they are scaled
        state = {f"model.{name}": value.cpu().contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


def _load_component(folder: Path, module_name: str, kind: str) -> nn.Module:
    """Load the folder as its users will."""
    spec = spec_from_file_location(f"scalelong_exported_{module_name}", folder / f"{module_name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return getattr(module, kind).from_pretrained(folder).eval()
    except ValueError as error:
        raise ExportError(f"this model cannot be exported: {error}. Use the format 'safetensors'") from error


def _copy_code(name: str, folder: Path) -> None:
    """One of the files in `code`, without the remarks for our own tools."""
    text = files("scalelong.export").joinpath("code", name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("# ruff:", "# pyright:"))]
    (folder / name).write_text("".join(lines), encoding="utf-8")


# The pipeline around a component


def _write_pipeline(
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
    _copy_code("pipeline.py", folder)
    scale, shift = process.time_map
    times = {} if (scale, shift) == (1.0, 0.0) else {"time_scale": scale, "time_shift": shift}
    index = {
        "unet": model,
        "scheduler": ["diffusers", type(solver).__name__],
        "vae": ["diffusers", "AutoencoderKL"] if autoencoder is not None else [None, None],
        **condition,
        **times,
    }
    _write_index(folder, ["pipeline", "ExportedPipeline"], index)


def _write_index(folder: Path, kind: str | list[str], entries: dict[str, Any]) -> None:
    index = {"_class_name": kind, "_diffusers_version": diffusers().__version__, **entries}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")


def _class_entries(conditions: ClassCondition) -> dict[str, Any]:
    # No list: diffusers takes every list for the module and the class of a component when it reads the hub.
    classes = {name: number for number, name in enumerate(conditions.classes)}
    null = conditions.null()
    return {"classes": classes, "null_label": None if null is None else int(null)}


def _write_condition(conditions: Conditions, folder: Path) -> dict[str, Any]:
    """What the pipeline must know to turn classes or texts into what the network takes: entries of model_index.json."""
    if isinstance(conditions, ClassCondition):
        return _class_entries(conditions)
    if not isinstance(conditions, TextCondition):
        return {}
    encoder = conditions.encoder
    text: dict[str, Any] = {"length": encoder.length, "dim": encoder.dim, "guided": conditions.guided}
    if isinstance(encoder, HashedWords):
        known = encoder.vocabulary
        return {"text": {**text, "vocabulary": None if known is None else sorted(known)}}
    if not isinstance(encoder, PretrainedTextEncoder):
        raise ExportError(f"a {type(encoder).__name__} has no diffusers folder; use the format 'safetensors'")
    tokenizer, model = encoder.loaded
    tokenizer.save_pretrained(folder / "tokenizer")
    model.save_pretrained(folder / "text_encoder")
    parts = {"tokenizer": tokenizer, "text_encoder": model}
    return {"text": text, **{name: ["transformers", type(part).__name__] for name, part in parts.items()}}


# Checks, and writing


def _require_same(
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


def _require_format(given: str) -> None:
    if given not in get_args(Format):
        raise ExportError(f"unknown format {given!r}; known: {', '.join(get_args(Format))}")


def require_finite(model: nn.Module) -> None:
    """Weights that diverged are of no use to others."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            raise ExportError(f"{name} has values that are not finite: export an earlier checkpoint")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
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


def _write_about(folder: Path, about: dict[str, Any], card: str, picture: Path | None = None) -> None:
    write_text(folder / "scalelong.json", json.dumps(about, indent=2, ensure_ascii=False))
    _write_card(folder, card, picture)


def _write_card(folder: Path, card: str, picture: Path | None) -> None:
    """`picture`: the samples that the card shows."""
    write_text(folder / "README.md", card)
    if picture is not None:
        shutil.copyfile(picture, folder / PICTURE)


def _write_file(
    path: Path, model: nn.Module, about: dict[str, Any], card: Callable[[], str], picture: Path | None = None
) -> Path:
    """A folder with model.safetensors and a card; or the file alone, if the path is that of one. Returns the file."""
    from safetensors.torch import save

    tensors, seen = {}, set()
    for name, value in model.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        # Tied weights share memory, which the format refuses.
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    # One entry, since several would be written in random order and the same export would not be the same file.
    content = save(tensors, metadata={"scalelong": json.dumps(about, sort_keys=True)})
    if path.suffix != ".safetensors":
        with _new_folder(path) as folder:
            write_bytes(folder / "model.safetensors", content)
            _write_card(folder, card(), picture)
        return path / "model.safetensors"
    with exclusive(make_folder(path.parent)):  # of two exports to one place one is refused
        if path.exists():
            raise ExportError(f"{path} exists already; choose another place (--out)")
        write_bytes(path, content)
    return path
