"""Weights that exist already, as the start of a new run: `scalelong train IMAGES --from WEIGHTS`.

    a run folder          its averaged weights, with its network, objective, condition and optimiser
    a diffusers folder    a UNet2DModel or UNet2DConditionModel, alone or in a pipeline, in safetensors
    nnet_ema.pth          a checkpoint of U-ViT's authors; the arguments of its network are read off its shapes

`adopt_weights` makes the configuration of the new run: what the weights decide is taken from them, and a flag that says
otherwise is refused. `load_start_` puts the weights into the network. Another scaling than theirs is attached so that
the network computes what it did: constants are divided out of the weights next to the merges (`fold_(inverse=True)`),
and the outputs before and after are compared. Position embeddings are resized to other images, class embeddings
extended by name; other channels are refused. No code of the weights' folder is run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attaching import coefficients, fold_, is_scaled, scale_skips_, without_records
from ..config import TrainConfig, flatten, load_config, to_dict, with_values
from ..diffusion import diffusers
from ..errors import CannotReadError, InvalidConfigError, require
from ..files import in_words, read_json
from ..models import Denoiser, PositionEmbedding, UViT, arguments_of, official_scaling, read_weights
from ..noise import SCHEDULES, NoiseProcess
from ..scaling import Constants, as_scaling
from .folder import CONFIG, RunFolder, require_no_links
from .load import load_run
from .model import DataShape, example_forward, logger, require_trust

EMBEDDING = "class_embedding.weight"
"""In U-ViT and in diffusers' UNets alike."""
TOLERANCE = 1e-5
"""Largest change of the outputs, relative to their size, that attaching a scaling may cause."""


@dataclass(frozen=True)
class Origin:
    """Weights, the network that they belong to, and what they decide about a run that begins with them."""

    path: Path
    kind: Literal["run", "diffusers", "authors"]
    shape: DataShape
    values: dict[str, Any]
    """By dotted name of the configuration."""
    preferred: dict[str, Any] = field(default_factory=dict)
    """The same, but flags may say otherwise."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model."""

    def network(self, trust: bool = False) -> nn.Module:
        """The network with its weights and its own scaling, in eval mode and float32."""
        if self.kind == "run":
            return load_run(self.path, trust=trust).model
        if self.kind == "authors":
            return _official(_tensors(self.path), self.options.get("heads")).eval()
        kind = _diffusers_class(self.path)
        try:
            found = kind.from_pretrained(
                self.path, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False
            )
        except Exception as error:  # its configuration may say anything, and its weights may be damaged
            what = f"`start_from` {self.path}: diffusers cannot load this {kind.__name__} ({in_words(error)[:300]})"
            raise InvalidConfigError(f"{what}: check the folder, or download it again") from error
        return found.float().eval()


def read_origin(path: str | PathLike[str], options: Mapping[str, Any] | None = None, trust: bool = False) -> Origin:
    """The weights at a path. Options of the model are needed where weights do not tell: heads of the authors' U-ViT."""
    place = Path(path).expanduser()
    if (place / CONFIG).is_file():
        return _of_run(place, trust)
    if place.is_dir():
        return _of_diffusers(place)
    if place.is_file():
        return _of_authors(place, dict(options or {}))
    raise InvalidConfigError(
        f"`start_from` {place} is not there: give a run folder, a folder of diffusers that you have downloaded, or a "
        f"checkpoint of U-ViT's authors (nnet_ema.pth)"
    )


def _of_run(path: Path, trust: bool) -> Origin:
    require_no_links(path)
    config = load_config(path / CONFIG)
    require_trust(config, path / CONFIG, trust)
    fixed = ["model", "diffusion.schedule", "diffusion.prediction", "diffusion.condition", "images.autoencoder"]
    fixed += ["diffusion.condition_dropout"] if config.diffusion.condition != "none" else []
    fixed += ["text.text_encoder", "text.text_length", "text.text_dim"] if config.diffusion.condition == "text" else []
    liked = ("scaling", "batch_size", "optimizer.lr", "optimizer.betas", "optimizer.weight_decay", "optimizer.clip")
    flat, shape = flatten(to_dict(config)), RunFolder(path).shape()
    square = shape.height if shape.height == shape.width else None
    preferred = {name: flat[name] for name in liked}
    preferred["images.size"] = square if config.images.autoencoder is None else config.images.size
    return Origin(path, "run", shape, {name: flat[name] for name in fixed}, preferred, dict(config.model_options))


