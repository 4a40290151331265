"""Run by torchrun: FOLDER FLAGS. Train as the flags say; then with FSDP2's sharded parameters, once straight through
and once in two goes.

accelerate shards on accelerators only, so the sharding is done here and accelerate leaves the model alone.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scalelong.cli.train import parse
from scalelong.config import CheckpointConfig, HardwareConfig, LoggingConfig, recipe
from scalelong.models import UViT
from scalelong.training import loop, train

unsharded = loop.build_model


def build_sharded(config, shape, **options):
    model = unsharded(config, shape, **options)
    assert isinstance(model, UViT)
    mesh = init_device_mesh("cpu", (2,))
    for block in (*model.encoder, model.middle, *model.decoder):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


config = replace(
    recipe("digits-tiny"),
    model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
    scaling="ls",
    hardware=HardwareConfig(precision="fp32"),
    steps=6,
    batch_size=8,
    checkpoints=CheckpointConfig(save_every=3),
    logging=LoggingConfig(log_every=2, trackers=(), samples=2, sampler_steps=2),
)
folder = Path(sys.argv[1])
train(parse(sys.argv[2:]).train, folder / "calm")
loop.build_model = build_sharded
Accelerator.prepare_model = lambda self, model, *_, **__: model  # pyright: ignore
train(config, folder / "straight")
train(replace(config, steps=3), folder / "twice")
train(config, folder / "twice")
# As the command line does: a process that ends without it may be aborted by its communication threads.
torch.distributed.barrier()
gc.collect()
torch.distributed.destroy_process_group()
