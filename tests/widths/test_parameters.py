"""What parameters are to μP: by module and shape."""

from typing import Any

import pytest
import torch
from torch import nn

import scalelong as sl
from scalelong import InvalidConfigError, UnclearParameterError, UViT
from scalelong.mup import Kind, kinds


def uvit(width: int, **options: Any) -> UViT:
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "channels": 1, "depth": 4, "heads": width // 16}
    return UViT(**{**sizes, "dim": width, **options})


def unet(width: int, **options: Any) -> nn.Module:
    from diffusers.models.unets.unet_2d import UNet2DModel

    values: dict[str, Any] = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 4}
    values |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "layers_per_block": 1}
    values |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (width, 2 * width)}
    return UNet2DModel(**{**values, **options})


ALL = {"time_mlp": True, "classes": 11, "context_dim": 12, "context_length": 3}
FAMILIES = {
    "plain": lambda width: uvit(width),
    "conditions": lambda width: uvit(width, **ALL),
    "channel gates": lambda width: uvit(width, scaling="ls:gate=channel"),
    "token gates": lambda width: uvit(width, scaling="ls:gate=token,start=paper"),
    "norms": lambda width: uvit(width, qk_norm=True, merge_norm=True, residual_scaling="rezero"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_uvit(family):
    found = kinds(FAMILIES[family](64), base=32)
    assert found.of("output") == ["to_patches.weight"]
    for name, kind in found.items():
        hidden = ("qkv.weight", "out.weight", "expand.weight", "reduce.weight", "merge.weight")
        if name.endswith(hidden) and "skip_scaling" not in name:
            assert kind == Kind("hidden", 2.0), name
        if name.endswith("bias") or "norm" in name:
            assert kind.kind in ("vector", "finite"), name
    assert found["position_embedding.weight"].kind == found["patch_embedding.weight"].kind == "input"
    assert found["to_patches.weight"] == Kind("output", 2.0)
    assert found["final_conv.weight"].kind == "finite"
    if family == "conditions":  # a class embedding has the shape of an output
        assert found["class_embedding.weight"].kind == found["context_embedding.weight"].kind == "input"
        assert found["time_embedding.0.weight"] == Kind("hidden", 2.0)
    if "gates" in family:
        gates = {kind.kind for name, kind in found.items() if "networks" in name and name.endswith("weight")}
        assert gates == {"hidden" if family == "channel gates" else "finite"}


def test_a_unet_is_rebuilt_from_its_configuration():
    found = kinds(unet(16), base=8)
    assert found["conv_in.weight"].kind == "input"
    assert found["conv_out.weight"] == Kind("output", 2.0)
    assert found["time_embedding.linear_1.weight"] == Kind("hidden", 2.0)
    counts = found.counts()
    assert (counts["input"], counts["output"]) == (1, 1)
    assert all(kind.m == 2 for kind in found.values() if kind.kind == "hidden")
    assert found["up_blocks.0.resnets.0.conv1.weight"].kind == "hidden"  # behind a concatenation


def test_a_conditional_unet_holds_the_size_of_its_heads():
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    values: dict[str, Any] = {"sample_size": 8, "norm_num_groups": 4, "cross_attention_dim": 12, "layers_per_block": 1}
    values |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    values |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    # Here attention_head_dim is the number of heads.
    model = UNet2DConditionModel(block_out_channels=(16, 32), attention_head_dim=4, **values)
    found = kinds(model, base=8)
    text = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_{}.weight"
    assert found[text.format("k")].kind == found[text.format("v")].kind == "input"
    assert found[text.format("q")] == Kind("hidden", 2.0)
    held = UNet2DConditionModel(block_out_channels=(8, 16), attention_head_dim=4, **values)
    with pytest.raises(InvalidConfigError, match="holds the size of a head"):
        kinds(model, base=held)


def test_a_unet_that_was_scaled_from_outside():
    model = unet(16)
    sl.scale_skips_(model, "ls")
    found = kinds(model, base=8)
    gates = [name for name in found if name.startswith("skip_scaling.")]
    assert len(gates) == len(list(model.skip_scaling.parameters()))  # pyright: ignore
    assert found["skip_scaling.shifts"].kind == "finite"
    assert {found[name].kind for name in gates if name.endswith("expand.weight")} <= {"hidden", "input"}
    base = unet(8)
    sl.scale_skips_(base, "ls")
    assert kinds(model, base=base) == found == kinds(model, base=unet(8))


class Parts(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(n, 5, 2)
        self.depthwise = nn.Conv2d(n, n, 3, groups=n)
        self.attention = nn.MultiheadAttention(n, n // 8, kdim=6, vdim=n)
        self.recurrent = nn.GRU(3, n)
        self.positions = nn.Parameter(torch.zeros(1, 7, n))
        self.scale = nn.Parameter(torch.zeros(1, n, 1, 1))
        self.mix = nn.Parameter(torch.zeros(n, n))


def test_kinds_go_by_the_module():
    for base in (Parts(16), lambda: Parts(16)):
        found = kinds(Parts(32), base=base)
        assert found["up.weight"] == Kind("output", 2.0)  # (in, out, k, k)
        assert found["depthwise.weight"].kind == "input"
        assert found["attention.q_proj_weight"] == found["attention.v_proj_weight"] == Kind("hidden", 2.0)
        assert found["attention.k_proj_weight"].kind == "input"
        assert found["recurrent.weight_ih_l0"].kind == "input"
        assert found["recurrent.weight_hh_l0"] == Kind("hidden", 2.0)
        assert found["positions"].kind == "input"
        assert found["scale"].kind == "vector"
        assert found["mix"] == Kind("hidden", 2.0)


class Unclear(nn.Module):
    def __init__(self, n: int, skip: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, n))
        self.cube = nn.Parameter(torch.zeros(n, n, n))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(n, n))
        self.main, self.skip = nn.Linear(3, n), nn.Linear(3, skip)
        self.merge = nn.Linear(n + skip, n)
        self.tokens = nn.Embedding(11, n)
        self.head = nn.Linear(n, 11, bias=False)
        self.head.weight = self.tokens.weight


def test_what_cannot_be_told_raises_by_name_and_can_be_named():
    model, base = Unclear(32, 64), Unclear(16, 16)
    with pytest.raises(UnclearParameterError) as error:
        kinds(model, base=base)
    for name in ("table", "cube", "normed.", "merge.weight", "tokens.weight (11, 32): it is tied, input as tokens"):
        assert name in str(error.value)
    assert "skip.weight" not in str(error.value)
    named: Any = {"table": "input", "cube": Kind("hidden", m=4.0), "merge.*": "hidden", "tokens.*": "output"}
    named |= {"normed.*.original0": "vector", "normed.*.original1": "hidden"}
    found = kinds(model, base=base, kinds=named)
    assert found["merge.weight"] == Kind("hidden", 3.0)
    assert found["cube"].m == 4.0
    assert found["tokens.weight"] == Kind("output", 2.0)
    assert "head.weight" not in found


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: uvit(32, depth=2), "the base has no parameter encoder.1"),
        (lambda: uvit(32, depth=6), "the model has no parameter encoder.2"),
        (lambda: uvit(32, heads=4), "heads .* have a size of 16, and of 8 in the base"),
        (lambda: 40, "no multiple of the head size 16"),
        (lambda: 0, "at least 1"),
        (lambda: "64", "must be a width"),
    ],
)
def test_a_base_that_does_not_fit(base, message):
    with pytest.raises(InvalidConfigError, match=message):
        kinds(uvit(64), base=base())


def test_other_refusals():
    with pytest.raises(InvalidConfigError, match="cannot be rebuilt at width 8 by itself"):
        kinds(nn.Linear(4, 4), base=8)
    with pytest.raises(InvalidConfigError, match="no parameter of the model is called"):
        kinds(uvit(64), base=32, kinds={"nothing.*": "hidden"})
    with pytest.raises(InvalidConfigError, match="a kind is one of input, hidden"):
        kinds(uvit(64), base=32, kinds={"norm.*": "matrix"})  # pyright: ignore[reportArgumentType]


def test_at_the_base_itself_kinds_are_told_by_another_width():
    found = kinds(uvit(32, **ALL), base=32)
    assert found.of("output") == ["to_patches.weight"]
    assert {kind.m for kind in found.values()} == {1.0}


def test_wrapped_models():
    class Compiled(nn.Module):  # as torch.compile does it
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    model = uvit(64)
    assert kinds(Compiled(model), base=32) == kinds(model, base=32)
    assert kinds(nn.DataParallel(model), base=32) == kinds(model, base=32)
