"""Optimisers and rates by name or import path, clipping, and the moving average: definitions, and exact resume."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelong.cli import main
from scalelong.config import OptimizerConfig, TrainConfig, conflicting_changes, dump_config
from scalelong.errors import InvalidConfigError, UntrustedCodeError
from scalelong.runs import load_run
from scalelong.training import Ema, train
from scalelong.training.optimizers import base_rate, make_optimizer, rate, set_rate
from scalelong.training.state import clip_gradient, create_moments

FOREIGN = "tests.training.foreign_optimizers"
CASES = {
    "adam": {},
    "muon": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adafactor": {},
    f"{FOREIGN}:Lion": {},
}


def with_optimizer(config, name, options, **changes):
    settings = replace(config.optimizer, optimizer=name, optimizer_options=options, lr=1e-3, **changes)
    return replace(config, steps=20, optimizer=settings, checkpoints=replace(config.checkpoints, save_every=10))


@pytest.mark.parametrize("name", CASES)
def test_two_times_ten_steps_are_twenty(name, tiny, tmp_path, crash_at, final_state):
    config = with_optimizer(tiny, name, CASES[name], decay="polynomial", decay_options={"power": 2.0})
    train(config, tmp_path / "whole", quiet=True)
    crash_at(config, tmp_path / "parts", 13)  # three steps after the checkpoint of step 10
    train(config, tmp_path / "parts", quiet=True)
    first, second = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    for one, other in ((first.model, second.model), (first.ema, second.ema)):
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert first.step == second.step == 20
    middle = load_run(tmp_path / "whole", weights="raw", step=10).model.state_dict()
    assert not torch.equal(first.model["to_patches.weight"], middle["to_patches.weight"])


def test_schedules_are_those_of_diffusers():
    from diffusers.optimization import get_scheduler

    def reference(make):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler, rates = make(optimizer), []
        for _ in range(20):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    def ours(name, **options):
        config = OptimizerConfig(lr=0.5, decay=name, decay_options=options)
        return [rate(config, step, 20) for step in (*range(20),)]

    theirs = reference(lambda o: get_scheduler("polynomial", o, num_warmup_steps=0, num_training_steps=20, power=2.0))
    assert ours("polynomial", power=2.0) == pytest.approx(theirs)
    theirs = reference(_restarts)
    assert ours("cosine_with_restarts", num_cycles=3) == pytest.approx(theirs)
    assert ours("piecewise_constant", step_rules="1:5,0.1")[4:6] == pytest.approx([0.5, 0.05])
    # With warm-up, the schedule begins after it; and a step may be asked for in any order.
    warm = OptimizerConfig(lr=1.0, warmup=4, decay="polynomial", decay_options={"power": 1.0, "lr_end": 0.0})
    assert [rate(warm, step, 24) for step in (14, 0, 4, 3)] == pytest.approx([0.5, 0.25, 1.0, 1.0])


def _restarts(optimizer):
    from diffusers.optimization import get_cosine_with_hard_restarts_schedule_with_warmup

    return get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 0, 20, num_cycles=3)


def test_what_cannot_be_is_refused():
    model = nn.Linear(1, 1)

    def refused(said, **values):
        with pytest.raises(InvalidConfigError, match=said):
            make_optimizer(model, OptimizerConfig(**values))

    refused("`optimizer` must be one of adamw", optimizer="lion")
    refused("has no option momentum; it takes", optimizer="adam", optimizer_options={"momentum": 0.9})
    refused("cannot be made", optimizer="sgd", optimizer_options={"momentum": -1})
    refused("cannot be imported", optimizer="no_such_package:Lion")
    refused("must make a torch.optim.Optimizer, got int", optimizer=f"{FOREIGN}:not_an_optimizer")
    refused("closure", optimizer=f"{FOREIGN}:NeedsClosure")
    refused("schedule-free", optimizer=f"{FOREIGN}:ScheduleFree")
    refused("`decay` must be one of constant", decay="torch.optim.lr_scheduler:StepLR")
    refused("`decay` cosine takes no `decay_options`", decay="cosine", decay_options={"power": 2})
    with pytest.raises(InvalidConfigError, match="cannot be made"):
        rate(OptimizerConfig(decay="polynomial", decay_options={"pow": 2}), 3, 10)


def test_a_decay_that_ends_with_the_run_ties_its_length():
    def changed(**values):
        before = TrainConfig(steps=10, optimizer=OptimizerConfig(**values))
        return conflicting_changes(before, replace(before, steps=20))

    assert "steps" in changed(decay="polynomial")
    assert not changed(decay="polynomial", decay_steps=10)
    assert not changed(decay="piecewise_constant", decay_options={"step_rules": "1:5,0.1"})


def test_the_command_and_consent(tiny, tmp_path, capsys):
    common = ["--samples-every", "0", "--monitor-every", "0", "--trackers", "--save-every", "4", "--quiet"]
    config = replace(tiny, steps=4)
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    command = ["train", "--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run"), *common]
    assert main([*command, "--optimizer", "sgd", "--optimizer-options", "momentum=0.5"]) == 0
    found = load_run(tmp_path / "run").config.optimizer
    assert (found.optimizer, found.optimizer_options) == ("sgd", {"momentum": 0.5})
    # What a file names is code of whoever wrote it.
    foreign = replace(config, optimizer=replace(config.optimizer, optimizer=f"{FOREIGN}:Lion"))
    (tmp_path / "theirs.yaml").write_text(dump_config(foreign))
    command[2], command[4] = str(tmp_path / "theirs.yaml"), str(tmp_path / "other")
    assert main(command) == 1
    assert UntrustedCodeError.__name__ in capsys.readouterr().err
    assert main([*command, "--trust"]) == 0


# The rate over time, clipping, and the moving average


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
    create_moments(optimizer)
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
