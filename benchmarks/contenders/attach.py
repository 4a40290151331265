"""Networks of others whose long skips are found and scaled from outside."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.models.presets import unet
from scalelong.skips import find_skips, fold_, scale_skips_

from ..errors import BenchmarkError


class ConcatenatingUNet(nn.Module):
    """A UNet of the other kind: the concatenation is the argument of the decoder blocks, as in guided-diffusion."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(levels)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for layer in self.down:
            skips.append(F.silu(layer(skips[-1])))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)


def stable_diffusion() -> nn.Module:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "stable-diffusion-1.5": stable_diffusion,
    "unet/cifar10": lambda: unet("cifar10"),
    "unet/cifar10, narrow": lambda: unet("cifar10", block_out_channels=(32, 64, 64, 64), layers_per_block=1),
    "concatenating": ConcatenatingUNet,
}


class Planning:
    """One search for the long skips, on the meta device where nothing is computed."""

    def __init__(self, network: str) -> None:
        with torch.device("meta"):
            self.model = NETWORKS[network]()
            self.inputs = (torch.zeros(1, 3, 32, 32),) if network == "concatenating" else None

    def __call__(self) -> None:
        find_skips(self.model, self.inputs)

    def about(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "skips": len(find_skips(self.model, self.inputs))}


def make_network(
    network: str, scaling: str | None, batch: int, *, folded: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network that is scaled from outside, or as it is (None), and its inputs."""
    torch.manual_seed(0)
    model = NETWORKS[network]().eval()
    image = torch.randn(batch, 3, 32, 32)
    inputs = (image,) if network == "concatenating" else (image, torch.full((batch,), 500.0))
    if scaling is not None:
        scale_skips_(model, scaling, inputs)
    if folded and (kept := fold_(model).kept):
        raise BenchmarkError(f"the constants of {network} cannot be folded: {kept}")
    return model, inputs
