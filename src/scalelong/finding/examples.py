"""Example inputs: as given, or made up from the configuration of a model of a known family."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ExampleInputsError

ExampleInputs = tuple[Any, ...] | dict[str, Any] | Tensor | None


def example_call(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for one forward, on the device of the model."""
    if example_inputs is None:
        example_inputs = _known_family(model)
    if isinstance(example_inputs, Tensor):
        example_inputs = (example_inputs,)
    if isinstance(example_inputs, dict):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, tuple | list):
        args, kwargs = tuple(example_inputs), {}
    else:
        raise ExampleInputsError(
            f"example_inputs must be a tuple of positional arguments or a dictionary of keyword arguments, "
            f"got {type(example_inputs).__name__}"
        )
    return _placed(model, args, kwargs)


def _placed(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Real inputs for a model on meta, or of fake tensors, become meta or fake as well."""
    from torch._subclasses.fake_tensor import FakeTensor

    weight = next(model.parameters(), next(model.buffers(), None))

    def place(value: Any) -> Any:
        value = without_subclass(value)
        if not isinstance(value, Tensor) or weight is None:
            return value
        if isinstance(weight, FakeTensor) and not isinstance(value, FakeTensor):
            return weight.fake_mode.from_tensor(value)
        return value.to("meta") if weight.is_meta and not value.is_meta else value

    return pytree.tree_map(place, (args, kwargs))


def without_subclass(value: Any) -> Any:
    """The plain tensor in a subclass that only acts on functions, such as MONAI's MetaTensor: the values are the same.

    Subclasses that act on operations (fake, sharded, quantised tensors) are something else, and stay as they are.
    """
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    kind, plain = (getattr(cls, "__torch_dispatch__", None) for cls in (type(value), Tensor))
    if kind is not plain:
        return value
    return value.as_subclass(Tensor)


def _known_family(model: nn.Module) -> dict[str, Any]:
    """Inputs for diffusers' UNets, as small as their number of levels allows."""
    for cls in type(model).__mro__:
        if cls.__name__ in _FAMILIES and cls.__module__.startswith("diffusers."):
            config: Any = model.config
            weight = next(model.parameters())
            levels = len(config.block_out_channels)
            inputs = _FAMILIES[cls.__name__](config, 2 ** max(levels, 3))
            return {name: _like(value, weight) for name, value in inputs.items()}
    signature = inspect.signature(model.forward)
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    example = ", ".join(f"{name}=..." for name in needed)
    raise ExampleInputsError(
        f"the long skips of a {type(model).__name__} are found by running it once, and its inputs are not known. "
        f"Pass example_inputs=(...) or example_inputs=dict({example}) for {type(model).__name__}.forward{signature}; "
        f"one small input is enough"
    )


def _like(value: Any, weight: Tensor) -> Any:
    if isinstance(value, dict):
        return {name: _like(item, weight) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.to(weight.device, weight.dtype if value.is_floating_point() else None)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def _unet_2d(config: Any, size: int) -> dict[str, Any]:
    inputs = {"sample": torch.zeros(1, config.in_channels, size, size), "timestep": torch.tensor([1])}
    if getattr(config, "num_class_embeds", None) or getattr(config, "class_embed_type", None):
        inputs["class_labels"] = torch.tensor([0])
    return inputs


def _unet_2d_condition(config: Any, size: int) -> dict[str, Any]:
    inputs = _unet_2d(config, size)
    projected = getattr(config, "class_embed_type", None) in ("projection", "simple_projection")
    if projected:
        inputs["class_labels"] = torch.zeros(1, config.projection_class_embeddings_input_dim)
    width = config.encoder_hid_dim or _first(config.cross_attention_dim)
    inputs["encoder_hidden_states"] = torch.zeros(1, 4, width)
    if getattr(config, "addition_embed_type", None) == "text_time":
        times = 6
        text = config.projection_class_embeddings_input_dim - times * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": torch.zeros(1, text), "time_ids": torch.zeros(1, times)}
    return inputs


def _unet_3d(config: Any, size: int) -> dict[str, Any]:
    return {
        "sample": torch.zeros(1, config.in_channels, 2, size, size),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.zeros(1, 4, _first(config.cross_attention_dim)),
    }


def _unet_motion(config: Any, size: int) -> dict[str, Any]:
    inputs = _unet_2d_condition(_WithDefaults(config), size)
    # One frame, because versions of diffusers differ in who repeats the text for each frame.
    return {**inputs, "sample": torch.zeros(1, config.in_channels, 1, size, size)}


def _unet_spatio_temporal(config: Any, size: int) -> dict[str, Any]:
    ids = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    return {
        "sample": torch.zeros(1, 2, config.in_channels, size, size),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.zeros(1, 1, _first(config.cross_attention_dim)),
        "added_time_ids": torch.zeros(1, ids),
    }


def _unet_1d(config: Any, size: int) -> dict[str, Any]:
    return {"sample": torch.zeros(1, config.in_channels, 8 * size), "timestep": torch.tensor([1])}


def _kandinsky3(config: Any, size: int) -> dict[str, Any]:
    return {
        "sample": torch.zeros(1, config.in_channels, size, size),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.zeros(1, 4, config.encoder_hid_dim),
        "encoder_attention_mask": torch.ones(1, 4),
    }


def _stable_cascade(config: Any, size: int) -> dict[str, Any]:
    side = size * config.patch_size
    inputs = {
        "sample": torch.zeros(1, config.in_channels, side, side),
        "timestep_ratio": torch.tensor([0.5]),
        "clip_text_pooled": torch.zeros(1, 1, config.clip_text_pooled_in_channels),
    }
    if config.clip_text_in_channels:
        inputs["clip_text"] = torch.zeros(1, 4, config.clip_text_in_channels)
    if config.clip_image_in_channels:
        inputs["clip_img"] = torch.zeros(1, 1, config.clip_image_in_channels)
    return inputs


class _WithDefaults:
    """A configuration whose missing entries are None."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, None)


_FAMILIES = {
    "UNet2DModel": _unet_2d,
    "UNet2DConditionModel": _unet_2d_condition,
    "UNet3DConditionModel": _unet_3d,
    "UNetMotionModel": _unet_motion,
    "UNetSpatioTemporalConditionModel": _unet_spatio_temporal,
    "UNet1DModel": _unet_1d,
    "Kandinsky3UNet": _kandinsky3,
    "StableCascadeUNet": _stable_cascade,
}


# What has to be known about single families of models.

_FREEU = ("s1", "s2", "b1", "b2")


@contextmanager
def without_freeu(model: nn.Module) -> Iterator[None]:
    """diffusers' FreeU filters the skips right before the merge: plan without it, so that the skips are seen."""
    blocks = [m for m in model.modules() if all(isinstance(getattr(m, name, None), int | float) for name in _FREEU)]
    values = [{name: getattr(block, name) for name in _FREEU} for block in blocks]
    try:
        for block in blocks:
            for name in _FREEU:
                setattr(block, name, None)
        yield
    finally:
        for block, before in zip(blocks, values, strict=True):
            for name, value in before.items():
                setattr(block, name, value)
