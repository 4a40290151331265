"""What is known about an exported model: as plain data, and as a model card for readers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..attaching import coefficients, spelled, summary
from ..config import to_dict
from ..errors import ExportError, ScaleLongError
from ..evaluation import NOISE, REAL, Scores, stored_scores
from ..models import UViT, count_parameters
from ..optional import needs
from ..runs import Run, RunFolder
from ..scaling import as_scaling

WEIGHTS = {"ema": "exponential moving average (EMA)", "raw": "raw, not averaged"}


def weights_of(run: Run) -> str:
    length = run.weights.partition(":")[2]
    return f"moving average of the length {length}" if length else WEIGHTS[run.weights]


def run_facts(run: Run) -> dict[str, Any]:
    config, data = to_dict(run.config), RunFolder(run.folder).about()
    config["data"], data["name"] = public_name(config["data"]), public_name(data["name"])
    return {
        "scalelong": __version__,
        "weights": weights_of(run),
        "step": run.step,
        "scaling": as_scaling(run.config.scaling).to_dict(),
        "coefficients": skip_coefficients(run),
        "data": data,
        "config": config,
        "scores": [_public_score(score) for score in scores_of(run)],
    }


def public_name(data: str) -> str:
    """The last part of a path: where a folder lies on this machine is not to be published."""
    return data if data.startswith("hf:") else Path(data).name or data


def _public_score(scores: Scores) -> dict[str, Any]:
    """A score without the places of its images."""
    found = scores.to_dict()
    found["protocol"]["data"] = public_name(found["protocol"]["data"])
    found["subject"] = {name: found["subject"][name] for name in ("step", "seed") if name in found["subject"]}
    return found


def picture_of(run: Run) -> Path | None:
    """The newest grid of samples that is not newer than the weights."""
    grids = {int(file.stem.rpartition("-")[2]): file for file in RunFolder(run.folder).samples.glob("step-*.png")}
    known = [step for step in grids if step <= run.step]
    return grids[max(known)] if known else None


PICTURE = "samples.png"


def scores_of(run: Run) -> list[Scores]:
    """The stored scores of exactly these weights."""
    return [
        score
        for score in stored_scores(run.folder)
        if score.subject.get("step") == run.step and score.protocol.weights == run.weights
    ]


def skip_coefficients(run: Run) -> list[float] | None:
    """κ_i from the outermost to the innermost long skip, on noise; None if the model does not tell."""
    condition = run.shape.example_condition(run.config, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, *run.shape.image), generator=generator)
    try:
        with torch.no_grad():
            run.network(x, torch.full((2,), 500.0), condition)
        return [float(value) for value in coefficients(run.model)]
    except (ScaleLongError, TypeError):
        return None


# The model card: what the model is, how it was trained, and what its scores mean.

USE = {
    "diffusers": """\
```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("THIS FOLDER", trust_remote_code=True)
images = pipeline({arguments}num_inference_steps=50, generator=torch.Generator().manual_seed(0)).images
```
`trust_remote_code` lets the Python files in this folder run; a folder without any does not need it.""",
    "safetensors": """\
`model.safetensors` holds the weights; the entry `scalelong` of its header is JSON with the configuration to build the
model from.""",
    "shipped": """\
A small network that comes with the package, for trying things out and nothing else: it has seen very few pictures, and
its samples may resemble them. `python -m research.shipped NAME` trains it again. Scored before the weights were
halved.""",
    "plain": """\
```python
from diffusers import {kind}

model = {kind}.from_pretrained("THIS FOLDER")
```""",
    "scaled": """\
```python
import scalelong

model = scalelong.from_pretrained("THIS FOLDER")  # a {kind} of diffusers with its scaling; pip install scalelong
```""",
    "file": """\
