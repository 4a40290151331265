"""Makes the small golden files from the authors' full ones: `python tests/golden/make.py FOLDER_OF_FULL_FILES`.

A full file holds weights, inputs, the output and every gradient of the authors' U-ViT under one of their methods. Here
methods that share weights and inputs share a file, and a gradient is kept as five numbers, its signature: the norm, and
the sums of its entries under four fixed choices of signs. A single wrong entry moves all four sums.

    constant.safetensors      methods none, inv_sqrt2 and cs
    ls_shared.safetensors     one gate for all skips
    ls_per_skip.safetensors   a gate for each skip
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
FILES = {"constant": ("none", "inv_sqrt2", "cs"), "ls_shared": ("ls_shared",), "ls_per_skip": ("ls_per_skip",)}
PROJECTIONS = 4


def signature(name: str, gradient: Tensor) -> Tensor:
    """‖g‖ and Σ ±g_i under four choices of signs, which depend on the name alone: float64 (5,)."""
    flat = gradient.detach().double().flatten()
    return torch.stack([flat.norm(), *(signs(name, number, len(flat)) @ flat for number in range(PROJECTIONS))])


def signs(name: str, number: int, count: int) -> Tensor:
    """±1 from the bits of a hash: the same with every version of everything."""
    content = hashlib.shake_256(f"{name} {number}".encode()).digest((count + 7) // 8)
    bits = [(byte >> place) & 1 for byte in content for place in range(8)]
    return torch.tensor(bits[:count], dtype=torch.float64) * 2 - 1


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def main(folder: Path) -> None:
    for file, methods in FILES.items():
        tensors: dict[str, Tensor] = {}
        about: dict[str, dict[str, str]] = {}
        for method in methods:
            about[method], full = read(folder / f"uvit_{method}.safetensors")
            for name, value in full.items():
                if name.startswith("grad."):
                    tensors[f"{method}.{name}"] = signature(name.removeprefix("grad."), value)
                elif name == "output":
                    tensors[f"{method}.output"] = value
                elif name in tensors:
                    assert torch.equal(tensors[name], value), f"{method} does not share {name}"
                else:
                    tensors[name] = value
        # One entry: several would be written in random order.
        save_file(tensors, HERE / f"{file}.safetensors", metadata={"methods": json.dumps(about, sort_keys=True)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
