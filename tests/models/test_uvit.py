"""U-ViT: the merge against its plain form, its norms, methods under compile and low precision, sizes, errors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import scalelong as sl
from scalelong.models import SkipMerge
from scalelong.scaling import Constants

METHODS = ["none", "cs", "ls", "norm", "merge_norm"]
BOTH = {"qk_norm": True, "merge_norm": True}


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 6, "heads": 4, "classes": 10, **changes})


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, 8, 8, generator=generator)
    return x, torch.linspace(0.5, 998.5, batch), torch.arange(batch) % 10


def gradients(model: torch.nn.Module, *values) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(*values)
    output.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return output, found


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.3), (0.8, 1.2), (1.0, 0.0)])
def test_merge_is_a_linear_of_the_concatenation(factors):
    merge = SkipMerge(16)
    main, skip = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 16, requires_grad=True)
    plain = torch.nn.functional.linear(
        torch.cat([main * factors[0], skip * factors[1]], dim=-1), merge.weight, merge.bias
    )
    ours = merge(main, skip, Constants(*factors))
    torch.testing.assert_close(ours, plain)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), [main, skip, *merge.parameters()]),
        torch.autograd.grad(plain.square().sum(), [main, skip, *merge.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "changes"), [("cs", {}), ("ls", {"checkpointing": True}), ("merge_norm", {}), ("cs", BOTH)]
)
def test_compiles_in_one_graph(method, changes):
    expected, plain = gradients(tiny(**{**changes, "scaling": method, "checkpointing": False}), *inputs())
    torch.compiler.reset()
    model = tiny(scaling=method, **changes)
    model.compile(fullgraph=True, backend="aot_eager")
    output, compiled = gradients(model, *inputs())
    torch.testing.assert_close(output, expected)
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], msg=name)


@pytest.mark.parametrize("changes", [{}, BOTH])
@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_gives_the_same_gradients(method, changes):
    _, plain = gradients(tiny(scaling=method, **changes), *inputs())
    _, checkpointed = gradients(tiny(scaling=method, checkpointing=True, **changes), *inputs())
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("method", "changes"), [*((method, {}) for method in METHODS), ("ls", BOTH)])
def test_low_precision(method, changes, dtype):
    x, t, y = inputs()
    expected = tiny(scaling=method, **changes)(x, t, y)
    model = tiny(scaling=method, **changes).to(dtype)
    output, _ = gradients(model, x.to(dtype), t, y)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.06, rtol=0.06)
    with torch.autocast("cpu", dtype):
        found = tiny(scaling=method, **changes)(x, t, y).float()
    torch.testing.assert_close(found, expected, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_any_depth(depth):
    model = tiny(depth=depth, scaling="cs")
    assert sl.coefficients(model) == pytest.approx([0.7**i for i in range(depth // 2)])
    assert model(*inputs()).shape == (2, 3, 8, 8)


def test_conditions():
    x, t, y = inputs()
    context = torch.randn(2, 5, 12)
    text = tiny(classes=None, context_dim=12, context_length=5)
    assert text(x, t, context=context).shape == x.shape
    assert not torch.equal(text(x, t, context=context), text(x, t, context=context + 1))
    both = tiny(context_dim=12, context_length=5)
    assert both(x, t, y, context).shape == x.shape
    assert not torch.equal(tiny()(x, t, y), tiny()(x, t, y + 1))
    assert torch.equal(tiny()(x, torch.tensor(5.0), y), tiny()(x, torch.full((2,), 5.0), y))


def test_other_image_sizes_on_request():
    x, t, y = torch.randn(2, 3, 12, 16), inputs()[1], inputs()[2]
    with pytest.raises(sl.InvalidInputError, match="interpolate_positions=True"):
        tiny()(x, t, y)
    model = tiny(interpolate_positions=True, scaling="ls")
    assert model(x, t, y).shape == x.shape
    assert torch.equal(model(*inputs()), tiny(scaling="ls:gate=channel")(*inputs())), "unchanged at its own size"
    with pytest.raises(sl.InvalidInputError, match="cannot be cut into patches"):
        model(torch.randn(2, 3, 9, 8), t, y)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depth": 1}, "depth"),
        ({"image_size": 9}, "multiple of patch_size"),
        ({"heads": 5}, "multiple of heads"),
        ({"classes": 0}, "classes"),
        ({"context_dim": 8}, "go together"),
        ({"scaling": "sc"}, "unknown scaling method"),
        ({"residual_scaling": "zero"}, "residual_scaling"),
        ({"residual_scaling": 0.0}, "residual_scaling"),
        ({"qk_norm": "yes"}, "must be true or false"),
        ({"merge_norm": None}, "must be true or false"),
        ({"merge_start": "zero"}, "merge_start must be one of authors, identity, additive, normalised, got 'zero'"),
        ({"final_start": "zero"}, "`final_start` must be one of authors, identity"),
        ({"init_std": "large"}, "`init_std` must be a number above 0"),
        ({"init_std": 0}, "`init_std` must be a number above 0"),
        ({"init_std": float("nan")}, "`init_std` must be a number above 0"),
    ],
)
def test_bad_arguments(changes, says):
    with pytest.raises(sl.InvalidConfigError, match=says):
        tiny(**changes)


def test_initialisation():
    """Unit gain by default; the position embedding and the biases do not follow `init_std`."""
    for changes, std in (({}, 64**-0.5), ({"init_std": 0.02}, 0.02), ({"init_std": 0.1}, 0.1)):
        model = tiny(dim=64, **changes)
        assert float(model.encoder[0].mlp.expand.weight.detach().std()) == pytest.approx(std, rel=0.05)  # pyright: ignore
        assert float(model.position_embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        assert not model.to_patches.bias.any()


def test_bad_inputs():
    x, t, y = inputs()
    with pytest.raises(sl.InvalidInputError, match=r"\(B, 3, H, W\)"):
        tiny()(x[:, :1], t, y)
    with pytest.raises(sl.InvalidInputError, match="needs labels y"):
        tiny()(x, t)
    with pytest.raises(sl.InvalidInputError, match="takes no labels y"):
        tiny(classes=None)(x, t, y)
    with pytest.raises(sl.InvalidInputError, match=r"context must be \(B, 5, 12\)"):
        tiny(context_dim=12, context_length=5)(x, t, y, torch.randn(2, 4, 12))


def test_published_sizes():
    from scalelong.models import UVIT_PRESETS, UVIT_PUBLISHED, count_parameters as count

    assert set(UVIT_PUBLISHED) == set(UVIT_PRESETS)
    with torch.device("meta"):
        for name, millions in UVIT_PUBLISHED.items():
            assert count(sl.UViT.preset(name)) == pytest.approx(millions * 1e6, rel=0.02), name
    with pytest.raises(sl.InvalidConfigError, match="cifar10-s2"):
        sl.UViT.preset("cifar10-xl")


def test_residual_baselines():
    x, t, y = inputs()
    rezero = tiny(residual_scaling="rezero")
    assert sum(name.endswith("residual.alpha") for name in rezero.state_dict()) == 2 * 7
    # With every branch at zero the blocks are identities and the merges are all that is left.
    tokens = rezero._embed(x, t, y, None) + rezero.position_embedding((4, 4))
    stream = tokens
    for block in rezero.decoder:
        stream = block.merge(stream, tokens, Constants(1.0, 1.0))  # pyright: ignore
    hidden = rezero.norm(stream)[:, 2:]
    from scalelong.models.uvit import unpatchify

    expected = rezero.final_conv(unpatchify(rezero.to_patches(hidden), (4, 4), 2, 3))
    torch.testing.assert_close(rezero(x, t, y), expected)
    _, grads = gradients(rezero, x, t, y)
    assert all(grads[name].abs() > 0 for name in grads if name.endswith("residual.alpha"))
    one, third = tiny(residual_scaling=1.0), tiny(residual_scaling=0.3)
    assert torch.equal(one(x, t, y), tiny(residual_scaling="none")(x, t, y))
    block = third.encoder[0]
    h = torch.randn(2, 5, 32)
    a = h + 0.3 * block.attention(block.attention_norm(h))  # pyright: ignore
    torch.testing.assert_close(block(h), a + 0.3 * block.mlp(block.mlp_norm(a)))  # pyright: ignore


def test_self_conditioning_of_version_0_2_is_refused_unless_it_was_off():
    assert tiny(self_conditioning="none", self_conditioning_rank=None)
    with pytest.raises(sl.InvalidConfigError, match="`self_conditioning`='middle' was removed"):
        tiny(self_conditioning="middle")
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        tiny(width=3)


# Norms on queries and keys, and on both inputs of the merges


def first_attention() -> Any:
    return tiny(qk_norm=True).get_submodule("encoder.0.attention")


def randomise(model: torch.nn.Module) -> None:
    """Gains and shifts away from 1 and 0, so that what is multiplied in the wrong place shows."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_attention_is_the_plain_formula_on_normed_queries_and_keys():
    attention = first_attention()
    randomise(attention)
    x, norm = torch.randn(2, 17, 32), torch.nn.LayerNorm(32)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attention.qkv(norm(x)).chunk(3, dim=-1))
    q, k = attention.query_norm(q), attention.key_norm(k)
    weights = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(attention(norm(x)), attention.out((weights @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.8, 0.3)])
