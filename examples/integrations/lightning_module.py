"""A LightningModule whose UNet is scaled, and watched and logged by a callback; a checkpoint that resumes exactly.

python examples/integrations/lightning_module.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import lightning  # pyright: ignore[reportMissingImports]
import torch
from torch.utils.data import DataLoader, TensorDataset

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.stability import lightning_callback, lightning_guard


class Diffusion(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.unet = sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2)
        # Here, so that the optimiser gets the gates of LS, and a checkpoint's weights meet a scaled network.
        sl.scale_skips_(self.unet, "ls")

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (images,) = batch
        generator = torch.Generator().manual_seed(self.global_step)
        noise, t = torch.randn(images.shape, generator=generator), 999 * torch.rand(len(images), generator=generator)
        share = (t / 999).view(-1, 1, 1, 1)
        return (self.unet((1 - share) * images + share * noise, t) - noise).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder: Path, epochs: int, checkpoint: Path | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, logger = Diffusion(), lightning.pytorch.loggers.TensorBoardLogger(folder, name="")
    callback = lightning_callback(network="unet", every=2, path=folder / "stability.jsonl")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback, lightning_guard(zero_loss=1.0, mode="ignore")],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    # Lightning goes on exactly at the end of an epoch; within one, only if the loader has a state_dict.
    images = to_float(load_data("digits").fetch(range(32)).images)
    trainer.fit(module, DataLoader(TensorDataset(images), batch_size=8), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"epoch-{epochs}.ckpt")
    return module, callback.monitor


def main(folder: str | Path) -> dict[str, float]:
    folder, found = Path(folder), {}
    fit(folder / "half", 1)
    resumed, monitor = fit(folder / "resumed", 2, folder / "half" / "epoch-1.ckpt")
    whole, _ = fit(folder / "whole", 2)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    found["largest difference after a resume"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    found["first reading after the resume at step"] = monitor.history[0]["step"]
    # A checkpoint opened without a Trainer.
    saved = torch.load(folder / "whole" / "epoch-2.ckpt", weights_only=True)
    module = Diffusion()
    module.load_state_dict(saved["state_dict"])
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([10.0, 500.0])
    found["difference of the module that was read back"] = float((module.unet(x, t) - whole.unet(x, t)).abs().max())
    found["tensors of gates in the checkpoint"] = sum("skip_scaling" in n for n in saved["state_dict"])
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/lightning").items():
        print(f"{name}: {value:g}")
