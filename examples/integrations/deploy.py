"""What works with torch.compile, torch.export, tracing, ONNX and torchao, as a table: differences, or why not.

python examples/integrations/deploy.py                      # aot_eager: the graph is captured, no compiler is needed
python examples/integrations/deploy.py --backend inductor   # compiled code (slow to compile)
"""

import argparse
import copy
import io
import logging
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn

import scalelong as sl
from scalelong.console import show_table

X, T = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([10.0, 500.0])


class Plain(nn.Module):
    """A tensor in, a tensor out, which is what exporters like best."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        found = self.model(x, t)
        return found if isinstance(found, Tensor) else found[0]


def uvit(scaling: str) -> nn.Module:
    torch.manual_seed(0)
    return sl.scale_skips_(sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2), scaling).eval()


def unet(scaling: str) -> nn.Module:
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sl.CancelledScalingWarning)
        return sl.scale_skips_(model, scaling).eval()


def folded(model: nn.Module) -> nn.Module:
    sl.fold_(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "U-ViT, cs": lambda: uvit("cs"),
    "U-ViT, ls": lambda: uvit("ls"),
    "U-ViT, cs folded": lambda: folded(uvit("cs")),
    "diffusers UNet, cs": lambda: unet("cs"),
    "diffusers UNet, ls": lambda: unet("ls"),
    "diffusers UNet, cs behind norms": lambda: unet("cs:behind_norms=true"),
    "the same, folded": lambda: folded(unet("cs:behind_norms=true")),
}


# The ways out. Each gets a model and gives something that can be called as the model can.


def compiled(model: nn.Module, backend: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)  # pyright: ignore[reportReturnType]


def exported(model: nn.Module, _: str) -> Callable[..., Tensor]:
    return torch.export.export(model, (X, T)).module()


def traced(model: nn.Module, _: str) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, (X, T), check_trace=False)  # pyright: ignore[reportReturnType]


def onnx(model: nn.Module, _: str) -> Callable[..., Tensor]:
    import onnxruntime  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (X, T), dynamo=True, verbose=False)
    content = io.BytesIO()
    program.save(content)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    session = onnxruntime.InferenceSession(content.getvalue())
    names = [entry.name for entry in session.get_inputs()]
    return lambda x, t: torch.from_numpy(session.run(None, dict(zip(names, (x.numpy(), t.numpy()), strict=True)))[0])


def quantised(model: nn.Module, _: str) -> Callable[..., Tensor]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore[reportMissingImports]

    quantize_(model, Int8WeightOnlyConfig())
    return model


WAYS: dict[str, tuple[Callable[[nn.Module, str], Callable[..., Tensor]], tuple[str, ...]]] = {
    "torch.compile": (compiled, ()),
    "torch.export": (exported, ()),
    "torch.jit.trace": (traced, ()),
    "ONNX": (onnx, ("onnxscript", "onnxruntime")),
    "torchao int8": (quantised, ("torchao",)),
}


def attempt(way: str, model: nn.Module, backend: str) -> str:
    """The largest relative difference to the model itself; the reason where it fails."""
    function, needed = WAYS[way]
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    plain = Plain(model).eval()
    try:
        with torch.no_grad():
            expected = plain(X, T)
            found = function(copy.deepcopy(plain), backend)(X, T)
    except Exception as error:  # every way has errors of its own, and the table is about them
        return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    return f"{float((found - expected).abs().max() / expected.abs().max()):.0e}"


def main(folder: Any = None, backend: str = "aot_eager", names: Any = tuple(MODELS)) -> dict[str, dict[str, str]]:  # noqa: ARG001
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    return {name: {way: attempt(way, MODELS[name](), backend) for way in WAYS} for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default: %(default)s)")
    table = main(backend=parser.parse_args().backend)
    show_table([{"network": name, **cells} for name, cells in table.items()], left=True)
