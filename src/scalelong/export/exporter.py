"""A trained run for others: a folder that diffusers loads, or one safetensors file. Complete or not there.

    export_run(run, folder)          a pipeline that `DiffusionPipeline.from_pretrained` loads, or with
                                     format="safetensors" the weights in one file whose header says what they are

An unconditional UNet becomes a DDPMPipeline. If its scaling can be put into the weights, or there is none, it has only
standard classes; if it is constant, a small class in the folder multiplies the skips. Neither needs scalelong.
Conditional models bring a short pipeline of their own, and a text encoder of transformers its weights; U-ViT brings its
class, which imports scalelong. What is written is loaded again and must compute what the model computes. The model
itself is not touched.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attaching import KEY, fold_, scaling_of, without_records
from ..diffusion import (
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
from ..models import Denoiser, UViT, output_tensor
from ..runs import Run
from ..scaling import ResidualBranch
from .card import PICTURE, model_card, picture_of, run_facts

FORMATS = ("diffusers", "safetensors")


def export_run(run: Run, target: str | Path, format: Literal["diffusers", "safetensors"] = "diffusers") -> Path:  # noqa: A002
    """The weights that `load_run` chose, with a model card, complete or not at all. Returns the folder or the file.

    "diffusers": the folder of a pipeline. "safetensors": a folder with model.safetensors, or a `target` that ends in
    .safetensors. Load it with `safetensors.torch.load_file` into a model built as the header's `config` says.
    """
    if format not in FORMATS:
        raise ExportError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    for name, value in run.model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            raise ExportError(f"{name} has values that are not finite: export an earlier checkpoint")
    if format == "safetensors":
        return _write_file(run, Path(target))
    with _new_folder(Path(target)) as folder:
        _write_pipeline(run, folder)
        write_text(folder / "scalelong.json", json.dumps(run_facts(run), indent=2, ensure_ascii=False))
        _write_card(run, "diffusers", folder)
    return Path(target)


def _write_file(run: Run, path: Path) -> Path:
    """A folder with model.safetensors and a card; or the file alone, if the path is that of one. Returns the file."""
    from safetensors.torch import save

    tensors, seen = {}, set()
    for name, value in run.model.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        # Tied weights share memory, which the format refuses.
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    # One entry, since several would be written in random order and the same export would not be the same file.
    content = save(tensors, metadata={"scalelong": json.dumps(run_facts(run), sort_keys=True)})
    if path.suffix != ".safetensors":
        with _new_folder(path) as folder:
            write_bytes(folder / "model.safetensors", content)
            _write_card(run, "safetensors", folder)
        return path / "model.safetensors"
    with exclusive(make_folder(path.parent)):  # of two exports to one place one is refused
        if path.exists():
            raise ExportError(f"{path} exists already; choose another place (--out)")
        write_bytes(path, content)
    return path


def _write_card(run: Run, kind: str, folder: Path) -> None:
    write_text(folder / "README.md", model_card(run, kind))
    if (picture := picture_of(run)) is not None:
        shutil.copyfile(picture, folder / PICTURE)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A new folder, complete or not there; what prevents it is an ExportError."""
    from safetensors import SafetensorError

    try:
        with new_folder(target) as folder:
            yield folder
    except FolderInUseError as error:
        raise ExportError(f"{error}; choose another one (--out)") from error
    except SafetensorError as error:  # safetensors reports a full disk as an error of its own
        raise ExportError(
            f"{target} could not be written: {in_words(error)}; make room, or choose another place"
        ) from error


# The pipeline


