"""Learnable scaling: the gate against Eq. 9 written out, its starts, shapes, sharing and precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scalelong as sl
import zoo
from scalelong.scaling import SkipSite

SHAPES = {
    "image": (2, 24, 5, 4),
    "sequence": (2, 24, 7),
    "volume": (2, 24, 3, 4, 2),
}


def conv_sites(*widths: int) -> list[SkipSite]:
    return [SkipSite(index=i, channels=width, main_channels=8) for i, width in enumerate(widths, 1)]


def token_sites(count: int, tokens: int = 20, dim: int = 32) -> list[SkipSite]:
    return [
        SkipSite(index=i, channels=dim, channel_axis=-1, main_channels=dim, tokens=tokens, fixed_tokens=True)
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_channel_gate_is_equation_9(shape):
    scaling = sl.LearnableScaling(start="paper", ratio=4).build(conv_sites(24, 24))
    skip = torch.randn(shape)
    net = scaling.get_submodule("networks.0")
    pooled = skip.flatten(2).mean(2)
    hidden = F.relu(pooled @ net.reduce.weight.T + net.reduce.bias)  # pyright: ignore
    kappa = torch.sigmoid(hidden @ net.expand.weight.T + net.expand.bias)  # pyright: ignore
    expected = skip * kappa.reshape(2, 24, *[1] * (len(shape) - 2))
    torch.testing.assert_close(scaling.scale(skip, 2), expected)


def test_token_gate_is_equation_9():
    scaling = sl.LearnableScaling(start="paper").build(token_sites(2))
    skip = torch.randn(3, 20, 32)
    net = scaling.get_submodule("networks.0")
    hidden = F.relu(skip.mean(2) @ net.reduce.weight.T + net.reduce.bias)  # pyright: ignore
    kappa = torch.sigmoid(hidden @ net.expand.weight.T + net.expand.bias)  # pyright: ignore
    torch.testing.assert_close(scaling.scale(skip, 1), skip * kappa[:, :, None])


def test_instance_enhance_gate():
    scaling = sl.LearnableScaling(module="ie", start="paper").build(conv_sites(24))
    net = scaling.get_submodule("networks.0")
    torch.nn.init.normal_(net.weight)  # pyright: ignore[reportArgumentType]
    torch.nn.init.normal_(net.bias)  # pyright: ignore[reportArgumentType]
    skip = torch.randn(2, 24, 5, 4)
    kappa = torch.sigmoid(net.weight * skip.mean((2, 3)) + net.bias)  # pyright: ignore
    torch.testing.assert_close(scaling.scale(skip, 1), skip * kappa[:, :, None, None])


@pytest.mark.parametrize("module", ["se", "ie", "scalar"])
@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("start", ["cs", "bounded"])
def test_starts_on_the_cs_curve_for_any_input(module, gate, shared, start):
    config = sl.LearnableScaling(module=module, gate=gate, shared=shared, kappa=0.6, start=start)
    scaling = config.build(token_sites(4))
    # A sigmoid does not reach 1, and bounded gates start where it does.
    largest = 0.999 if module != "scalar" else 1.0
    for i, kappa in enumerate([1, 0.6, 0.36, 0.216], 1):
        skip = torch.randn(3, 20, 32) * 10
        ratio = scaling.scale(skip, i) / skip
        torch.testing.assert_close(ratio, torch.full_like(ratio, min(kappa, largest)))


def test_bounded_gate_written_out():
    scaling = sl.LearnableScaling(start="bounded", gate="token", kappa=0.6, pace=0.5).build(token_sites(3))
    for parameter in scaling.parameters():
        torch.nn.init.normal_(parameter)
    net, shifts = scaling.get_submodule("networks.0"), scaling.get_parameter("shifts")
    skip = torch.randn(3, 20, 32)
    logits = net.expand(F.relu(net.reduce(skip.mean(2)))) + shifts[2]  # pyright: ignore
    expected = 0.6**2 * 2 ** torch.tanh(0.5 * logits)
    torch.testing.assert_close(scaling.scale(skip, 3), skip * expected[:, :, None])


@pytest.mark.parametrize(("shift", "factor"), [(1e3, 2.0), (-1e3, 0.5)])
def test_bounded_gates_stay_between_half_and_twice_the_curve(shift, factor):
    scaling = sl.LearnableScaling(start="bounded", gate="token").build(token_sites(6))
    torch.nn.init.constant_(scaling.get_parameter("shifts"), shift)
    for i in range(1, 7):
        scaling.scale(torch.randn(2, 20, 32), i)
        torch.testing.assert_close(scaling.coefficient(i), torch.full((2, 20, 1), factor * min(0.7 ** (i - 1), 0.999)))


@pytest.mark.parametrize(("start", "shape"), [("bounded", (3, 1, 32)), ("cs", (3, 20, 1)), ("paper", (3, 20, 1))])
def test_automatic_gates_of_tokens(start, shape):
    scaling = sl.LearnableScaling(start=start).build(token_sites(2))
    scaling.scale(torch.randn(3, 20, 32), 1)
    assert torch.as_tensor(scaling.coefficient(1)).shape == shape


def test_a_saved_scaling_means_what_it_meant():
    """As `to_dict` wrote it before there were bounded gates."""
    saved = {
        "method": "ls",
        "module": "se",
        "shared": True,
        "ratio": 16,
        "activation": "relu",
        "gate": "auto",
        "start": "cs",
        "kappa": 0.7,
    }
    scaling = sl.as_scaling(saved).build(token_sites(2))
    assert set(scaling.state_dict()) == {"offsets"} | {
        f"networks.0.{layer}.{kind}" for layer in ("reduce", "expand") for kind in ("weight", "bias")
    }
    scaling.scale(torch.randn(1, 20, 32), 1)
    torch.testing.assert_close(scaling.coefficient(1), torch.full((1, 20, 1), 0.999))


def test_one_network_per_width_when_shared():
    assert len(sl.LearnableScaling().build(conv_sites(16, 32, 32, 16)).get_submodule("networks")._modules) == 2
    assert len(sl.LearnableScaling(shared=False).build(conv_sites(16, 32, 32)).get_submodule("networks")._modules) == 3


@pytest.mark.parametrize("activation", ["relu", "elu", "mish", "gelu", "silu", "tanh"])
def test_activations(activation):
    scaling = sl.LearnableScaling(activation=activation, start="paper").build(conv_sites(32))
    net = scaling.get_submodule("networks.0")
    skip = torch.randn(2, 32, 4, 4)
    hidden = getattr(torch.nn.functional, activation)(net.reduce(skip.mean((2, 3))))  # pyright: ignore
    kappa = torch.sigmoid(net.expand(hidden))  # pyright: ignore
    torch.testing.assert_close(scaling.scale(skip, 1), skip * kappa[:, :, None, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", ["se", "ie", "scalar"])
def test_weights_stay_in_full_precision(dtype, module):
    config = sl.LearnableScaling(module=module, start="paper")
    scaling = config.build(conv_sites(32))
    before = {name: value.clone() for name, value in scaling.state_dict().items()}
    skip = torch.randn(2, 32, 4, 4)
    expected = scaling.scale(skip, 1)
    holder = torch.nn.ModuleDict({"scaling": scaling}).to(dtype)
    for name, value in scaling.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name]), "not even rounded"
    low = holder["scaling"].scale(skip.to(dtype), 1)  # pyright: ignore[reportCallIssue]
    assert low.dtype == dtype
    torch.testing.assert_close(low.float(), expected, atol=0.05, rtol=0.02)
    with torch.autocast("cpu", dtype):
        gate = scaling.scale(skip, 1)
    torch.testing.assert_close(gate, expected, atol=0, rtol=0)


def test_double_precision_is_followed():
    scaling = sl.LearnableScaling().build(conv_sites(32)).double()
    assert scaling.scale(torch.randn(2, 32, 4, 4, dtype=torch.float64), 1).dtype == torch.float64


def test_token_gate_refuses_another_length():
    scaling = sl.LearnableScaling(gate="token").build(token_sites(2))
    with pytest.raises(sl.InvalidConfigError, match=r"20 tokens and got 21.*gate='channel'"):
        scaling.scale(torch.randn(2, 21, 32), 1)
    with pytest.raises(sl.InvalidConfigError, match="token features"):
        sl.LearnableScaling(gate="token").build(conv_sites(8))


def test_channels_last_features():
    """(B, H, W, C) features, as in HDiT: the gate is per channel."""
    site = SkipSite(index=1, channels=16, channel_axis=-1)
    scaling = sl.LearnableScaling(start="paper", ratio=2).build([site])
    skip = torch.randn(2, 5, 4, 16)
    first = sl.LearnableScaling(start="paper", ratio=2).build([SkipSite(index=1, channels=16)])
    first.load_state_dict(scaling.state_dict())
    torch.testing.assert_close(scaling.scale(skip, 1), first.scale(skip.permute(0, 3, 1, 2), 1).permute(0, 2, 3, 1))


class PositionedTokens(zoo.Tokens):
    """With a learned vector for each position, as the authors' U-ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 7, 8))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.positions[:, 1:, :3], t)


def test_the_authors_gates_are_for_tokens_where_positions_are_learned():
    inputs = torch.randn(2, 6, 3), torch.tensor([1.0, 9.0])
    for model, width in ((PositionedTokens(), 7), (zoo.Tokens(), 8)):
        sl.scale_skips_(model, "ls:start=paper", inputs)
        assert {parameter.shape[-1] for parameter in sl.scaling_of(model).parameters()} >= {width}
