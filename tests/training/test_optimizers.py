"""Optimisers and schedules by name or import path: they are what they say, and resume exactly."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelong.cli import main
from scalelong.config import OptimizerConfig, TrainConfig, conflicting_changes, dump_config
from scalelong.errors import InvalidConfigError, MissingDependencyError, UntrustedCodeError
from scalelong.runs import load_run
from scalelong.training import train
from scalelong.training.optimizers import make_optimizer
from scalelong.training.state import Ema, rate

FOREIGN = "tests.training.foreign_optimizers"
CASES = {
    "adam": {},
    "muon": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adafactor": {},
    f"{FOREIGN}:Lion": {},
    f"{FOREIGN}:ScheduleFree": {"momentum": 0.8},
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


@pytest.mark.parametrize(("name", "options"), [("adam", {}), ("sgd", {"momentum": 0.9}), ("rmsprop", {"alpha": 0.9})])
def test_they_are_torchs_own(name, options):
    ours, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(ours.state_dict())
    config = OptimizerConfig(optimizer=name, optimizer_options=options, lr=0.05, weight_decay=0.01, betas=(0.8, 0.9))
    made = make_optimizer(ours, config)
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[name]
    known = {"betas": (0.8, 0.9)} if name == "adam" else {}
    reference = kind(plain.parameters(), lr=0.05, weight_decay=0.01, foreach=False, **known, **options)
    x = torch.randn(4, 3)
    for _ in range(3):
        for model, optimizer in ((ours, made), (plain, reference)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_a_schedule_free_optimiser_lends_its_average():
    from tests.training.foreign_optimizers import ScheduleFree

    model = nn.Linear(2, 2, bias=False)
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    ema = Ema(model, OptimizerConfig(), 1, optimizer)
    optimizer.train()
    z = [model.weight.detach().clone()]
    for step in range(5):
        model.weight.grad = torch.randn(2, 2)
        z.append(z[-1] - 0.1 * model.weight.grad)
        optimizer.step()
        ema.update(step)
    weights = model.weight.detach().clone()
    with ema.applied():
        torch.testing.assert_close(model.weight.detach(), torch.stack(z[1:]).mean(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.weight, weights)


def test_schedules_are_those_of_diffusers_and_torch():
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
    steps = reference(lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.3))
    assert ours("torch.optim.lr_scheduler:StepLR", step_size=5, gamma=0.3) == pytest.approx(steps)
    # With warm-up, the schedule begins behind it; and a step may be asked for in any order.
    warm = OptimizerConfig(
        lr=1.0, warmup=4, decay="torch.optim.lr_scheduler:ExponentialLR", decay_options={"gamma": 0.5}
    )
    assert [rate(warm, step, 20) for step in (6, 0, 4, 3)] == pytest.approx([0.25, 0.25, 1.0, 1.0])


def _restarts(optimizer):
    from diffusers.optimization import get_cosine_with_hard_restarts_schedule_with_warmup

    return get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 0, 20, num_cycles=3)


def test_what_cannot_be_is_refused():
    model = nn.Linear(1, 1)

    def refused(said, kind: type[Exception] = InvalidConfigError, **values):
        with pytest.raises(kind, match=said):
            make_optimizer(model, OptimizerConfig(**values))

    refused("`optimizer` must be one of adamw", optimizer="lion")
    refused("has no option momentum; it takes", optimizer="adam", optimizer_options={"momentum": 0.9})
    refused("cannot be made", optimizer="sgd", optimizer_options={"momentum": -1})
    refused("cannot be imported", optimizer="no_such_package:Lion")
    refused("must make a torch.optim.Optimizer, got int", optimizer=f"{FOREIGN}:not_an_optimizer")
    refused("closure", optimizer=f"{FOREIGN}:NeedsClosure")
    refused("schedulefree", kind=MissingDependencyError, optimizer="schedule-free")
    refused("`decay` cosine takes no `decay_options`", decay="cosine", decay_options={"power": 2})
    for decay, options, said in (
        ("polynomial", {"pow": 2}, "cannot be made"),
        ("torch.optim.lr_scheduler:ReduceLROnPlateau", {}, "function of the step alone"),
        ("torch.optim.lr_scheduler:Nothing", {}, "has no 'Nothing'"),
    ):
        with pytest.raises(InvalidConfigError, match=said):
            rate(OptimizerConfig(decay=decay, decay_options=options), 3, 10)


def test_a_decay_that_ends_with_the_run_ties_its_length():
    def changed(**values):
        before = TrainConfig(steps=10, optimizer=OptimizerConfig(**values))
        return conflicting_changes(before, replace(before, steps=20))

    assert "steps" in changed(decay="polynomial")
    assert not changed(decay="polynomial", decay_steps=10)
    assert not changed(decay="torch.optim.lr_scheduler:StepLR", decay_options={"step_size": 3})


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
