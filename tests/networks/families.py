"""The model families of the battery: how to build a tiny one, what to feed it, and how many long skips it has.

The counts come from the architectures, not from what was found.
"""

import copy
import importlib
import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from scalelong.attaching import scale_skips_, scaling_of
from scalelong.errors import CancelledScalingWarning
from scalelong.finding import Candidate, SkipPlan, candidates, find_skips, select
from scalelong.scaling import MergeNorm, SkipScaling
from scalelong.tracing import record


@dataclass(frozen=True)
class Family:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any] | tuple[Any, ...]]
    """Of a batch size and a resolution (a factor of the smallest one)."""
    count: int
    needs: str = "torch"
    resizable: bool = True
    picklable: bool = True
    """Whether the host alone can be pickled."""


def image(size: int = 16, channels: int = 3) -> Callable[[int, int], tuple[Any, ...]]:
    return lambda batch, factor: (torch.randn(batch, channels, factor * size, factor * size),)


def image_and_time(size: int = 16) -> Callable[[int, int], tuple[Any, ...]]:
    return lambda batch, factor: (torch.randn(batch, 3, factor * size, factor * size), torch.linspace(1, 9, batch))


def tokens(batch: int, factor: int) -> tuple[Any, ...]:
    return torch.randn(batch, 6 * factor, 3), torch.linspace(1, 9, batch)


def _public(package: str, name: str, inputs: Callable[[int, int], Any], count: int, **more: Any) -> Family:
    """A class of a package that may be absent. What is no field of a family is an argument of the class."""
    own = {key: more.pop(key) for key in ("needs", "resizable", "picklable") if key in more}

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(package), name)(**more)

    return Family(make, inputs, count, **{"needs": package.partition(".")[0], **own})


def _diffusers(name: str, inputs: Callable[[int, int], Any], count: int, **config: Any) -> Family:
    return _public("diffusers", name, inputs, count, **config)


def _monai(name: str, inputs: Callable[[int, int], Any], count: int, **config: Any) -> Family:
    common = {"spatial_dims": 2, "in_channels": 3, "out_channels": 2}
    return _public("monai.networks.nets", name, inputs, count, **common | config)


def _uvit() -> nn.Module:
    from scalelong.models import UViT

    return UViT(image_size=16, patch_size=4, dim=16, depth=6, heads=2, interpolate_positions=True)


def _conditioned(text: int, *frames: int, size: int = 8, **more: Any) -> Callable[[int, int], dict[str, Any]]:
    """Image or video, time, text, and what else a network takes: functions of the batch size."""

    def inputs(batch: int, factor: int) -> dict[str, Any]:
        made = {
            "sample": torch.randn(batch, 4, *frames, size * factor, size * factor),
            "timestep": torch.full((batch,), 3),
            "encoder_hidden_states": torch.randn(batch, 4, text),
        }
        return {**made, **{name: value(batch) for name, value in more.items()}}

    return inputs


def _blocks(down: str, up: str) -> dict[str, Any]:
    return {"down_block_types": tuple(down.split()), "up_block_types": tuple(up.split())}


def _image_and_step(kind: float) -> Callable[[int, int], dict[str, Any]]:
    return lambda b, f: {"sample": torch.randn(b, 3, 16 * f, 16 * f), "timestep": torch.full((b,), kind)}


_TINY = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_TEXT = {**_TINY, "cross_attention_dim": 8, "attention_head_dim": 4}
_DDPM = {**_TINY, "sample_size": 16, "attention_head_dim": 4}

