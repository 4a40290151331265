"""One safetensors file whose header says what the weights are."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save

from ..errors import ExportError
from ..files import write_bytes
from ..runs.load import Run
from .about import describe_run


def export_safetensors(run: Run, target: str | Path) -> Path:
    """Load it with `safetensors.torch.load_file` into a model built as the header's `config` says."""
    path = Path(target)
    path = path if path.suffix == ".safetensors" else path / "model.safetensors"
    if path.exists():
        raise ExportError(f"{path} exists already; choose another place with --out")
    tensors, seen = {}, set()
    for name, value in run.model.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        # Tied weights share memory, which the format refuses.
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    # One entry, since several would be written in random order and the same export would not be the same file.
    content = save(tensors, metadata={"scalelong": json.dumps(describe_run(run), sort_keys=True)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise ExportError(f"{path} could not be written: {error}") from error
    return path
