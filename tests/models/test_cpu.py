"""Fused blocks of a U-ViT on a CPU against its ordinary ones."""

import copy
import multiprocessing
import pickle
import platform
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import scalelong as sl
from scalelong.models import UViT, cpu, fuse_, fused, keep_freed_memory, unfuse_
from scalelong.scaling import Constants


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Features of any size are large enough."""
    monkeypatch.setattr(cpu, "LARGE", 0)


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
    """One entry for each fused block that was called."""
    found: list[int] = []
    real = cpu._forward
    monkeypatch.setattr(cpu, "_forward", lambda *given: (found.append(1), real(*given))[1])
    return found


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("none", {}),
        ("cs", {"qkv_bias": True, "residual_scaling": 0.3}),
        ("ls", {"merge_norm": True}),
        ("mp", {}),
        ("merge_norm", {}),
    ],
)
def test_a_fused_network_computes_what_its_layers_compute(scaling, options, calls):
    model = network(scaling=scaling, **options)
    plain = gradients(model)
    assert not calls
    ours = gradients(fuse_(model))
    assert len(calls) == 5
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=3e-4)
    with torch.no_grad():
        x, t = torch.randn(3, 1, 8, 8), torch.rand(3) * 999
        mine = model(x, t)
        torch.testing.assert_close(mine, unfuse_(model)(x, t), rtol=1e-4, atol=1e-4)


def test_small_features_take_the_layers_in_float32(calls, monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 2**40)
    model = fuse_(network())
    gradients(model)
    assert not calls
    with mixed():
        gradients(model)
    assert len(calls) == 5


def test_nothing_but_the_classes_changes(tmp_path):
    model = network(scaling="cs")
    before, names = dict(model.named_parameters()), list(model.state_dict())
    text = repr(model)
    assert fuse_(model) is model
    assert list(model.state_dict()) == names
    assert repr(model) == text
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(again.middle, cpu.FusedBlock)
    model.save_pretrained(tmp_path)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 500.0])
    torch.testing.assert_close(sl.UViT.from_pretrained(tmp_path)(x, t), model(x, t))
    assert not isinstance(unfuse_(model).middle, cpu.FusedBlock)
    with fused(model):
        with fused(model):
            pass
        assert isinstance(model.middle, cpu.FusedBlock)
    assert not isinstance(model.middle, cpu.FusedBlock)


def test_what_is_not_fused():
    class Mine(UViT):
        pass

    checkpointed = network(checkpointing=True)
    others = [nn.Linear(2, 2), Mine(**network().arguments()), network().double(), network().to("meta"), checkpointed]
    for model in others:
        assert not any(isinstance(module, cpu.FusedBlock) for module in fuse_(model).modules())


@pytest.mark.parametrize("fuses", [True, False])
def test_outputs_of_blocks_can_be_changed_in_place(fuses):
    model = network()
    h = torch.randn(2, 17, 16, requires_grad=True)
    expected = torch.autograd.grad((model.encoder[0](h) + 1).square().sum(), h)
    output = (fuse_(model) if fuses else model).encoder[0](h)
    output.add_(1)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), h), expected, rtol=1e-4, atol=1e-4)
    merged = model.decoder[0](h, h, Constants(1.0, 0.5)).mul_(2)
    merged.sum().backward()
    assert h.grad is not None


def test_a_graph_can_be_kept_and_is_differentiated_once():
    model = fuse_(network(scaling="cs"))
    x, t = torch.randn(2, 1, 8, 8, requires_grad=True), torch.rand(2)
    loss = model(x, t).square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once, x.grad = x.grad, None
    loss.backward()
    torch.testing.assert_close(x.grad, once)
    (first,) = torch.autograd.grad(model(x, t).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_frozen_layers():
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
        return len(calls)

    assert made() == 5
    for name, others in (("encoder.1", 5), ("encoder.1.mlp.expand", 4), ("decoder.0.merge", 5)):
        seen = []
        handle = model.get_submodule(name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert made() == others, name
        assert seen == [1]
        handle.remove()
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
    assert made() == 4


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


def test_fused_blocks_keep_less():
    model = UViT(image_size=16, patch_size=2, dim=64, depth=4, heads=2)
    plain = kept(model, 8)
    assert kept(fuse_(model), 8) < 0.7 * plain


# Mixed precision: autocast to bfloat16


def mixed():
    return torch.autocast("cpu", torch.bfloat16)


def errors(found, exact) -> list[float]:
    """The error of the output and of each gradient, as a share of its norm."""
    pairs = zip((found[0], *found[1]), (exact[0], *exact[1]), strict=True)
    return [float((a.detach() - b.detach()).norm() / (b.detach().norm() + 1e-12)) for a, b in pairs]


@pytest.mark.parametrize("scaling", ["cs", "ls"])
@pytest.mark.parametrize("low_attention", [True, False])
def test_mixed_precision_rounds_no_more_than_torchs_layers(scaling, low_attention, monkeypatch, calls):
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
        assert own < max(1.5 * theirs, 0.02)


def test_weights_in_bfloat16_under_autocast(calls):
    model = fuse_(network()).bfloat16()
    with mixed():
        output = model(torch.randn(2, 1, 8, 8).bfloat16(), torch.rand(2))
    assert not calls
    output.float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype is each.dtype for each in model.parameters())


def test_weights_that_others_use_under_the_same_autocast():
    """torch remembers what it has cast: a copy that was made without gradients would cut them off for all users."""
    block, x = fuse_(network()).middle, torch.randn(3, 17, 16)
    weight = block.get_submodule("attention.out").weight
    with mixed():
        block(x)
        alone = torch.nn.functional.linear(x, weight)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(alone.float().sum(), weight)  # type: ignore[arg-type]
    assert gradient.abs().max() > 0


# Freed memory stays with the process


def faults(keep: bool) -> int:
    """Pages that a loop takes from the system."""
    if keep:
        assert keep_freed_memory()
    for _ in range(3):
        torch.zeros(16_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep it")
def test_memory_is_not_taken_from_the_system_again():
    context = multiprocessing.get_context("fork")
    kept, left = (ProcessPoolExecutor(1, context).submit(faults, keep).result() for keep in (True, False))
    if left < 50:
        pytest.skip(f"freed memory stays without being asked to: {left} page faults")
    assert kept * 3 < left
