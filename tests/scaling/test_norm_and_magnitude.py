"""The methods that normalise: against torch's own layers and against the property that they promise."""

import pytest
import torch
import torch.nn.functional as F

import scalelong as sl
from scalelong.scaling import SkipSite


def test_layer_norm_on_tokens_and_images():
    tokens = torch.randn(2, 7, 16) * 5 + 3
    site = [SkipSite(index=i, channels=16, channel_axis=-1) for i in (1, 2)]
    scaling = sl.NormScaling(0.5).build(site)
    torch.testing.assert_close(scaling.scale(tokens, 2), 0.5 * F.layer_norm(tokens, (16,), eps=1e-6))
    image = tokens.transpose(1, 2).unflatten(2, (7, 1))
    on_image = sl.NormScaling(0.5).build([SkipSite(index=i, channels=16) for i in (1, 2)]).scale(image, 2)
    torch.testing.assert_close(on_image.flatten(2).transpose(1, 2), scaling.scale(tokens, 2))


def test_rms_norm():
    tokens = torch.randn(2, 7, 16) * 5 + 3
    scaling = sl.NormScaling(norm="rms").build([SkipSite(index=1, channels=16, channel_axis=-1)])
    torch.testing.assert_close(scaling.scale(tokens, 1), F.rms_norm(tokens, (16,), eps=1e-6))


def test_norm_does_not_overflow_in_half_precision():
    tokens = torch.full((1, 4, 16), 1000.0, dtype=torch.float16)
    tokens[..., ::2] = -1000.0
    scaling = sl.NormScaling(norm="rms").build([SkipSite(index=1, channels=16, channel_axis=-1)])
    assert torch.equal(scaling.scale(tokens, 1).abs(), torch.ones_like(tokens))


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("main", "skip"), [(64, 64), (96, 32), (10, 70)])
def test_magnitude_is_kept(t, main, skip):
    """Unit-variance operands give a unit-variance concatenation and sum, whatever t and the widths (EDM2)."""
    a, b = torch.randn(4000, main), torch.randn(4000, skip)
    cat = sl.MagnitudePreserving(t).build([SkipSite(index=1, channels=skip, main_channels=main)]).constants(1)
    assert cat is not None
    merged = torch.cat([cat.main * a, cat.skip * b], dim=1)
    assert float(merged.square().mean()) == pytest.approx(1, abs=0.02)
    add = sl.MagnitudePreserving(t).build([SkipSite(index=1, channels=skip)]).constants(1)
    assert add is not None
    summed = add.main * torch.randn(100_000) + add.skip * torch.randn(100_000)
    assert float(summed.square().mean()) == pytest.approx(1, abs=0.03)