```python
import scalelong
from safetensors.torch import load_file

model = ...  # built by its own class; of a U-ViT, the header of the file has the arguments
scalelong.load_scaling_(model, "model.safetensors")  # if the table names a scaling, and the model has none yet
model.load_state_dict(load_file("model.safetensors"))
```""",
}


def describe_model(network: nn.Module, written: nn.Module) -> dict[str, Any]:
    """What the file or folder of a bare model says about itself. `written` may have its scaling in the weights."""
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


def bare_card(about: dict[str, Any], use: str) -> str:
    """The card of a bare model: what it is and how it is loaded. Nothing is known about its training."""
    values = ["depends on the data" if value is None else f"{value:.4g}" for value in about["coefficients"]]
    rows = {
        "model": f"{escaped(about['class'])}, {about['parameters'] / 1e6:.2f}M parameters",
        "scaling of the long skips": escaped(about["scaling"] or "none"),
        "scaling that is in the weights": escaped(about["in_the_weights"] or "none"),
        "κ, outermost to innermost": ", ".join(values) or "none",
    }
    library = "diffusers" if about["class"].startswith("diffusers.") else "scalelong"
    intro = f"Written by scalelong {about['scalelong']}. How and on what it was trained is not recorded here."
    return _card(library, escaped(about["class"].rpartition(".")[2]), intro, use, rows)


def _card(library: str, title: str, intro: str, use: str, rows: dict[str, str]) -> str:
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    head = f"---\nlibrary_name: {library}\ntags: [diffusion, image-generation, scalelong]\n---\n# {title}\n\n{intro}"
    return f"{head}\n\n{use}\n\n| | |\n|---|---|\n{lines}\n"


LICENCES = {
    "digits": "UCI, Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0",
    "garments": "Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), its first 2000 training images at 16x16, MIT",
    "portraits": "DiceBear's adventurer, big-smile, personas and toon-head (CC BY 4.0) and pixel-art (CC0) at 32x32",
}
"""Data of networks that come with the package."""


def model_card(run: Run, kind: str, scores: Sequence[Scores] | None = None) -> str:
    """The card of a run: how to use it, how it was trained, and what its scores mean.

    `kind`: a key of USE. `scores`: others than those that are stored with the run.
    """
    config, about = run.config, run_facts(run)
    data, optimizer, values = about["data"], config.optimizer, about["coefficients"]
    name, model = escaped(data["name"]), escaped(config.model)
    method = escaped("AdamW" if optimizer.optimizer == "adamw" else optimizer.optimizer)
    rows = {
        "weights": f"{weights_of(run)}, after step {run.step}",
        "data": f"{name}: {data['images']} images to train on, {data['channels']}x{data['height']}x{data['width']}, "
        f"fingerprint {escaped(data['fingerprint'][:16])}",
        "model": f"{model}, {count_parameters(run.model) / 1e6:.2f}M parameters",
        "scaling": escaped(spelled(as_scaling(config.scaling).to_dict())),
        "κ, outermost to innermost": ", ".join(f"{value:.4g}" for value in values) if values else "none",
        "objective": f"predicts {config.diffusion.prediction}, {config.diffusion.schedule} noise schedule",
        "condition": config.diffusion.condition,
        "training": f"{config.batch_size} images a step, {method}, rate {optimizer.lr:g}, weight decay "
        f"{optimizer.weight_decay:g}, EMA {optimizer.ema_length or f'{optimizer.ema_rate:g}'}, seed {config.seed}",
    }
    if kind == "shipped":
        rows["licences"] = (
            f"weights Apache-2.0, as the package; data {LICENCES[data['name'].removeprefix('captioned-')]}"
        )
    intro = f"A diffusion model trained with scalelong {about['scalelong']}."
    intro += " The table says how its long skip connections are scaled."
    if kind != "shipped" and picture_of(run) is not None:  # a packed network has no file for it
        intro += f"\n\n![samples]({PICTURE})"
    use = USE[kind].format(arguments=_example_condition(run)) if kind == "diffusers" else USE[kind]
    library = "diffusers" if kind == "diffusers" else "scalelong"
    found = scores_of(run) if scores is None else scores
    return _card(library, f"{model} on {name}", intro, use, rows) + f"\n## Scores\n\n{_scores(found)}\n"


def _example_condition(run: Run) -> str:
    """The condition of one image, as an argument of the pipeline."""
    if run.config.diffusion.condition == "class":
        return f"class_labels=[{_python_text((run.shape.classes or ('0',))[0])}], "
    if run.config.diffusion.condition == "text":
        words = (RunFolder(run.folder).vocabulary() or ["a", "photograph"])[: run.config.text.text_length]
        return f"prompt={_python_text(' '.join(words[:3]))}, "
    return ""


def escaped(text: str) -> str:
    """Text of others as one line of Markdown in which nothing is a link, an image, HTML, or a new cell of the table."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:300]
    return re.sub(r"([\\`*_\[\]#!|~<>&])", r"\\\1", line)


def _python_text(text: str) -> str:
    """A literal of Python that can stand in a block of code: no quote, no fence and no tag ends it."""
    return re.sub(r"[`<>&]", lambda found: f"\\x{ord(found[0]):02x}", json.dumps(text[:300]))


def _scores(found: Sequence[Scores]) -> str:
    if not found:
        return "Not scored. `scalelong eval RUN` does it."
    rows = ["| score | value, 95 % interval | held-out real images | noise | protocol |", "|---|---|---|---|---|"]
    remarks: list[str] = []
    for scores in found:
        p = scores.protocol
        how = (
            f"{p.images} images, {p.sampler} {p.sampler_steps} steps, guidance {p.guidance:g}, "
            f"conditions: {p.conditions}, {p.weights} weights, {p.features} features {p.features_sha256[:12]}, "
            f"against {p.reference_images} images, data {p.data_sha256[:12]}"
        )
        rows += [
            f"| {row['']} | {row['value']} | {row.get(REAL, 'unknown')} | {row.get(NOISE, 'unknown')} | "
            f"{escaped(how)} |"
            for row in scores.rows()
        ]
        remarks += [remark for remark in scores.remarks()[1:] if remark not in remarks]
    explained = "Real images that were held out and uniform noise are scored with the same features, for comparison."
    return "\n".join([*rows, "", explained, *(f"- {remark}" for remark in remarks)])


# An exported folder to the Hugging Face hub, where there is a network.


def push_to_hub(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Uploads a folder; the address of the commit. Who you are is what `huggingface-cli login` has stored."""
    hub = needs("huggingface_hub", "hub", "pushing to the hub")
    api = hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ExportError(
            f"{folder} could not be pushed to {repository}: {error}. The folder is complete; push it again when the "
            f"network and your token are there"
        ) from error
