"""One way to call any model: names of conditions, kinds of outputs, and conditions that nothing is computed from."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong.config import DiffusionConfig, TextConfig, TrainConfig
from scalelong.errors import InvalidConfigError, InvalidInputError
from scalelong.models import Denoiser, UViT, call_arguments, evaluating, output_tensor
from scalelong.runs import DataShape, build_model

X, T = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 2.0])
TOKENS, LABELS = torch.randn(2, 4, 6), torch.tensor([0, 1])
BLOCKS: dict[str, Any] = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1}
PLAIN = {**BLOCKS, "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
CROSS = {
    **BLOCKS,
    "attention_head_dim": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
}


@dataclass
class Wrapped:
    sample: Tensor


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, t):
        return self.make(x)


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: Wrapped(x), lambda x: (x, None), lambda x: {"sample": x}, lambda x: [x]]
)
def test_outputs_of_all_kinds(make):
    assert output_tensor(make(X)) is X
    assert torch.equal(Denoiser(Returns(make))(X, T), X)


def test_an_output_without_a_tensor_is_named():
    with pytest.raises(InvalidInputError, match="must return a tensor, got str"):
        output_tensor("nothing")
    assert output_tensor({"mine": X}, select=lambda result: result["mine"]) is X
    with pytest.raises(InvalidConfigError, match=r"no tensor and no `\.sample`"):
        Denoiser(Returns(lambda x: None))(X, T)


def test_a_network_that_is_built_and_cannot_run_is_named_with_its_line():
    """diffusers takes any value for most options, and fails when the network runs."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(**{"sample_size": 8, **PLAIN, "freq_shift": {"value": 0}})
    with pytest.raises(
        InvalidConfigError, match=r"UNet2DModel was built, .* line \d+ of \w+\.py raises TypeError: .*--model"
    ):
        Denoiser(model)(X, T)


def test_failures_of_other_kinds_keep_their_names():
    def full(x):
        raise MemoryError

    def gone(x):
        raise torch.distributed.DistBackendError("the other process is gone")

    def ours(x):
        call_arguments(Returns(lambda x: x), x, x, LABELS)

    for make, kind in ((full, MemoryError), (gone, torch.distributed.DistBackendError), (ours, InvalidConfigError)):
        with pytest.raises(kind) as raised:
            Denoiser(Returns(make))(X, T)
        assert "was built" not in str(raised.value)


def test_arguments_have_the_model_s_own_names():
    model = UViT(image_size=8, patch_size=4, channels=3, dim=16, depth=2, heads=2, context_dim=6, context_length=4)
    arguments = call_arguments(model, X, T, TOKENS)
    assert set(arguments) == {"x", "t", "context"}
    assert torch.equal(model(**arguments), Denoiser(model)(X, T, TOKENS))
    assert set(call_arguments(Returns(lambda x: x), X, T)) == {"x", "t"}


def test_a_condition_without_an_argument_raises():
    for condition, kind in ((TOKENS, "text"), (LABELS, "class")):
        with pytest.raises(InvalidConfigError, match=f"condition '{kind}' needs a model whose forward takes"):
            Denoiser(Returns(lambda x: x))(X, T, condition)


def test_evaluating_leaves_modes_and_random_numbers_alone():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    model[1].eval()
    before = torch.get_rng_state()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(before, torch.get_rng_state())


class DropsTokens(nn.Module):
    """Its forward takes tokens and labels, looks at their shapes, and drops them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x, t, y=None, context=None):
        assert y is None or y.shape[0] == len(x)
        assert context is None or context.dim() == 3
        return self.layer(x)


class UsesBoth(DropsTokens):
    def __init__(self):
        super().__init__()
        self.embed, self.project = nn.Embedding(8, 3), nn.Linear(6, 3)

    def forward(self, x, t, y=None, context=None):
        told = self.embed(y) if context is None else self.project(context).mean(1)
        return self.layer(x) + told[:, :, None, None]


def settings(model: str, condition: str, **options: Any) -> TrainConfig:
    diffusion = DiffusionConfig(condition=condition)  # pyright: ignore[reportArgumentType]
    text = TextConfig(text_length=4, text_dim=6)
    return TrainConfig(model=model, model_options=options, diffusion=diffusion, text=text)


SHAPE = DataShape(3, 8, 8, ("a", "b"))


@pytest.mark.parametrize("condition", ["class", "text"])
def test_a_model_that_drops_its_condition_is_refused(condition):
    with pytest.raises(InvalidConfigError, match=f"condition '{condition}' has no effect on this DropsTokens"):
        build_model(settings(f"{__name__}:DropsTokens", condition), SHAPE)
    build_model(settings(f"{__name__}:UsesBoth", condition), SHAPE)


@pytest.mark.parametrize(
    ("kind", "condition", "options", "message"),
    [
        (
            "UNet2DConditionModel",
            "text",
            {"mid_block_type": "UNetMidBlock2D"},
            "condition 'text' has no effect on this",
        ),
        ("UNet2DConditionModel", "class", {}, "cannot be called with condition 'class'.*encoder_hidden_states"),
        ("UNet2DModel", "class", {"num_class_embeds": None}, "cannot be called with condition 'class'"),
        ("UNet2DModel", "text", {}, "condition 'text' needs a model whose forward takes tokens"),
    ],
)
def test_diffusers_configs_that_drop_a_condition_are_refused(kind, condition, options, message, tmp_path):
    """They used to be trained unconditionally, without a word."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": kind, **PLAIN}))
    with pytest.raises(InvalidConfigError, match=message):
        build_model(settings(str(file), condition, **options), SHAPE)


def test_a_diffusers_config_uses_the_class(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "UNet2DModel", **PLAIN}))
    model = build_model(settings(str(file), "class"), SHAPE)
    x = torch.zeros(2, 3, 8, 8)
    with evaluating(model), torch.no_grad():
        for parameter in model.get_submodule("class_embedding").parameters():
            parameter.normal_(std=10.0)
        first, second = Denoiser(model)(x, T, LABELS), Denoiser(model)(x, T, LABELS.flip(0))
    assert not torch.equal(first, second)


def test_a_diffusers_config_with_cross_attention_uses_the_text(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": "UNet2DConditionModel", **CROSS}))
    model = build_model(settings(str(file), "text"), SHAPE)
    assert model.config.cross_attention_dim == 6  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    tokens = torch.randn(2, 4, 6)
    with evaluating(model), torch.no_grad():
        first, second = Denoiser(model)(X, T, tokens), Denoiser(model)(X, T, tokens.flip(0))
    assert not torch.equal(first, second)
