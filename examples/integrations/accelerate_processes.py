"""accelerate with a scaled network: save_state and load_state in two processes on a CPU (DDP, gloo).

python examples/integrations/accelerate_processes.py FOLDER           # starts its two processes itself
torchrun --nproc-per-node 2 examples/integrations/accelerate_processes.py FOLDER
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator

import scalelong as sl
from scalelong.stability import AccelerateMonitor


def make() -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2)


def prepared(scaling_from: Path | None = None) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = make()
    if scaling_from is None:
        sl.scale_skips_(model, "ls")  # before prepare: the gates are wrapped and optimised with the rest
    else:
        sl.load_scaling_(model, scaling_from)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer


def steps(accelerator: Accelerator, model: Any, optimizer: Any, numbers: range) -> None:
    monitor = AccelerateMonitor(accelerator, model, every=2)
    monitor.begin_at(numbers.start)
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
        x, t = torch.randn(2, 1, 8, 8, generator=generator), 999 * torch.rand(2, generator=generator)
        loss = (model(x, t) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()


def work(folder: Path) -> dict[str, float]:
    """In every process: four steps; two steps, a checkpoint, and two more in objects that were made anew."""
    _, whole, _ = run = prepared()
    steps(*run, range(4))
    expected = _parameters(whole)
    run = prepared()
    steps(*run, range(2))
    run[0].save_state(str(folder / "state"))
    run[0].wait_for_everyone()
    run = prepared(scaling_from=folder / "state")
    run[0].load_state(str(folder / "state"))
    steps(*run, range(2, 4))
    found = _parameters(run[1])
    worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    return {
        "largest difference after a resume": worst,
        "gates": float(sum("skip_scaling" in name for name in found)),
        "sum of all parameters": float(sum(value.double().sum() for value in found.values())),
    }


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}


def _process(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = work(Path(folder))
    torch.save(found, Path(folder) / f"found-{rank}.pt")
    torch.distributed.destroy_process_group()


def main(folder: str | Path) -> dict[str, float]:
    from torch.distributed.elastic.utils.distributed import get_free_port

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    mp.spawn(_process, (str(place), get_free_port()), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (torch.load(place / f"found-{rank}.pt") for rank in (0, 1))
    return {**first, "processes agree": float(first == second)}


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/accelerate")
    if "RANK" in os.environ:  # under torchrun or `accelerate launch`
        place.mkdir(parents=True, exist_ok=True)
        print(work(place))
    else:
        for name, value in main(place).items():
            print(f"{name}: {value:g}")
