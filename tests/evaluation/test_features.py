"""Classifiers made on the spot, Inception's adapter, and anyone's extractor."""

import hashlib
import sys
import types
from pathlib import Path

import pytest
import torch

from scalelong.data import ImageData, MemoryData, load_data
from scalelong.errors import FeatureError, MissingDependencyError
from scalelong.evaluation import (
    InceptionFeatures,
    features as classifier_module,
    features_of,
    load_extractor,
    reference_of,
    train_classifier,
)
from scalelong.evaluation.features import Classifier
from scalelong.files import cache_folder


def test_the_classifier_is_good_and_its_accuracy_is_true(classifier: Classifier, digits: ImageData) -> None:
    assert classifier.accuracy > 0.95
    _, held_out = digits.split(len(digits) // 5, 0)
    batch = held_out.fetch(range(len(held_out)))
    assert batch.labels is not None
    assert float((classifier.classify(batch.images) == batch.labels).float().mean()) == pytest.approx(
        classifier.accuracy
    )
    assert classifier(batch.images[:5]).shape == (5, 64)


def test_the_second_time_it_comes_from_the_cache(
    classifier: Classifier, digits: ImageData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classifier_module, "_train", lambda *_: pytest.fail("trained again"))
    again = train_classifier(digits)
    assert again.digest == classifier.digest
    assert f"accuracy {classifier.accuracy:.1%}" in capsys.readouterr().out


def test_training_again_gives_the_same_classifier_and_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier_module, "STEPS", 20)
    data = load_data("digits", limit=100)
    before, digests = torch.get_rng_state(), []
    for name in ("a", "b"):
        monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / name))
        torch.manual_seed(len(name))
        digests.append(train_classifier(data).digest)
    assert digests[0] == digests[1]
    torch.set_rng_state(before)
    train_classifier(data, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_damaged_cache_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier_module, "STEPS", 5)
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    data = load_data("digits", limit=60)
    first = train_classifier(data)
    (file,) = cache_folder("classifiers").glob("*/classifier.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert train_classifier(data).digest == first.digest
    file.unlink()  # as a cleaner of caches may do
    assert train_classifier(data).digest == first.digest
    next(file.parent.glob("*.json")).write_text("{")
    assert train_classifier(data).digest == first.digest


def test_a_flipped_bit_in_the_statistics_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier_module, "STEPS", 5)
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    data = load_data("digits", limit=60)
    extractor = train_classifier(data)
    first = reference_of(data, extractor)
    content = first.file.read_bytes()
    for place in range(0, len(content), len(content) // 5):
        first.file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        again = reference_of(data, extractor)
        assert torch.equal(again.moments.mean, first.moments.mean)
        assert torch.equal(again.moments.covariance, first.moments.covariance)
        assert torch.equal(again.features, first.features)
        assert first.file.read_bytes() == content


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 12), (3, 64, 64)])
def test_images_without_labels_learn_their_rotation(
    shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier_module, "STEPS", 3)
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    said: list[str] = []
    images = torch.randint(0, 256, (30, *shape), dtype=torch.uint8)
    extractor = train_classifier(MemoryData("unlabelled", images), say=said.append)
    assert extractor(images).shape == (30, 64)
    assert "rotations" in said[-1]


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
    with pytest.raises(FeatureError, match="channels"):
        extractor(torch.zeros(1, 4, 8, 8, dtype=torch.uint8))


def test_inception_checks_the_hash_before_it_loads(inception_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded a file that nobody vouches for"))
    with pytest.raises(FeatureError, match="must begin with 6726825d"):
        InceptionFeatures(inception_weights)
    with pytest.raises(FeatureError, match="no Inception weights"):
        InceptionFeatures(inception_weights.with_name("absent.pth"))


def test_inception_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    try:
        import torch_fidelity  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"scalelong\[eval\]"):
            InceptionFeatures(tmp_path / "weights.pth", sha256=digest)


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
        with pytest.raises(FeatureError, match=message):
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
    for name in ("random", "classifier"):
        moved = load_extractor(name, digits, say=lambda _: None, device="meta")
        assert moved(images.to("meta")).device.type == "meta"


def test_an_accelerator_is_used_where_there_is_one(digits, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert load_extractor("random", digits).device.type == "meta"  # type: ignore[attr-defined]
