"""A table of public models: the long skips that are found, and whether each method scales what the source says.

    python -m research.models_table docs/evidence/models.md

Every model is built small, with random weights, without a network. Packages that are not installed are left out; to
have them all, `pip install --no-deps --target FOLDER` those named below, and put the folder into PYTHONPATH.

The reference knows nothing of the search. For each model somebody read the source and wrote down the line of the merges
and which operand is the skip. `Reference` waits for that line and multiplies that operand: merges run innermost first.
"""

import importlib
import importlib.metadata
import linecache
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import scalelong as sl

KAPPA = 0.7
TEXT = """# Public models

`python -m research.models_table docs/evidence/models.md` makes this table. Every model is built small, with random
weights. For each of them somebody read the source and wrote down the line of its merges and which operand is the
skip; the reference multiplies that operand there, and shares nothing with the search.
{counts}

- skips: how often the line runs in one forward; found: what `find_skips` says.
- cs: the output of `scale_skips_(model, "cs:0.7", inputs)`, which verifies itself as well, against the reference.
- ls, merge_norm: whether the method can be attached. merge_norm leaves merges alone that a norm follows already, and
  refuses additions.
- start: whether `start_skips_(model, "cs", inputs)` can put the constants into the weights, after a norm where there is
  one. No: the merge is an addition, or what reads it cannot take a factor.

"""


@dataclass
class Model:
    package: str
    name: str
    make: Callable[[Any], nn.Module]
    """From the imported module to a network."""
    inputs: Any
    lines: dict[str, int]
    """Text in the line of a merge, and which operand there is the skip."""
    module: str = ""
    """Where the class is, if not in the package itself."""


