"""The optional norms of U-ViT: on queries and keys, and on both inputs of the merges."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import scalelong as sl
from scalelong.models import SkipMerge
from scalelong.scaling import Constants

BOTH = {"qk_norm": True, "merge_norm": True}


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 6, "heads": 4, **changes})


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 700.0])


def first_attention() -> Any:
    return tiny(qk_norm=True).get_submodule("encoder.0.attention")


def randomise(model: torch.nn.Module) -> None:
    """Gains and shifts away from 1 and 0, so that what is multiplied in the wrong place shows."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_norms_draw_nothing_and_are_off_by_default():
    plain, normed = tiny(), tiny(**BOTH)
    weights = normed.state_dict()
    for name, value in plain.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, weights[name]), name
    added = {name.rsplit(".", 2)[1] for name in set(weights) - set(plain.state_dict())}
    assert added == {"query_norm", "key_norm", "main_norm", "skip_norm"}
    assert torch.equal(tiny(qk_norm=False, merge_norm=False)(*inputs()), plain(*inputs()))


def test_attention_is_the_plain_formula_on_normed_queries_and_keys():
    attention = first_attention()
    randomise(attention)
    x, norm = torch.randn(2, 17, 32), torch.nn.LayerNorm(32)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attention.qkv(norm(x)).chunk(3, dim=-1))
    q, k = attention.query_norm(q), attention.key_norm(k)
    weights = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(attention(norm(x)), attention.out((weights @ v).transpose(1, 2).flatten(2)))


def test_logits_are_bounded_whatever_the_weights():
    """|q·k| / √d ≤ √d: both have at most the norm √d."""
    attention = first_attention()
    attention.qkv.weight.data *= 1000
    seen = []
    for norm in (attention.query_norm, attention.key_norm):
        norm.register_forward_hook(lambda _, __, output: seen.append(output))
    attention(torch.nn.LayerNorm(32)(torch.randn(2, 17, 32)))
    q, k = seen
    assert float((q @ k.mT).detach().abs().max()) / 8**0.5 <= 8**0.5 + 1e-4


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
def test_every_scaling_acts_behind_the_norm(method):
    """If κ came in front of it, a norm would divide it out: the gradient of nothing would be left of it."""
    x, t = inputs()
    plain, scaled = tiny(**BOTH), tiny(**BOTH, scaling=method)
    scaled.load_state_dict({**scaled.state_dict(), **_weights(plain)})
    assert float((scaled(x, t) - plain(x, t)).detach().abs().max()) > 1e-3
    scaled(x, t).square().mean().backward()
    # At zero, the last layer of bounded gates passes nothing on to the one before.
    silent = {name for name, p in scaled.named_parameters() if p.grad is None or not p.grad.any()}
    assert not {name for name in silent if "skip_scaling" not in name}


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def test_folding_and_starting_stay_exact():
    x, t = inputs()
    scaled = tiny(**BOTH, scaling="cs:0.6")
    expected = scaled(x, t)
    started = tiny(**BOTH)
    sl.start_skips_(started, "cs:0.6")
    torch.testing.assert_close(started(x, t), expected)
    sl.fold_(scaled)
    torch.testing.assert_close(scaled(x, t), expected)


def test_a_copy_from_its_arguments_takes_the_weights_and_a_plain_network_does_not():
    model = tiny(**BOTH, scaling="cs")
    randomise(model)
    twin = sl.UViT(**model.arguments())
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(*inputs()), model(*inputs()))
    with pytest.raises(RuntimeError, match="main_norm"):
        tiny(scaling="cs").load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    x, t = inputs()
    expected = tiny(**BOTH, scaling="ls")(x, t)
    output = tiny(**BOTH, scaling="ls").to(dtype)(x.to(dtype), t)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.06, rtol=0.06)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(tiny(**BOTH, scaling="ls")(x, t).float(), expected, atol=0.06, rtol=0.06)


def test_checkpointing_and_compiling_change_nothing():
    x, t = inputs()
    expected = tiny(**BOTH, scaling="cs")
    expected(x, t).square().mean().backward()
    torch.compiler.reset()
    for changes in ({"checkpointing": True}, {}):
        model = tiny(**BOTH, scaling="cs", **changes)
        if not changes:
            model.compile(fullgraph=True, backend="aot_eager")
        model(x, t).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("name", ["qk_norm", "merge_norm"])
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_only_true_or_false(name, value):
    with pytest.raises(sl.InvalidConfigError, match="must be true or false"):
        tiny(**{name: value})
