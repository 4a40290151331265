"""One rule of collapse: on one curve detector, guard, monitor, range, trainer, comparisons and reports say the same."""

import json
import math
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from report.made_up import make_run
from scalelong.experiments.records import read_run
from scalelong.noise import LEVELS, flat_losses
from scalelong.report import collect
from scalelong.stability import Collapse, CollapseDetector, CollapseGuard, StabilityMonitor, rate_range
from scalelong.training.monitoring import RunMonitor


class Toy(nn.Module):
    """A U of one long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.join = nn.Conv1d(8, 4, 1)

    def forward(self, x):
        skip = self.down(x).relu()
        inner = self.middle(nn.functional.avg_pool1d(skip, 2)).relu()
        return self.up(self.join(torch.cat([nn.functional.interpolate(inner, scale_factor=2), skip], 1)))


def noisy(seed: int, level: float, noise: float, steps: int = 400) -> list[float]:
    source = random.Random(seed)
    fall = [level + (1 - level) * math.exp(-step / 20) for step in range(steps)]
    return [value * math.exp(noise * source.gauss(0, 1) - noise**2 / 2) for value in fall]


def curve(*parts: tuple[float, int]) -> list[float]:
    """So many steps at each loss."""
    return [loss for loss, steps in parts for _ in range(steps)]


def back(low: float, high: float) -> list[float]:
    return curve((1.0, 10), (low, 140), (high, 150))


SLOWLY = [0.2 + 0.8 * step / 80 for step in range(80)]
CURVES = {
    "lost 58 %": (back(0.4, 0.75), True),
    "lost 39 %": (back(0.1, 0.45), False),
    "lost 47 %": (back(0.1, 0.52), False),
    "lost 62 %": (back(0.2, 0.7), True),
    "lost all": (back(0.1, 1.0), True),
    "lost more than all": (back(0.1, 3.0), True),
    "lost slowly": (back(0.2, 0.2)[:150] + SLOWLY + [1.0] * 80, True),
    "lost, came back and lost again": (curve((1.0, 10), (0.1, 90), (1.0, 60), (0.1, 100), (1.0, 60)), True),
    "too little learned to lose it": (back(0.85, 1.0), False),
    "a spike": (curve((1.0, 10), (0.2, 100), (3.0, 3), (0.2, 187)), False),
    "a warm restart": (curve((1.0, 10), (0.1, 100), (0.3, 90), (0.1, 100)), False),
    "never learned": ([1.0] * 300, False),
    "healthy, noise of 20 %": (noisy(0, 0.2, 0.2), False),
    "healthy, noise of 50 %": (noisy(1, 0.3, 0.5), False),
    "healthy, little learned": (noisy(2, 0.6, 0.3), False),
}


def by_detector(losses):
    detector = CollapseDetector(zero_loss=1.0)
    return any(isinstance(detector.add(step, loss), Collapse) for step, loss in enumerate(losses, start=1))


def by_guard(losses):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with CollapseGuard(model, optimizer, mode="ignore", zero_loss=1.0, on_event=lambda _: None) as guard:
        found = []
        for loss in losses:
            optimizer.step()
            found.append(guard.step(loss))
    return any(found)


def by_monitor(losses):
    options = {"every": 10, "zero_loss": 1.0, "on_alarm": lambda _: None}
    with StabilityMonitor(Toy(), probe_batch=(torch.zeros(1, 4, 8),), **options) as monitor:
        for loss in losses:
            monitor.step(loss)
    return "collapse" in {alarm.kind for alarm in monitor.alarms}


def by_range(losses):
    def step(model, i, _):
        return losses[i] + 0 * model.down.weight.sum()

    options = {"rates": (1e-9,), "methods": ("none",), "seeds": 1, "steps": len(losses), "reference_loss": 1.0}
    return rate_range(lambda _: Toy(), step, **options, jobs=1).runs[0].outcome == "collapsed"


def by_trainer(losses):
    """As a run judges itself: by noise level, here all of one."""
    with TemporaryDirectory() as folder:
        state: Any = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=False), step=0)
        monitor = RunMonitor(SimpleNamespace(path=Path(folder)), state, every=0)  # pyright: ignore[reportArgumentType]
        found = []
        for step, loss in enumerate(losses, start=1):
            sums = torch.zeros(3, LEVELS)
            sums[:, 2] = torch.tensor([8.0, 8 * loss, 8.0])
            monitor.add(step, sums)
            found.append(monitor.collapse())
    return any(found)


def recorded(losses, folder):
    """A run that wrote the mean of every ten steps down as its held-out loss."""
    run = make_run(folder, "none")
    lines = [
        {"step": step + 10, "held_out_loss": sum(losses[step : step + 10]) / 10} for step in range(0, len(losses), 10)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def by_compare(losses):
    with TemporaryDirectory() as folder:
        return read_run(recorded(losses, Path(folder) / "run")).collapsed


def by_report(losses):
    with TemporaryDirectory() as folder:
        return collect([recorded(losses, Path(folder) / "run")])["runs"][0]["collapsed"]


@pytest.mark.parametrize(
    "way",
    [by_detector, by_guard, by_monitor, by_range, by_trainer, by_compare, by_report],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("name", CURVES)
def test_all_say_the_same_of_one_curve(name, way):
    losses, collapsed = CURVES[name]
    assert way(losses) is collapsed


def test_a_network_that_learns_fast_and_is_lost_soon_is_seen():
    """As recorded: learned within 20 steps, lost after 28."""
    losses = [1 - 0.02 * min(step, 18) for step in range(28)] + [1.0] * 30
    assert by_detector(losses)


def test_what_a_collapsed_network_costs_is_what_is_the_same_at_every_position():
    torch.manual_seed(0)
    noise, bright = torch.randn(64, 3, 16, 16), torch.rand(64, 3, 1, 1).expand(64, 3, 16, 16)
    assert float(flat_losses(noise).mean()) == pytest.approx(1, abs=0.01)
    # A flow's target holds the image. Its brightness is known to an answer without positions, the rest is not.
    assert torch.allclose(flat_losses(noise - bright), flat_losses(noise), atol=1e-5)
    assert float(flat_losses(noise - bright).mean()) < float((noise - bright).square().mean()) - 0.2


@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["plateau", "drift", "warm restarts"])
def test_long_healthy_runs_are_quiet(kind, correlation):
    shapes = {
        "plateau": lambda step: 0.7 + 0.3 * math.exp(-step / 500),
        "drift": lambda step: 0.2 + 0.8 * math.exp(-step / 60) + 0.1 * math.sin(step / 900) ** 2,
        "warm restarts": lambda step: 0.2 + 0.8 * math.exp(-step / 60) + 0.15 * math.exp(-(step % 2000) / 200),
    }
    for seed, noise in enumerate((0.05, 0.2, 0.4)):
        source, state, losses = random.Random(seed), 0.0, []
        for step in range(4000):
            state = correlation * state + math.sqrt(1 - correlation**2) * source.gauss(0, 1)
            losses.append(shapes[kind](step) * math.exp(noise * state - noise**2 / 2))
        assert not by_detector(losses), noise
