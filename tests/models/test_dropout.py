"""Dropout with fewer draws: the same distribution as torch's, from other numbers."""

import pytest
import torch
from torch import nn

from scalelong.models import unet
from scalelong.models.dropout import PackedDropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("shape", [(1001,), (3, 5, 67), (8, 16, 9, 11)])
def test_entries_are_dropped_with_the_probability_and_the_rest_is_scaled(p, shape):
    torch.manual_seed(0)
    x = torch.rand(shape) + 1
    found = torch.stack([PackedDropout(p)(x) for _ in range(200)])
    kept = found != 0
    torch.testing.assert_close(found[kept], (x / (1 - p)).expand_as(found)[kept])
    # Four standard errors, over all entries and for neighbours, which come from the same number.
    for share, expected in ((kept, 1 - p), (kept.flatten(1)[:, :-1] & kept.flatten(1)[:, 1:], (1 - p) ** 2)):
        error = (expected * (1 - expected) / share.numel()) ** 0.5
        assert abs(share.double().mean() - expected) < 4 * error


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_has_the_same_mask(inplace):
    x = torch.ones(4, 6, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = PackedDropout(0.3, inplace)(x * 1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_the_seed_decides():
    def drawn(seed):
        torch.manual_seed(seed)
        return PackedDropout(0.5)(torch.ones(999))

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_what_needs_no_numbers_is_left_to_torch(p):
    x = torch.randn(10)
    assert torch.equal(PackedDropout(p)(x), nn.Dropout(p)(x))
    assert torch.equal(PackedDropout(0.5).eval()(x), x)
    torch.manual_seed(0)
    sparse = PackedDropout(0.5)(torch.ones(6, 4)[:, ::2])  # not dense in memory
    torch.manual_seed(0)
    assert torch.equal(sparse, nn.Dropout(0.5)(torch.ones(6, 4)[:, ::2]))


def test_a_unet_has_them():
    kinds = {type(module) for module in unet("cifar10", block_out_channels=(32, 32, 32, 32)).modules()}
    assert PackedDropout in kinds
    assert nn.Dropout not in kinds
