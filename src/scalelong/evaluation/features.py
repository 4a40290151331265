"""A small classifier trained on the data set at hand: features that need no download and fit any images.

With labels it learns the classes; without, it learns which of four ways an image was turned. It is seeded and kept on
disk. Its hash goes into every score, because on another machine training may round differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from ..data import ImageData, to_float
from ..errors import FeatureError
from ..files import cache_folder, digest, file_digest, key_of, locked, write_bytes, write_text
from ..optional import load_object, needs
from .scores import Moments, MomentsSum

VERSION = 1
DIM = 64
STEPS, TRAINING_BATCH, RATE = 1000, 64, 2e-3
MOST_HELD_OUT = 2000


class Network(nn.Module):
    """Convolutions that halve the image down to about 4 pixels, then the mean over what is left."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__()
        widths = [16, 32, 64, 64, 64, 64]
        halvings = max(1, min(len(widths), (side // 4).bit_length() - 1))
        layers: list[nn.Module] = []
        for width in widths[:halvings]:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1, stride=2), nn.GroupNorm(4, width), nn.ReLU()]
            channels = width
        self.trunk = nn.Sequential(*layers)
        # Means over quarters of the image keep some of where things are.
        self.features = nn.Linear(4 * channels, DIM)
        self.head = nn.Linear(DIM, classes)

    def embed(self, images: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.trunk(to_float(images)), 2)
        return F.relu(self.features(x.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.embed(images))


@dataclass(frozen=True)
class Classifier:
    name: str
    digest: str
    accuracy: float
    """On images that it was not trained on."""
    network: Network

    def __call__(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.network.embed(images)

    @torch.no_grad()
    def classify(self, images: Tensor) -> Tensor:
        """The number of the likeliest class of each image."""
        return torch.cat([self.network(part).argmax(dim=1) for part in images.split(256)])


def train_classifier(data: ImageData, *, seed: int = 0, say: Callable[[str], None] = print) -> Classifier:
    """The classifier of this data set, from the cache if it is there. The global random state is not touched."""
    turns = data.classes is None or len(data.classes) < 2
    classes = 4 if turns or data.classes is None else len(data.classes)
    settings = [VERSION, DIM, STEPS, TRAINING_BATCH, RATE]
    about = {"data": data.fingerprint(), "seed": seed, "settings": settings, "turns": turns}
    folder = cache_folder("classifiers") / key_of(about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(data.channels, min(data.height, data.width), classes)
    with locked(folder):
        weights, note = folder / "classifier.safetensors", folder / "classifier.json"
        if not note.exists() or digest(weights.read_bytes()) != json.loads(note.read_text())["digest"]:
            say(f"training a classifier on {data.name}, once: {STEPS} steps")
            accuracy = _train(network, data, turns, seed)
            content = save({name: value.contiguous() for name, value in network.state_dict().items()})
            write_bytes(weights, content)
            found = {**about, "digest": digest(content), "accuracy": accuracy}
            write_text(note, json.dumps(found, indent=2))
        network.load_state_dict(load(weights.read_bytes()))
        found = json.loads(note.read_text())
    task = "four ways of turning an image" if turns else f"{classes} classes"
    say(f"features: classifier of {task}, accuracy {found['accuracy']:.1%} on held-out images, {found['digest'][:12]}")
    return Classifier("classifier", found["digest"], found["accuracy"], network.eval())


def _train(network: Network, data: ImageData, turns: bool, seed: int) -> float:
    training, held_out = data.split(max(1, min(len(data) // 5, MOST_HELD_OUT)), seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    network.train()
    for _ in range(STEPS):
        rows = torch.randint(len(training), (TRAINING_BATCH,), generator=generator)
        images, labels = _examples(training, rows, turns, generator)
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    right = 0
    with torch.no_grad():
        for rows in torch.arange(len(held_out)).split(TRAINING_BATCH):
            images, labels = _examples(held_out, rows, turns, generator)
            right += int((network(images).argmax(dim=1) == labels).sum())
    return right / len(held_out)


def _examples(data: ImageData, rows: Tensor, turns: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    batch = data.fetch(rows)
    if not turns:
        assert batch.labels is not None
        return batch.images, batch.labels
    labels = torch.randint(4, (len(rows),), generator=generator)
    return _turned(batch.images, labels), labels


def _turned(images: Tensor, times: Tensor) -> Tensor:
    """Images turned by a quarter so many times; of images that are not square, a square part."""
    if images.shape[2] != images.shape[3]:
        images = images[:, :, : min(images.shape[2:]), : min(images.shape[2:])]
    return torch.stack([torch.rot90(image, int(count), (1, 2)) for image, count in zip(images, times, strict=True)])


# Inception's features by torch-fidelity, for FIDs that can be compared with published ones.

SHA256 = "6726825d"
"""The first digits of the sha256 of weights-inception-2015-12-05-6726825d.pth, which torch-fidelity publishes."""


class InceptionFeatures:
    """The 2048 features of the pooling layer. The file's hash is checked before it is loaded."""

    name = "inception"

    def __init__(self, weights: str | Path, sha256: str = SHA256) -> None:
        path = Path(weights).expanduser()
        if not path.is_file():
            raise FeatureError(
                f"there are no Inception weights at {path}; they are weights-inception-2015-12-05-6726825d.pth of "
                f"torch-fidelity's release v0.2.0"
            )
        found = file_digest(path)
        if not found.startswith(sha256):
            raise FeatureError(f"{path} is refused: its sha256 begins with {found[:12]} and must begin with {sha256}")
        self.digest = found
        self._model = _load(path)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[1] != 3:
            raise FeatureError(f"Inception takes images of 1 or 3 channels, not {images.shape[1]}")
        (features,) = self._model(images)
        return features


def _load(path: Path) -> Any:
    inception = needs("torch_fidelity.feature_extractor_inceptionv3", "eval", "Inception FID")
    model = inception.FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path)
    )
    # In training mode its normalisation would use the statistics of each batch.
    return model.eval()


# The view that scores have of features, and the way from a name to an extractor.

BATCH = 256


@runtime_checkable
class FeatureExtractor(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """A hash of all that decides the features: weights and preprocessing."""
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to features (B, D)."""
        ...


def load_extractor(
    spec: str, data: ImageData, weights: str | Path | None = None, say: Callable[[str], None] = print
) -> FeatureExtractor:
    """ "classifier", "inception" with the path of its weights, or "package.module:factory" for your own.

    A factory is called with the data set, and returns an object with `name`, `digest` and a call like that above.
    """

    if spec == "classifier":
        return train_classifier(data, say=say)
    if spec == "inception":
        if weights is None:
            raise FeatureError("Inception needs the path of its weights: --feature-weights weights-inception-….pth")
        return InceptionFeatures(weights)
    if ":" not in spec:
        raise FeatureError(f"unknown features {spec!r}; known: classifier, inception, or package.module:factory")
    made = load_object(spec, "feature extractor", FeatureError)(data)
    if not isinstance(made, FeatureExtractor) or not callable(made):
        raise FeatureError(f"{spec} must return an object with name, digest and a call, got {type(made).__name__}")
    return made


@torch.no_grad()
def features_of(extractor: FeatureExtractor, images: Tensor) -> Tensor:
    """Features of many images, batch by batch."""
    features = torch.cat([extractor(part).detach().cpu().double() for part in images.split(BATCH)])
    if features.dim() != 2 or len(features) != len(images):
        raise FeatureError(
            f"{extractor.name} must give (B, D) and gave {tuple(features.shape)} for {len(images)} images"
        )
    if not bool(torch.isfinite(features).all()):
        raise FeatureError(f"{extractor.name} gave features that are not finite")
    return features


# What samples are compared with: moments and features of a data set, kept on disk under its fingerprint.

FORMAT = 1
MOST_FEATURES = 10_000
"""So many features, evenly spread over the data, are kept for precision and recall."""


@dataclass(frozen=True)
class Reference:
    """`data` is the fingerprint of the data set, `digest` that of the features."""

    data: str
    digest: str
    moments: Moments
    features: Tensor
    file: Path


def reference_of(data: ImageData, extractor: FeatureExtractor, say: Callable[[str], None] = print) -> Reference:
    about = {"data": data.fingerprint(), "features": extractor.digest, "format": FORMAT}
    folder = cache_folder("statistics") / key_of(about)
    file = folder / "statistics.safetensors"
    with locked(folder):
        found = _read(file, about)
        if found is None:
            say(f"computing the {extractor.name} features of {len(data)} images of {data.name}, once")
            write_bytes(file, _compute(data, extractor, about))
            found = _read(file, about)
            assert found is not None
    return found


def export_npz(reference: Reference, path: str | PathLike[str]) -> None:
    """`mu` and `sigma`, as pytorch-fid and the U-ViT authors store them."""
    import io

    import numpy as np

    content = io.BytesIO()
    np.savez(content, mu=reference.moments.mean.numpy(), sigma=reference.moments.covariance.numpy())
    write_bytes(Path(path), content.getvalue())


def _compute(data: ImageData, extractor: FeatureExtractor, about: dict[str, object]) -> bytes:
    total, kept, stride = MomentsSum(), [], max(1, -(-len(data) // MOST_FEATURES))
    for rows in torch.arange(len(data)).split(BATCH):
        features = features_of(extractor, data.fetch(rows).images)
        total.add(features)
        kept.append(features[rows % stride == 0].float())
    moments = total.moments()
    tensors = {"mean": moments.mean, "covariance": moments.covariance, "features": torch.cat(kept)}
    return save(tensors, metadata={"scalelong": json.dumps({**about, "n": moments.n})})


def _read(file: Path, about: dict[str, object]) -> Reference | None:
    """None if it is not there or cannot be read: then it is computed again."""
    try:
        with safe_open(file, framework="pt") as content:
            note = json.loads((content.metadata() or {})["scalelong"])
            mean, covariance, features = (content.get_tensor(name) for name in ("mean", "covariance", "features"))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if any(note.get(name) != value for name, value in about.items()):
        return None
    return Reference(note["data"], note["features"], Moments(mean, covariance, note["n"]), features, file)
