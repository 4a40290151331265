"""The scaling in the state dict of its model: one small tensor, `scalelong_scaling`, next to the weights.

    state_dict()             a hook adds the tensor: method, plan, what is folded
    load_state_dict(...)     a hook takes it out again, and compares

So whatever writes weights writes the scaling: torch.save, safetensors, save_pretrained, accelerate, Lightning, FSDP. A
model that is not scaled answers with "unexpected key scalelong_scaling". A scaled one warns if the tensor is missing,
and refuses a different scaling.

The tensor holds the bytes of a compressed JSON text as floating-point numbers from 0 to 255. They survive casts to half
precision and averages of weights, and need no type that some file format or optimiser's average does not know.
"""

import json
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ScalingMismatchError, UnscaledWeightsWarning
from ..files import in_words
from ..finding import STATE, native_plan
from ..scaling import SkipScaling

KEY = "scalelong_scaling"
"""The name of the tensor, after the prefix of the model in the state dict; also an entry of a diffusers config."""
REGISTERED = "skip_scaling"
"""The module of a scaled model that holds the gates."""
LOAD_WITH = "load_with"
"""An entry of a diffusers config, next to the options of the scaling: what loads it."""
FORMAT = 3
COMPENSATED = "_compensated"
"""The attribute of a scaling that holds the skips whose weights were divided (`fold_(inverse=True)`)."""


def describe(host: Any) -> dict[str, Any]:
    """What is written down about the scaling of a model."""
    state = host.__dict__.get(STATE)
    scaling: SkipScaling = host.skip_scaling if state is None else state.scaling
    plan: Any = native_plan(host) if state is None else state.plan
    return {
        "class": class_name(host),
        "format": FORMAT,
        "scaling": scaling.config.to_dict(),
        "plan": plan.to_dict(),
        "folded": [] if state is None else sorted(state.folded),
        "compensated": sorted(vars(scaling).get(COMPENSATED, ())),
    }


def class_name(host: nn.Module) -> str:
    """The name of the model's class, without the class that FSDP2 puts in front of it."""
    return next(cls for cls in type(host).__mro__ if not cls.__module__.startswith("torch.distributed.")).__name__


_ROUND = 512


def encode(description: dict[str, Any]) -> Tensor:
    content = zlib.compress(_text(description).encode(), 9)
    content += bytes(-len(content) % _ROUND)  # so that the tensors of two scalings of one network mostly have one shape
    return torch.tensor([list(content)], dtype=torch.float32, device="cpu")  # PEFT takes vectors for damaged


def _text(description: dict[str, Any]) -> str:
    # A method of somebody's own may have options that JSON does not know. To save weights must not fail for it.
    return json.dumps(description, separators=(",", ":"), default=repr)


def decode_record(tensor: Tensor, name: str = KEY) -> dict[str, Any]:
    """The description, or a ScalingMismatchError that names the tensor."""
    try:
        values = gathered(tensor).detach().cpu().double().round().clamp(0, 255)
        content = bytes(int(value) for value in values.flatten().tolist())
        description = json.loads(zlib.decompressobj().decompress(content))  # which knows where the text ends
    except (ValueError, TypeError, RuntimeError, zlib.error) as error:
        raise ScalingMismatchError(
            f"{name} does not hold a scaling ({in_words(error)}; was it averaged with that of a different "
            f"model?): save it again"
        ) from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else type(description).__name__
        raise ScalingMismatchError(f"{name} has format {found}, and this version reads {FORMAT}: save it again")
    return description


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (FSDP2). All processes take part."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()


# On and off. The two hooks go with copies and pickles of the model, and ask the model that they are called with.


def write_record_(host: nn.Module) -> None:
    """From now on the state dict of the host says how it is scaled."""
    erase_record_(host)
    host.register_state_dict_post_hook(save_record)
    host.register_load_state_dict_pre_hook(load_record)
    _reserve(host)
    config = getattr(host, "register_to_config", None)
    if callable(config) and hasattr(host, "_internal_dict"):  # diffusers
        # diffusers' own from_pretrained ignores the entry, and logs it with the sentence that says what to call.
        config(**{KEY: {**describe(host)["scaling"], LOAD_WITH: "scalelong.from_pretrained(folder)"}})


def erase_record_(host: nn.Module) -> None:
    for module in host.modules():
        module.__dict__.pop(KEY, None)
    for hooks in (host._state_dict_hooks, host._load_state_dict_pre_hooks):
        for number, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (save_record, load_record):
                del hooks[number]
    config: Any = vars(host).get("_internal_dict")
    if isinstance(config, dict) and KEY in config:
        vars(host)["_internal_dict"] = type(config)({name: value for name, value in config.items() if name != KEY})


_SILENT = threading.local()


