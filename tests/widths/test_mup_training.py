"""--base-width in runs: equal to the standard run at the base, exact resume, rates over time, and the grid."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scalelong import InvalidConfigError
from scalelong.cli import main
from scalelong.config import OptimizerConfig, TrainConfig, recipe
from scalelong.experiments import PlannedRun, best_rate_rows, comparison, config_range, sweep
from scalelong.runs.model import DataShape, build_model, mup_kinds, with_width
from scalelong.training import train
from scalelong.training.optimizers import base_rate, make_optimizer, set_rate
from scalelong.training.state import BadSteps

SHAPE = DataShape(1, 8, 8)


def small(base_width: int | None = None, steps: int = 4, **changes: Any) -> TrainConfig:
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        batch_size=4,
        model_options={"patch_size": 4, "dim": 32, "depth": 2, "heads": 4},
        images=replace(base.images, held_out=16),
        optimizer=replace(base.optimizer, warmup=2, base_width=base_width, **changes),
        logging=replace(base.logging, log_every=1, held_out_every=4, samples_every=0, monitor_every=2, trackers=()),
        checkpoints=replace(base.checkpoints, save_every=2),
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "latest" / "model.safetensors")


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "wide"
    train(small(16), folder, quiet=True)
    return folder


def test_at_the_base_a_run_is_the_standard_one_to_the_last_bit(tmp_path, wide):
    train(small(), tmp_path / "standard", quiet=True)
    train(small(32), tmp_path / "base", quiet=True)
    assert equal(weights(tmp_path / "standard"), weights(tmp_path / "base"))
    assert not equal(weights(tmp_path / "standard"), weights(wide))


def test_a_run_goes_on_exactly(tmp_path, wide):
    train(small(16, steps=2), tmp_path / "run", quiet=True)
    train(small(16), tmp_path / "run", quiet=True)
    assert equal(weights(tmp_path / "run"), weights(wide))


def test_schedule_and_guard_respect_the_groups():
    config = small(16)
    model = build_model(config, SHAPE)
    optimizer = make_optimizer(model, config.optimizer, mup_kinds(model, config, SHAPE))
    plain, scaled = optimizer.param_groups
    for rate in (1e-3, 5e-4):
        set_rate(optimizer, rate)
        assert (plain["lr"], scaled["lr"], base_rate(optimizer)) == (rate, rate / 2, rate)
    assert (plain["weight_decay"], scaled["weight_decay"]) == (0.03, 0.06)
    before = [parameter.clone() for parameter in model.parameters()]
    bad = BadSteps(torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    bad.skip_if_bad(optimizer, None, 0, torch.tensor(1.0), torch.tensor(torch.nan))
    optimizer.step()
    assert bad.first() == 0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_start_of_a_run():
    standard, wide, unit = (build_model(small(16 if i else None), SHAPE) for i in range(3))
    unit = build_model(small(16, output_start="unit"), SHAPE)
    name = "to_patches.weight"
    assert torch.equal(wide.get_parameter(name), standard.get_parameter(name) * 0.5**0.5)
    assert equal(unit.state_dict(), standard.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "sgd"}, "`optimizer` sgd"),
        ({"optimizer": "adagrad"}, "do not hold for `optimizer` adagrad"),
        ({"optimizer": "lion_pytorch:Lion"}, "do not hold for `optimizer` lion_pytorch:Lion"),
        ({"optimizer": "adam"}, "`optimizer` adam adds it to the gradient"),
        ({"output_start": "half"}, "`output_start` must be one of strict, unit, zero"),
        ({"base_width": 0}, "`base_width` must be at least 1"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(InvalidConfigError, match=message):
        OptimizerConfig(**{"base_width": 64, **changes})


def test_more_refusals():
    with pytest.raises(InvalidConfigError, match=r"`base_width` 20: .*no multiple of the head size 8"):
        build_model(small(20), SHAPE)
    with pytest.raises(InvalidConfigError, match="leave base_width out"):
        config_range(small(16), rates=(1e-3,))


# Widths of other networks


class Own(nn.Module):
    """A network of someone's own, with one deviation for all widths."""

    def __init__(self, width: int = 32, std: float = 0.02) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.third, self.last = nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)
        for layer in (self.first, self.second, self.third, self.last):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(self.second(self.first(x)).tanh()).tanh())


