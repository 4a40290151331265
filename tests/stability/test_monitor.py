"""The monitor in small training loops: what it reads, that it disturbs nothing, and when it raises alarms."""

import copy
import gc
import json
import math
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import scalelong as sl
from scalelong.errors import ExampleInputsError, InvalidConfigError
from scalelong.files import read_json_lines
from scalelong.stability import (
    AccelerateMonitor,
    Alarm,
    StabilityMonitor,
    lightning_callback,
    measure,
    plan_for,
)
from scalelong.stability.monitor import UpdateWatch


def silent(alarm: Alarm) -> None:
    """Alarms that a test provokes need not be logged."""


def tiny(scaling: str = "none", depth: int = 4) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=depth, heads=2, scaling=scaling)


def batch(seed: int = 0, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=source), 999 * torch.rand(count, generator=source)


def train(model: nn.Module, steps: int, monitor: StabilityMonitor | None = None, lr: float = 1e-3) -> torch.optim.AdamW:
    """Learn to answer with half of the input."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        x, t = batch(100 + step)
        loss = (model(x, t) - x / 2).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    return optimizer


@pytest.mark.parametrize("scaling", ["none", "cs:0.5", "ls"])
def test_a_reading_names_every_skip_and_block(scaling):
    model = tiny(scaling)
    with StabilityMonitor(model, every=2, probe_batch=batch()) as monitor:
        train(model, 4, monitor)
    assert [reading["step"] for reading in monitor.history] == [2, 4]
    reading = monitor.history[-1]
    blocks = ["encoder.0", "encoder.1", "middle", "decoder.0", "decoder.1"]
    for kind in ("block_rms", "probe_block_rms", "similarity", "gradient_norm", "update_ratio"):
        assert {f"{kind}/{name}" for name in blocks} <= set(reading), kind
    assert {"skip_rms/1", "skip_rms/2", "probe_skip_rms/1", "kappa/1", "kappa/2", "loss"} <= set(reading)
    assert all(math.isfinite(value) for value in reading.values())
    assert "headroom" not in reading  # float32 has room for any activation
    if scaling == "cs:0.5":
        assert reading["kappa/2"] == 0.5


def test_the_numbers_are_those_of_a_plain_calculation():
    model, (x, t) = tiny("cs"), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    handle = model.encoder[0].register_forward_hook(lambda *parts: kept.append(parts[2]))
    with StabilityMonitor(model, every=1) as monitor:
        model(x, t).square().mean().backward()
        handle.remove()
        before = copy.deepcopy(model.middle)
        total = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        gradients = [p.grad.clone() for p in model.middle.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        reading = monitor.step()
    assert reading is not None
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    weight = math.sqrt(sum(float(p.detach().square().sum()) for p in before.parameters()))
    assert reading["skip_rms/1"] == pytest.approx(float(kept[0].detach().square().mean().sqrt()), rel=1e-5)
    assert reading["gradient_norm/middle"] == pytest.approx(norm, rel=1e-4)
    assert reading["gradient_norm/all"] == pytest.approx(total, rel=1e-5)
    assert reading["update_ratio/middle"] == pytest.approx(0.1 * norm / weight, rel=1e-4)


@pytest.mark.parametrize("scaling", ["none", "ls"])
def test_training_does_not_notice(scaling):
    watched, alone = tiny(scaling), tiny(scaling)
    with StabilityMonitor(watched, every=2, probe_batch=batch()) as monitor:
        train(watched, 6, monitor)
    train(alone, 6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.modules())
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    for mine, theirs in zip(watched.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


class CountReads(TorchDispatchMode):
    """Counts numbers that are read from a device: each makes an accelerator wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_step_without_a_reading_waits_for_the_device():
    model = tiny("ls")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with StabilityMonitor(model, every=5, probe_batch=batch()) as monitor:
        for step in range(1, 10):
            x, t = batch(step)
            with CountReads() as counter:
                loss = (model(x, t) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                reading = monitor.step(loss)
            assert (reading is not None) == (step == 5)
            if reading is None:
                assert counter.reads == 0, step


def test_validation_between_steps_is_not_read():
    model, (x, t) = tiny(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with StabilityMonitor(model, every=1) as monitor:
        model(x, t).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(100 * x, t)
        reading = monitor.step()
        assert reading is not None
        size = float(measure(model, plan_for(model), (x, t), {}).skips[1][0])
        assert reading["skip_rms/1"] == pytest.approx(size, rel=1e-5)


def test_tokens_that_are_all_alike_have_a_similarity_of_one():
    model = tiny()
    before = measure(model, plan_for(model), batch(), {}).alike
    model.encoder[1].register_forward_hook(lambda *parts: parts[2].mean(1, keepdim=True).expand_as(parts[2]))
    after = measure(model, plan_for(model), batch(), {}).alike
    assert after["encoder.0"] == before["encoder.0"] < 0.6
    assert after["encoder.1"] == pytest.approx(1.0, abs=1e-5)


def test_the_rate_is_the_one_that_a_guard_has_lowered():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    guard = sl.CollapseGuard(model, optimizer)
    guard.rate_factor = 0.125
    with StabilityMonitor(model, every=1, on_alarm=silent) as monitor:
        model(*batch()).square().mean().backward()
        optimizer.step()
        monitor.step(math.nan)
    assert guard.rates == [0.025]
    assert "The learning rate is 0.025" in monitor.alarms[0].message
    assert re.fullmatch(r"StabilityMonitor\(UViT, \d long skips?, every 1 step: step 1, 1 alarm\)", repr(monitor))


def test_silent_on_a_healthy_network():
    model = tiny("cs")
    with StabilityMonitor(model, every=2, probe_batch=batch(), zero_loss=0.25) as monitor:
        train(model, 80, monitor, lr=1e-3)
    assert monitor.alarms == []
    assert monitor.history[-1]["loss"] < monitor.history[0]["loss"]


def test_a_nan_loss_between_two_readings_is_not_forgotten(caplog):
    with StabilityMonitor(tiny(), every=4) as monitor:
        for loss in (0.5, math.nan, 0.5, 0.5):
            monitor.step(torch.tensor(loss))
    assert [(alarm.step, alarm.kind) for alarm in monitor.alarms] == [(4, "non-finite")]
    assert "last good checkpoint" in caplog.text


def test_overflow_margin_of_half_precision():
    model = tiny().half()
    with StabilityMonitor(model, every=1, on_alarm=silent) as monitor:
        x, t = batch()
        with torch.no_grad():
            model.position_embedding.weight.fill_(20000.0)
        model(x.half(), t.half())
        reading = monitor.step()
    assert reading is not None
    assert reading["headroom"] < 8
    assert "overflow margin" in {alarm.kind for alarm in monitor.alarms}


def test_readings_as_json_lines_survive_a_restart(tmp_path):
    path = tmp_path / "deep" / "stability.jsonl"
    model = tiny()
    with StabilityMonitor(model, every=2, path=path, on_alarm=silent) as monitor:
        train(model, 6, monitor)
        monitor.step(math.nan)
        monitor.step()
    lines = read_json_lines(path)
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert lines[-1]["loss"] is None
    assert lines[-1]["alarms"][0]["kind"] == "non-finite"
    with StabilityMonitor(model, every=2, path=path) as monitor:
        monitor.steps = 4
        train(model, 2, monitor)
    assert [line["step"] for line in read_json_lines(path)] == [2, 4, 6]
    json.loads(path.read_text().splitlines()[0])


def test_a_model_that_we_did_not_write():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=1,
    )
    x = torch.randn(2, 1, 8, 8)
    plain = measure(model, plan_for(model), (), {"sample": x, "timestep": torch.tensor([3, 5])})
    assert set(plain.skips) == {1, 2, 3, 4}
    assert "mid_block" in plain.blocks
    sl.scale_skips_(model, sl.UniformScaling(0.9))
    with StabilityMonitor(model, every=1, probe_batch={"sample": x, "timestep": torch.tensor([3, 5])}) as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(x, torch.tensor([3, 5])).sample.square().mean().backward()
        optimizer.step()
        reading = monitor.step()
    assert reading is not None
    assert reading["kappa/4"] == pytest.approx(0.9)
    # Read in front of the scaling, so that a skip's size is that of the feature itself.
    assert reading["probe_skip_rms/1"] == pytest.approx(float(plain.skips[1][0]), rel=1e-5)
    assert reading["skip_rms/1"] == pytest.approx(float(plain.skips[1][0]), rel=1e-5)
    assert reading["gradient_norm/mid_block"] > 0


def test_composes_with_the_compiler():
    torch.compiler.reset()
    model = tiny("ls", depth=2)
    reference = copy.deepcopy(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    with StabilityMonitor(compiled, every=2, probe_batch=batch()) as monitor:
        train(compiled, 4, monitor)
    with StabilityMonitor(reference, every=2, probe_batch=batch()) as expected:
        train(reference, 4, expected)
    assert len(monitor.history) == 2
    for mine, theirs in zip(monitor.history, expected.history, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=1e-6)
    torch.compiler.reset()


def test_accelerate_counts_optimiser_steps():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with AccelerateMonitor(accelerator, model, every=2) as monitor:
        for step in range(8):
            x, t = batch(step)
            with accelerator.accumulate(model):
                loss = (model(x, t) - x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)
    assert [reading["step"] for reading in monitor.history] == [2, 4]
    assert monitor.history[0]["gradient_norm/all"] > 0


def test_lightning_callback_with_an_accumulated_step():
    class Trainer:
        is_global_zero, logger, global_step = True, None, 0

    module = nn.Module()
    module.unet = tiny()
    callback, trainer = lightning_callback(every=1, network="unet"), Trainer()
    callback.on_train_start(trainer, module)
    optimizer = torch.optim.SGD(module.unet.parameters(), lr=0.01)
    for number, step in enumerate([0, 1, 1, 2]):
        x, t = batch(number)
        loss = module.unet(x, t).square().mean()
        loss.backward()
        if step > trainer.global_step:
            optimizer.step()
            optimizer.zero_grad()
        trainer.global_step = step
        callback.on_train_batch_end(trainer, module, {"loss": loss.detach()}, (x, t), number)
    callback.on_train_end(trainer, module)
    assert [reading["step"] for reading in callback.monitor.history] == [1, 2]


def test_clear_errors():
    with pytest.raises(InvalidConfigError, match="at least 1"):
        StabilityMonitor(tiny(), every=0)
    with pytest.raises(ExampleInputsError, match="probe_batch="):
        StabilityMonitor(nn.Sequential(nn.Linear(2, 2)))


def test_a_monitor_that_is_dropped_without_close_keeps_nothing_alive():
    model = sl.UViT(image_size=8, patch_size=4, dim=8, depth=2, heads=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = StabilityMonitor(model, every=1, probe_batch=(torch.zeros(1, 3, 8, 8), torch.zeros(1)))
    gone, meter, weights = weakref.ref(monitor), monitor._meter, weakref.ref(next(model.parameters()))
    assert meter.on
    hooks = len(_global_optimizer_pre_hooks)
    del monitor
    gc.collect()
    assert gone() is None
    assert len(_global_optimizer_pre_hooks) == hooks - 1
    model(torch.zeros(1, 3, 8, 8), torch.zeros(1)).sum().backward()
    assert not meter.blocks
    del model, optimizer
    gc.collect()
    assert weights() is None


def test_a_reading_copies_the_weights_once():
    """Peak of tensors that exist between the step's hooks, counted by their storage."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
    watch = UpdateWatch({"all": list(model.parameters())})
    watch.on = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    watch.close()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in seen.events() or ())
    assert taken <= 1.05 * size
    assert float(watch.readings()["update_ratio/all"]) > 0
