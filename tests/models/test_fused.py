"""Blocks as one call against their layers."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scalelong.models import UViT, cpu as fused
from scalelong.models.uvit import Block
from scalelong.scaling.base import UNSCALED, Constants

PATHS = {"small": 2**40, "large": 0}
"""LARGE, so that features of any size take a path."""


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setattr(fused, "LARGE", PATHS[request.param])
    return request.param


@pytest.fixture
def at_any_size(monkeypatch):
    """Small features take the path of large ones."""
    monkeypatch.setattr(fused, "LARGE", 0)


def block(residual="none", qkv_bias: bool = True, merges: bool = True) -> Block:
    torch.manual_seed(0)
    made = Block(12, 3, 2.0, qkv_bias, residual, merges=merges)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@contextlib.contextmanager
def layer_by_layer():
    """As if somebody looked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelong.models.uvit.is_ordinary", lambda _: False)
        patch.setattr("scalelong.models.uvit.is_fusible", lambda _: False)
        yield


def calls(monkeypatch) -> list[bool]:
    """Whether each call of a fused block has had a skip."""
    found = []
    real = fused.fused_block
    monkeypatch.setattr(
        "scalelong.models.uvit.fused_block", lambda *args: (found.append(len(args) > 2), real(*args))[1]
    )
    return found


def values(module: Block, factors: Constants, skips: bool = True, shape=(3, 5, 12)):
    torch.manual_seed(1)
    x, skip = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    output = module(x, skip, factors) if skips else module(x)
    inputs = [x, *([skip] if skips else []), *module.parameters()]
    return output, torch.autograd.grad(output.square().sum(), inputs)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("residual", ["none", 0.3])
@pytest.mark.parametrize("factors", [UNSCALED, Constants(0.9, 0.6)])
def test_a_block_is_its_layers(path, factors, residual, qkv_bias, monkeypatch):
    module, called = block(residual, qkv_bias), calls(monkeypatch)
    ours = values(module, factors)
    assert called == [True]
    with layer_by_layer():
        plain = values(module, factors)
    assert called == [True]
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[1], plain[1], rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        x = torch.randn(3, 5, 12)
        torch.testing.assert_close(module(x, x, factors), values_without_gradients(module, x, factors), rtol=0, atol=0)


def values_without_gradients(module, x, factors):
    with layer_by_layer():
        return module(x, x, factors)


def test_a_block_without_a_merge(path, monkeypatch):
    module, called = block(merges=False), calls(monkeypatch)
    ours = values(module, UNSCALED, skips=False)
    assert called == [False]
    with layer_by_layer():
        torch.testing.assert_close(ours, values(module, UNSCALED, skips=False), rtol=2e-5, atol=2e-5)


def test_features_that_are_not_contiguous(path):
    module = block()
    x = torch.randn(5, 3, 12).transpose(0, 1)
    with layer_by_layer():
        plain = module(x, x, UNSCALED)
    torch.testing.assert_close(module(x, x, UNSCALED), plain, rtol=1e-5, atol=1e-5)


