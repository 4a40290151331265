"""Scale the long skips of a UNet from diffusers: look, scale, train a step, fold where possible.

python examples/scale_diffusers_unet.py
"""

import torch
from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

from scalelong.attaching import coefficients, save_scaling, scale_skips_, unscale_
from scalelong.finding import find_skips
from scalelong.scaling import LearnableScaling

unet = UNet2DModel(
    sample_size=16,
    block_out_channels=(32, 64),
    layers_per_block=1,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
images, timesteps = torch.randn(4, 3, 16, 16), torch.randint(0, 1000, (4,))

# 1. Look before you leap: where are the long skips, and what becomes of them behind the merge?
print(find_skips(unet))

# 2. Scale them, in one line. Learnable scaling starts on the curve of constant scaling, 0.7^(i-1).
scale_skips_(unet, LearnableScaling(kappa=0.7))

# 3. Train as before. The gates are parameters of the model, under the one name `skip_scaling`.
optimiser = torch.optim.AdamW(unet.parameters(), lr=1e-4)
for _ in range(2):
    noise = torch.randn_like(images)
    loss = (unet(images + noise, timesteps).sample - noise).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
print("coefficients:", [round(kappa, 3) for kappa in coefficients(unet)])

# 4. The scaling alone can be saved, and taken off again without a trace.
save_scaling(unet, "scaling.safetensors")
unscale_(unet)
