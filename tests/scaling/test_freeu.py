"""FreeU as a scaling of any plan, against diffusers' own."""

import pytest
import torch
from torch import nn

import scalelong as sl

diffusers = pytest.importorskip("diffusers")


def small_unet() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()


def noisy_inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "sample": torch.randn(2, 4, 16, 16, dtype=dtype),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 5, 8, dtype=dtype),
    }


@pytest.mark.parametrize("factors", [(0.9, 0.2, 1.5, 1.6), (0.5, 0.8, 1.0, 0.7)])
def test_equals_diffusers_own_freeu(factors):
    s1, s2, b1, b2 = factors
    theirs, ours = small_unet(), small_unet()
    theirs.enable_freeu(s1=s1, s2=s2, b1=b1, b2=b2)  # pyright: ignore[reportCallIssue]
    sl.scale_skips_(ours, sl.FreeUScaling(s1, s2, b1, b2))
    with torch.no_grad():
        plain = small_unet()(**noisy_inputs()).sample
        wanted = theirs(**noisy_inputs()).sample
        found = ours(**noisy_inputs()).sample
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - plain).abs().max() > 1e-3
        sl.unscale_(ours)
        assert torch.equal(ours(**noisy_inputs()).sample, plain)


def test_only_the_two_lowest_resolutions_are_changed():
    model = sl.scale_skips_(small_unet(), "freeu")
    levels = [site.level for site in sl.scaling_of(model).sites]
    assert sl.coefficients(model) == [{0: 0.9, 1: 0.2}.get(level or 0, 1.0) for level in levels]
    assert levels == sorted(levels, reverse=True)  # pyright: ignore[reportArgumentType]


def test_tokens_are_refused_by_name():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.dec = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

        def forward(self, x):
            skips = []
            for enc in self.enc:
                x = torch.tanh(enc(x))
                skips.append(x)
            for dec in self.dec:
                x = torch.tanh(dec(torch.cat([torch.tanh(x @ x.mT @ x), skips.pop()], -1)))
            return x

    with pytest.raises(sl.InvalidConfigError, match=r"FreeU filters features of images"):
        sl.scale_skips_(Tokens(), "freeu", (torch.randn(2, 5, 8),))


@pytest.mark.parametrize("wrong", ["freeu:s1=-1", "freeu:b2=x", "freeu:b3=1"])
def test_wrong_options(wrong):
    with pytest.raises(sl.InvalidConfigError):
        sl.as_scaling(wrong)
