"""The model card: what the model is, how it was trained, and what its scores mean."""

from __future__ import annotations

from ..runs.load import Run
from ..scaling import as_scaling
from .about import WEIGHTS, describe_run, scores_of, skip_coefficients

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
}


def model_card(run: Run, kind: str) -> str:
    config, about = run.config, describe_run(run)
    data = about["data"]
    values = skip_coefficients(run)
    listed = ", ".join(f"{value:.4g}" for value in values) if values else "none"
    arguments = (
        f'class_labels=["{(run.shape.classes or ("0",))[0]}"], ' if config.diffusion.condition == "class" else ""
    )
    optimizer = config.optimizer
    return f"""\
---
library_name: {"diffusers" if kind == "diffusers" else "scalelong"}
tags: [diffusion, image-generation, scalelong]
---
# {config.model} on {data["name"]}

A diffusion model trained with scalelong {about["scalelong"]}. The table says how its long skip connections are scaled.

{USE[kind].format(arguments=arguments)}

| | |
|---|---|
| weights | {WEIGHTS[run.weights]}, after step {run.step} |
| data | {data["name"]}: {data["images"]} images to train on, {data["channels"]}x{data["height"]}x{data["width"]}, \
fingerprint {data["fingerprint"][:16]} |
| model | {config.model}, {sum(p.numel() for p in run.model.parameters()) / 1e6:.2f}M parameters |
| scaling | {as_scaling(config.scaling)} |
| κ, outermost to innermost | {listed} |
| objective | predicts {config.diffusion.prediction}, {config.diffusion.schedule} noise schedule |
| condition | {config.diffusion.condition} |
| training | {config.batch_size} images a step, AdamW, rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, \
EMA {optimizer.ema_rate:g}, seed {config.seed} |

## Scores

{_scores(run)}
"""


def _scores(run: Run) -> str:
    found = scores_of(run)
    if not found:
        return "Not scored. `scalelong eval RUN` does it."
    rows = ["| score | value, 95 % interval | protocol |", "|---|---|---|"]
    for scores in found:
        p = scores.protocol
        how = (
            f"{p.images} images, {p.sampler} {p.sampler_steps} steps, guidance {p.guidance:g}, "
            f"conditions: {p.conditions}, {p.weights} weights, {p.features} features {p.features_sha256[:12]}, "
            f"against {p.reference_images} images, data {p.data_sha256[:12]}"
        )
        values = {"Fréchet distance": scores.frechet, "precision": scores.precision, "recall": scores.recall}
        if scores.agreement is not None:
            values["shows what was asked for"] = scores.agreement
        rows += [f"| {name} | {value} | {how} |" for name, value in values.items()]
    return "\n".join(rows)