def test_a_factory_of_someones_own():
    config = replace(small(8), model=f"{__name__}:Own", model_options={"width": 32})
    assert with_width(config, 64).model_options == {"width": 64}
    torch.manual_seed(0)
    standard, model = build_model(replace(config, optimizer=OptimizerConfig()), SHAPE), build_model(config, SHAPE)
    assert torch.equal(model.get_parameter("second.weight"), standard.get_parameter("second.weight") / 2)
    assert torch.equal(model.get_parameter("last.weight"), standard.get_parameter("last.weight") / 4)


def test_widths_of_unets():
    config = replace(small(), model="unet/cifar10", model_options={})
    assert with_width(config, 64).model_options["block_out_channels"] == [64, 128, 128, 128]
    wide = with_width(replace(small(), model="unet/mscoco256", model_options={}), 256).model_options
    assert wide == {"block_out_channels": [256, 512, 768], "attention_head_dim": 16}  # a number of heads


# Rates × widths


def made_up(runs: list[PlannedRun], *_: Any, **__: Any) -> bool:
    """Runs whose losses are functions of method, width and rate, in the place of training."""
    for run in runs:
        (run.folder / "checkpoints" / f"step-{run.config.steps}").mkdir(parents=True)
        width, rate = run.config.model_options["dim"], run.config.optimizer.lr
        best = 2e-3 if run.config.optimizer.base_width else 2e-3 * 16 / width
        loss = 0.5 + math.log(rate / best) ** 2 / 10 + run.seed / 100
        lines = [json.dumps({"step": step, "held_out_loss": value}) for step, value in ((1, 0.9), (2, loss))]
        (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return True


def test_rates_and_widths_are_a_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "run_all", made_up)
    monkeypatch.setattr(PlannedRun, "finished", property(lambda run: (run.folder / "checkpoints").exists()))
    methods = ["standard: scaling=none", "mup: base_width=16"]
    found = sweep(small(), methods, [0, 1], tmp_path, widths=[16, 32], rates=[1e-3, 2e-3, 4e-3])
    assert found is not None
    assert sorted(found) == [(width, rate) for width in (16, 32) for rate in (1e-3, 2e-3, 4e-3)]
    assert {run.config["model_options.heads"] for run in found[32, 1e-3].runs} == {4}
    assert {run.config["model_options.heads"] for run in found[16, 1e-3].runs} == {2}
    assert (tmp_path / "width-32" / "rate-0.001" / "mup-seed0").is_dir()
    names = ("method", "width", "best rate")
    assert [tuple(row[name] for name in names) for row in best_rate_rows(found)] == [
        ("standard", "16", "0.002"),
        ("standard", "32", "0.001 (the smallest tried)"),
        ("mup", "16", "0.002"),
        ("mup", "32", "0.002"),
    ]
    heads = sweep(small(), ["none"], [0], tmp_path / "standard", widths=[16, 32])
    assert heads is not None
    assert {run.config["model_options.heads"] for run in heads[32, None].runs} == {4}, "without μP, as many as before"
    monkeypatch.setattr(type(found[16, 1e-3]), "mean_loss", lambda *_: math.inf)
    assert best_rate_rows(found)[-1]["best rate"] == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-width", "48", "--widths", "50,96", "--rates", "1e-3"], "no multiple of the head size 24"),
        (["--widths", "48,48", "--rates", "1e-3"], "--widths must name different values"),
    ],
)
def test_the_command_refuses(arguments, message, capsys, tmp_path):
    assert main(["compare", "--methods", "none", "--out", str(tmp_path), "--quiet", *arguments]) == 1
    assert message in capsys.readouterr().err
