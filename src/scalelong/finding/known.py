"""Knowledge about some models: wrappers around a model, models that scale themselves, inputs of known families."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ExampleInputsError
from ..scaling import Constants, SkipScaling, SkipSite
from .plan import Attachment, LongSkip, Places, PlannedMerge, SkipPlan

ExampleInputs = tuple[Any, ...] | dict[str, Any] | Tensor | None

STATE = "_scalelong"
"""The attribute of a scaled model that holds what was attached to it."""

CHOICES: dict[str, tuple[str | None, str | None]] = {
    # The adapter and the base network exchange features at every level; the base network's decoder has the skips
    # (diffusers, models/controlnets/controlnet_xs.py).
    "UNetControlNetXSModel": ("up_blocks.*", "add"),
    # The blocks of the decoder all read the embedding next to the U of the encoder (github.com/sail-sg/MDT).
    "MDTv2": ("en_outblocks.*", None),
}
"""`include` and `exclude` for public models whose forward leaves a choice, by the name of the class."""


@runtime_checkable
class SkipHost(Protocol):
    """A model that scales its long skips itself."""

    skip_scaling: SkipScaling

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        ...

    def fold_skip(self, index: int, factors: Constants) -> None:
        """Bake the factors of merge i into the weights of the layer after it."""
        ...


_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    **dict.fromkeys(("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel"), "module"),
}


def unwrap(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, DDP, FSDP, weight averaging and adapters."""
    while isinstance(model, nn.Module):
        name = _WRAPPERS.get(type(model).__name__) if type(model).__module__.startswith("torch.") else None
        inner: Any = getattr(model, name) if name else None
        if inner is None and callable(base := getattr(model, "get_base_model", None)):  # PEFT
            inner = base()
        if inner is model or not isinstance(inner, nn.Module):
            break
        model = inner
    if isinstance(model, nn.Module) and not isinstance(model, SkipHost):
        inside = [module for module in model.modules() if isinstance(module, SkipHost)]
        return inside[0] if len(inside) == 1 else model
    return model


def native_plan(model: Any) -> SkipPlan | None:
    """The plan of a model that scales its skips itself; None for other models."""
    if not isinstance(model, SkipHost):
        return None
    sites = model.skip_sites()
    named = all(isinstance(getattr(model, side, None), nn.ModuleList) for side in ("encoder", "decoder"))
    skips = []
    for site in sites:
        decoder = f"decoder.{len(sites) - site.index}" if named else ""
        skip = LongSkip(
            index=site.index,
            producer=f"encoder.{site.index - 1}" if named else "",
            consumer=decoder,
            shape=(1, site.tokens, site.channels) if site.tokens else (1, site.channels),
            site=site,
            merge=PlannedMerge(kind="cat" if site.main_channels is not None else "add", location=type(model).__name__),
            places=Places(skip=Attachment(kind="native", module=decoder, axis=site.channel_axis)),
        )
        skips.append(skip)
    return SkipPlan(type(model).__name__, tuple(skips))


# Example inputs


