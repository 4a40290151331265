"""The Trainer of transformers with a scaled network, the monitor's callback, and a checkpoint that resumes exactly.

python examples/integrations/transformers_trainer.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.stability import trainer_callback, trainer_guard


class Denoising(nn.Module):
    """The Trainer wants a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2)

    def forward(self, images: Tensor, noise: Tensor, t: Tensor) -> dict[str, Tensor]:
        share = (t / 999).view(-1, 1, 1, 1)
        return {"loss": (self.unet((1 - share) * images + share * noise, t) - noise).square().mean()}


def examples() -> list[dict[str, Tensor]]:
    images, generator = to_float(load_data("digits").fetch(range(64)).images), torch.Generator().manual_seed(0)
    noise, t = torch.randn(images.shape, generator=generator), 999 * torch.rand(len(images), generator=generator)
    return [{"images": x, "noise": e, "t": s} for x, e, s in zip(images, noise, t, strict=True)]


def fit(folder: Path, resume: bool = False) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Denoising()
    sl.scale_skips_(model.unet, "ls")  # before the Trainer, which makes the optimiser and reads checkpoints
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4 if not resume and folder.name == "half" else 8,
        per_device_train_batch_size=8,
        save_steps=4,
        logging_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples(), callbacks=[trainer_guard(mode="ignore")])  # pyright: ignore[reportArgumentType]
    callback = trainer_callback(trainer, network="unet", every=2)
    trainer.add_callback(callback)  # it logs as the Trainer logs, so that readings reach report_to
    trainer.train(resume_from_checkpoint=resume or None)
    return model, callback.watcher, trainer


def main(folder: str | Path) -> dict[str, float]:
    folder, found = Path(folder), {}
    fit(folder / "half")
    resumed, monitor, trainer = fit(folder / "half", resume=True)
    whole, _, _ = fit(folder / "whole")
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    found["largest difference after a resume"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    found["first reading after the resume at step"] = monitor.history[0]["step"]
    logged = [line for line in trainer.state.log_history if "stability/kappa/1" in line]
    found["readings in the Trainer's log"] = len(logged)
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/trainer").items():
        print(f"{name}: {value:g}")
