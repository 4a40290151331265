"""Public models, scaled, under everything that people train with. Minutes: `pytest -m slow tests/integrations`."""

import copy
import gc
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import scalelong as sl
from families import FAMILIES

pytestmark = pytest.mark.slow

NAMES = (
    "UViT",
    "UNet2DModel DDPM",
    "UNet2DConditionModel SD",
    "HunyuanDiT2DModel",
    "MONAI UNet",
    "MONAI BasicUNet",
    "MONAI DiffusionModelUNet",
    "MONAI SegResNet",
)


def _made(name: str, method: str | None = "ls") -> tuple[nn.Module, dict[str, Any]]:
    """A scaled model in evaluation mode, and keywords to call it with."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # a last layer of zeros would hide everything
            if not parameter.any():
                parameter.normal_(std=0.1)
    given = family.inputs(2, 1)
    inputs = given if isinstance(given, dict) else {"args": given}
    if method is not None:
        sl.scale_skips_(model, method, given)
        with torch.no_grad():  # gates that differ, so that one that is lost shows
            for parameter_name, parameter in model.named_parameters():
                if "skip_scaling" in parameter_name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model, inputs


def _call(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    named = dict(inputs)
    found = model(*named.pop("args", ()), **named)
    found = getattr(found, "sample", found)
    return found[0] if isinstance(found, tuple | list) else found


@pytest.mark.parametrize("name", NAMES)
def test_compiled_by_inductor(name):
    model, inputs = _made(name)
    with torch.no_grad():
        expected = _call(model, inputs)
        torch.compiler.reset()
        found = _call(torch.compile(model), inputs)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    model, inputs = _made(name)
    plain, _ = _made(name, None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, other = _call(model, inputs), _call(plain, inputs)
    with torch.no_grad():
        expected = _call(model, inputs)
    assert (found.float() - expected).norm() < 0.1 * expected.norm()
    assert not torch.equal(found, other)


@pytest.mark.parametrize("name", NAMES)
def test_averaged_by_diffusers(name):
    """EMAModel keeps the average of gates beside that of weights, and gives both back."""
    training_utils = pytest.importorskip("diffusers.training_utils")
    model, inputs = _made(name)
    average = training_utils.EMAModel(model.parameters(), decay=0.5, use_ema_warmup=False)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.step(model.parameters())
    share = 1 - average.cur_decay_value
    average.copy_to(model.parameters())
    for (key, parameter), old in zip(model.named_parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old + share, rtol=1e-4, atol=1e-5, msg=key)
    sl.verify(model, tuple(inputs["args"]) if "args" in inputs else inputs)


@pytest.mark.parametrize("name", NAMES)
def test_adapted_by_peft(name):
    peft = pytest.importorskip("peft")
    model, inputs = _made(name)
    layers = [key for key, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    layers = [
        key for key in layers if "skip_scaling" not in key and getattr(model.get_submodule(key), "groups", 1) == 1
    ]
    with torch.no_grad():
        expected = _call(model, inputs)
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=layers[1:4], modules_to_save=["skip_scaling"])
    )
    with torch.no_grad():
        torch.testing.assert_close(_call(adapted.base_model.model, inputs), expected, rtol=1e-4, atol=1e-5)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
        adapted_output = _call(adapted.base_model.model, inputs)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(_call(merged, inputs), adapted_output, rtol=1e-3, atol=1e-4)
    assert sl.is_scaled(merged)


def _two_processes(rank: int, rendezvous: str, name: str, way: str, result: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model, inputs = _made(name)
    model.train()
    if way == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped = fully_shard(model)  # pyright: ignore[reportAssignmentType]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    _call(wrapped, inputs).float().square().mean().backward()
    optimizer.step()
    whole = {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in model.named_parameters()
    }
    if rank == 0:
        torch.save(whole, result)
    # DDP goes first: a group that dies with it waits for a thread of its own, which wants Python's lock.
    del wrapped, optimizer
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_take_the_step_of_one(name, way, tmp_path):
    """Both see the same batch, so their mean is the gradient of one process."""
    model, inputs = _made(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _call(model, inputs).float().square().mean().backward()
    optimizer.step()
    arguments = (str(tmp_path / "meet"), name, way, str(tmp_path / "weights.pt"))
    mp.start_processes(_two_processes, arguments, nprocs=2, start_method="spawn")  # pyright: ignore
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert any("skip_scaling" in key for key in found)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach(), rtol=1e-4, atol=1e-5, msg=key)
