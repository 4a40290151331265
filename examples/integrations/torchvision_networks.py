"""segmentation_models.pytorch's Unet, and lucidrains' Unet with its Trainer. Both import torchvision.

python examples/integrations/torchvision_networks.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch

import scalelong as sl
from scalelong.stability import StabilityMonitor


def segmentation(folder: Path) -> dict[str, Any]:
    import segmentation_models_pytorch as smp  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    network = smp.Unet("efficientnet-b0", encoder_weights=None, in_channels=3, classes=1).eval()
    x = torch.randn(1, 3, 64, 64)
    plan = sl.find_skips(network, (x,))
    plain = network(x)
    sl.scale_skips_(network, "cs", (x,))
    scaled = network(x)
    torch.save(network.state_dict(), folder / "smp.pt")
    other = smp.Unet("efficientnet-b0", encoder_weights=None, in_channels=3, classes=1).eval()
    sl.load_scaling_(other, folder / "smp.pt")
    other.load_state_dict(torch.load(folder / "smp.pt", weights_only=True))
    report = sl.fold_(network, (x,))
    return {
        "smp: long skips": len(plan),
        "smp: scaling changes the output by": float((scaled - plain).abs().max()),
        "smp: read back, difference": float((other(x) - scaled).abs().max()),
        "smp: folded": len(report.folded),
        "smp: folded, difference": float((network(x) - scaled).abs().max()),
    }


def diffusion(folder: Path) -> dict[str, Any]:
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet  # pyright: ignore[reportMissingImports]

    from scalelong.data import load_data
    from scalelong.diffusion.sampling import as_picture

    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    images = load_data("digits", size=16, channels=3)
    for number in range(120):  # its Trainer wants a hundred at least
        as_picture(images.fetch([number]).images[0]).save(pictures / f"{number}.png")
    torch.manual_seed(0)
    network = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    inputs = (torch.randn(1, 3, 16, 16), torch.tensor([10]))
    plan = sl.find_skips(network, inputs)
    sl.scale_skips_(network, "ls", inputs)  # before GaussianDiffusion and Trainer, which copies it for its average
    diffusion = GaussianDiffusion(network, image_size=16, timesteps=20, sampling_timesteps=2)
    options: dict[str, Any] = {"train_batch_size": 16, "gradient_accumulate_every": 1, "train_num_steps": 3}
    options |= {"save_and_sample_every": 1000, "num_samples": 1, "amp": False, "calculate_fid": False}
    trainer = Trainer(diffusion, str(pictures), results_folder=str(folder / "results"), **options)
    with StabilityMonitor(network, every=1, plan=plan) as monitor:
        # It has no callbacks: the monitor is told of a step by the optimiser that the Trainer made.
        trainer.opt.optimizer.register_step_post_hook(lambda *_: monitor.step())
        trainer.train()
    trainer.save(1)
    again = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    saved = torch.load(folder / "results" / "model-1.pt", weights_only=True)
    sl.load_scaling_(again, saved["model"])
    again.load_state_dict(
        {key.removeprefix("model."): value for key, value in saved["model"].items() if key.startswith("model.")}
    )
    x, t = inputs
    return {
        "lucidrains: long skips": len(plan),
        "lucidrains: readings": len(monitor.history),
        "lucidrains: read back, difference": float((again.eval()(x, t) - network.eval()(x, t)).abs().max()),
        "lucidrains: average is scaled": float(sl.is_scaled(trainer.ema.ema_model)),
    }


def main(folder: str | Path) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return segmentation(Path(folder)) | diffusion(Path(folder))


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/torchvision").items():
        print(f"{name}: {value}")
