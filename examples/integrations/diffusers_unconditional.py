"""A loop of the shape of diffusers' train_unconditional.py (accelerate, EMAModel, hooks, checkpoints, a pipeline at the
end), with what scalelong adds marked by # <--. Twice: with the scaling as a start, and attached.

python examples/integrations/diffusers_unconditional.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel  # pyright: ignore[reportPrivateImportUsage]
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

import scalelong as sl  # <--
from scalelong.data import load_data, to_float
from scalelong.stability import AccelerateMonitor  # <--


def make_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def train(folder: Path, way: str, steps: int, resume_from: Path | None = None) -> tuple[Any, EMAModel]:
    """`way` is "start" (κ in the weights, nothing attached) or a scaling to attach, such as "ls"."""
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    unet, scheduler = make_unet(), DDPMScheduler(num_train_timesteps=1000)
    if way == "start":
        sl.start_skips_(unet, "cs:behind_norms=true")  # <-- before EMA and optimiser
    else:
        sl.scale_skips_(unet, way)  # <--
    ema = EMAModel(unet.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=unet.config)

    def save_models(models: list[Any], weights: list[Any], output: str) -> None:
        for model in models:
            model.save_pretrained(Path(output) / "unet")
            weights.pop()
        # EMAModel.save_pretrained would build a plain UNet2DModel, and lose the averages of the gates.
        torch.save(ema.state_dict(), Path(output) / "ema.pt")  # <-- if attached

    def load_models(models: list[Any], source: str) -> None:
        while models:
            # diffusers' script reads a plain UNet2DModel here, and would lose the gates of LS.
            models.pop().load_state_dict(sl.from_pretrained(Path(source) / "unet").state_dict())  # <-- if attached
        ema.load_state_dict(torch.load(Path(source) / "ema.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save_models)
    accelerator.register_load_state_pre_hook(load_models)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=6)
    unet, optimizer, schedule = accelerator.prepare(unet, optimizer, schedule)
    monitor = AccelerateMonitor(accelerator, unet, every=2)  # <-- after prepare
    first = 0
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
        first = int(resume_from.name.removeprefix("step-"))
        monitor.begin_at(first)
    images = to_float(load_data("digits").fetch(range(32)).images)
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)
        clean = images[torch.randint(0, 32, (4,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator)
        t = torch.randint(0, 1000, (4,), generator=generator)
        predicted = unet(scheduler.add_noise(clean, noise, t), t).sample  # pyright: ignore[reportArgumentType]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        monitor.step(loss)  # <-- after optimizer.step()
        ema.step(unet.parameters())
        accelerator.save_state(str(folder / f"step-{step + 1}"))
    monitor.close()
    bare = accelerator.unwrap_model(unet)
    DDPMPipeline(unet=bare, scheduler=scheduler).save_pretrained(folder / "pipeline")
    return bare, ema


def images_of(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(batch_size=1, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np")
    return torch.from_numpy(drawn.images)


def main(folder: str | Path) -> dict[str, float]:
    folder, found = Path(folder), {}
    for way in ("start", "ls"):
        trained, average = train(folder / way, way, 4)
        resumed, again = train(folder / f"{way}-resumed", way, 4, resume_from=folder / way / "step-2")
        weights = [*trained.parameters(), *average.shadow_params], [*resumed.parameters(), *again.shadow_params]
        found[f"{way}: largest difference after a resume"] = max(
            float((a - b).detach().abs().max()) for a, b in zip(*weights, strict=True)
        )
        # A pipeline whose UNet was only started is a plain one; an attached scaling comes back by sl.from_pretrained.
        read = DDPMPipeline.from_pretrained if way == "start" else sl.from_pretrained
        images = images_of(read(folder / way / "pipeline"))
        alone = images_of(DDPMPipeline(unet=trained, scheduler=DDPMScheduler(num_train_timesteps=1000)))
        found[f"{way}: difference of the pipeline's images"] = float((images - alone).abs().max())
    saved = sl.from_pretrained(folder / "ls" / "step-4" / "unet")
    found["ls: tensors of gates in the checkpoint"] = sum(
        "skip_scaling" in name for name, _ in saved.named_parameters()
    )
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/diffusers").items():
        print(f"{name}: {value:g}")
