"""The rate over time, clipping, and the moving average against their definitions."""

import copy
import math

import pytest
import torch
from torch import nn

from scalelong.config import OptimizerConfig
from scalelong.training import Ema
from scalelong.training.state import base_rate, clip_gradient, create_state, make_optimizer, rate, set_rate


def test_rates():
    constant = OptimizerConfig(lr=1.0, warmup=4)
    assert [rate(constant, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerConfig(lr=1.0, decay="linear")
    assert [rate(linear, step, 4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = OptimizerConfig(lr=2.0, warmup=2, decay="cosine", decay_steps=12)
    assert rate(cosine, 7, 99) == pytest.approx(1.0)
    assert rate(cosine, 12, 99) == pytest.approx(0.0, abs=1e-12)


def test_adamw_is_fused_and_its_early_state_changes_nothing():
    torch.manual_seed(0)
    ours, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.1)
    optimizer = make_optimizer(ours, config)
    create_state(optimizer)
    assert optimizer.param_groups[0]["fused"]
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=config.betas, weight_decay=0.03, foreach=False)
    x = torch.randn(4, 3)
    for _ in range(3):
        for model, step in ((ours, optimizer), (plain, reference)):
            step.zero_grad()
            model(x).square().mean().backward()
            step.step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_clipping_reports_the_norm_before():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    assert clip_gradient(parameters, None).item() == pytest.approx(5.0)
    assert parameters[1].grad[1] == 4.0
    assert clip_gradient(parameters, 1.0).item() == pytest.approx(5.0)
    assert clip_gradient(parameters, None).item() == pytest.approx(1.0, abs=1e-4)


def test_ema_follows_its_recursion():
    model = nn.Linear(4, 4)
    ema = Ema(model, OptimizerConfig(ema_rate=0.9, ema_warmup=False))
    slow = copy.deepcopy(model.weight.detach()).double()
    for step in range(20):
        with torch.no_grad():
            model.weight += torch.randn(4, 4)
        ema.update(step)
        slow = 0.9 * slow + 0.1 * model.weight.detach().double()
    torch.testing.assert_close(ema.averages[0].double(), slow, rtol=1e-5, atol=1e-5)


def test_by_default_the_average_has_forgotten_the_random_start():
    config = OptimizerConfig()
    for steps in (100, 1000, 10_000):
        left = math.prod(Ema(nn.Linear(1, 1), config).rate(step) for step in range(steps))
        assert left < 1e-6, f"{left:.0%} of the start after {steps} steps"


def test_ema_warmup_begins_short():
    ema = Ema(nn.Linear(1, 1), OptimizerConfig(ema_rate=0.99, ema_warmup=True))
    assert ema.rate(0) == pytest.approx(0.1)
    assert ema.rate(10**6) == 0.99


def test_ema_is_in_float32_for_low_precision_weights():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    ema = Ema(model, OptimizerConfig(ema_rate=0.999, ema_warmup=False))
    before = ema.averages[0].clone()
    with torch.no_grad():
        model.weight += 1.0
    ema.update(0)
    assert ema.averages[0].dtype == torch.float32
    # bfloat16 could not hold a change this small.
    torch.testing.assert_close(ema.averages[0] - before, torch.full((2, 2), 0.001), rtol=0.02, atol=0)


def test_distance_is_zero_until_something_moves():
    model = nn.Linear(4, 4, bias=False)
    ema = Ema(model, OptimizerConfig(ema_rate=0.5, ema_warmup=False))
    assert ema.distance() == 0
    with torch.no_grad():
        model.weight.mul_(2.0)
    assert ema.distance().item() == pytest.approx(0.5)


def test_applied_lends_the_averages_and_gives_the_weights_back():
    model = nn.Linear(4, 4)
    ema = Ema(model, OptimizerConfig(ema_rate=0.5, ema_warmup=False))
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update(0)
    weights = model.weight.detach().clone()

    def fail_within():
        with ema.applied():
            assert torch.equal(model.weight, ema.averages[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert torch.equal(model.weight, weights)
    assert model.weight.requires_grad


def test_a_group_keeps_its_share_of_the_rate():
    slow, fast = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": slow.parameters(), "lr_scale": 0.1}, {"params": fast.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    for value in (0.5, 0.25):
        set_rate(optimizer, value)
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.1 * value), value]
        assert base_rate(optimizer) == pytest.approx(value)


def test_one_group_has_the_rate_itself_to_the_last_bit():
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=1.0)
    for value in (2e-4 / 3, 0.1 + 0.2, 1e-300):
        set_rate(optimizer, value)
        assert optimizer.param_groups[0]["lr"] == value == base_rate(optimizer)
