"""Run by torchrun: FOLDER FLAGS. Train as the flags say; then with FSDP2's sharded parameters, once straight through
and once in two goes.

accelerate turns FSDP2 on where there are GPUs. Here it is told to, and its own `prepare` shards the network.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from scalelong.cli.train import parse
from scalelong.config import CheckpointConfig, HardwareConfig, LoggingConfig, recipe
from scalelong.training import train

CONFIG = replace(
    recipe("digits-tiny"),
    model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
    scaling="ls",
    hardware=HardwareConfig(precision="fp32", accumulation=2),
    steps=6,
    batch_size=8,
    checkpoints=CheckpointConfig(save_every=3),
    logging=LoggingConfig(log_every=2, trackers=(), samples=2, sampler_steps=2),
)
plain = Accelerator.__init__


def sharding(self: Accelerator, *arguments: Any, **options: Any) -> None:
    plain(self, *arguments, **options)
    self.state.distributed_type = DistributedType.FSDP
    self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )


def require_shards(state: Any) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in state.bare.parameters())


def main(folder: Path, flags: list[str]) -> None:
    train(parse(flags).train, folder / "calm")
    Accelerator.__init__ = sharding
    train(CONFIG, folder / "straight", hooks=[require_shards])
    train(replace(CONFIG, steps=3), folder / "twice")
    train(CONFIG, folder / "twice")
    # As the command line does: a process that ends without it may be aborted by its communication threads.
    torch.distributed.barrier()
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