@contextmanager
def without_records() -> Iterator[None]:
    """State dicts without the tensor, and no warning where it is missing: the scaling is kept elsewhere."""
    before = getattr(_SILENT, "on", False)
    _SILENT.on = True
    try:
        yield
    finally:
        _SILENT.on = before


def save_record(host: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:  # noqa: ARG001
    """A hook that adds the tensor to a state dict."""
    # Loaders that fill a model on meta look for a parameter to each entry, and find none to this one.
    first = next(host.parameters(), None)
    if getattr(_SILENT, "on", False) or (first is not None and first.is_meta):
        return
    description = describe(host)
    state_dict[prefix + KEY] = encode(description)
    for layer, part in _adapter_parts(host):
        # PEFT writes what lies inside its layers, and nothing else.
        _reserve(host.get_submodule(f"{layer}.{part}"))
        state_dict[f"{prefix}{layer}.{part}.{KEY}"] = encode({**description, "layer": layer})


def load_record(host: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook that takes the tensor out of a state dict before the weights are read, and compares."""
    found = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix) and KEY in name}
    state: Any = host.__dict__.get(STATE)
    ours, scaling = json.loads(_text(describe(host))), host.skip_scaling if state is None else state.scaling
    for name, tensor in found.items():
        saved = decode_record(tensor, name)
        require_same_record(saved, ours, type(host).__name__)
        vars(scaling)[COMPENSATED] = set(saved["compensated"])
    gates = f"{prefix}{REGISTERED}."
    own = [name for name, _ in host.named_parameters(prefix.removesuffix(".")) if not name.startswith(gates)]
    # Not the weights of an adapter or of a part of the model.
    are_weights = 2 * sum(name in state_dict for name in own) > len(own)
    if found or not are_weights or getattr(_SILENT, "on", False) or _gets_weights_from_another_process():
        return
    lost = next(scaling.parameters(), None) is not None and not any(name.startswith(gates) for name in state_dict)
    end = (
        ". The learned gates are not in these weights either and keep the values that they had here: call "
        "scalelong.load_scaling_(model, ...) on an unscaled model with the file that has them"
    )
    warnings.warn(
        f"these weights do not say that they were trained with scaled long skips ({prefix}{KEY} is missing), and "
        f"this {type(host).__name__} is scaled: {spelled(ours['scaling'])}. If they are those of a plain model, "
        f"call scalelong.unscale_(model), or go on training with the scaling; scalelong.fold_(model, inverse=True) "
        f"gives them their function back{end if lost else ''}",
        UnscaledWeightsWarning,
        stacklevel=6,
    )


def _gets_weights_from_another_process() -> bool:
    """Where the weights are sent from the first process to the others, these have no tensor to see."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_rank() > 0


def _reserve(module: nn.Module) -> None:
    # torch.distributed.checkpoint and functional_call look an entry of the state dict up in the model.
    module.__dict__[KEY] = torch.empty(0, device="cpu")


def _adapter_parts(host: nn.Module) -> Iterator[tuple[str, str]]:
    """The first layer with adapters of PEFT, and the part of it that holds an adapter: "lora_A.default"."""
    for name, module in host.named_modules():
        if hasattr(module, "base_layer"):
            for layer in getattr(module, "adapter_layer_names", ()):
                adapters = getattr(module, layer, None)
                if isinstance(adapters, nn.ModuleDict) and len(adapters):
                    yield from ((name, f"{layer}.{adapter}") for adapter in adapters)
                    return


# What must be the same.


def require_same_record(saved: dict[str, Any], ours: dict[str, Any], model: str) -> None:
    """Refuse a scaling that is not the model's own."""
    if saved["scaling"] != ours["scaling"]:
        raise ScalingMismatchError(
            f"the weights were saved with the scaling {spelled(saved['scaling'])}, and this {model} has "
            f"{spelled(ours['scaling'])}. Scale it alike: scalelong.unscale_(model), then "
            f"scalelong.load_scaling_(model, ...) with the file or state dict of these weights"
        )
    if saved["folded"] != ours["folded"]:
        raise ScalingMismatchError(
            f"in these weights the coefficients of the long skips {saved['folded'] or 'none'} are folded in, and in "
            f"this {model} those of {ours['folded'] or 'none'}"
        )
    theirs, mine = (_places(description["plan"]) for description in (saved, ours))
    if theirs != mine:
        different = [place for place in theirs if place not in mine] or [place for place in mine if place not in theirs]
        raise ScalingMismatchError(
            f"the weights were saved with {len(theirs)} scaled long skips, and this {model} has {len(mine)}, or others:"
            f" {'; '.join(different[:3])}"
        )


def _places(plan: dict[str, Any]) -> list[str]:
    skips = plan["skips"]
    return [f"long skip {skip['index']} from {skip['producer']} to {skip['consumer']}" for skip in skips]


def spelled(scaling: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in scaling.items() if name != "method")
    return f"{scaling['method']} ({options})" if options else scaling["method"]
