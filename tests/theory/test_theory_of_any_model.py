"""Sensitivities and κ of a network that we did not write: diffusers' UNet."""

import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel

import scalelong.skips as skips
from scalelong import theory
from scalelong.kappa import choose_kappa
from scalelong.scaling import CustomScaling

pytestmark = [
    pytest.mark.skipif(not hasattr(skips, "find_skips"), reason="needs skips to be found in any model"),
    # Its GroupNorms cancel most of a constant scaling, and attaching says so.
    pytest.mark.filterwarnings("ignore:GroupNorm"),
]


def small_unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        norm_num_groups=4,
        add_attention=False,
    )


def test_sensitivities_are_differences_of_scaled_models() -> None:
    model = small_unet().double()
    inputs = (torch.randn(2, 1, 8, 8, dtype=torch.float64), torch.tensor([3, 800]))
    measured = theory.skip_sensitivities(model, *inputs)
    assert len(measured) == theory.count_skips(model, inputs) == 4
    step = 1e-5
    for j in range(4):
        outputs = []
        for sign in (-1, 1):
            kappas = tuple(1 + sign * step * (i == j) for i in range(4))
            skips.scale_skips_(model, CustomScaling(kappas), example_inputs=inputs)
            with torch.no_grad():
                outputs.append(model(*inputs).sample)
            skips.unscale_(model)
        derivative = (outputs[1] - outputs[0]) / (2 * step)
        assert measured[j] == pytest.approx(float(derivative.square().sum()) / 2, rel=1e-4)
    assert not skips.is_scaled(model)


@pytest.mark.parametrize("method", ["data", "network", "pilot"])
def test_all_estimators(method) -> None:
    images = torch.rand(32, 1, 8, 8) * 2 - 1
    options = {"steps": 4, "seeds": 1, "grid": (1, 0.5), "batch_size": 4} if method == "pilot" else {}
    choice = choose_kappa(small_unet, images, method=method, **options)
    assert choice.skips == 4
    assert 0.1 <= choice.kappa <= 1
