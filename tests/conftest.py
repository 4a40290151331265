"""What every test shares: one thread, fixed seeds, and the folder of golden files and data, where there is one."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
os.environ["SCALELONG_PRECISION"] = "fp32"  # in processes that tests start as well: what is faster may change

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The authors' inputs, weights, outputs and gradients."""
    return _shared("golden")


@pytest.fixture(scope="session")
def cifar10() -> Path:
    """Real CIFAR-10 as parquet."""
    return _shared("data/cifar10")


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs the folder shared/{name} beside the repository")
    return folder