class Reference(TorchFunctionMode):
    """Multiplies the skips where the named lines run; without factors it counts them."""

    def __init__(self, lines: dict[str, int], factors: list[float] | None = None) -> None:
        super().__init__()
        self.lines, self.factors, self.count = lines, factors, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        operand = self._operand() if name in ("cat", "concat", "add", "__add__", "__iadd__", "add_") else None
        if operand is not None:
            self.count += 1
            if self.factors is not None:
                joined = name in ("cat", "concat")
                parts = list(args[0] if joined else args[:2])
                parts[operand] = parts[operand] * self.factors[-self.count]
                args = (parts, *args[1:]) if joined else (*parts, *args[2:])
        return func(*args, **kwargs)

    def _operand(self) -> int | None:
        frame = sys._getframe(2)
        positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        first, last = positions[0] or frame.f_lineno, positions[1] or frame.f_lineno
        text = "".join(linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1))
        return next((operand for line, operand in self.lines.items() if line in text), None)


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def run(model: nn.Module, inputs: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    while not isinstance(found, torch.Tensor):
        found = found.sample if hasattr(found, "sample") else next(iter(found))
    return found


def lively(model: nn.Module) -> nn.Module:
    """Weights that are zero at the start hide everything."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.detach().any():
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def judge(spec: Model) -> dict[str, str]:
    row = {"package": spec.package, "version": importlib.metadata.version(spec.package), "class": spec.name}
    torch.manual_seed(0)
    model = lively(spec.make(importlib.import_module(spec.module or spec.package.replace("-", "_"))))
    torch.manual_seed(2)
    inputs = spec.inputs()
    with Reference(spec.lines) as counter:
        plain = run(model, inputs)
    row |= {"skips": str(counter.count), "found": "", "cs": "", "ls": "", "merge_norm": "", "start": "", "why": ""}
    try:
        row["found"] = str(len(sl.find_skips(model, inputs)))
        sl.scale_skips_(model, f"cs:{KAPPA}", inputs)
    except sl.NoLongSkipsError:
        row |= {"found": "none", "cs": "right" if counter.count == 0 else "WRONG"}
        return row
    except sl.ScaleLongError as error:
        row |= {"cs": "refused", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
        return row
    found = run(model, inputs)
    sl.unscale_(model)
    with Reference(spec.lines, [KAPPA**i for i in range(counter.count)]):
        wanted = run(model, inputs)
    far = float((found - wanted).abs().max() / wanted.abs().max())
    matters = float((plain - wanted).abs().max() / wanted.abs().max()) > 1e-4
    right = far < 1e-4 and row["found"] == row["skips"] and (matters or counter.count == 1)
    row["cs"] = "right" if right else f"WRONG ({far:.0e})"
    for method in ("ls", "merge_norm"):
        row[method] = attempt(lambda method=method: sl.scale_skips_(model, method, inputs, verify=False))
        if row[method] == "yes":
            sl.unscale_(model)
        if row[method] == "yes" and method == "merge_norm" and all_normed(model, inputs):
            row[method] = "norms are there"
    row["start"] = attempt(lambda: sl.start_skips_(model, "cs", inputs))
    return row


def all_normed(model: nn.Module, inputs: Any) -> bool:
    return all(skip.readers.norm for skip in sl.find_skips(model, inputs))


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except sl.ScaleLongError as error:
        return f"no ({type(error).__name__.removesuffix('Error')})"
    return "yes"


def rows(wanted: str) -> Iterator[dict[str, str]]:
    for spec in [*models(), *segmentation_models()]:
        if not re.search(wanted, f"{spec.package} {spec.name}"):
            continue
        try:
            yield judge(spec)
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            print(f"left out: {spec.package} {spec.name}: {error}", file=sys.stderr)
        except Exception as error:
            print(f"not built: {spec.package} {spec.name}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)


CAT = {"torch.cat([hidden_states, res_hidden_states], dim=1)": 1}
POP = {"torch.cat((x, h.pop()), dim = 1)": 1, "torch.cat((x, r), dim = 1)": 1}
OUT = {"torch.cat((out, skip), dim=1)": 1}


def models() -> list[Model]:
    """Models of diffusers, MONAI, lucidrains and others."""
    two = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    text = {"sample": image(1, 4, 8, 8), "timestep": torch.tensor([3]), "encoder_hidden_states": image(1, 4, 8)}
    found = []

    def diffusers(name: str, config: dict[str, Any], inputs: dict[str, Any], lines: Any = CAT, note: str = "") -> None:
        make = lambda package: getattr(package, name)(**config)  # noqa: E731
        found.append(Model("diffusers", name + note, make, lambda: inputs, lines))

    picture = {"sample": image(1, 3, 16, 16), "timestep": torch.tensor([3])}
    for down in ("DownBlock2D", "AttnDownBlock2D", "ResnetDownsampleBlock2D"):
        up = down.replace("Down", "Up").replace("Downs", "Ups")
        config = {**two, "down_block_types": ("DownBlock2D", down), "up_block_types": (up, "UpBlock2D")}
        diffusers("UNet2DModel", config, picture, CAT, f" ({down})")
    crossed = {**two, "cross_attention_dim": 8, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    for down, up in (
        ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"),
        ("SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D"),
    ):
        config = {**crossed, "down_block_types": ("DownBlock2D", down), "up_block_types": (up, "UpBlock2D")}
        diffusers("UNet2DConditionModel", config, text, CAT, f" ({down})")
    xl = {"transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    xl |= {"projection_class_embeddings_input_dim": 32, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    ids = {"added_cond_kwargs": {"text_embeds": image(1, 8), "time_ids": image(1, 6)}}
    diffusers("UNet2DConditionModel", {**crossed, **xl}, {**text, **ids}, CAT, " (SDXL)")
    video = {**text, "sample": image(1, 4, 2, 8, 8)}
    three = {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "cross_attention_dim": 8}
    three |= {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}
    diffusers("UNet3DConditionModel", {**two, **three}, video)
    moving = {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "cross_attention_dim": 8}
    moving |= {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "motion_num_attention_heads": 2}
    moving |= {n: v for n, v in two.items() if n != "attention_head_dim"} | {"num_attention_heads": 2}
    diffusers("UNetMotionModel", moving, {**video, "sample": image(1, 4, 1, 8, 8)})
    still = {"sample": image(1, 2, 8, 8, 8), "timestep": torch.tensor([3.0]), "encoder_hidden_states": image(1, 1, 8)}
    still |= {"added_time_ids": image(1, 3)}
    spatial = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 8}
    spatial |= {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 12, "num_attention_heads": 2}
    spatial |= {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal")}
    spatial |= {"up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")}
    diffusers("UNetSpatioTemporalConditionModel", spatial, still)
    hunyuan = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 8}
    hunyuan |= {"hidden_size": 16, "num_layers": 8, "cross_attention_dim": 8, "cross_attention_dim_t5": 8}
    hunyuan |= {"pooled_projection_dim": 8, "text_len": 3, "text_len_t5": 4, "activation_fn": "gelu-approximate"}
    said = {"hidden_states": image(1, 4, 8, 8), "timestep": torch.tensor([3.0])}
    said |= {"encoder_hidden_states": image(1, 3, 8), "text_embedding_mask": torch.ones(1, 3)}
    said |= {"encoder_hidden_states_t5": image(1, 4, 8), "text_embedding_mask_t5": torch.ones(1, 4)}
    said |= {"image_meta_size": torch.ones(1, 6), "style": torch.zeros(1, dtype=torch.long)}
    said |= {"image_rotary_emb": (torch.ones(16, 8), torch.zeros(16, 8))}
    diffusers("HunyuanDiT2DModel", hunyuan, said, {"torch.cat([hidden_states, skip], dim=-1)": 1})
    xs = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (4, 8)}
    xs |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 8, "norm_num_groups": 4}
    xs |= {"ctrl_block_out_channels": (2, 4), "ctrl_conditioning_embedding_out_channels": (2, 2)}
    xs |= {"ctrl_max_norm_num_groups": 2, "ctrl_num_attention_heads": 2, "num_attention_heads": 2}
    control = {**text, "sample": image(1, 4, 16, 16), "controlnet_cond": image(1, 3, 32, 32)}
    diffusers("UNetControlNetXSModel", xs, control, {"torch.cat([hidden_states, res_h_base], dim=1)": 1})
    vit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "in_channels": 4}
    caption = {"encoder_hidden_states": image(1, 3, 8), "timestep": torch.tensor([3])}
    pixart = {**vit, "caption_channels": 8, "cross_attention_dim": 16, "norm_num_groups": 4}
    sized = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    diffusers("PixArtTransformer2DModel", pixart, {"hidden_states": image(1, 4, 8, 8), **caption, **sized}, {})
    diffusers("AutoencoderTiny", {}, {"sample": image(1, 3, 16, 16)}, {})
    diffusers("AutoencoderKL", {"block_out_channels": (32,)}, {"sample": image(1, 3, 8, 8)}, {})
    diffusers("VQModel", {"block_out_channels": (32,)}, {"sample": image(1, 3, 8, 8)}, {})
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "in_channels": 4}
    dit |= {"norm_num_groups": 4}
    label = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    diffusers("DiTTransformer2DModel", dit, {"hidden_states": image(1, 4, 8, 8), **label}, {})

    def monai(name: str, inputs: Any, lines: dict[str, int], **config: Any) -> None:
        config = {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, **config}
        dims = f" ({config['spatial_dims']}D)"
        make = lambda nets: getattr(nets, name)(**{k: v for k, v in config.items() if v is not None})  # noqa: E731
        found.append(Model("monai", name + dims, make, inputs, lines, "monai.networks.nets"))

    skip = {"torch.cat([x, y], dim=self.dim)": 0}
    for dims, size in ((1, (32,)), (2, (32, 32)), (3, (16, 16, 16))):
        batch = lambda size=size: (image(2, 3, *size),)  # noqa: E731
        levels = {"spatial_dims": dims, "channels": (4, 8, 12), "strides": (2, 2)}
        monai("UNet", batch, skip, **levels, num_res_units=1)
        monai("AttentionUnet", batch, {"torch.cat((att, fromlower), dim=1)": 0}, **levels)
        if dims > 1:
            large = lambda dims=dims: (image(2, 3, *(32,) * dims),)  # noqa: E731
            flat = {"spatial_dims": dims, "features": (4, 4, 8, 8, 8, 4)}
            monai("BasicUNet", large, {"torch.cat([x_e, x_0], dim=1)": 0}, **flat)
            monai("BasicUNetPlusPlus", large, {"torch.cat([x_e, x_0], dim=1)": 0}, **flat)
            kernels = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}
            monai("DynUNet", batch, OUT, spatial_dims=dims, filters=(4, 8, 12), **kernels)
            add = {"x = up(x) + down_x[i + 1]": 1}
            monai("SegResNet", batch, add, spatial_dims=dims, init_filters=8)
            vae = {"input_image_size": size, "init_filters": 8, "spatial_dims": dims}
            monai("SegResNetVAE", batch, add, **vae)
            swin = {"spatial_dims": dims, "feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}
            wide = lambda dims=dims: (image(1, 3, *(64,) * dims),)  # noqa: E731
            monai("SwinUNETR", wide, OUT, **swin)
            vit = {"img_size": (32,) * dims, "feature_size": 4, "hidden_size": 24, "mlp_dim": 16, "num_heads": 2}
            monai("UNETR", large, OUT, **vit, spatial_dims=dims)
            time = lambda size=size: (image(1, 3, *size), torch.tensor([3]))  # noqa: E731
            steps = {"channels": (4, 8), "attention_levels": (False, True), "num_head_channels": 4}
            monai("DiffusionModelUNet", time, CAT, **steps, spatial_dims=dims, num_res_blocks=1, norm_num_groups=4)
            monai("MedNeXtS", large, {"x = x + enc_outputs[-(i + 1)]": 1}, spatial_dims=dims)
            one = lambda dims=dims: (image(1, 1, *(32,) * dims),)  # noqa: E731
            monai("VNet", one, {"torch.cat((out, skipxdo), 1)": 1}, spatial_dims=dims, in_channels=1)
            ds = {"x = x + x_down[i]": 1, "x += x_down.pop(0)": 1}
            monai("SegResNetDS", large, ds, spatial_dims=dims, init_filters=8, blocks_down=(1, 1, 1))
            monai(
                "ResNet",
                large,
                {},
                block="basic",
                layers=[1, 1, 1, 1],
                block_inplanes=[4, 4, 8, 8],
                spatial_dims=dims,
                n_input_channels=3,
                in_channels=None,
                out_channels=None,
            )
    monai(
        "FlexibleUNet",
        lambda: (image(1, 3, 64, 64),),
        {"torch.cat([x_e, x_0], dim=1)": 0, "torch.cat([x, skip": 1},
        backbone="efficientnet-b0",
        spatial_dims=2,
    )
    monai("AutoEncoder", lambda: (image(2, 3, 16, 16),), {}, channels=(4, 8), strides=(2, 2))
    monai("HighResNet", lambda: (image(2, 3, 16, 16),), {})
    monai("DenseNet", lambda: (image(2, 3, 32, 32),), {}, init_features=8, growth_rate=4, block_config=(2, 2))
    monai(
        "EfficientNetBN",
        lambda: (image(2, 3, 32, 32),),
        {},
        model_name="efficientnet-b0",
        out_channels=None,
        pretrained=False,
    )

    def other(package: str, module: str, name: str, config: Any, inputs: Any, lines: dict[str, int]) -> None:
        make = lambda found: getattr(found, name)(**config)  # noqa: E731
        place = module.rpartition(".")[2]
        found.append(Model(package, name if "." not in module else f"{place}.{name}", make, inputs, lines, module))

    ddpm, time = "denoising-diffusion-pytorch", lambda: (image(2, 3, 16, 16), torch.tensor([1, 5]))
    small = {"dim": 8, "dim_mults": (1, 2), "attn_dim_head": 4, "attn_heads": 2}
    flash = {"dim": 8, "dim_mults": (1, 2)}
    other(ddpm, "denoising_diffusion_pytorch", "Unet", {**small, "flash_attn": False}, time, POP)
    other(ddpm, "denoising_diffusion_pytorch.repaint", "Unet", {**small, "flash_attn": False}, time, POP)
    other(ddpm, "denoising_diffusion_pytorch.guided_diffusion", "Unet", flash, time, POP)
    one = {**flash, "channels": 3}
    other(ddpm, "denoising_diffusion_pytorch", "Unet1D", one, lambda: (image(2, 3, 32), torch.tensor([1, 5])), POP)
    guided = lambda: (image(2, 3, 16, 16), torch.tensor([1, 5]), torch.tensor([0, 1]))  # noqa: E731
    free = {**flash, "num_classes": 4, "cond_drop_prob": 0.0}
    other(ddpm, "denoising_diffusion_pytorch.classifier_free_guidance", "Unet", free, guided, POP)
    karras = {"dim": 8, "dim_max": 16, "num_downsamples": 2, "num_blocks_per_stage": 1, "attn_dim_head": 4}
    noisy = {"image_size": 16, "channels": 3, "attn_res": (8,), "fourier_dim": 8}
    mixed = {"C * torch.cat((a, b), dim = dim)": 1}
    sigma = lambda: {"x": image(2, 3, 16, 16), "time": torch.ones(2)}  # noqa: E731
    other(ddpm, "denoising_diffusion_pytorch.karras_unet", "KarrasUnet", {**karras, **noisy}, sigma, mixed)
    dalle = {"torch.cat((fmap, down_hiddens.pop() * self.skip_connect_scale), dim = 1)": 1, **POP}
    prior = {"dim": 8, "image_embed_dim": 8, "cond_dim": 8, "dim_mults": (1, 2), "channels": 3, "attn_dim_head": 4}
    shown = lambda: {"x": image(1, 3, 16, 16), "time": torch.ones(1), "image_embed": image(1, 8)}  # noqa: E731
    other("dalle2-pytorch", "dalle2_pytorch", "Unet", prior, shown, dalle)
    frames = lambda: (image(1, 3, 2, 16, 16), torch.tensor([3]))  # noqa: E731
    other("video-diffusion-pytorch", "video_diffusion_pytorch", "Unet3D", {**flash, "attn_dim_head": 4}, frames, POP)
    space = {
        "dim": 8,
        "channels": 3,
        "dim_mult": (1, 2),
        "attn_dim_head": 4,
        "attn_heads": 2,
        "self_attns": (False, True),
    }
    space |= {
        "temporal_compression": (False, True),
        "resnet_block_depths": (1, 1),
        "attn_pos_bias": False,
        "condition_on_timestep": False,
    }
    film = lambda: (image(1, 3, 2, 16, 16),)  # noqa: E731
    popped = {"torch.cat((hiddens.pop() * self.skip_scale, x), dim = 1)": 0}
    other("make-a-video-pytorch", "make_a_video_pytorch", "SpaceTimeUnet", space, film, popped)
    nested = {"torch.cat((x, down_hiddens.pop() * self.skip_scale), dim=1)": 1, "torch.cat((x, r), dim = 1)": 1}
    picture1 = lambda: (image(1, 3, 16, 16),)  # noqa: E731
    levels = {
        "dim": 8,
        "channels": 3,
        "dim_mults": (1, 2),
        "nested_unet_depths": (0, 0),
        "consolidate_upsample_fmaps": False,
    }
    levels |= {"num_blocks_per_stage": (1, 1), "num_self_attn_per_stage": (0, 1)}
    other("x-unet", "x_unet", "XUnet", levels, picture1, nested)
    decoding = {"torch.cat((skip_connection, x), dim=CHANNELS_DIMENSION)": 0}
    shallow = {
        "in_channels": 3,
        "out_classes": 2,
        "num_encoding_blocks": 3,
        "out_channels_first_layer": 4,
        "padding": 1,
    }
    padded = lambda *shape: lambda: (image(1, 3, *shape),)  # noqa: E731
    other("unet", "unet", "UNet2D", {**shallow, "normalization": "batch"}, padded(32, 32), decoding)
    other("unet", "unet", "UNet3D", {**shallow, "normalization": "batch"}, padded(16, 16, 16), decoding)
    other("unet", "unet", "UNet1D", shallow, padded(32), decoding)
    stages = {"n_stages": 3, "features_per_stage": (4, 8, 8), "conv_op": nn.Conv2d, "kernel_sizes": 3}
    stages |= {"strides": (1, 2, 2), "num_classes": 2, "n_conv_per_stage_decoder": 1, "input_channels": 3}
    stages |= {"conv_bias": True, "norm_op": nn.InstanceNorm2d, "nonlin": nn.ReLU}
    nnunet = {"torch.cat((x, skips[-(s+2)]), 1)": 1, "torch.cat((x, skips[-(s + 2)]), 1)": 1}
    place = "dynamic_network_architectures.architectures.unet"
    package = "dynamic-network-architectures"
    other(package, place, "PlainConvUNet", {**stages, "n_conv_per_stage": 1}, picture1, nnunet)
    other(package, place, "ResidualEncoderUNet", {**stages, "n_blocks_per_stage": 1}, picture1, nnunet)
    heads = {"n_blocks_per_stage": 1, **{k: v for k, v in stages.items() if k != "n_conv_per_stage_decoder"}}
    other(package, place, "ResidualUNet", {**heads, "n_conv_per_stage_decoder": 1}, picture1, nnunet)
    audio = {"sources": ["a", "b"], "audio_channels": 1, "channels": 4, "depth": 3, "lstm_layers": 0, "resample": False}
    sound = lambda: (image(1, 1, 1024),)  # noqa: E731
    other("demucs", "demucs.demucs", "Demucs", audio, sound, {"x = decode(x + skip)": 1})
    layers = {"torch.cat((x, skip), dim = -1)": 1}
    speech = {"dim": 16, "depth": 4, "dim_head": 8, "heads": 2, "cond_on_time": False, "max_seq_len": 32}
    other("e2-tts-pytorch", "e2_tts_pytorch.e2_tts", "Transformer", speech, lambda: (image(1, 8, 16),), layers)
    unet_skip = {"dim": 16, "depth": 5, "heads": 2, "attn_dim_head": 8, "unet_skips": True}
    unet_cat = {"concatted_skip = cat((skip, x), dim = -1)": 0}
    other("x-transformers", "x_transformers", "Encoder", unet_skip, lambda: (image(1, 8, 16),), unet_cat)
    return found


def segmentation_models() -> list[Model]:
    """Decoders of segmentation_models_pytorch on several encoders."""
    lines = {
        "Unet": {"torch.cat([feature_map, skip_connection], dim=1)": 1},
        "Linknet": {"x = x + skip": 1},
        "MAnet": {"torch.cat([x, skip], dim=1)": 1},
        "FPN": {"x = x + skip": 1},
    }
    encoders = "resnet18 resnet34 vgg11 vgg11_bn mobilenet_v2 densenet121 efficientnet-b0 resnext50_32x4d se_resnet50"
    encoders += " xception inceptionv4 timm-efficientnet-b0 timm-mobilenetv3_small_100 mit_b0 dpn68"
    pairs = [(decoder, encoder) for encoder in encoders.split() for decoder in lines]

    def make(decoder: str, encoder: str) -> Callable[[Any], nn.Module]:
        return lambda smp: getattr(smp, decoder)(encoder, encoder_weights=None, classes=2)

    batch = lambda: (image(2, 3, 64, 64),)  # noqa: E731
    name = "segmentation-models-pytorch"
    return [Model(name, f"{d} ({e})", make(d, e), batch, lines[d]) for d, e in pairs]


def import_torchvision() -> None:
    """Let torchvision be imported next to a torch for which it has no operators. No network here needs them."""
    register = torch.library.register_fake

    def without_torchvision(op: Any, *args: Any, **kwargs: Any) -> Any:
        return (lambda f: f) if str(op).startswith("torchvision::") else register(op, *args, **kwargs)

    torch.library.register_fake = without_torchvision


def main() -> None:
    import_torchvision()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    out, wanted = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    made = []
    for row in rows(wanted):
        made.append(row)
        print(" | ".join(row.values()), flush=True)
    out.write_text(page(made))


def page(made: list[dict[str, str]]) -> str:
    head = list(made[0])
    table = [head, ["---"] * len(head), *(list(row.values()) for row in made)]
    wrong, refused = (sum(word in row["cs"] for row in made) for word in ("WRONG", "refused"))
    none = sum(row["found"] == "none" for row in made)
    right = f"{len(made) - wrong - refused} right ({none} of these have no long skips)"
    counts = f"**{len(made)} models: {right}, {refused} refused by name, {wrong} silently wrong.**"
    return TEXT.format(counts=counts) + "\n".join(f"| {' | '.join(cells)} |" for cells in table) + "\n"


if __name__ == "__main__":
    main()
