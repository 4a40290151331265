"""Fused blocks of a U-ViT on a CPU against its ordinary ones."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import scalelong as sl
from scalelong.models import UViT, cpu, fuse_, fused, unfuse_
from scalelong.scaling import Constants

SIZES = {"small": 2**40, "large": 0}
"""Values of LARGE, so that features of any size take a path."""


@pytest.fixture(params=SIZES)
def size(request, monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", SIZES[request.param])
    return request.param


def network(**options) -> UViT:
    torch.manual_seed(0)
    model = UViT(**{"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 4, "heads": 2, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model: UViT, images: int = 3) -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    x = torch.randn(images, 1, 8, 8, requires_grad=True)
    output = model(x, torch.rand(images) * 999)
    return output, torch.autograd.grad(output.square().sum(), [x, *model.parameters()])


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many blocks each fused call has had."""
    found: list[int] = []
    real = cpu._apply
    monkeypatch.setattr(cpu, "_apply", lambda blocks, *rest: (found.append(len(blocks)), real(blocks, *rest))[1])
    return found


@pytest.mark.parametrize("images", [3, 40])  # 6 sequences, and 80
@pytest.mark.parametrize("scaling", ["none", "cs", "ls", "ls:module=scalar", "mp", "norm"])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "residual_scaling": 0.3}, {"merge_norm": True}])
def test_a_fused_network_computes_what_its_layers_compute(size, images, scaling, options, calls):
    model = network(scaling=scaling, **options)
    plain = gradients(model, images)
    assert not calls
    ours = gradients(fuse_(model), images)
    rows = [3] if "merge_norm" in options else [3, 2]
    assert calls[: len(rows)] == rows if size == "small" else set(calls) == {1}
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=3e-4)
    with torch.no_grad():
        x, t = torch.randn(images, 1, 8, 8), torch.rand(images) * 999
        mine = model(x, t)
        torch.testing.assert_close(mine, unfuse_(model)(x, t), rtol=1e-4, atol=1e-4)


def test_nothing_but_the_classes_changes(tmp_path):
    model = network(scaling="cs")
    before, names = dict(model.named_parameters()), list(model.state_dict())
    text = repr(model)
    assert fuse_(model) is model
    assert list(model.state_dict()) == names
    assert repr(model) == text
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is type(model) is not UViT
    model.save_pretrained(tmp_path)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 500.0])
    torch.testing.assert_close(sl.UViT.from_pretrained(tmp_path)(x, t), model(x, t))
    assert type(unfuse_(model)) is UViT
    with fused(model):
        assert type(model) is not UViT
        with fused(model):
            pass
        assert type(model) is not UViT
    assert type(model) is UViT


def test_what_is_not_fused():
    class Mine(UViT):
        pass

    checkpointed = network(checkpointing=True)
    others = [nn.Linear(2, 2), Mine(**network().arguments()), network().double(), network().to("meta"), checkpointed]
    for model in others:
        kind = type(model)
        assert type(fuse_(model)) is kind


@pytest.mark.parametrize("fuses", [True, False])
def test_outputs_of_blocks_can_be_changed_in_place(size, fuses):
    model = network()
    h = torch.randn(2, 17, 16, requires_grad=True)
    expected = torch.autograd.grad((model.encoder[0](h) + 1).square().sum(), h)
    output = (fuse_(model) if fuses else model).encoder[0](h)
    output.add_(1)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), h), expected, rtol=1e-4, atol=1e-4)
    merged = model.decoder[0](h, h, Constants(1.0, 0.5)).mul_(2)
    merged.sum().backward()
    assert h.grad is not None


def test_the_reference(size):
    model = fuse_(network())
    block = model.decoder[0]
    parts = cpu.parts_of(block, merges=True)  # type: ignore[arg-type]
    assert parts is not None
    x, skip = torch.randn(3, 5, 16).transpose(0, 1), torch.randn(5, 3, 16)  # one that is not contiguous
    expected = cpu.plain_block(parts.numbers, (0.9, 0.6), x, skip, parts.weights)
    torch.testing.assert_close(block(x, skip, Constants(0.9, 0.6)), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_can_be_kept_and_differentiated(size):
    model = fuse_(network(scaling="cs"))
    x, t = torch.randn(2, 1, 8, 8, requires_grad=True), torch.rand(2)
    loss = model(x, t).square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once, x.grad = x.grad, None
    loss.backward()
    torch.testing.assert_close(x.grad, once)

    def second():
        (first,) = torch.autograd.grad(model(x, t).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    ours = second()
    with sdpa_kernel(SDPBackend.MATH):  # no other attention of torch can be differentiated twice
        plain = second()
    for one, other in zip(ours, plain, strict=True):
        one, other = (torch.zeros(1) if value is None else value for value in (one, other))
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


def test_frozen_layers(size):
    model = network().requires_grad_(False)
    weight = model.get_parameter("decoder.1.mlp.reduce.weight").requires_grad_(True)
    found = []
    for each in (model, fuse_(model)):
        each(torch.ones(2, 1, 8, 8), torch.ones(2)).sum().backward()
        found.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert model.encoder[0].get_submodule("mlp.expand").weight.grad is None  # type: ignore[union-attr]


def test_hooks_are_called_and_what_is_not_ordinary_takes_the_layers(calls):
    model = fuse_(network())
    x, t = torch.randn(2, 1, 8, 8), torch.rand(2)

    def made(model=model, x=x):
        calls.clear()
        model(x, t)
        return calls[:]

    assert made() == [3, 2]
    for name, others in (
        ("encoder.1", [1, 1, 1, 2]),
        ("encoder.1.mlp.expand", [1, 1, 2]),
        ("decoder.0.merge", [3, 1, 1]),
    ):
        seen = []
        handle = model.get_submodule(name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert made() == others, name
        assert seen == [1]
        handle.remove()
    model.decoder[1].requires_grad_(False)  # nothing before it is asked for gradients that it need not have
    assert made() == [3, 1, 1]
    model.requires_grad_(True)
    model.enable_gradient_checkpointing()
    assert made() == [1, 1, 1, 1, 1]
    model.disable_gradient_checkpointing()
    with FlopCounterMode(display=False):
        assert not made()
    with sdpa_kernel(SDPBackend.MATH):
        assert not made()
    with torch.autocast("cpu", torch.float16):
        assert not made()
    assert not made(fuse_(network(residual_scaling="rezero")))
    assert not made(copy.deepcopy(model).double(), x.double())
    qkv = model.middle.get_submodule("attention.qkv")
    qkv.forward = qkv.forward  # what offloading does
    assert made() == [1, 1, 2]


@pytest.mark.parametrize("products", [True, False])
def test_attention_of_large_scores(products, monkeypatch):
    """Its softmax subtracts the largest score first."""
    monkeypatch.setattr(cpu, "_products_are_faster", lambda *_: products)
    model = network()
    with torch.no_grad():
        model.middle.get_submodule("attention.qkv").weight.mul_(100)  # type: ignore[union-attr,operator]
    plain, ours = gradients(model, 8), gradients(fuse_(model), 8)
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-3, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in ours[1])


@pytest.mark.parametrize("shape", [(3, 5, 1), (3, 1, 12)])
def test_a_gated_addition_is_the_plain_one(shape):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, 7), torch.randn(3, 5, 12), torch.rand(shape), torch.randn(7, 24)[:, :12]]
    inputs = [value.double().requires_grad_() for value in inputs]
    torch.testing.assert_close(cpu.gated_addition(*inputs), inputs[0] + (inputs[1] * inputs[2]) @ inputs[3].t())
    assert torch.autograd.gradcheck(cpu.gated_addition, inputs)
    assert torch.autograd.gradgradcheck(cpu.gated_addition, inputs)


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