def test_the_paths_are_the_reference():
    module = block()
    x, skip = torch.randn(3, 5, 12), torch.randn(3, 5, 12)
    numbers = fused.Numbers(3, 1e-5, 1e-5, 1.0, 1.0)
    attention, mlp = module.attention, module.mlp
    assert module.merge is not None
    layers = (
        module.merge,
        module.attention_norm,
        module.mlp_norm,
        attention.qkv,
        attention.out,
        mlp.expand,
        mlp.reduce,
    )
    weights = [value for layer in layers for value in (layer.weight, layer.bias)]
    expected = fused.plain_block(numbers, (0.9, 0.6), x, skip, *weights)
    torch.testing.assert_close(module(x, skip, Constants(0.9, 0.6)), expected, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_kept_and_asked_for_twice(path):
    module = block()
    x = torch.randn(3, 5, 12, requires_grad=True)
    loss = module(x, x, UNSCALED).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    loss.backward()
    for parameter, gradient in zip(module.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


@pytest.mark.usefixtures("at_any_size")
def test_the_gradient_can_be_differentiated():
    module = block()
    assert module.merge is not None
    weights = [module.mlp.expand.weight, module.merge.weight]
    x = torch.randn(2, 3, 12, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(module(x, x, Constants(1.0, 0.5)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *weights])

    ours = second()
    with sdpa_kernel(SDPBackend.MATH):  # no other attention of torch can be differentiated twice
        torch.testing.assert_close(ours, second(), rtol=1e-3, atol=1e-3)


def test_frozen_layers(path):
    module = block()
    module.requires_grad_(False)
    module.mlp.reduce.weight.requires_grad_(True)
    x = torch.randn(2, 3, 12)
    module(x, x, UNSCALED).sum().backward()
    ours, module.mlp.reduce.weight.grad = module.mlp.reduce.weight.grad, None
    with layer_by_layer():
        module(x, x, UNSCALED).sum().backward()
    torch.testing.assert_close(ours, module.mlp.reduce.weight.grad)
    assert module.mlp.expand.weight.grad is None


def network(**options) -> UViT:
    torch.manual_seed(0)
    model = UViT(**{"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 4, "heads": 2, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def rows(monkeypatch) -> list[int]:
    """How many blocks each call of a row has had."""
    found = []
    real = fused.fused_blocks
    monkeypatch.setattr(
        "scalelong.models.uvit.fused_blocks", lambda *args: (found.append(len(args[0])), real(*args))[1]
    )
    return found


def gradients(model: UViT, images: int = 3):
    torch.manual_seed(1)
    x = torch.randn(images, 1, 8, 8, requires_grad=True)
    output = model(x, torch.rand(images) * 999)
    return output, torch.autograd.grad(output.square().sum(), [x, *model.parameters()])


@pytest.mark.parametrize("images", [3, 40])  # 6 sequences, and 80
@pytest.mark.parametrize("scaling", ["none", "cs", "ls", "ls:module=scalar", "uniform", "mp", "norm"])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "residual_scaling": 0.3}, {"merge_norm": True}])
def test_a_row_of_blocks_is_its_layers(images, scaling, options, monkeypatch):
    model, called = network(scaling=scaling, **options), rows(monkeypatch)
    ours = gradients(model, images)
    assert called == ([3] if "merge_norm" in options else [3, 2])
    with layer_by_layer():
        torch.testing.assert_close(ours, gradients(model, images), rtol=1e-4, atol=2e-4)


def test_the_gradient_of_a_row_can_be_differentiated(monkeypatch):
    model, called = network(scaling="cs"), rows(monkeypatch)
    x, t = torch.randn(2, 1, 8, 8, requires_grad=True), torch.rand(2)

    def second():
        (first,) = torch.autograd.grad(model(x, t).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    ours = second()
    assert called == [3, 2]
    with sdpa_kernel(SDPBackend.MATH):
        plain = second()
    for one, other in zip(ours, plain, strict=True):
        one, other = (torch.zeros(1) if value is None else value for value in (one, other))
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


def test_outputs_of_a_row_that_nobody_uses():
    model = network()
    blocks = [block.fused() for block in model.encoder if isinstance(block, Block)]
    x = torch.randn(3, 17, 16, requires_grad=True)
    first, _ = fused.fused_blocks(blocks, x)  # pyright: ignore[reportArgumentType]
    first.sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.encoder[1].parameters())
    ours = x.grad.clone()
    x.grad = None
    with layer_by_layer():
        model.encoder[0](x).sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-4, atol=1e-4)


def test_a_row_steps_aside_for_whoever_would_notice(monkeypatch):
    model, called = network(), rows(monkeypatch)
    x, t = torch.randn(2, 1, 8, 8), torch.rand(2)

    def made():
        called.clear()
        model(x, t)
        return called[:]

    assert made() == [3, 2]
    seen = []
    handle = model.encoder[1].register_forward_hook(lambda *_: seen.append(1))
    assert made() == [2]
    assert seen == [1]
    handle.remove()
    handle = model.decoder[0].register_full_backward_hook(lambda *_: None)
    assert made() == [3]
    handle.remove()
    model.decoder[1].requires_grad_(False)  # nothing before it is asked for gradients that it need not have
    assert made() == [3]
    model.requires_grad_(True)
    model.enable_gradient_checkpointing()
    assert made() == []
    model.disable_gradient_checkpointing()
    with torch.no_grad():
        assert made() == [3, 2]
        model.requires_grad_(False)
        assert made() == [3, 2]
    monkeypatch.setattr(fused, "LARGE", 0)
    assert made() == []


@pytest.mark.parametrize("products", [True, False])
def test_attention_is_torchs(products, monkeypatch):
    monkeypatch.setattr(fused, "_products_are_faster", lambda *_: products)
    module = block()
    ours = values(module, UNSCALED, shape=(4, 9, 12))
    with layer_by_layer():
        torch.testing.assert_close(ours, values(module, UNSCALED, shape=(4, 9, 12)), rtol=2e-5, atol=5e-5)


def test_attention_of_large_scores():
    """Its softmax subtracts the largest score first."""
    module = block()
    with torch.no_grad():
        module.attention.qkv.weight *= 100
    ours = values(module, UNSCALED, shape=(8, 9, 12))
    assert fused._products_are_faster(torch.empty(8, 9, 12), 3)
    with layer_by_layer():
        plain = values(module, UNSCALED, shape=(8, 9, 12))
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-3, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in ours[1])


