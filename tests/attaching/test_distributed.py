"""Two processes with gloo: DDP and FSDP2 train a scaled model, and both processes agree."""

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import scalelong as sl
import zoo

NETWORKS = {"hooks": zoo.GuidedDiffusion, "rewrite": zoo.CatThenFunction}


def _inputs(name: str, rank: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(10 + rank)
    x = torch.randn(2, 3, 16, 16)
    return (x, torch.ones(2)) if name == "hooks" else (x,)


def _train(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    for name, make in NETWORKS.items():
        for way in ("ddp", "fsdp"):
            torch.manual_seed(0)
            model: nn.Module = sl.scale_skips_(make(), "ls", _inputs(name, 0))
            if way == "ddp":
                model = DistributedDataParallel(model)
            else:
                fully_shard(model)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                model(*_inputs(name, rank)).square().mean().backward()
                optimiser.step()
            assert sl.is_scaled(model)
            with torch.no_grad():
                output = model(*_inputs(name, 0))
            gates = [p for n, p in model.named_parameters() if "skip_scaling" in n]
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in gates]
            found[name, way] = (output, [p.detach().clone() for p in full])
            assert len(sl.coefficients(model)) == len(sl.plan_of(model))
            sl.save_scaling(model, f"{results}.{name}.{way}.safetensors")
            if way == "fsdp":
                _save_and_load(name, make, model, f"{results}.{name}")
    torch.save(found, f"{results}.{rank}")
    dist.destroy_process_group()


def _save_and_load(name: str, make: Any, model: nn.Module, path: str) -> None:
    """Full and sharded state dicts hold the scaling, and another process group reads them."""
    inputs = _inputs(name, 0)
    model.eval()
    with torch.no_grad():
        expected = model(*inputs)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain = sl.load_scaling_(make().eval(), whole)
        plain.load_state_dict(whole)
        with torch.no_grad():
            torch.testing.assert_close(plain(*inputs), expected)
        with pytest.raises(RuntimeError, match="scalelong_scaling"):
            make().load_state_dict(whole)
    sharded = get_model_state_dict(model)
    assert "scalelong_scaling" in sharded
    dcp.save(sharded, checkpoint_id=f"{path}.dcp")  # pyright: ignore[reportPrivateImportUsage]
    other = sl.load_scaling_(make(), f"{path}.fsdp.safetensors").eval()
    fully_shard(other)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=f"{path}.dcp")  # pyright: ignore[reportPrivateImportUsage]
    with warnings.catch_warnings():
        warnings.simplefilter("error", sl.UnscaledWeightsWarning)
        set_model_state_dict(other, state)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
    with torch.no_grad():
        torch.testing.assert_close(other(*inputs), expected)


@pytest.fixture(scope="module")
def trained():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
            _train, (f"{folder}/rendezvous", f"{folder}/results"), nprocs=2
        )
        return [torch.load(f"{folder}/results.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_processes_train_a_scaled_model(trained, name, way):
    (output, gates), (other_output, other_gates) = trained[0][name, way], trained[1][name, way]
    torch.testing.assert_close(output, other_output)
    for mine, theirs in zip(gates, other_gates, strict=True):
        torch.testing.assert_close(mine, theirs)
    if name == "hooks":  # it has dropout, which differs between processes
        return
    # The same two steps in one process, on the mean of both gradients.
    torch.manual_seed(0)
    model = sl.scale_skips_(NETWORKS[name](), "ls", _inputs(name, 0))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        for rank in (0, 1):
            (model(*_inputs(name, rank)).square().mean() / 2).backward()
        optimiser.step()
    alone = [p for n, p in model.named_parameters() if "skip_scaling" in n]
    for mine, theirs in zip(gates, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
