"""A loop of the shape of diffusers' train_text_to_image.py and train_text_to_image_lora.py: a UNet with
cross-attention, a text encoder of transformers, all weights or LoRA. What scalelong adds is marked by # <--.

The text encoder is tiny and random, and there is no autoencoder: nothing is downloaded.

python examples/integrations/diffusers_text_to_image.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel  # pyright: ignore[reportPrivateImportUsage]
from peft import LoraConfig
from transformers import CLIPTextConfig, CLIPTextModel

import scalelong as sl  # <--

LORA = "pytorch_lora_weights.safetensors"


def make_unet() -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def make_text_encoder() -> CLIPTextModel:
    torch.manual_seed(1)
    config = CLIPTextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=48,
        eos_token_id=49,
        pad_token_id=49,
    )
    return CLIPTextModel(config).eval()


def train(unet: Any, steps: int = 3) -> list[float]:
    """The loop itself: nothing in it knows of the scaling."""
    text_encoder, scheduler = make_text_encoder(), DDPMScheduler()
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        latents, noise = torch.randn(2, 2, 4, 8, 8, generator=generator)
        t, tokens = torch.randint(0, 1000, (2,), generator=generator), torch.randint(0, 48, (2, 8), generator=generator)
        with torch.no_grad():
            context = text_encoder(tokens).last_hidden_state
        noisy = scheduler.add_noise(latents, noise, t)  # pyright: ignore[reportArgumentType]
        loss = torch.nn.functional.mse_loss(unet(noisy, t, encoder_hidden_states=context).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def output(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    x, context = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 8, 16, generator=generator)
    with torch.no_grad():
        return unet.eval()(x, torch.tensor([500]), encoder_hidden_states=context).sample


def difference(one: Any, other: Any) -> float:
    return float((output(one) - output(other)).abs().max())


def main(folder: str | Path) -> dict[str, float]:
    folder, found = Path(folder), {}
    # 1. All weights, the scaling attached behind the norms that would cancel it: it folds as a whole.
    unet = make_unet()
    sl.scale_skips_(unet, "cs:behind_norms=true")  # <-- after from_pretrained, before EMA, optimiser and prepare
    train(unet)
    unet.save_pretrained(folder / "unet")
    found["attached, back by sl.from_pretrained"] = difference(unet, sl.from_pretrained(folder / "unet"))  # <--
    folded = sl.from_pretrained(folder / "unet")
    sl.fold_(folded)  # <-- at the end: a plain UNet, for every pipeline and every tool
    folded.save_pretrained(folder / "folded")
    found["folded, back by diffusers alone"] = difference(unet, UNet2DConditionModel.from_pretrained(folder / "folded"))
    # 2. LoRA, as train_text_to_image_lora.py: the base is frozen, and its scaling is constant.
    unet = make_unet()
    sl.scale_skips_(unet, "cs:behind_norms=true")  # <-- before add_adapter
    unet.requires_grad_(False)
    unet.add_adapter(
        LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v"])
    )
    train(unet)
    unet.save_lora_adapter(folder / "lora")
    other = make_unet()
    sl.scale_skips_(other, "cs:behind_norms=true")  # <-- the file of LoRA holds the adapter alone
    other.load_lora_adapter(folder / "lora", prefix=None, weight_name=LORA)
    found["LoRA, back on a scaled base"] = difference(unet, other)
    unscaled = make_unet()
    unscaled.load_lora_adapter(folder / "lora", prefix=None, weight_name=LORA)
    found["LoRA on a base that nobody scaled: wrong by"] = difference(unet, unscaled)
    unet.fuse_lora()
    unet.unload_lora()
    sl.fold_(unet)  # <-- only after the adapters are in the weights
    found["LoRA fused, scaling folded"] = difference(unet, other)
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/text").items():
        print(f"{name}: {value:.3g}")