def _write_pipeline(run: Run, folder: Path) -> None:
    """The network, its scheduler, and, unless diffusers' DDPMPipeline serves, a pipeline with the condition."""
    is_uvit, process, prediction = type(run.model) is UViT, run.process, run.config.diffusion.prediction
    unet = _write_uvit(run, folder / "unet") if is_uvit else _write_unet(run, folder / "unet")
    scale, shift = process.time_map
    is_plain = run.config.diffusion.condition == "none" and (scale, shift) == (1.0, 0.0) and run.autoencoder is None
    if is_plain and not is_uvit:
        scheduler(process, prediction, "ddpm").save_pretrained(folder / "scheduler")
        kind, entries = "DDPMPipeline", {"unet": unet, "scheduler": ["diffusers", "DDPMScheduler"]}
    else:
        solver = scheduler(process, prediction, "dpm++", clip=run.autoencoder is None)
        solver.save_pretrained(folder / "scheduler")
        if run.autoencoder is not None:
            run.autoencoder.model.save_pretrained(folder / "vae")
        _copy_code("pipeline.py", folder)
        kind = ["pipeline", "ExportedPipeline"]
        entries = {
            "unet": unet,
            "scheduler": ["diffusers", type(solver).__name__],
            "vae": ["diffusers", "AutoencoderKL"] if run.autoencoder is not None else [None, None],
            **_write_condition(run.conditions, folder),
            **({} if (scale, shift) == (1.0, 0.0) else {"time_scale": scale, "time_shift": shift}),
        }
    index = {"_class_name": kind, "_diffusers_version": diffusers().__version__, **entries}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_condition(conditions: Conditions, folder: Path) -> dict[str, Any]:
    """What the pipeline must know to turn classes or texts into what the network takes: entries of model_index.json."""
    if isinstance(conditions, ClassCondition):
        # No list: diffusers takes every list for the module and the class of a component when it reads the hub.
        classes, null = {name: number for number, name in enumerate(conditions.classes)}, conditions.null()
        return {"classes": classes, "null_label": None if null is None else int(null)}
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


# The network: its folder, and its entry in model_index.json (the module and the class)


def _write_uvit(run: Run, folder: Path) -> list[str]:
    assert isinstance(run.model, UViT)
    arguments = run.model.arguments()
    config = {"sample_size": arguments["image_size"], "in_channels": arguments["channels"], "arguments": arguments}
    _require_same(run, _write_component(run.model, folder, "uvit_model", "UViTModel", config))
    return ["uvit_model", "UViTModel"]


def _write_unet(run: Run, folder: Path) -> list[str]:
    """A UNet of diffusers. Constants that a normalisation keeps out of the weights go with a small class."""
    model: Any = run.model
    kind, folded = type(model).__name__, copy.deepcopy(model)
    if getattr(diffusers(), kind, None) is not type(model):
        raise ExportError(
            f"{kind} is neither a class of diffusers nor scalelong.UViT, so it has no diffusers folder; use the format "
            f"'safetensors', and build the model by its own code before the weights are loaded"
        )
    if any(isinstance(module, ResidualBranch) for module in model.modules()):
        raise ExportError("residual_scaling is not part of diffusers' classes; use the format 'safetensors'")
    kept = fold_(folded).kept
    if not kept:
        _require_same(run, folded)
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
    config |= {"arguments": arguments, "factors": factors}
    _require_same(run, _write_component(model, folder, "scaled_unet", "ScaledUNet", config))
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


def _write_component(model: nn.Module, folder: Path, name: str, kind: str, config: dict[str, Any]) -> nn.Module:
    """The folder of a network with a class of ours, NAME.py. Gives it back as its users will load it."""
    from safetensors.torch import save_file

    folder.mkdir()
    about = {"_class_name": kind, "_diffusers_version": diffusers().__version__, **config}
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    _copy_code(f"{name}.py", folder)
    with without_records():  # the folder says how they are scaled
        state = {f"model.{name}": value.cpu().contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    spec = spec_from_file_location(f"scalelong_exported_{name}", folder / f"{name}.py")
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


@torch.no_grad()
def _require_same(run: Run, exported: nn.Module) -> None:
    """What is written must compute what the model computes."""
    generator, t = torch.Generator().manual_seed(0), torch.tensor([10.0, 900.0])
    x = torch.randn((2, *run.shape.image), generator=generator)
    condition, named = run.shape.example_condition(run.config, 2), {}
    if condition is not None and condition.is_floating_point():
        named = {"encoder_hidden_states": (condition := torch.randn(condition.shape, generator=generator))}
    elif condition is not None:
        named = {"class_labels": condition}
    # A copy, because a forward of a scaled model notes its coefficients.
    expected = Denoiser(copy.deepcopy(run.model))(x, t, condition)
    difference = float((output_tensor(exported.eval()(x, t, **named)) - expected).abs().max())
    if not difference <= 1e-4 * max(1.0, float(expected.abs().max())):
        raise ExportError(
            f"what was written would compute something else than the model (difference {difference:.3g}); use the "
            f"format 'safetensors'"
        )
