"""Muon: torch's updates, the right parameters, exact states, and rates over widths."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scalelong as sl
from scalelong.muon import groups_for_muon, orthogonalised

SHAPES = [(16, 16), (48, 16), (16, 64), (16, 16), (8, 100)]


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int = 0) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=source)
    optimizer.step()


def matrices() -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=source)) for shape in SHAPES]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_torchs(nesterov):
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.01, "weight_decay": 0.1, "nesterov": nesterov}
    mine = sl.Muon(ours, products="bfloat16", **options)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for seed in range(3):
        stepped(mine, ours, seed)
        stepped(reference, theirs, seed)
    for one, other, start in zip(ours, theirs, matrices(), strict=True):
        assert (one - other).norm() < 0.02 * (one - start).norm()


def test_singular_values_become_one():
    stack = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(stack, 5, torch.float32))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_rest_is_adamw_to_the_last_bit():
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
    mine, reference = (
        sl.Muon([{"params": ours, "muon": False}], **options),
        torch.optim.AdamW(theirs, fused=True, **options),
    )
    for seed in range(3):
        stepped(mine, ours, seed)
        stepped(reference, theirs, seed)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_hidden_matrices_of_a_uvit():
    model = sl.UViT(image_size=8, patch_size=2, dim=16, depth=2, heads=2, classes=3, time_mlp=True, scaling="ls")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = sl.muon_groups(model, lr=0.1)
    hidden = {names[id(p)] for group in groups if group["muon"] for p in group["params"]}
    layers = ("attention.qkv", "attention.out", "mlp.expand", "mlp.reduce")
    blocks = [f"{block}.{layer}.weight" for block in ("encoder.0", "middle", "decoder.0") for layer in layers]
    assert hidden == {*blocks, "decoder.0.merge.weight", "time_embedding.0.weight", "time_embedding.2.weight"}
    assert sum(len(group["params"]) for group in groups) == len(names)


class Convolutions(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.up = nn.ConvTranspose2d(width, width, 2)
        self.head = nn.Conv2d(width, 3, 3)


def test_networks_of_someones_own():
    model = Convolutions()

    def hidden(**options):
        groups = sl.muon_groups(model, lr=0.1, **options)
        return [p for group in groups if group["muon"] for p in group["params"]]

    assert [id(p) for p in hidden()] == [id(model.inner.weight), id(model.up.weight)]
    assert [id(p) for p in hidden(kinds={"up.*": "output"})] == [id(model.inner.weight)]
    optimizer = sl.Muon(sl.muon_groups(model, lr=0.1, weight_decay=0.0), products="float32")
    before = copy.deepcopy(model)
    stepped(optimizer, list(model.parameters()))
    moved = (before.inner.weight - model.inner.weight).flatten(1)
    assert torch.linalg.svdvals(moved).max() < 1.3 * 0.1 * 0.2 * 12  # the larger side is 16 · 9 = 12²
    with pytest.raises(sl.InvalidConfigError, match="no parameter"):
        sl.muon_groups(model, lr=0.1, kinds={"nothing": "hidden"})


def test_a_state_that_was_loaded_goes_on_exactly():
    whole, parts = matrices(), matrices()
    first = sl.Muon(whole, lr=0.1)
    for seed in range(4):
        stepped(first, whole, seed)
    second = sl.Muon(parts, lr=0.1)
    for seed in range(2):
        stepped(second, parts, seed)
    third = sl.Muon(parts, lr=0.1, products="float32")  # the state keeps the precision
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    for seed in range(2, 4):
        stepped(third, parts, seed)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_vectors_and_bad_values_are_refused():
    with pytest.raises(sl.InvalidConfigError, match="muon_groups"):
        sl.Muon([nn.Parameter(torch.zeros(3))])
    bad: list[dict[str, Any]] = [{"lr": -1.0}, {"momentum": 1.0}, {"ns_steps": 0}, {"products": "int8"}]
    for options in bad:
        with pytest.raises(sl.InvalidConfigError):
            sl.Muon(matrices(), **options)


def test_blocks_move_alike_at_all_widths():
    def make(width: int) -> nn.Module:
        return sl.UViT(image_size=4, patch_size=2, channels=1, dim=width, depth=2, heads=width // 16)

    def optimizer(model, kinds, lr):
        return sl.Muon(groups_for_muon(model, kinds, lr=lr, weight_decay=0.0), products="float32")

    found = sl.mup.coordinates(make, (32, 64, 128), steps=1, seeds=2, lr=4e-3, optimizer=optimizer)
    assert found.holds("mup")
    assert not found.holds("standard")
    groups = sl.muon_groups(make(64), lr=0.1, weight_decay=0.01, base=16)
    rates = {(group["muon"], group["lr"], group["weight_decay"]) for group in groups}
    assert rates == {(False, 0.1, 0.01), (False, 0.025, 0.04), (True, 0.05, 0.02)}


# Several processes


def small_uvit() -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(image_size=4, patch_size=2, channels=1, dim=16, depth=2, heads=2, scaling="ls")


def images(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(rank)), torch.linspace(0, 999, 4)


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        for rank in ranks:
            (model(*images(rank)).square().mean() / len(ranks)).backward()
        optimizer.step()


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = DistributedDataParallel(small_uvit())
    two_steps(model, sl.Muon(sl.muon_groups(model, lr=0.01)), [rank])
    sharded = fully_shard(small_uvit())
    with pytest.raises(sl.UnsupportedModelError, match=r"sharded \(FSDP\)"):
        sl.Muon(sl.muon_groups(sharded, lr=0.01))  # pyright: ignore[reportArgumentType]
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_take_the_steps_of_one_and_sharded_matrices_are_refused(tmp_path: Path):
    mp.spawn(_process, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    alone = small_uvit()
    two_steps(alone, sl.Muon(sl.muon_groups(alone, lr=0.01), products="float32"), [0, 1])
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(first[name], parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)
