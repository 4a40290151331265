"""As much of torchvision as smp, timm and denoising_diffusion_pytorch touch when they are imported and trained.

torchvision's wheels do not import beside the CPU build of torch that this project is tested with ("operator
torchvision::nms does not exist"). What is tested is those libraries' networks and trainers, none of which use its
operators; resizing and saving pictures is done here in the smallest way that works.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch


class Anything:
    """Stands for classes, functions and enumerations that are named when a module is imported, and never used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (torch.nn.Module,)


class Compose:
    def __init__(self, parts: list[Callable[[Any], Any]]) -> None:
        self.parts = parts

    def __call__(self, value: Any) -> Any:
        for part in self.parts:
            value = part(value)
        return value


class Unchanged(torch.nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, value: Any) -> Any:
        return value


class ToTensor:
    def __call__(self, picture: Any) -> torch.Tensor:
        array = np.array(picture)
        return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1).float() / 255


TRANSFORMS = {"Compose": Compose, "Lambda": lambda function: function, "ToTensor": ToTensor}
TRANSFORMS |= dict.fromkeys(("Resize", "CenterCrop", "RandomHorizontalFlip"), Unchanged)


class Stub(ModuleType):
    __version__ = "0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("transforms", "utils", "models", "datasets", "ops", "io"):
            return import_module(f"{self.__name__}.{name}")
        return TRANSFORMS.get(name) or Anything()


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """For this process: run it in one of its own."""
    sys.meta_path.insert(0, Finder())