def example_call(model: nn.Module, example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for one forward, on the device of the model.

    Real inputs for a model on meta, or of fake tensors, become meta or fake as well.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if example_inputs is None:
        example_inputs = _inputs_of_family(model)
    if isinstance(example_inputs, Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, tuple | list | dict):
        raise ExampleInputsError(
            f"example_inputs must be a tuple of positional arguments or a dictionary of keyword arguments, "
            f"got {type(example_inputs).__name__}"
        )
    weight = next(model.parameters(), next(model.buffers(), None))

    def place(value: Any) -> Any:
        value = without_subclass(value)
        if not isinstance(value, Tensor) or weight is None:
            return value
        if isinstance(weight, FakeTensor) and not isinstance(value, FakeTensor):
            return weight.fake_mode.from_tensor(value)
        return value.to("meta") if weight.is_meta and not value.is_meta else value

    by_name = isinstance(example_inputs, dict)
    args, kwargs = ((), example_inputs) if by_name else (tuple(example_inputs), {})
    return pytree.tree_map(place, (args, kwargs))


def without_subclass(value: Any) -> Any:
    """The plain tensor in a subclass that only acts on functions, such as MONAI's MetaTensor: the values are the same.

    Subclasses that act on operations (fake, sharded, quantised tensors) stay as they are.
    """
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    kind, plain = (getattr(cls, "__torch_dispatch__", None) for cls in (type(value), Tensor))
    return value.as_subclass(Tensor) if kind is plain else value


def _inputs_of_family(model: nn.Module) -> dict[str, Any]:
    """Inputs for diffusers' UNets."""
    for cls in type(model).__mro__:
        if cls.__name__ in _FAMILIES and cls.__module__.startswith("diffusers."):
            weight = next(model.parameters())
            leaves, structure = pytree.tree_flatten(_FAMILIES[cls.__name__](_Config(model.config)))
            placed = [leaf.to(weight.device, weight.dtype if leaf.is_floating_point() else None) for leaf in leaves]
            return pytree.tree_unflatten(placed, structure)
    signature = inspect.signature(model.forward)
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    example = ", ".join(f"{name}=..." for name in needed)
    raise ExampleInputsError(
        f"the long skips of a {type(model).__name__} are found by running it once, and its inputs are not known. "
        f"Pass example_inputs=(...) or example_inputs=dict({example}) for {type(model).__name__}.forward{signature}; "
        f"one small input is enough"
    )


class _Config:
    """A configuration of diffusers, whose missing entries are None, and the inputs that several families share."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, None)

    @property
    def size(self) -> int:
        """Height and width: as small as the number of levels allows."""
        return 2 ** max(len(self.block_out_channels), 3)

    def image(self, *frames: int, **others: Any) -> dict[str, Any]:
        sample = torch.zeros(1, self.in_channels, *frames, self.size, self.size)
        return {"sample": sample, "timestep": torch.tensor([1]), **others}

    def text(self, length: int = 4) -> dict[str, Tensor]:
        width = self.cross_attention_dim
        width = self.encoder_hid_dim or (width[0] if isinstance(width, tuple | list) else width)
        return {"encoder_hidden_states": torch.zeros(1, length, width)}

    def conditions(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if self.class_embed_type in ("projection", "simple_projection"):
            inputs["class_labels"] = torch.zeros(1, self.projection_class_embeddings_input_dim)
        elif self.num_class_embeds or self.class_embed_type:
            inputs["class_labels"] = torch.tensor([0])
        if self.addition_embed_type == "text_time":
            times = 6
            text = self.projection_class_embeddings_input_dim - times * self.addition_time_embed_dim
            inputs["added_cond_kwargs"] = {"text_embeds": torch.zeros(1, text), "time_ids": torch.zeros(1, times)}
        return inputs


def _spatio_temporal(config: Any) -> dict[str, Any]:
    ids = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    sample = torch.zeros(1, 2, config.in_channels, config.size, config.size)  # frames before channels
    return {**config.image(), **config.text(1), "sample": sample, "added_time_ids": torch.zeros(1, ids)}


def _stable_cascade(config: Any) -> dict[str, Any]:
    side = config.size * config.patch_size
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


_FAMILIES: dict[str, Any] = {
    "UNet2DModel": lambda c: c.image(**c.conditions()),
    "UNet2DConditionModel": lambda c: c.image(**c.text(), **c.conditions()),
    "UNet3DConditionModel": lambda c: c.image(2, **c.text()),
    # One frame, because versions of diffusers differ in whether the caller repeats the text for each frame.
    "UNetMotionModel": lambda c: c.image(1, **c.text(), **c.conditions()),
    "UNetSpatioTemporalConditionModel": _spatio_temporal,
    "UNet1DModel": lambda c: c.image(sample=torch.zeros(1, c.in_channels, 8 * c.size)),
    "Kandinsky3UNet": lambda c: c.image(**c.text(), encoder_attention_mask=torch.ones(1, 4)),
    "StableCascadeUNet": _stable_cascade,
}


@contextmanager
def without_freeu(model: nn.Module) -> Iterator[None]:
    """diffusers' FreeU filters the skips right before the merge: plan without it, so that the skips are seen."""
    names = ("s1", "s2", "b1", "b2")
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    for module in model.modules():
        values = {name: getattr(module, name, None) for name in names}
        if all(isinstance(value, int | float) for value in values.values()):
            before.append((module, values))
    try:
        for block, values in before:
            vars(block).update(dict.fromkeys(values))
        yield
    finally:
        for block, values in before:
            vars(block).update(values)