# Folders of diffusers


def _of_diffusers(place: Path) -> Origin:
    inner = place / "unet" if (place / "model_index.json").is_file() else place
    absent = f"`start_from` {place}: there is neither a run ({CONFIG}) nor a UNet of diffusers (config.json) in it"
    require((inner / "config.json").is_file(), absent)
    kind, described = _diffusers_class(inner), _json(inner / "config.json")

    def whole(name: str, value: Any) -> int:
        fits = type(value) is int and 0 < value < 2**20
        what = f"{name} in its config.json must be a whole number above 0, got {str(value)[:60]!r}"
        require(fits, f"`start_from` {inner}: {what}")
        return value

    size = described.get("sample_size") or 64
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    height, width = (whole("sample_size", side) for side in sides)
    channels = whole("in_channels", described.get("in_channels", 3))
    classes = whole("num_class_embeds", described.get("num_class_embeds") or 1)
    classes = classes if described.get("num_class_embeds") is not None else None
    alone = described.get("out_channels", channels) == channels
    require(alone, f"`start_from` {place}: its UNet also predicts variances, which no objective here does")
    values: dict[str, Any] = {"model": str((inner / "config.json").resolve())}
    if kind.__name__ == "UNet2DConditionModel":
        values |= {"diffusion.condition": "text", "text.text_dim": described.get("cross_attention_dim")}
    else:
        values |= {"diffusion.condition": "class" if classes else "none"}
    preferred: dict[str, Any] = {"scaling": "none"}
    if (place / "vae").is_dir() and inner != place:
        values |= {"images.autoencoder": str(place.resolve())}
    else:
        preferred |= {"images.size": height}
    settings = place / "scheduler" / "scheduler_config.json"
    if inner != place and settings.is_file():
        values |= _objective(settings)
    names = None if not classes else tuple(f"class {i} of {place.name}" for i in range(classes))
    return Origin(inner, "diffusers", DataShape(channels, height, width, names), values, preferred)


def _diffusers_class(folder: Path) -> Any:
    name = _json(folder / "config.json").get("_class_name")
    if name not in ("UNet2DModel", "UNet2DConditionModel"):
        raise InvalidConfigError(
            f"`start_from` {folder}: it holds a {name}; UNet2DModel and UNet2DConditionModel can be trained on. Of a "
            f"U-ViT that was exported, give the run folder instead"
        )
    return getattr(diffusers(), name)


def _json(path: Path) -> dict[str, Any]:
    found = read_json(path)
    require(isinstance(found, dict), f"{path} must hold a JSON object, as diffusers writes it")
    return found


def _objective(path: Path) -> dict[str, Any]:
    """Our names of a scheduler's noise and prediction. One that we do not have is refused."""
    scheduler = _json(path)
    names = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}
    prediction = names.get(str(scheduler.get("prediction_type", "epsilon")))
    betas = None
    if scheduler.get("num_train_timesteps", 1000) == 1000:  # all of ours have as many
        with suppress(Exception):  # what others wrote may be anything
            betas = diffusers().DDPMScheduler.from_config(scheduler).betas.float()
    for schedule in SCHEDULES:
        process = NoiseProcess(schedule)  # pyright: ignore[reportArgumentType]
        if betas is None or prediction is None or not process.is_diffusion:
            continue
        known = process.betas.float()
        if known.shape == betas.shape and torch.allclose(betas, known, rtol=1e-3, atol=1e-7):
            return {"diffusion.schedule": schedule, "diffusion.prediction": prediction}
    ours = f"{', '.join(SCHEDULES)}; {', '.join(names)}"
    raise InvalidConfigError(f"{path} has a noise schedule or a prediction that is not one of ours ({ours})")


# Checkpoints of the authors


def _of_authors(path: Path, options: dict[str, Any]) -> Origin:
    weights = _tensors(path)
    model = _official(weights, options.get("heads"))
    arguments = model.arguments()
    size = model.image_size
    condition = "class" if model.classes else "text" if model.context_dim else "none"
    values: dict[str, Any] = {"model": "uvit", "diffusion.condition": condition}
    if condition == "text":
        values |= {"text.text_dim": model.context_dim, "text.text_length": model.context_length}
    ours = ("patch_size", "dim", "depth", "heads", "mlp_ratio", "qkv_bias", "time_mlp", "final_conv")
    known = {name: arguments[name] for name in ours}
    preferred: dict[str, Any] = {"scaling": official_scaling(weights)}
    preferred |= {"images.size": size[0]} if model.channels in (1, 3) else {}
    names = None if not model.classes else tuple(f"class {i} of {path.name}" for i in range(model.classes))
    return Origin(path, "authors", DataShape(model.channels, size[0], size[1], names), values, preferred, known)


