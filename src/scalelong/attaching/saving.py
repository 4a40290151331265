"""Save the scaling of a model alone, and load it from wherever it was written.

    save_scaling(model, "scaling.safetensors")     the scaling alone, learned gates included
    load_scaling_(model, "scaling.safetensors")    from that file
    load_scaling_(model, "folder/")                from any folder of weights that hold it
    load_scaling_(model, state_dict)               from a state dict or a checkpoint

`scalelong.attaching.record` puts the scaling into every state dict. Nothing here runs code from a file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ScaleLongError, ScalingMismatchError
from ..files import in_words, parse_json, require_regular, write_bytes
from ..finding import SkipPlan
from ..scaling import as_scaling
from .api import scale_skips_, scaling_of
from .host import host_of, require_scaled
from .record import COMPENSATED, FORMAT, KEY, REGISTERED, class_name, decode_record, describe, gathered

_SAFE = ".safetensors"
_TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin")


def save_scaling(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the scaling of the model, learned gates included, without the model's own weights.

    If the model is sharded (FSDP2), all processes call it, and the first one writes.
    """
    from safetensors.torch import save

    host, scaling = require_scaled(model).model, scaling_of(model)
    description = {**describe(host), "host": {"class": class_name(host)}}
    tensors = {name: gathered(value).detach().cpu().contiguous() for name, value in scaling.state_dict().items()}
    content = save(tensors, metadata={"scalelong": json.dumps(description)})
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        write_bytes(path, content)


def load_scaling_(
    model: nn.Module, source: str | PathLike[str] | Mapping[str, Any], *, prefix: str | None = None
) -> nn.Module:
    """Scale the model as the source says: gates included, the model's own weights untouched. Returns the model.

    The source is a file of `save_scaling`; a state dict or a checkpoint that holds one; a file of weights
    (.safetensors, .pt, .pth, .ckpt, .bin); or a folder of such files, as `save_pretrained`, accelerate or PEFT write.
    If it holds several scaled models, `prefix` says which: what stands before "scalelong_scaling" in its name.
    A model that is not built like the saved one is refused.
    """
    saved = _choose(source, prefix, class_name(host_of(model).model))
    description = saved.description
    model, whole = _part_of_class(model, description["class"]), model
    host = host_of(model)
    plan = SkipPlan.from_dict(description["plan"])
    own = host.plan() if host.is_native else None
    for theirs, ours in zip_longest(plan.sites, plan.sites if own is None else own.sites):
        if theirs != ours:
            raise ScalingMismatchError(
                f"the file scales {len(plan)} long skips, this model has {len(own or plan)}, and they differ (in the "
                f"file, in this model): {theirs}, {ours}; build the model as it was when saved"
            )
    if description["class"] != class_name(host.model):
        raise ScalingMismatchError(
            f"the file scales a {description['class']}, this model is a {class_name(host.model)}: build the model that "
            f"it was saved from"
        )
    config = as_scaling(description["scaling"])
    _compare_tensors(saved.gates, config.build(plan.sites).state_dict())
    scale_skips_(model, config, plan=plan)
    scaling = scaling_of(model)
    scaling.load_state_dict(saved.gates)
    if description["folded"]:
        state = host.detach()
        state.folded |= set(description["folded"])
        host.attach(state)
    vars(scaling)[COMPENSATED] = set(description.get("compensated", ()))
    return whole


def _part_of_class(model: nn.Module, name: str) -> nn.Module:
    """The model itself, or the one part of it that is of the class that was saved: a network in a LightningModule."""
    inner = host_of(model).model
    parts = [module for module in inner.modules() if class_name(module) == name] if class_name(inner) != name else []
    return parts[0] if len(parts) == 1 else model


@dataclass(frozen=True)
class Saved:
    """A scaling that was found in a source."""

    prefix: str
    description: dict[str, Any]
    gates: dict[str, Tensor]


# Where a scaling can be found.


def saved_scalings(source: str | PathLike[str] | Mapping[str, Any]) -> list[Saved]:
    """All scalings in a file, folder or state dict. The same one in several files counts once."""
    if isinstance(source, Mapping):
        return list(_in_mapping(source))
    path = Path(source)
    if not path.is_dir():
        return _in_files([path], strict=True)
    if (path / ".metadata").exists():
        raise ScalingMismatchError(
            f"{path} is a folder of torch.distributed.checkpoint, whose index is a pickle, which could run code. Use "
            f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file) and give the file, or write "
            f"the scaling next to it with save_scaling"
        )
    found = []
    for inside in sorted({file.parent for file in path.rglob("*") if file.suffix in (_SAFE, *_TORCH_FILES)}):
        files = sorted(inside.iterdir())
        here = _in_files([file for file in files if file.suffix == _SAFE], strict=False)
        here = here or [s for file in files if file.suffix in _TORCH_FILES for s in _in_files([file], strict=False)]
        # With the folder in the prefix: a pipeline may hold several models.
        name = "" if inside == path else f"{inside.relative_to(path).as_posix()}/"
        found += [Saved(name + saved.prefix, saved.description, saved.gates) for saved in here]
    return list({saved.prefix: saved for saved in found}.values())


