"""A folder that `DiffusionPipeline.from_pretrained` loads.

An unconditional UNet becomes a DDPMPipeline. If its scaling can be put into the weights, or there is none, it has only
standard classes; if it is constant, a small class in the folder multiplies the skips. Neither needs scalelong.
Class-conditional models bring a short pipeline of their own; U-ViT brings its class, too, which imports scalelong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..diffusion.solvers import scheduler
from ..errors import ExportError
from ..noise import diffusers
from ..runs.load import Run
from ..runs.model import is_uvit, uvit_arguments
from ..scaling import as_scaling
from .about import describe_run
from .card import model_card
from .place import copy_code, new_folder
from .unet import write_unet


def export_diffusers(run: Run, target: str | Path) -> Path:
    path = Path(target)
    if run.config.diffusion.condition == "text":
        raise ExportError(
            "text-conditional models cannot be written as a diffusers folder: their text encoder is not part of the "
            "run. Use --format safetensors"
        )
    with new_folder(path) as folder:
        if is_uvit(run.config):
            _write_uvit(run, folder)
        else:
            _write_unet(run, folder)
        about = describe_run(run)
        (folder / "scalelong.json").write_text(json.dumps(about, indent=2, ensure_ascii=False))
        (folder / "README.md").write_text(model_card(run, "diffusers"))
    return path


def _write_unet(run: Run, folder: Path) -> None:
    component = write_unet(run, folder / "unet")
    standard = run.config.diffusion.condition == "none" and run.process.schedule != "vp" and run.autoencoder is None
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


def _write_uvit(run: Run, folder: Path) -> None:
    from safetensors.torch import save_file

    arguments = uvit_arguments(run.config, run.shape) | {"scaling": as_scaling(run.config.scaling).to_dict()}
    size = run.shape.height if run.shape.height == run.shape.width else [run.shape.height, run.shape.width]
    config: dict[str, Any] = {
        "_class_name": "UViTModel",
        "_diffusers_version": diffusers().__version__,
        "sample_size": size,
        "in_channels": run.shape.channels,
        "arguments": arguments,
    }
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(json.dumps(config, indent=2))
    state = {f"model.{name}": value.contiguous().clone() for name, value in run.model.state_dict().items()}
    save_file(state, folder / "unet" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    copy_code("uvit_model.py", folder / "unet")
    _write_pipeline(run, folder, ["uvit_model", "UViTModel"])


def _write_pipeline(run: Run, folder: Path, model: list[str]) -> None:
    solver = scheduler(run.process, run.config.diffusion.prediction, "dpm++", clip=run.autoencoder is None)
    solver.save_pretrained(folder / "scheduler")
    if run.autoencoder is not None:
        run.autoencoder.model.save_pretrained(folder / "vae")
    copy_code("pipeline.py", folder)
    classes = list(run.shape.classes or ()) if run.config.diffusion.condition == "class" else None
    null = run.conditions.null()
    times = {"time_scale": 0.999, "time_shift": 0.999} if run.process.schedule == "vp" else {}
    index = {
        "_class_name": ["pipeline", "ExportedPipeline"],
        "_diffusers_version": diffusers().__version__,
        "unet": model,
        "scheduler": ["diffusers", type(solver).__name__],
        "vae": ["diffusers", "AutoencoderKL"] if run.autoencoder is not None else [None, None],
        "classes": classes,
        "null_label": None if null is None else int(null),
        **times,
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