def test_the_merge_reads_both_operands_normed(factors):
    merge = SkipMerge(16, norm=True)
    randomise(merge)
    main, skip = 30 * torch.randn(2, 5, 16), 0.01 * torch.randn(2, 5, 16)
    assert merge.main_norm is not None
    assert merge.skip_norm is not None
    joined = torch.cat([factors[0] * merge.main_norm(main), factors[1] * merge.skip_norm(skip)], dim=-1)
    ours = merge(main, merge.norm_skip(skip), Constants(*factors))
    torch.testing.assert_close(ours, F.linear(joined, merge.weight, merge.bias))


@pytest.mark.parametrize("method", ["cs:0.5", "uniform", "norm:kappa=0.5", "mp:0.3", "ls", "ls:start=paper"])
def test_every_scaling_acts_after_the_norm(method):
    """Before it, a norm would divide κ out."""
    x, t, y = inputs()
    plain, scaled = tiny(**BOTH), tiny(**BOTH, scaling=method)
    scaled.load_state_dict({**scaled.state_dict(), **_weights(plain)})
    assert float((scaled(x, t, y) - plain(x, t, y)).detach().abs().max()) > 1e-3
    scaled(x, t, y).square().mean().backward()
    # At zero, the last layer of bounded gates passes nothing on to the one before.
    without = {name for name, p in scaled.named_parameters() if p.grad is None or not p.grad.any()}
    assert not {name for name in without if "skip_scaling" not in name}


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def test_folding_and_starting_stay_exact():
    x, t, y = inputs()
    scaled = tiny(**BOTH, scaling="cs:0.6")
    expected = scaled(x, t, y)
    started = tiny(**BOTH)
    sl.start_skips_(started, "cs:0.6")
    torch.testing.assert_close(started(x, t, y), expected)
    sl.fold_(scaled)
    torch.testing.assert_close(scaled(x, t, y), expected)


def test_a_copy_from_its_arguments_takes_the_weights_and_a_plain_network_does_not():
    model = tiny(**BOTH, scaling="cs")
    randomise(model)
    twin = sl.UViT(**model.arguments())
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(*inputs()), model(*inputs()))
    with pytest.raises(RuntimeError, match="main_norm"):
        tiny(scaling="cs").load_state_dict(model.state_dict())