def _official(weights: dict[str, Tensor], heads: int | None) -> UViT:
    return UViT.from_official(weights, scaling=official_scaling(weights), **arguments_of(weights, heads))


def _tensors(path: Path) -> dict[str, Tensor]:
    """Weights alone: nothing in the file is run."""
    try:
        return read_weights(path)
    except CannotReadError as error:
        raise InvalidConfigError(
            f"`start_from` {path}: no weights can be read without running code: {error}"
        ) from error


# The configuration of the new run


def adopt_weights(config: TrainConfig, given: Collection[str] = (), trust: bool = False) -> TrainConfig:
    """The configuration with all that the weights of `config.start_from` decide. `given` are fields that a user set:
    where they contradict the weights, they are refused."""
    assert config.start_from is not None
    origin = read_origin(config.start_from, config.model_options, trust)
    values, now = dict(origin.values), flatten(to_dict(config))
    if values.get("images.autoencoder") is None and origin.shape.channels in (1, 3):
        values["images.channels"] = origin.shape.channels
    apart = f"does not go with the weights of {config.start_from}, which were made for"
    for path, value in values.items():
        name = path.rpartition(".")[2]
        agrees = name not in given or now[path] == value
        require(agrees, f"`{name}` {now[path]} {apart} {value!r}: leave it out, or `start_from`")
    for name, value in config.model_options.items():
        known = origin.options.get(name, value)
        require(known == value, f"`model_options` {name}={value} {apart} {name}={known}: leave it out, or `start_from`")
    values |= {p: v for p, v in origin.preferred.items() if p.rpartition(".")[2] not in given and v is not None}
    return replace(with_values(config, values), model_options={**origin.options, **config.model_options})


# The weights, in the network of the new run


def load_start_(model: nn.Module, config: TrainConfig, shape: DataShape) -> None:
    """Put the weights of `config.start_from` into the network that `build_model(config, shape)` made."""
    assert config.start_from is not None
    # The configuration names the same code as the run that the weights come from, and was agreed to with it.
    origin = read_origin(config.start_from, config.model_options, trust=True)
    theirs, ours = origin.shape.channels, shape.channels
    what = f"the weights of {config.start_from} were made for {theirs} channels, and {config.data} has {ours}"
    require(theirs == ours, f"{what}: convert the images with `channels` {theirs}")
    network = origin.network(trust=True)
    network = _scaled_like(network, config, origin)
    with without_records():
        weights, wanted = dict(network.state_dict()), model.state_dict()
    remarks = _fit_classes(weights, wanted, config, origin.shape.classes, shape.classes)
    remarks += _fit_positions(weights, network, model)
    wrong = [name for name in wanted if name not in weights or weights[name].shape != wanted[name].shape]
    surplus = [name for name in weights if name not in wanted]
    if wrong or surplus:
        name = (wrong + surplus)[0]
        there, here = (tuple(found[name].shape) if name in found else "absent" for found in (weights, wanted))
        raise InvalidConfigError(
            f"the weights of {config.start_from} do not fit the network of this run: {name} is {there} there and "
            f"{here} here, and {len(wrong) + len(surplus)} differ in all; adopt_weights(config) makes one that fits"
        )
    with without_records():
        model.load_state_dict(weights)
    logger.info(f"start: the weights of {config.start_from}" + "".join(f"; {remark}" for remark in remarks))


