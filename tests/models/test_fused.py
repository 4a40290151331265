"""The lean branches against the plain layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scalelong.models import UViT, cpu as fused


@pytest.fixture
def at_any_size(monkeypatch):
    """Small features take the lean path as well, so that the tests are quick."""
    monkeypatch.setattr(fused, "SMALLEST", 0)


def layers(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.LayerNorm, nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    norm, expand, reduce = nn.LayerNorm(12), nn.Linear(12, 40, bias=bias), nn.Linear(40, 12)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.to(dtype), expand.to(dtype), reduce.to(dtype)


def gradients(function, x, modules):
    parameters = [x, *(p for module in modules for p in module.parameters())]
    output = function(x)
    return output, torch.autograd.grad(output.square().sum(), parameters)


@pytest.mark.parametrize("shape", [(3, 5, 1), (3, 1, 12)])
def test_a_gated_addition_is_the_plain_one(shape):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, 7), torch.randn(3, 5, 12), torch.rand(shape), torch.randn(7, 24)[:, :12]]
    inputs = [value.double().requires_grad_() for value in inputs]
    ours, plain = fused.gated_addition(*inputs), inputs[0] + (inputs[1] * inputs[2]) @ inputs[3].t()
    torch.testing.assert_close(ours, plain)
    assert torch.autograd.gradcheck(fused.gated_addition, inputs)
    assert torch.autograd.gradgradcheck(fused.gated_addition, inputs)


@pytest.mark.usefixtures("at_any_size")
@pytest.mark.parametrize("method", ["ls", "ls:gate=channel", "ls:module=ie", "ls:module=scalar"])
def test_a_gate_keeps_no_second_copy_of_the_skips(method):
    def kept(scaling):
        torch.manual_seed(0)
        model = UViT(image_size=16, patch_size=2, channels=1, dim=64, depth=6, heads=2, scaling=scaling)
        sizes: dict[int, int] = {}

        def note(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(8, 1, 16, 16), torch.rand(8) * 999)
        return sum(sizes.values())

    assert kept(method) < 1.02 * kept("none")


@pytest.mark.parametrize("bias", [True, False])
def test_a_normed_linear_is_the_plain_one(bias):
    norm, linear, _ = layers(bias)
    x = torch.randn(3, 5, 12, requires_grad=True)
    ours = gradients(lambda x: fused.normed_linear(x, norm, linear), x, (norm, linear))
    plain = gradients(lambda x: linear(norm(x)), x, (norm, linear))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_a_normed_mlp_is_the_plain_one():
    norm, expand, reduce = layers()
    x = torch.randn(3, 5, 12, requires_grad=True)
    ours = gradients(lambda x: fused.normed_mlp(x, norm, expand, reduce), x, (norm, expand, reduce))
    plain = gradients(lambda x: reduce(F.gelu(expand(norm(x)))), x, (norm, expand, reduce))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_finite_differences():
    norm, expand, reduce = layers(dtype=torch.float64)
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fused.normed_linear(x, norm, expand), x)
    assert torch.autograd.gradcheck(lambda x: fused.normed_mlp(x, norm, expand, reduce), x)


def test_the_gradient_can_be_differentiated():
    norm, expand, reduce = layers()
    x = torch.randn(2, 3, 12, requires_grad=True)

    def second(function):
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, expand.weight, norm.weight])

    ours = second(lambda x: fused.normed_mlp(x, norm, expand, reduce))
    torch.testing.assert_close(ours, second(lambda x: reduce(F.gelu(expand(norm(x))))), rtol=1e-4, atol=1e-3)
    ours = second(lambda x: fused.normed_linear(x, norm, expand))
    torch.testing.assert_close(ours, second(lambda x: expand(norm(x))), rtol=1e-4, atol=1e-3)


def test_frozen_layers():
    norm, expand, reduce = layers()
    for parameter in (*norm.parameters(), *expand.parameters()):
        parameter.requires_grad_(False)
    x = torch.randn(2, 3, 12)
    fused.normed_mlp(x, norm, expand, reduce).sum().backward()
    expected = torch.autograd.grad(reduce(F.gelu(expand(norm(x)))).sum(), [reduce.weight])
    torch.testing.assert_close(reduce.weight.grad, *expected)
    assert expand.weight.grad is None


@pytest.mark.usefixtures("at_any_size")
def test_it_steps_aside_for_whoever_would_notice():
    norm, expand, reduce = layers()
    x = torch.randn(2, 3, 12)
    assert fused.can_fuse(x, norm, expand, reduce)
    assert not fused.can_fuse(x.double(), norm, expand)
    assert not fused.can_fuse(x.to("meta"), norm, expand)
    assert not fused.can_fuse(x, norm, nn.Identity())
    with torch.no_grad():
        assert not fused.can_fuse(x, norm, expand)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.can_fuse(x, norm, expand)
    with FlopCounterMode(display=False):
        assert not fused.can_fuse(x, norm, expand)
    with torch.autograd.forward_ad.dual_level():
        assert not fused.can_fuse(x, norm, expand)
    handle = expand.register_forward_hook(lambda *_: None)
    assert not fused.can_fuse(x, norm, expand)
    handle.remove()
    assert fused.can_fuse(x, norm, expand)


def test_small_features_are_left_to_the_plain_layers():
    norm, expand, _ = layers()
    assert not fused.can_fuse(torch.randn(2, 3, 12), norm, expand)
    assert fused.can_fuse(torch.randn(fused.SMALLEST // 12 + 1, 12), norm, expand)


@pytest.mark.usefixtures("at_any_size")
def test_a_hook_in_a_block_is_called():
    model = UViT(image_size=8, patch_size=2, channels=1, dim=16, depth=2, heads=2)
    seen = []
    model.middle.get_submodule("mlp.expand").register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.randn(2, 1, 8, 8), torch.rand(2)).sum().backward()
    assert len(seen) == 1


@pytest.mark.usefixtures("at_any_size")
def test_a_block_remembers_a_third_less(monkeypatch):
    model = UViT(image_size=16, patch_size=2, channels=3, dim=64, depth=4, heads=2)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def kept() -> int:
        sizes: dict[int, int] = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(torch.randn(4, 3, 16, 16), torch.rand(4))
        del output
        return sum(sizes.values())

    lean = kept()
    monkeypatch.setattr("scalelong.models.uvit.can_fuse", lambda *_: False)
    assert lean < 0.7 * kept()