def _choose(source: str | PathLike[str] | Mapping[str, Any], prefix: str | None, kind: str) -> Saved:
    where = "this state dict" if isinstance(source, Mapping) else os.fspath(source)
    # Lightning's average keeps a model twice, under the same names: the first, `state_dict`, is the average.
    found = [*{saved.prefix: saved for saved in reversed(saved_scalings(source))}.values()][::-1]
    if not found:
        raise ScalingMismatchError(
            f"no scaling was found in {where}: looked for a tensor whose name ends in {KEY!r}. Weights of a model that "
            f"was scaled by an earlier version do not hold it: scale_skips_ the model as it was, and go on"
        )
    if prefix is not None:
        found = [saved for saved in found if saved.prefix == prefix] or found
    elif len(found) > 1:
        found = [saved for saved in found if saved.description["class"] == kind] or found
    if len(found) > 1 or (prefix is not None and found[0].prefix != prefix):
        names = ", ".join(f"prefix={saved.prefix!r} ({saved.description['class']})" for saved in found)
        raise ScalingMismatchError(f"{where} holds {len(found)} scaled models; say which one: {names}")
    return found[0]


def _in_mapping(values: Mapping[str, Any]) -> Iterator[Saved]:
    """In a state dict, or in the state dicts of a checkpoint."""
    tensors = {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, Tensor)}
    yield from _in_tensors(list(tensors), tensors.__getitem__)
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _in_mapping(value)


def _in_tensors(names: list[str], read: Callable[[str], Tensor]) -> Iterator[Saved]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        before, key, after = name.rpartition(KEY)
        if key and before[-1:] in ("", ".") and not after:
            description = decode_record(read(name), name)
            # In the file of an adapter of PEFT it stands inside a layer.
            found.setdefault(
                before.rpartition(description["layer"])[0] if "layer" in description else before, description
            )
    for prefix, description in found.items():
        # In a full state dict, PEFT has its copy of the gates under "modules_to_save".
        places = (f"{prefix}{REGISTERED}.modules_to_save.default.", f"{prefix}{REGISTERED}.")
        start = next((place for place in places if any(other.startswith(place) for other in names)), places[-1])
        gates = {other.removeprefix(start): read(other) for other in names if other.startswith(start)}
        yield Saved(prefix, description, gates)


def _in_files(paths: list[Path], strict: bool) -> list[Saved]:
    """In files that belong together. `strict`: a file that cannot be read is an error."""
    from safetensors import SafetensorError

    try:
        for path in paths:
            require_regular(path)
        if paths and paths[0].suffix in _TORCH_FILES:
            content = torch.load(paths[0], map_location="cpu", weights_only=True, mmap=True)
            return list(_in_mapping(content)) if isinstance(content, Mapping) else []
        return _in_safetensors(paths)
    except ScaleLongError:
        raise
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        if not strict:
            return []
        torch_file = paths[0].suffix in _TORCH_FILES
        safe = "cannot be read without running code" if torch_file else "was not written by save_scaling"
        raise ScalingMismatchError(
            f"{paths[0]} {safe}, nor does it hold weights with a scaling ({in_words(error)}): save it again. Weights "
            f"that you trust can be given as a state dict"
        ) from error


def _in_safetensors(paths: list[Path]) -> list[Saved]:
    """Shards of one model: its tensors may lie in any of them."""
    from safetensors import safe_open

    owner: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            description = parse_json(metadata.get("scalelong", "null"))
            if isinstance(description, dict) and "host" in description and "plan" in description:
                return [Saved("", _checked(description, path), {name: file.get_tensor(name) for name in names})]
            owner |= dict.fromkeys(names, path)

    def read(name: str) -> Tensor:
        with safe_open(owner[name], framework="pt") as file:
            return file.get_tensor(name)

    return list(_in_tensors(list(owner), read))


def _checked(description: dict[str, Any], path: Path) -> dict[str, Any]:
    if description.get("format") != FORMAT:
        raise ScalingMismatchError(
            f"{path} has format {description.get('format')}, this version reads {FORMAT}: save it again"
        )
    return description


def _compare_tensors(saved: dict[str, Any], built: dict[str, Any]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in built.items()}
    if ours and not theirs:
        raise ScalingMismatchError(
            f"the scaling has learned gates, and they are not in the file (looked for {REGISTERED}.*). An adapter of "
            f'PEFT keeps them with modules_to_save=["{REGISTERED}"]; without it, load the scaling from the weights of '
            f"the base model"
        )
    if theirs != ours:
        raise ScalingMismatchError(f"the file's tensors {theirs} are not those of its scaling, {ours}: save it again")
