"""Train your own diffusers UNet with constant scaling (CS) attached to its long skips.

    PYTHONPATH=examples scalelong train --recipe digits-tiny --model train_own_unet:small_unet --scaling cs:0.7

or, from Python, `python examples/train_own_unet.py runs/own-unet`. The factory below knows nothing of scalelong: the
long skips are found by running the model once.
"""

import sys

from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

from scalelong.config import LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.runs.folder import read_metrics
from scalelong.runs.load import load_run
from scalelong.training import train


def small_unet(image_size: int = 8, channels: int = 1, width: int = 32) -> UNet2DModel:
    """What the trainer knows of the data (image_size, channels, classes) is passed to arguments of these names."""
    return UNet2DModel(
        sample_size=image_size,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
    )


def main(folder: str, steps: int = 300) -> None:
    config = TrainConfig(
        data="digits",
        model=f"{small_unet.__module__}:{small_unet.__name__}",
        scaling="cs:0.7",
        steps=steps,
        batch_size=32,
        optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.99), warmup=50, clip=1.0, ema_rate=0.99, ema_warmup=True),
        logging=LoggingConfig(log_every=50, samples=36),
    )
    train(config, folder)
    run = load_run(folder, trust=True)  # its configuration names the factory above, which is run
    loss = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    print(f"{type(run.model).__name__} at step {run.step}: loss {loss[0]:.3f} -> {loss[-1]:.3f}, samples in {folder}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-unet")