def _scaled_like(network: nn.Module, config: TrainConfig, origin: Origin) -> nn.Module:
    """The same function with the scaling of the new run."""
    wanted = as_scaling(config.scaling)
    own = network.skip_scaling.config if isinstance(network, UViT) else None
    if origin.kind == "run":
        own = as_scaling(RunFolder(origin.path).begun_with().scaling)  # pyright: ignore[reportOptionalMemberAccess]
    if own is not None and own.to_dict() == wanted.to_dict():
        return network
    generator = torch.Generator().manual_seed(0)
    x, condition = torch.randn(4, *origin.shape.image, generator=generator), origin.shape.example_condition(config, 4)
    if condition is not None and condition.is_floating_point():
        condition = torch.randn(condition.shape, generator=generator)
    before = _outputs(network, x, condition)
    report = fold_(network) if isinstance(network, UViT) or is_scaled(network) else None
    if report is not None and report.kept:
        raise InvalidConfigError(
            f"the weights of {config.start_from} have the scaling {own}, of which long skip {next(iter(report.kept))} "
            f"cannot be put into the weights ({next(iter(report.kept.values()))}): train with the same `scaling`"
        )
    reasons = ""
    if isinstance(network, UViT):
        network = _attach_to_uvit(network, config.scaling, x, condition)
    elif wanted.to_dict() != as_scaling("none").to_dict():
        scale_skips_(network, config.scaling, example_forward(network, config, origin.shape))
        kept = fold_(network, inverse=True).kept
        reasons = "".join(f"; long skip {index}: {reason}" for index, reason in kept.items())
    change = float((_outputs(network, x, condition) - before).norm() / before.norm().clamp_min(1e-30))
    if not change <= TOLERANCE:
        raise InvalidConfigError(
            f"`scaling` {config.scaling} would change what the weights of {config.start_from} compute (by "
            f"{change:.1%}), and the weights cannot make up for it{reasons}; take `scaling` none, or "
            f"a constant one such as cs"
        )
    return network


@torch.no_grad()
def _attach_to_uvit(network: UViT, scaling: str, x: Tensor, condition: Tensor | None) -> UViT:
    """A U-ViT with a scaling, and 1/κ_i in the weights that read skip i. Gates that start flat count as constants."""
    twin = UViT(**{**network.arguments(), "scaling": scaling}).eval()
    with without_records():
        own = twin.state_dict()
        twin.load_state_dict({**own, **{n: v for n, v in network.state_dict().items() if not n.startswith("skip_")}})
    _outputs(twin, x, condition)
    for index, kappa in enumerate(coefficients(twin), start=1):
        constants = twin.skip_scaling.constants(index) or Constants(1.0, float(kappa))
        if 0.0 in constants:
            raise InvalidConfigError(f"`scaling` {scaling} cuts long skip {index} (κ = 0): no weights make up for that")
        twin.fold_skip(index, Constants(1 / constants.main, 1 / constants.skip))
    return twin


@torch.no_grad()
def _outputs(network: nn.Module, x: Tensor, condition: Tensor | None) -> Tensor:
    return Denoiser(network.eval())(x, torch.tensor([10.0, 200.0, 500.0, 900.0]), condition)


def _fit_classes(
    weights: dict[str, Tensor],
    wanted: Mapping[str, Tensor],
    config: TrainConfig,
    theirs: tuple[str, ...] | None,
    ours: tuple[str, ...] | None,
) -> list[str]:
    """One row per class of the new data: that of the same name, or else the row of no class in particular."""
    trained, condition = ("with", "class") if EMBEDDING in weights else ("without", "none")
    said = f"the weights of {config.start_from} were trained {trained} classes: give `condition` {condition}"
    require((EMBEDDING in weights) == (EMBEDDING in wanted), said)
    if EMBEDDING not in weights:
        return []
    rows, count = weights[EMBEDDING], len(wanted[EMBEDDING])
    names = list(theirs or ())
    # A run with dropped labels has one row more than classes, the null label.
    null = rows[-1] if len(rows) == len(names) + 1 else rows.mean(0)
    found = [rows[names.index(name)] if name in names else None for name in ours or ()]
    unnamed = all(row is None for row in found)
    if unnamed and len(rows) == count:
        return []  # as many classes, in their order
    if unnamed and len(rows) == len(ours or ()):
        found = list(rows)
    new = [row is None for row in found]
    table = [null if row is None else row for row in found]
    weights[EMBEDDING] = torch.stack((table + [null] * count)[:count])
    return [f"{sum(new)} of {len(new)} classes are new, and begin as no class in particular"] if any(new) else []


def _fit_positions(weights: dict[str, Tensor], network: nn.Module, model: nn.Module) -> list[str]:
    """U-ViT has a learned vector per patch, which is interpolated for another size."""
    if not isinstance(network, UViT) or not isinstance(model, UViT):
        return []
    own: PositionEmbedding = network.position_embedding
    grid = model.position_embedding.grid
    if own.grid == grid or network.patch_size != model.patch_size:
        return []
    with torch.no_grad():
        weights["position_embedding.weight"] = own(grid)
    return [f"positions resized from {own.grid[0]}x{own.grid[1]} to {grid[0]}x{grid[1]} patches"]
