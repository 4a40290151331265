"""The middle's features, or the time alone, modulate the decoder's norms: off by default, zero at the start."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import scalelong as sl
from scalelong.models import count_parameters, cpu

KINDS = ("middle", "time")


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 6, "heads": 4, **changes})


def inputs(count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=drawn), torch.rand(count, generator=drawn) * 999


def trained(**changes) -> sl.UViT:
    """With layers away from zero, so that the modulation shows."""
    model, drawn = tiny(**changes), torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.startswith("modulation"):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=drawn)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("scaling", ["none", "cs:0.7", "ls"])
@pytest.mark.parametrize("large", [False, True])
def test_at_the_start_it_is_the_plain_network_bit_for_bit(kind, rank, scaling, large, monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 0 if large else 2**40)
    plain = tiny(scaling=scaling)
    ours = tiny(scaling=scaling, self_conditioning=kind, self_conditioning_rank=rank)
    weights = ours.state_dict()
    for name, value in plain.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, weights[name]), name
    assert torch.equal(ours(*inputs()), plain(*inputs()))


def test_the_layers_learn_from_the_first_step():
    model = tiny(self_conditioning="middle")
    model(*inputs()).square().mean().backward()
    layers: Any = model.get_submodule("modulation.middle")
    for layer in layers:
        assert layer.weight.grad is not None
        assert bool(layer.weight.grad.any())


def by_hand(model: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The formula of the module's first lines, block by block."""
    seen: dict[str, torch.Tensor] = {}
    handle = model.middle.register_forward_hook(lambda *call: seen.update(middle=call[2]))
    entered: list[tuple] = []
    handles = [b.register_forward_pre_hook(lambda _, args: entered.append(args)) for b in model.decoder]
    model(x, t)
    for each in (handle, *handles):
        each.remove()
    source = seen["middle"][:, 1:].mean(1)
    if model.self_conditioning == "time":
        angles = t[:, None] * torch.exp(-torch.arange(16) / 16 * torch.log(torch.tensor(10000.0)))
        source = torch.cat([angles.cos(), angles.sin()], dim=1)
    z = (source - source.mean(1, keepdim=True)) / (source.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    if model.self_conditioning_rank:
        z = z @ model.get_submodule("modulation.bottleneck").weight.T
    features = seen["middle"]
    for number, block in enumerate(model.decoder):
        layer = model.get_submodule(f"modulation.{model.self_conditioning}.{number}")
        s1, b1, s2, b2 = F.linear(z, layer.weight, layer.bias)[:, None].chunk(4, dim=-1)
        h = F.linear(torch.cat([features, entered[number][1]], -1), block.merge.weight, block.merge.bias)
        h = h + block.attention(block.attention_norm(h) * (1 + s1) + b1, torch.nn.Identity())
        features = h + block.mlp(block.mlp_norm(h) * (1 + s2) + b2, torch.nn.Identity())
    tokens = model.to_patches(model.norm(features)[:, 1:])
    image = tokens.reshape(-1, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, 8, 8)
    return model.final_conv(image)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 4])
def test_it_is_the_formula(kind, rank):
    model = trained(self_conditioning=kind, self_conditioning_rank=rank).eval()
    with torch.no_grad():
        expected = by_hand(model, *inputs())
        torch.testing.assert_close(model(*inputs()), expected)
        plain = tiny().eval()(*inputs())
    assert float((expected - plain).abs().max()) > 1e-3


def test_images_do_not_see_each_other_and_the_control_does_not_see_them():
    x, t = inputs(4)
    model = trained(self_conditioning="middle")
    torch.testing.assert_close(model(x, t)[:2], model(x[:2], t[:2]))
    control, told = trained(self_conditioning="time"), []
    handle = control.get_submodule("modulation").register_forward_hook(lambda *call: told.append(call[2]))
    control(x, t)
    control(torch.zeros_like(x), t)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


@pytest.mark.parametrize("depth", [6, 12])
@pytest.mark.parametrize("rank", [None, 4])
def test_arithmetic_and_size_are_counted_and_equal_to_the_controls(depth, rank):
    counted, sizes = {}, {}
    dim, blocks, tokens = 32, depth // 2, 17
    for kind in ("none", *KINDS):
        model = tiny(depth=depth, self_conditioning=kind, self_conditioning_rank=None if kind == "none" else rank)
        sizes[kind] = count_parameters(model)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*inputs(1))
        counted[kind] = counter.get_total_flops()
    assert counted["middle"] == counted["time"]
    assert sizes["middle"] == sizes["time"]
    width = rank or dim
    shared = dim * rank if rank else 0
    assert counted["middle"] - counted["none"] == 2 * (shared + blocks * width * 4 * dim)
    assert sizes["middle"] - sizes["none"] == shared + blocks * (width * 4 * dim + 4 * dim)
    if rank is None:
        share = (counted["middle"] - counted["none"]) / counted["none"]
        assert share <= 4 * blocks / ((26 * blocks + 12) * tokens)
        assert share < 0.01