def test_large_blocks_keep_less(monkeypatch):
    sizes = {"image_size": 16, "patch_size": 2, "channels": 3, "dim": 64, "depth": 4, "heads": 2}
    model = UViT(**sizes)  # type: ignore[arg-type]
    monkeypatch.setattr(cpu, "LARGE", 0)
    plain, lean = kept(model, 8), kept(fuse_(model), 8)
    assert lean < 0.7 * plain
    for method in ("ls", "ls:gate=channel", "ls:module=scalar"):  # a gate keeps no second copy of the skips
        assert kept(fuse_(UViT(**sizes, scaling=method)), 8) < 1.02 * lean  # type: ignore[arg-type]


@pytest.mark.parametrize("image", [8, 12])
def test_patches_are_those_of_the_convolution(image):
    model = network(image_size=image, channels=3, patch_size=2)
    x = torch.randn(2, 3, image, image)
    expected = model._patches(x)
    torch.testing.assert_close(fuse_(model)._patches(x), expected)
    model.patch_embedding.padding = (1, 1)  # a convolution that is no product any more
    assert model._patches(x).shape[1] > expected.shape[1]


# Mixed precision: autocast to bfloat16


def mixed():
    return torch.autocast("cpu", torch.bfloat16)


def errors(found, exact) -> list[float]:
    """The error of the output and of each gradient, as a share of its norm."""
    pairs = zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True)
    return [float((a.detach() - b.detach()).norm() / (b.detach().norm() + 1e-12)) for a, b in pairs]


@pytest.mark.parametrize("scaling", ["cs", "ls"])
@pytest.mark.parametrize("low_attention", [True, False])
def test_mixed_precision_rounds_no_more_than_torchs_layers(size, scaling, low_attention, monkeypatch, calls):
    monkeypatch.setattr(cpu, "_low_products_are_faster", lambda *_: low_attention)
    torch.manual_seed(0)
    model = UViT(image_size=16, patch_size=2, channels=1, dim=32, depth=4, heads=2, scaling=scaling)
    x, t = torch.randn(4, 1, 16, 16), torch.linspace(0, 999, 4)

    def found(model, x):
        output = model(x, t)
        return output, torch.autograd.grad(output.square().sum(), list(model.parameters()))

    with mixed():
        layers, ours = found(model, x), found(fuse_(model), x)
        assert calls
        with torch.no_grad():
            torch.testing.assert_close(model(x, t), ours[0], rtol=1e-2, atol=1e-2)
    assert all(gradient.dtype is torch.float32 for gradient in ours[1])
    exact = found(unfuse_(model).double(), x.double())
    for own, theirs in zip(errors(ours, exact), errors(layers, exact), strict=True):
        assert own < max(1.5 * theirs, 0.02), size


def test_weights_in_bfloat16_under_autocast(calls):
    model = fuse_(network()).bfloat16()
    with mixed():
        output = model(torch.randn(2, 1, 8, 8).bfloat16(), torch.rand(2))
    assert not calls
    output.float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype is each.dtype for each in model.parameters())


def test_weights_that_others_use_under_the_same_autocast(size):
    """torch remembers what it has cast: a copy that was made without gradients would cut them off for all users."""
    block, x = fuse_(network()).middle, torch.randn(3, 17, 16)
    weight = block.get_submodule("attention.out").weight
    with mixed():
        block(x)
        alone = torch.nn.functional.linear(x, weight)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(alone.float().sum(), weight)  # type: ignore[arg-type]
    assert gradient.abs().max() > 0


def test_the_gain_of_bfloat16_is_a_ratio_of_times():
    assert 0 < cpu.gain_of_bfloat16(size=64) < 1000