def test_it_steps_aside_for_whoever_would_notice(monkeypatch):
    module, called = block(), calls(monkeypatch)
    x = torch.randn(2, 3, 12)

    def fuses(x=x, module=module):
        called.clear()
        module(x, x, UNSCALED)
        return called[:]

    assert fuses() == [True]
    assert not fuses(x.double(), block().double())
    assert not fuses(x.to("meta"), block().to("meta"))
    with torch.autocast("cpu", torch.float16):
        assert not fuses()
    with FlopCounterMode(display=False):
        assert not fuses()
    with torch.autograd.forward_ad.dual_level():
        assert not fuses()
    with sdpa_kernel(SDPBackend.MATH):
        assert not fuses()
    for name in ("mlp.expand", "attention", "mlp_residual", "attention_norm"):
        handle = module.get_submodule(name).register_forward_hook(lambda *_: None)
        assert not fuses(), name
        handle.remove()
    assert module.merge is not None
    handle = module.merge.register_forward_pre_hook(lambda *_: None)
    assert fuses() == [False]  # the rest of the block is still one call
    handle.remove()
    assert fuses() == [True]
    module.attention.qkv.forward = module.attention.qkv.forward  # what offloading does
    assert not fuses()
    assert not fuses(x, block("rezero"))
    adapted = block()
    adapted.mlp.expand = nn.Sequential(adapted.mlp.expand)  # pyright: ignore[reportAttributeAccessIssue]
    assert not fuses(x, adapted)
    empty = torch.randn(0, 3, 12)
    assert not fuses(empty)


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


@pytest.mark.usefixtures("at_any_size")
def test_a_hook_in_a_block_is_called():
    model = UViT(image_size=8, patch_size=2, channels=1, dim=16, depth=2, heads=2)
    seen = []
    model.middle.get_submodule("mlp.expand").register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.randn(2, 1, 8, 8), torch.rand(2)).sum().backward()
    assert len(seen) == 1