def test_plain_weights_load_with_a_note_and_compute_the_same(caplog):
    plain, ours = tiny(), trained(self_conditioning="middle")
    with caplog.at_level(logging.WARNING):
        ours.load_state_dict(plain.state_dict())
    assert "without self-conditioning" in caplog.text
    assert torch.equal(ours(*inputs()), plain(*inputs()))
    caplog.clear()
    again = tiny(self_conditioning="middle")
    again.load_state_dict(ours.state_dict())
    assert not caplog.text


def test_weights_with_it_are_refused_where_they_do_not_belong():
    weights = trained(self_conditioning="middle").state_dict()
    with pytest.raises(RuntimeError, match=r"self_conditioning='middle', and this network has none: build it with"):
        tiny().load_state_dict(weights)
    with pytest.raises(RuntimeError, match="self_conditioning='middle', and this network has 'time'"):
        tiny(self_conditioning="time").load_state_dict(weights)
    with pytest.raises(RuntimeError, match="size mismatch"):
        tiny(self_conditioning="middle", self_conditioning_rank=4).load_state_dict(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_copies_and_arguments(kind, tmp_path):
    model = trained(self_conditioning=kind, self_conditioning_rank=4, scaling="cs").eval()
    model.save_pretrained(tmp_path)
    for twin in (sl.UViT.from_pretrained(tmp_path), sl.UViT(**model.arguments())):
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(*inputs()), model(*inputs()))


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_folding_and_starting_stay_exact(kind):
    scaled = trained(self_conditioning=kind)
    sl.scale_skips_(scaled, "cs:0.6")
    expected = scaled(*inputs())
    started = trained(self_conditioning=kind)
    sl.start_skips_(started, "cs:0.6")
    torch.testing.assert_close(started(*inputs()), expected)
    sl.fold_(scaled)
    torch.testing.assert_close(scaled(*inputs()), expected)


def test_checkpointing_compiling_and_low_precision():
    x, t = inputs()
    expected = trained(self_conditioning="middle", scaling="cs")
    expected(x, t).square().mean().backward()
    torch.compiler.reset()
    for changes in ({"checkpointing": True}, {}):
        model = trained(self_conditioning="middle", scaling="cs", **changes)
        if not changes:
            model.compile(fullgraph=True, backend="aot_eager")
        model(x, t).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
    half = trained(self_conditioning="middle", scaling="cs").to(torch.bfloat16)(x.to(torch.bfloat16), t)
    torch.testing.assert_close(half.float(), expected(x, t), atol=0.06, rtol=0.06)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(expected(x, t).float(), half.float(), atol=0.06, rtol=0.06)


@pytest.mark.parametrize(("kind", "kept"), [("middle", "decoder"), ("time", "middle")])
def test_a_cache_keeps_what_the_conditioning_does_not_read(kind, kept):
    """With "middle" the features are fresh at every step, so the encoder runs; the inner decoder is kept."""
    model = trained(self_conditioning=kind).eval()
    x, _ = inputs()
    with torch.no_grad(), sl.cached(model, depth=1, every=2) as cache:
        for t in (900.0, 800.0):
            model(x, torch.full((2,), t))
    assert (cache.full_steps, cache.cached_steps) == (1, 1)
    assert cache.inner is not None
    assert any(name.startswith(kept) for name, _ in cache.inner.calls)
    assert any(name.startswith("encoder") for name, _ in cache.inner.calls) == (kind == "time")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"self_conditioning": "mid"}, "self_conditioning must be one of none, middle, time"),
        ({"self_conditioning": True}, "self_conditioning must be one of"),
        ({"self_conditioning_rank": 4}, "which is 'none'"),
        ({"self_conditioning": "middle", "self_conditioning_rank": 0}, "from 1 to the width 32"),
        ({"self_conditioning": "middle", "self_conditioning_rank": 33}, "from 1 to the width 32"),
        ({"self_conditioning": "middle", "self_conditioning_rank": 2.0}, "must be a whole number"),
    ],
)
def test_what_is_refused(changes, words):
    with pytest.raises(sl.InvalidConfigError, match=words):
        tiny(**changes)
