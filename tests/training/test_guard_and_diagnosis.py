"""Non-finite numbers: noticed before they reach the weights, and traced to their layer and long skip."""

import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import nn

from scalelong.attaching import scale_skips_
from scalelong.config import OptimizerConfig
from scalelong.models import UViT
from scalelong.stability import explain_nonfinite
from scalelong.training.optimizers import make_optimizer
from scalelong.training.state import BadSteps, create_moments

CPU = torch.device("cpu")


def fine(value=1.0):
    return torch.tensor(value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_no_update_from_the_first_bad_step_on(bad, where):
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1))
    create_moments(optimizer)
    steps = BadSteps(CPU)
    seen = []
    for step in range(4):
        model(torch.ones(1, 2)).sum().backward()
        numbers = {"loss": fine(), "norm": fine()}
        if step == 2:
            numbers[where] = torch.tensor(bad)
        steps.skip_if_bad(optimizer, None, step, **numbers)
        optimizer.step()
        seen.append(model.weight.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(seen[1], seen[3])  # sticky: nobody has looked yet
    assert steps.first() == 2
    assert optimizer.state[model.weight]["step"] == 2
    steps = BadSteps(CPU)
    assert steps.first() is None


def test_fp16_overflow_is_normal_until_the_scale_collapses():
    class Scaler:
        scale = 65536.0

        def get_scale(self):
            return self.scale

    optimizer = make_optimizer(nn.Linear(2, 2), OptimizerConfig())
    scaler = Scaler()
    steps = BadSteps(CPU)
    steps.skip_if_bad(optimizer, scaler, 0, fine(), torch.tensor(float("inf")))
    assert steps.first() is None
    scaler.scale = 1.0
    steps.skip_if_bad(optimizer, scaler, 1, fine(), fine())
    assert steps.first() is None
    steps.skip_if_bad(optimizer, scaler, 2, fine(), torch.tensor(float("nan")))
    assert steps.first() == 2
    steps = BadSteps(CPU)
    steps.skip_if_bad(optimizer, scaler, 3, torch.tensor(float("nan")), fine())
    assert steps.first() == 3


def small_uvit():
    torch.manual_seed(0)
    return UViT(image_size=4, patch_size=2, channels=1, dim=16, depth=6, heads=2, scaling="cs:0.5")


def look(model, x=None, rate=None):
    x = torch.randn(2, 1, 4, 4) if x is None else x

    def backward():
        model(x, torch.tensor([1.0, 2.0])).square().mean().backward()

    return explain_nonfinite(model, backward, [x], step=7, last_good=5, rate=rate)


def test_a_bad_weight_in_a_merge_names_layer_and_skip():
    model = small_uvit()
    with torch.no_grad():
        model.get_parameter("decoder.1.merge.weight")[0, 0] = float("inf")
    found = look(model)
    assert found.layer == "decoder.1.merge (SkipMerge)"
    assert found.merged == (2,)
    assert found.parameters == ["decoder.1.merge.weight"]
    assert set(found.skip_rms) == {1, 2, 3}
    assert found.largest is not None
    text = str(found)
    assert "step 7" in text
    assert "in the block that merges long skip 2" in text
    assert "RMS of the long skips" in text
    assert "step 5" in text


@pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")
def test_attached_scaling_knows_its_merges_too():
    model = UNet2DModel(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    )
    scale_skips_(model, "cs")
    with torch.no_grad():
        model.get_parameter("up_blocks.1.resnets.0.conv1.weight").fill_(float("nan"))
    x = torch.randn(2, 1, 8, 8)
    found = explain_nonfinite(model, lambda: model(x, torch.tensor([1.0, 2.0])).sample.mean().backward(), [x], 7, None)
    assert found.layer == "up_blocks.1.resnets.0.conv1 (Conv2d)"
    assert 1 in found.merged


def test_a_backward_that_overflows_while_the_forward_does_not():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x, t):
            return x * self.weight.sqrt()

    found = look(Root())
    assert found.layer is None
    assert found.gradients == ["weight"]
    assert "the backward pass is not" in str(found)


def test_bad_data_and_a_clean_second_pass_are_told_apart():
    assert look(small_uvit(), torch.full((2, 1, 4, 4), float("nan"))).bad_input
    assert "A second pass over the same batch was finite" in str(look(small_uvit()))


def test_numbers_that_ran_away_blame_the_rate_and_not_the_hardware():
    model = small_uvit()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e4)
    found = look(model, rate=1000.0)
    text = str(found)
    assert "hardware" not in text
    assert "learning rate was 1000" in text
    assert "that is the rate" in text
    assert "0.001 instead of 1000" in text