def kept(model: UViT, images: int) -> int:
    """Bytes that autograd keeps of a forward, weights apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.randn(images, 3, 16, 16), torch.rand(images))
    return sum(sizes.values())


def test_a_large_block_remembers_a_third_less():
    model = UViT(image_size=16, patch_size=2, channels=3, dim=64, depth=4, heads=2)
    images = fused.LARGE // (65 * 64) + 1
    lean = kept(model, images)
    with layer_by_layer():
        assert lean < 0.7 * kept(model, images)
    assert kept(model, images // 2) > 0.55 * lean  # below that, everything is kept


# Mixed precision: autocast to bfloat16


def mixed():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.fixture(params=[True, False])
def low_attention(request, monkeypatch):
    monkeypatch.setattr(fused, "_low_products_are_faster", lambda *_: request.param)
    return request.param


def errors(found, exact) -> list[float]:
    """Of the output and of each gradient, as a share of its norm."""
    pairs = zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True)
    return [float((a.detach() - b.detach()).norm() / (b.detach().norm() + 1e-12)) for a, b in pairs]


def exact_values(module: Block, factors: Constants, **options):
    """In double precision, with the same inputs."""
    wide = block(merges=module.merge is not None).double()
    wide.load_state_dict(module.state_dict())
    torch.manual_seed(1)
    x, skip = (torch.randn(options["shape"]).double().requires_grad_() for _ in range(2))
    output = wide(x, skip, factors)
    return output, torch.autograd.grad(output.square().sum(), [x, skip, *wide.parameters()])


@pytest.mark.parametrize("factors", [UNSCALED, Constants(0.9, 0.6)])
@pytest.mark.parametrize("products", [True, False])
@pytest.mark.usefixtures("low_attention")
def test_mixed_precision_rounds_no_more_than_torchs_layers(path, factors, products, monkeypatch):
    monkeypatch.setattr(fused, "_products_are_faster", lambda *_: products)
    module, called, shape = block(), calls(monkeypatch), (8, 50, 12)
    exact = exact_values(module, factors, shape=shape)
    with mixed():
        ours = values(module, factors, shape=shape)
        assert called == [True]
        with layer_by_layer():
            layers = values(module, factors, shape=shape)
    assert ours[0].dtype is torch.float32
    assert all(gradient.dtype is torch.float32 for gradient in ours[1])
    for own, theirs in zip(errors(ours, exact), errors(layers, exact), strict=True):
        assert own < max(1.3 * theirs, 0.01), path


@pytest.mark.usefixtures("low_attention")
def test_mixed_precision_without_gradients_is_the_same(path):
    module, x = block(), torch.randn(8, 50, 12)
    with mixed():
        expected = module(x, x, Constants(0.9, 0.6))
        with torch.no_grad():
            torch.testing.assert_close(module(x, x, Constants(0.9, 0.6)), expected, rtol=0, atol=0)


def test_features_in_bfloat16_under_autocast(path):
    """As the merge of a gated skip leaves them."""
    module = block(merges=False)
    x = torch.randn(2, 5, 12).bfloat16().requires_grad_()
    with mixed():
        output = module(x)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16
    with mixed():
        torch.testing.assert_close(output, module(x.detach().float()))


@pytest.mark.parametrize("norms", [torch.float32, torch.bfloat16])
def test_weights_in_bfloat16_under_autocast(path, norms, monkeypatch):
    module, called = block().bfloat16(), calls(monkeypatch)
    for part in (module.attention_norm, module.mlp_norm):
        part.to(norms)
    x = torch.randn(2, 5, 12).bfloat16()
    with mixed():
        output = module(x, x, UNSCALED)
    assert not called, path
    output.float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype is each.dtype for each in module.parameters())


def test_a_backward_pass_under_autocast_is_the_same(path):
    module = block()
    with mixed():
        inside = values(module, UNSCALED)
    torch.manual_seed(1)
    x, skip = (torch.randn(3, 5, 12, requires_grad=True) for _ in range(2))
    with mixed():
        output = module(x, skip, UNSCALED)
    outside = torch.autograd.grad(output.square().sum(), [x, skip, *module.parameters()])
    torch.testing.assert_close(inside[1], outside, rtol=0, atol=0)


def test_weights_that_others_use_under_the_same_autocast(path):
    """torch remembers what it has cast: a copy that was made without gradients would cut them off for everybody."""
    module, x = block(), torch.randn(3, 5, 12)
    weight = module.attention.out.weight
    with mixed():
        module(x, x, UNSCALED)
        alone = torch.nn.functional.linear(x, weight)
    (gradient,) = torch.autograd.grad(alone.float().sum(), weight)
    assert gradient.abs().max() > 0


@pytest.mark.usefixtures("at_any_size")
def test_the_gradient_of_mixed_precision_can_be_differentiated():
    module, exact = block(), block().double()
    torch.manual_seed(2)
    x = torch.randn(2, 3, 12)

    def second(module, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(module(x, x, Constants(1.0, 0.5)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, module.mlp.expand.weight])

    with mixed():
        ours = second(module, x)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second(exact, x.double())
    for a, b in zip(ours, expected, strict=True):
        assert (a.double() - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("scaling", ["cs", "ls"])
def test_a_network_in_mixed_precision(path, scaling):
    torch.manual_seed(0)
    model = UViT(image_size=16, patch_size=2, channels=1, dim=32, depth=4, heads=2, scaling=scaling)
    x, t = torch.randn(4, 1, 16, 16), torch.linspace(0, 999, 4)

    def found(model, x):
        output = model(x, t)
        return output, torch.autograd.grad(output.square().sum(), list(model.parameters()))

    with mixed():
        ours = found(model, x)
        with layer_by_layer():
            layers = found(model, x)
    exact = found(model.double(), x.double())
    for own, theirs in zip(errors(ours, exact), errors(layers, exact), strict=True):
        assert own < max(1.5 * theirs, 0.02), path


def test_the_gain_of_bfloat16_is_a_ratio_of_times():
    assert 0 < fused.gain_of_bfloat16(size=64) < 1000
