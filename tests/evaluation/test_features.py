"""Inception's adapter, anyone's extractor, and the device of features."""

import hashlib
import sys
import types
from pathlib import Path

import pytest
import torch

from scalelong.data import ImageData, load_data
from scalelong.errors import CannotReadError, EvaluationError
from scalelong.evaluation import (
    InceptionFeatures,
    RandomFeatures,
    features_of,
    load_extractor,
    reference_of,
)


def test_a_flipped_bit_in_the_statistics_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    data, extractor = load_data("digits", limit=60), RandomFeatures(1)
    first = reference_of(data, extractor)
    content = first.file.read_bytes()
    for place in range(0, len(content), len(content) // 3):
        first.file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        again = reference_of(data, extractor)
        assert torch.equal(again.moments.covariance, first.moments.covariance)
        assert torch.equal(again.features, first.features)
        assert first.file.read_bytes() == content


class StandIn(torch.nn.Module):
    """Has the interface of torch-fidelity's extractor; torchvision, which that needs, is not installed here."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path: str) -> None:
        super().__init__()
        assert name == "inception-v3-compat"
        assert features_list == ["2048"]
        state = torch.load(feature_extractor_weights_path, weights_only=True)
        self.layer = torch.nn.Linear(3, 2048)
        self.layer.load_state_dict(state)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        assert not self.training
        assert images.dtype == torch.uint8
        return (self.layer(images.float().mean(dim=(2, 3))),)


@pytest.fixture
def inception_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package, module = types.ModuleType("torch_fidelity"), types.ModuleType("torch_fidelity.feature_extractor")
    monkeypatch.setattr(module, "FeatureExtractorInceptionV3", StandIn, raising=False)
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", module)
    torch.save(torch.nn.Linear(3, 2048).state_dict(), tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_inception_takes_gray_and_colour(inception_weights: Path) -> None:
    digest = hashlib.sha256(inception_weights.read_bytes()).hexdigest()
    extractor = InceptionFeatures(inception_weights, sha256=digest[:8])
    assert extractor.digest == digest
    gray = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    features = extractor(gray)
    assert features.shape == (4, 2048)
    torch.testing.assert_close(features, extractor(gray.expand(-1, 3, -1, -1)))
    with pytest.raises(EvaluationError, match="channels"):
        extractor(torch.zeros(1, 4, 8, 8, dtype=torch.uint8))


def test_inception_checks_the_hash_before_it_loads(inception_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded a file that nobody vouches for"))
    with pytest.raises(EvaluationError, match="must begin with 6726825d"):
        InceptionFeatures(inception_weights)
    with pytest.raises(CannotReadError, match="absent"):
        InceptionFeatures(inception_weights.with_name("absent.pth"))


def test_anyones_extractor(digits: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_features")

    class Means:
        name, digest = "means", "0" * 64

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return images.float().mean(dim=(2, 3))

    monkeypatch.setattr(module, "make", lambda data: Means(), raising=False)
    monkeypatch.setattr(module, "wrong", lambda data: object(), raising=False)
    monkeypatch.setitem(sys.modules, "my_features", module)
    assert load_extractor("my_features:make", digits).name == "means"
    for spec, message in (
        ("my_features:wrong", "must return"),
        ("my_features:absent", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
        ("inseption", "unknown features"),
        ("inception", "needs the path"),
    ):
        with pytest.raises(EvaluationError, match=message):
            load_extractor(spec, digits)


def test_features_run_on_their_device(digits):
    """The `meta` device stands in for an accelerator: it computes shapes alone."""
    seen: list[str] = []

    class Elsewhere:
        name, digest, device = "elsewhere", "0", torch.device("meta")

        def __call__(self, images):
            seen.append(images.device.type)
            return torch.ones(len(images), 2)

    images = digits.fetch(range(5)).images
    assert features_of(Elsewhere(), images).shape == (5, 2)
    assert seen == ["meta"]
    moved = load_extractor("random", digits, device="meta")
    assert moved(images.to("meta")).device.type == "meta"


def test_an_accelerator_is_used_where_there_is_one(digits, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert load_extractor("random", digits).device.type == "meta"  # type: ignore[attr-defined]
