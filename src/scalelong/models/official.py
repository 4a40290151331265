"""Checkpoints of the authors: their argument and parameter names, translated into ours."""

import math
import pickle
import re
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attaching import without_records
from ..config import EARLIER
from ..errors import CannotReadError, InvalidConfigError, ScalingMismatchError
from ..files import NOT_THE_FILE, refusal, require_regular

if TYPE_CHECKING:
    from .uvit import UViT

_ARGUMENTS = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "in_chans": "channels",
    "embed_dim": "dim",
    "depth": "depth",
    "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "mlp_time_embed": "time_mlp",
    "num_classes": "classes",
    "clip_dim": "context_dim",
    "num_clip_token": "context_length",
    "conv": "final_conv",
    "use_checkpoint": "checkpointing",
}
# The defaults of their constructor, where they differ from ours. The text-to-image class has the last two.
_DEFAULTS = {"img_size": 224, "patch_size": 16, "embed_dim": 768, "num_heads": 12}
_TEXT_DEFAULTS = {"clip_dim": 768, "num_clip_token": 77}

_NAMES = [
    (r"^patch_embed\.proj\.", "patch_embedding."),
    (r"^time_embed\.", "time_embedding."),
    (r"^label_emb\.", "class_embedding."),
    (r"^context_embed\.", "context_embedding."),
    (r"^pos_embed$", "position_embedding.weight"),
    (r"^in_blocks\.", "encoder."),
    (r"^mid_block\.", "middle."),
    (r"^out_blocks\.", "decoder."),
    (r"^decoder_pred\.", "to_patches."),
    (r"^final_layer\.", "final_conv."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.attn\.", ".attention."),
    (r"\.norm2\.", ".mlp_norm."),
    (r"\.mlp\.fc1\.", ".mlp.expand."),
    (r"\.mlp\.fc2\.", ".mlp.reduce."),
    (r"\.skip_linear\.", ".merge."),
    (r"^se\.layer1\.", "skip_scaling.networks.0.reduce."),
    (r"^se\.layer2\.", "skip_scaling.networks.0.expand."),
]
_SCALING = "skip_scaling."
_GATE_PER_SKIP = re.compile(r"^se\.(\d+)\.layer([12])\.(.*)$")


def official_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Our constructor's arguments for theirs."""
    ignored = {"norm_layer", "qk_scale", "scalelong", "kappa"} & set(arguments)
    unknown = set(arguments) - set(_ARGUMENTS) - {"skip"}
    if ignored or unknown:
        raise InvalidConfigError(
            f"from_official does not take {', '.join(sorted(ignored | unknown))}; it takes "
            f"{', '.join(_ARGUMENTS)}, and the long skips' scaling as scaling="
        )
    if not arguments.get("skip", True):
        raise InvalidConfigError("skip=False is a network without long skips; UViT always has them")
    text = any(name in arguments for name in _TEXT_DEFAULTS)
    theirs = {**_DEFAULTS, **(_TEXT_DEFAULTS if text else {}), **arguments}
    ours = {_ARGUMENTS[name]: value for name, value in theirs.items() if name in _ARGUMENTS}
    # They write -1 where we write None.
    classes = ours.get("classes")
    ours["classes"] = classes if classes is not None and classes > 0 else None
    return {**EARLIER, **ours}


def official_name(name: str, skips: int) -> str:
    """Our name of one of their parameters. Their gate K = 0 belongs to the innermost skip, ours to the outermost."""
    gate = _GATE_PER_SKIP.match(name)
    if gate:
        layer = "reduce" if gate[2] == "1" else "expand"
        return f"skip_scaling.networks.{skips - 1 - int(gate[1])}.{layer}.{gate[3]}"
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def arguments_of(weights: Mapping[str, Tensor], heads: int | None = None) -> dict[str, Any]:
    """The arguments of the authors' constructor for a file, read off the shapes of its weights.

    The number of heads leaves no trace in them. The authors' networks have heads of 64, which is what is taken unless
    it is said.
    """
    missing = [name for name in ("pos_embed", "patch_embed.proj.weight", "decoder_pred.weight") if name not in weights]
    if missing:
        raise InvalidConfigError(
            f"these are no weights of the authors' U-ViT: {', '.join(missing)} is missing; found "
            f"{', '.join(sorted(weights)[:4])} ... Give a checkpoint of theirs (nnet_ema.pth), or the folder of a run"
        )
    dim, channels, patch, _ = weights["patch_embed.proj.weight"].shape
    classes = len(weights["label_emb.weight"]) if "label_emb.weight" in weights else None
    context = weights["context_embed.weight"].shape[1] if "context_embed.weight" in weights else None
    extra = 1 + (1 if classes else 0) + (_TEXT_DEFAULTS["num_clip_token"] if context else 0)
    patches = weights["pos_embed"].shape[1] - extra
    side = math.isqrt(max(patches, 0))
    if side < 1 or side**2 != patches:
        raise InvalidConfigError(f"these weights are of {patches} patches, which are not those of a square image")
    if heads is None and dim % 64:
        raise InvalidConfigError(f"how many heads does a U-ViT of width {dim} have? Say it: --model-options heads=8")
    blocks = [int(name.split(".")[1]) for name in weights if name.startswith("in_blocks.")]
    arguments = {
        "img_size": side * patch,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": dim,
        "depth": 2 * (max(blocks) + 1),
        "num_heads": heads or dim // 64,
        "mlp_ratio": weights["mid_block.mlp.fc1.weight"].shape[0] / dim,
        "qkv_bias": "mid_block.attn.qkv.bias" in weights,
        "mlp_time_embed": "time_embed.0.weight" in weights,
        "num_classes": classes,
        "conv": "final_layer.weight" in weights,
    }
    arguments |= {"clip_dim": context, "num_clip_token": _TEXT_DEFAULTS["num_clip_token"]} if context else {}
    return arguments


def official_scaling(weights: Mapping[str, Tensor]) -> str:
    """The scaling whose learned gates are in a file. Constants leave no trace in it."""
    if not any(name.startswith("se.") for name in weights):
        return "none"
    return f"ls:shared={'true' if 'se.layer1.weight' in weights else 'false'},start=paper"


def load_official_(model: "UViT", weights: Mapping[str, Tensor] | str | PathLike[str]) -> None:
    """Load the authors' weights. Every one must find its place, and none of ours may be left out."""
    state: Mapping[str, Tensor] = weights if isinstance(weights, Mapping) else read_weights(weights)
    translated = {official_name(name, model.depth // 2): value for name, value in state.items()}
    with without_records():
        expected = model.state_dict()
    if any(name.startswith(_SCALING) for name in translated):
        # Their gates have no offset: at zero it changes nothing.
        if _SCALING + "offsets" in expected:
            translated[_SCALING + "offsets"] = torch.zeros_like(expected[_SCALING + "offsets"])
        _require_same_gates(model, translated, expected)
    else:
        # A file without gates: those of a learnable scaling stay where they start.
        translated.update({name: value for name, value in expected.items() if name.startswith(_SCALING)})
    missing, surplus = sorted(set(expected) - set(translated)), sorted(set(translated) - set(expected))
    if missing or surplus:
        raise ScalingMismatchError(
            f"the file does not fit these arguments: missing {missing[:5]}, not expected {surplus[:5]} "
            f"({len(missing)} and {len(surplus)} in all). Give the arguments of the network that it was saved from"
        )
    wrong = [name for name, value in translated.items() if value.shape != expected[name].shape]
    if wrong:
        name = wrong[0]
        raise ScalingMismatchError(
            f"{len(wrong)} weights have other shapes than these arguments ask for, for example {name}: "
            f"{tuple(translated[name].shape)} in the file, {tuple(expected[name].shape)} expected. Give the "
            f"arguments of its network"
        )
    with without_records():  # the caller says how they were scaled
        model.load_state_dict(translated)


def read_weights(path: str | PathLike[str]) -> dict[str, Tensor]:
    """The state dict of a file of torch or safetensors, read without running code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    damage = (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError)
    try:
        require_regular(path)
        safe = str(path).endswith(".safetensors")
        found = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except (*damage, IndexError, AssertionError, SafetensorError, OSError) as error:
        if isinstance(error, CannotReadError):
            raise
        if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
            raise refusal(error, path, CannotReadError) or error from error
        raise CannotReadError(
            f"{path} is no file of weights, or holds more than weights only, which may be code and is not "
            f"read: download it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CannotReadError(
            f"{path} must hold tensors by name, as `torch.save(model.state_dict(), path)` writes them"
        )
    return found


def _require_same_gates(model: "UViT", translated: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if {name for name in translated if name.startswith(_SCALING)} != {n for n in expected if n.startswith(_SCALING)}:
        shared = _SCALING + "networks.1.reduce.weight" not in translated
        raise ScalingMismatchError(
            f"the file holds learned gates that do not fit scaling={model.skip_scaling.config}; "
            f'pass scaling=LearnableScaling(shared={shared}, start="paper")'
        )
