"""A small classifier trained on the data set at hand: features that need no download and fit any images.

With labels it learns the classes; without, it learns which of four ways an image was turned. It is seeded and kept on
disk. Its hash goes into every score, because on another machine training may round differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from ...data import ImageData, to_float
from ...files import cache_folder, key_of, locked, write_bytes, write_text

VERSION = 1
DIM = 64
STEPS, BATCH, RATE = 1000, 64, 2e-3
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
    settings = [VERSION, DIM, STEPS, BATCH, RATE]
    about = {"data": data.fingerprint(), "seed": seed, "settings": settings, "turns": turns}
    folder = cache_folder("classifiers") / key_of(about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(data.channels, min(data.height, data.width), classes)
    with locked(folder):
        weights, note = folder / "classifier.safetensors", folder / "classifier.json"
        if not note.exists() or _digest(weights.read_bytes()) != json.loads(note.read_text())["digest"]:
            say(f"training a classifier on {data.name}, once: {STEPS} steps")
            accuracy = _train(network, data, turns, seed)
            content = save({name: value.contiguous() for name, value in network.state_dict().items()})
            write_bytes(weights, content)
            found = {**about, "digest": _digest(content), "accuracy": accuracy}
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
        rows = torch.randint(len(training), (BATCH,), generator=generator)
        images, labels = _examples(training, rows, turns, generator)
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    network.eval()
    right = 0
    with torch.no_grad():
        for rows in torch.arange(len(held_out)).split(BATCH):
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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