DIFFUSERS = {
    "UNet2DModel DDPM": _diffusers(
        "UNet2DModel",
        _image_and_step(3),
        4,
        **_DDPM,
        **_blocks("DownBlock2D AttnDownBlock2D", "AttnUpBlock2D UpBlock2D"),
    ),
    "UNet2DModel NCSN++": _diffusers(
        "UNet2DModel",
        _image_and_step(3.0),
        4,
        picklable=False,
        **{**_DDPM, "block_out_channels": (32, 32), "norm_num_groups": None},
        **_blocks("SkipDownBlock2D AttnSkipDownBlock2D", "AttnSkipUpBlock2D SkipUpBlock2D"),
        time_embedding_type="fourier",
        downsample_padding=1,
    ),
    "UNet2DConditionModel SD": _diffusers(
        "UNet2DConditionModel",
        _conditioned(8),
        4,
        **_TEXT,
        **_blocks("CrossAttnDownBlock2D DownBlock2D", "UpBlock2D CrossAttnUpBlock2D"),
    ),
    "UNet2DConditionModel SDXL": _diffusers(
        "UNet2DConditionModel",
        _conditioned(8, added_cond_kwargs=lambda b: {"text_embeds": torch.randn(b, 8), "time_ids": torch.randn(b, 6)}),
        4,
        **_TEXT,
        **_blocks("DownBlock2D CrossAttnDownBlock2D", "CrossAttnUpBlock2D UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
        use_linear_projection=True,
    ),
    "UNet3DConditionModel": _diffusers(
        "UNet3DConditionModel",
        _conditioned(8, 2),
        4,
        **_TEXT,
        **_blocks("CrossAttnDownBlock3D DownBlock3D", "UpBlock3D CrossAttnUpBlock3D"),
    ),
    "UNetSpatioTemporalConditionModel": _diffusers(
        "UNetSpatioTemporalConditionModel",
        lambda b, f: {
            "sample": torch.randn(b, 2, 4, 8 * f, 8 * f),
            "timestep": torch.full((b,), 3),
            "encoder_hidden_states": torch.randn(b, 1, 8),
            "added_time_ids": torch.randn(b, 3),
        },
        4,
        sample_size=8,
        in_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=8,
        num_attention_heads=(2, 2),
        addition_time_embed_dim=4,
        **_blocks(
            "CrossAttnDownBlockSpatioTemporal DownBlockSpatioTemporal",
            "UpBlockSpatioTemporal CrossAttnUpBlockSpatioTemporal",
        ),
        projection_class_embeddings_input_dim=12,
    ),
    "UNetMotionModel": _diffusers(
        "UNetMotionModel",
        _conditioned(8, 2, encoder_hidden_states=lambda b: torch.randn(2 * b, 4, 8)),
        4,
        **{**_TINY, "cross_attention_dim": 8, "num_attention_heads": 2},
        motion_num_attention_heads=2,
        motion_max_seq_length=4,
        **_blocks("CrossAttnDownBlockMotion DownBlockMotion", "UpBlockMotion CrossAttnUpBlockMotion"),
    ),
    "UNet1DModel": _diffusers(
        "UNet1DModel",
        lambda b, f: {"sample": torch.randn(b, 4, 32 * f), "timestep": torch.tensor([3])},
        3,
        sample_size=16,
        block_out_channels=(32, 32, 64),
        in_channels=4,
        out_channels=4,
        time_embedding_type="fourier",
        use_timestep_embedding=False,
        flip_sin_to_cos=True,
        **_blocks("DownBlock1DNoSkip DownBlock1D AttnDownBlock1D", "AttnUpBlock1D UpBlock1D UpBlock1DNoSkip"),
        mid_block_type="UNetMidBlock1D",
        freq_shift=1.0,
        extra_in_channels=64,
    ),
    "HunyuanDiT2DModel": _diffusers(
        "HunyuanDiT2DModel",
        lambda b, f: {
            "hidden_states": torch.randn(b, 4, 16, 16),
            "timestep": torch.full((b,), 3.0),
            "encoder_hidden_states": torch.randn(b, 4, 8),
            "text_embedding_mask": torch.ones(b, 4),
            "encoder_hidden_states_t5": torch.randn(b, 4, 8),
            "text_embedding_mask_t5": torch.ones(b, 4),
            "image_rotary_emb": (torch.randn(64, 8), torch.randn(64, 8)),
        },
        2,
        resizable=False,
        sample_size=16,
        num_layers=6,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        attention_head_dim=8,
        num_attention_heads=2,
        mlp_ratio=2.0,
        pooled_projection_dim=4,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        text_len=4,
        text_len_t5=4,
        use_style_cond_and_image_meta_size=False,
    ),
    "Kandinsky3UNet": _diffusers(
        "Kandinsky3UNet",
        _conditioned(8, encoder_attention_mask=lambda b: torch.ones(b, 4)),
        3,
        in_channels=4,
        time_embedding_dim=8,
        groups=2,
        attention_head_dim=4,
        layers_per_block=2,
        block_out_channels=(8, 8, 8, 8),
        cross_attention_dim=8,
        encoder_hid_dim=8,
    ),
    "StableCascadeUNet": _diffusers(
        "StableCascadeUNet",
        lambda b, f: {
            "sample": torch.randn(b, 4, 8 * f, 8 * f),
            "timestep_ratio": torch.linspace(0.1, 0.9, b),
            "clip_text_pooled": torch.randn(b, 1, 8),
        },
        2,
        in_channels=4,
        out_channels=4,
        patch_size=1,
        conditioning_dim=8,
        clip_seq=2,
        timestep_ratio_embedding_dim=8,
        clip_text_pooled_in_channels=8,
        switch_level=(True, True),
        block_out_channels=(8, 8, 8),
        num_attention_heads=(2, 2, 2),
        dropout=(0.1,) * 3,
        **dict.fromkeys(("down_num_layers_per_block", "up_num_layers_per_block"), (1, 1, 1)),
        **dict.fromkeys(("down_blocks_repeat_mappers", "up_blocks_repeat_mappers"), (1, 1, 1)),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 3,
        self_attn=(True,) * 3,
    ),
}

_LEVELS = {"channels": (4, 8, 12), "strides": (2, 2)}
MONAI = {
    "MONAI UNet": _monai("UNet", image(), 2, **_LEVELS, num_res_units=1),
    "MONAI BasicUNet": _monai("BasicUNet", image(32), 4, features=(4, 4, 8, 8, 8, 4)),
    "MONAI AttentionUnet": _monai("AttentionUnet", image(), 2, **_LEVELS),
    "MONAI DynUNet": _monai(
        "DynUNet",
        lambda b, f: (torch.randn(b, 3, 8 * f, 8 * f, 8 * f),),
        2,
        spatial_dims=3,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        filters=(4, 8, 12),
        upsample_kernel_size=(2, 2),
    ),
    "MONAI SegResNet": _monai("SegResNet", image(), 2, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    "MONAI SwinUNETR": _monai(
        "SwinUNETR",
        image(64),
        5,
        needs="einops",
        resizable=False,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        window_size=4,
    ),
    "MONAI DiffusionModelUNet": _monai(
        "DiffusionModelUNet",
        lambda b, f: {"x": torch.randn(b, 3, 16 * f, 16 * f), "timesteps": torch.linspace(1, 9, b)},
        4,
        needs="einops",
        channels=(8, 16),
        attention_levels=(False, True),
        num_res_blocks=1,
        out_channels=3,
        num_head_channels=4,
        norm_num_groups=4,
    ),
}

WRITTEN = {
    "hand-written": Family(zoo.HandWritten, image(), 3),
    "zip loop": Family(zoo.ZipLoop, image(), 3),
    "cat then function": Family(zoo.CatThenFunction, image(), 3),
    "free function": Family(zoo.FreeFunction, image(), 3),
    "helper method": Family(zoo.HelperMethod, image(), 3),
    "additive": Family(zoo.Additive, image(), 3),
    "pix2pix": Family(zoo.pix2pix, image(), 3),
    "attention gates": Family(zoo.Attention, image(), 2),
    "cropped": Family(zoo.Cropped, image(32), 2),
    "smp": Family(zoo.EncoderDecoder, image(), 2),
    "popping": Family(zoo.Popping, image(), 2),
    "shared decoder": Family(zoo.SharedDecoder, image(), 3),
    "guided-diffusion": Family(zoo.GuidedDiffusion, image_and_time(), 4),
    "lucidrains": Family(zoo.Lucidrains, image_and_time(), 5),
    "HDiT": Family(zoo.ChannelsLast, image(), 2),
    "U-ViT, authors'": Family(zoo.Tokens, tokens, 3),
    "additive tokens": Family(zoo.AdditiveTokens, tokens, 3),
    "1D": Family(zoo.OneDimensional, lambda b, f: (torch.randn(b, 1, 16 * f),), 4),
    "video": Family(zoo.Video, lambda b, f: (torch.randn(b, 3, 3, 8 * f, 8 * f),), 2),
    "nn.Sequential": Family(lambda: nn.Sequential(zoo.conv(3, 3), zoo.ZipLoop(), zoo.conv(3, 3)), image(), 3),
    "hourglass": Family(zoo.HourglassNet, image(), 3),
    "run twice": Family(zoo.Guided, image(), 3),
    "mixed": Family(zoo.Mixed, image(), 3),
    "nested function": Family(zoo.NestedFunction, image(), 2),
    "functional": Family(zoo.Functional, image(), 3),
    "one concat": Family(zoo.OneConcat, image(), 2),
    "fastai": Family(zoo.FastAI, image(), 2),
    "pyramid": Family(zoo.Pyramid, image(), 2),
    "one level": Family(zoo.Shallow, image(), 1),
}

UVIT = {"UViT": Family(_uvit, image_and_time(), 3)}

FAMILIES = {**DIFFUSERS, **MONAI, **WRITTEN, **UVIT}


def available(family: Family) -> bool:
    return importlib.util.find_spec(family.needs) is not None


def build(family: Family) -> nn.Module:
    """A model in evaluation mode in which every weight matters: zero initialisations are undone."""
    torch.manual_seed(0)
    model = family.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 0 and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return model


def call(model: nn.Module, inputs: dict[str, Any] | tuple[Any, ...]) -> Tensor:
    """The main output tensor."""
    output: Any = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


@cache
def case(name: str) -> "Case":
    """A model of a family with its inputs and plan, made once. Tests copy the model."""
    family = FAMILIES[name]
    if not available(family):
        pytest.skip(f"needs {family.needs}")
    model = build(family)
    torch.manual_seed(1)
    inputs = family.inputs(2, 1)
    with torch.no_grad():
        output = call(model, inputs)
    return Case(name, family, model, inputs, output, find_skips(model, inputs))


@dataclass(frozen=True)
class Case:
    name: str
    family: Family
    model: nn.Module
    inputs: Any
    output: Tensor
    plan: SkipPlan

    def scaled(self, method: Any, *, verify: bool = False) -> nn.Module:
        """A scaled copy. Learned gates are random, so that they depend on the skip."""
        model = copy.deepcopy(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CancelledScalingWarning)
            scale_skips_(model, method, self.inputs if verify else None, plan=self.plan)
        torch.manual_seed(2)
        with torch.no_grad():
            for parameter in scaling_of(model).parameters():
                parameter.normal_(std=0.5)
        return model


@cache
def merges(name: str) -> dict[tuple[str, int], tuple[int, Candidate]]:
    """The merges of the long skips: which operation of which name, and which skip it merges."""
    c = case(name)
    args, kwargs = ((), c.inputs) if isinstance(c.inputs, dict) else (c.inputs, {})
    trace = record(c.model, args, kwargs)
    found = candidates(trace)
    chosen = select(trace, found).chosen
    places = {(one.merge.name, one.merge.ordinal): (i, one) for i, one in enumerate(chosen, start=1)}
    if c.plan.repeats > 1:  # the same network once more has the same skips once more
        for one in found:
            for i, first in enumerate(chosen, start=1):
                if _same_place(one, first):
                    places[one.merge.name, one.merge.ordinal] = (i, one)
    return places


def _same_place(one: Candidate, other: Candidate) -> bool:
    a, b = one.merge, other.merge
    return (a.call.name, a.site.key, a.shapes) == (b.call.name, b.site.key, b.shapes)


class Reference(TorchDispatchMode):
    """Scales the operands of the merges themselves, where torch executes them: no hooks, no rewriting."""

    def __init__(self, case: Case, scaling: SkipScaling) -> None:
        super().__init__()
        self.scaling, self.counts, self.places = scaling, Counter(), merges(case.name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        place = self.places.get((name, self.counts[name]))
        self.counts[name] += 1
        if place is not None:
            index, found = place
            operands = list(args[0]) if name == "cat" else list(args)
            config = self.scaling.config
            if isinstance(config, MergeNorm):
                kappa = (config.kappa or 1.0) ** (index - 1)
                if config.on == "concatenation":
                    axis = args[1]
                    merged = normed(func(*args), axis, config.norm, self._gain(index, found.operand))
                    start = sum(operand.shape[axis] for operand in operands[: found.operand])
                    merged.narrow(axis, start, operands[found.operand].shape[axis]).mul_(kappa)
                    return merged
                axis = args[1] if name == "cat" else self.scaling.sites[index - 1].channel_axis
                gains = self._gains(index)
                if config.on == "both":
                    operands[found.operand] = normed(operands[found.operand], axis, config.norm, gains.get("skip"))
                operands[found.operand] = operands[found.operand] * kappa
                main = normed(operands[found.main], axis, config.norm, gains.get("main"))
                operands[found.main] = operands[found.main].copy_(main) if name.endswith("_") else main
            else:
                operands[found.operand] = self.scaling.scale(operands[found.operand], index)
                constants = self.scaling.constants(index)
                if constants is not None and constants.main != 1.0:
                    operands[found.main].mul_(constants.main)
            args = (operands, *args[1:]) if name == "cat" else tuple(operands)
        return func(*args, **(kwargs or {}))

    def _gains(self, index: int) -> dict[str, Tensor]:
        found = {name: value for name, value in self.scaling.named_parameters() if name.endswith(f".{index}")}
        return {name.partition("_")[0]: value for name, value in found.items()}

    def _gain(self, index: int, operand: int) -> Tensor | None:
        gains = self._gains(index)
        return torch.cat([gains["main"], gains["skip"]][:: 1 if operand else -1]) if gains else None


def normed(x: Tensor, axis: int, norm: str, gain: Tensor | None) -> Tensor:
    """By torch's own functions."""
    moved = x.movedim(axis, -1)
    shape = (moved.shape[-1],)
    result = F.layer_norm(moved, shape, gain) if norm == "layer" else F.rms_norm(moved, shape, gain, eps=1e-5)
    return result.movedim(-1, axis).contiguous()


def reference(case: Case, scaling: SkipScaling) -> Tensor:
    with torch.no_grad(), Reference(case, scaling):
        return call(case.model, case.inputs)
