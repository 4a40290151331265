"""Noise must never be praised: anchors, the features that they refuse, and the choice between features."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from scalelong.cli import main
from scalelong.data import ImageData, MemoryData, load_data
from scalelong.evaluation import (
    Score,
    anchors_of,
    bad_images,
    reference_of,
    score_images,
    trusted_features,
)

CIFAR = Path(__file__).parents[3] / "shared/data/cifar10"


def write_folder(folder: Path, images: torch.Tensor) -> Path:
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(folder / f"{i:04d}.png")
    return folder


def real_and_reference(name: str, tmp_path: Path) -> tuple[torch.Tensor, ImageData]:
    """Images that the reference does not hold, and the reference."""
    if name in ("digits", "garments"):
        reference, held_out = load_data(name, limit=1200).split(400)
        return held_out.fetch(range(400)).images, reference
    if not CIFAR.is_dir():
        pytest.skip(f"{CIFAR} is not there")
    held_out = load_data(CIFAR, split="test", limit=400).fetch(range(400)).images
    if name == "cifar10":
        return held_out, load_data(CIFAR, limit=800)
    photographs = load_data(CIFAR, limit=300).fetch(range(300)).images
    return held_out[:150], load_data(write_folder(tmp_path / "photographs", photographs))


@pytest.mark.parametrize("name", ["digits", "garments", "cifar10", "300 photographs"])
def test_noise_is_not_precise_and_real_images_are(name: str, shared_cache: None, tmp_path: Path) -> None:
    real, data = real_and_reference(name, tmp_path)
    extractor, reference = trusted_features("auto", data)

    def score(images: torch.Tensor):
        return score_images(images, data, extractor, reference, subject={})

    generator = torch.Generator().manual_seed(7)
    good = score(real)
    assert good.precision.value > 0.7
    assert good.recall.value > 0.7
    uniform = torch.randint(0, 256, real.shape, dtype=torch.uint8, generator=generator)
    normal = (128 + 64 * torch.randn(real.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    for noise in (uniform, normal):
        bad = score(noise)
        assert bad.precision.value < 0.1
        assert bad.recall.value < 0.2
    # The anchors say the same without anybody holding images out by hand.
    assert good.anchors is not None
    anchors = good.anchors.values
    assert anchors["real"]["precision"] == pytest.approx(good.precision.value, abs=0.12)
    assert anchors["noise"]["precision"] < 0.1
    for kind in ("noise", "blurred", "shuffled"):
        assert anchors["real"]["frechet"] < 0.7 * anchors[kind]["frechet"]


class Lots:
    """Features that are drawn by lot, which cannot tell noise from digits."""

    name, digest = "lots", "m" * 64

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(images), 4, generator=torch.Generator().manual_seed(int(images.sum())))


def test_features_that_praise_noise_are_refused_by_name(shared_cache: None, digits: ImageData) -> None:
    reference = reference_of(digits, Lots())
    noise = torch.randint(0, 256, (300, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scores = score_images(noise, digits, Lots(), reference, subject={"folder": "noise"})
    assert scores.precision is None
    assert scores.recall is None
    assert scores.frechet.value >= 0
    assert "no precision and recall by lots features: uniform noise has precision 0." in str(scores)


def test_anchors_are_measured_once(shared_cache: None, digits: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor, reference = trusted_features("random", digits)
    first = anchors_of(digits, extractor, reference, 50)
    monkeypatch.setattr("scalelong.evaluation.anchors._measure", lambda *_: pytest.fail("measured again"))
    assert anchors_of(digits, extractor, reference, 50) == first
    assert first.images == 50
    for file in (reference.file.parents[2] / "anchors").glob("*/anchors.json"):
        file.write_text("{")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        anchors_of(digits, extractor, reference, 50)


def test_a_handful_of_images_has_no_anchors(shared_cache: None, digits: ImageData) -> None:
    few = MemoryData("few", digits.fetch(range(6)).images)
    extractor, reference = trusted_features("auto", few)
    scores = score_images(few.fetch(range(6)).images, few, extractor, reference, subject={})
    assert scores.precision is None
    assert "too few images" in str(scores)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 30, 17), (4, 3, 5), (1, 1, 1)])
def test_bad_images_of_any_shape(shape: tuple[int, int, int]) -> None:
    images = torch.arange(5 * shape[0] * shape[1] * shape[2]).reshape(5, *shape).to(torch.uint8)
    bad = bad_images(images, torch.Generator().manual_seed(0))
    assert all(kind.shape == images.shape and kind.dtype == torch.uint8 for kind in bad.values())
    # Shuffling moves pixels and changes none.
    assert torch.equal(bad["shuffled"].flatten(2).sort().values, images.flatten(2).sort().values)


def test_eval_shows_anchors_and_stores_them(
    shared_cache: None, digits: ImageData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    folder = write_folder(tmp_path / "noise", noise)
    assert main(["eval", str(folder), "--data", "digits"]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if "noise" in line and "real" in line)
    assert head.split() == ["value", "real", "noise", "blurred", "shuffled"]
    assert main(["eval", str(folder), str(folder), "--data", "digits", "--json", "--quiet"]) == 0
    (first, _) = json.loads(capsys.readouterr().out)
    assert first["precision"]["value"] < 0.1
    assert first["anchors"]["values"]["real"]["precision"] > 0.7
    assert first["anchors"]["images"] == 60


def test_near_copies_resemble_their_pairs(shared_cache: None, digits: ImageData) -> None:
    """Features may call alike what is not."""
    extractor, reference = trusted_features("random", digits)
    upright = digits.fetch(range(200)).images

    class Deceived:
        name, digest = extractor.name, extractor.digest

        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return extractor(upright[: len(images)])

    copied = score_images(upright, digits, extractor, reference, subject={})
    assert copied.copies.value == 1.0
    assert copied.anchors is not None
    assert copied.anchors.values["real"]["copies"] < 0.05
    turned = upright.flip(-1).flip(-2)
    assert score_images(turned, digits, Deceived(), reference, subject={}).copies.value < 0.2


VERDICTS = {
    "real": (lambda images: images, "near the real ones"),
    "blurred": (lambda images: bad_images(images, torch.Generator().manual_seed(0))["blurred"], "blurry"),
    "noise": (lambda images: bad_images(images, torch.Generator().manual_seed(0))["noise"], "noisy"),
    "shuffled": (lambda images: bad_images(images, torch.Generator().manual_seed(0))["shuffled"], "no nearer"),
    "one for all": (lambda images: images[:1].repeat(len(images), 1, 1, 1), "little variety"),
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_the_verdict_in_words(kind: str, shared_cache: None) -> None:
    data, held_out = load_data("garments").split(400)
    make, word = VERDICTS[kind]
    extractor, reference = trusted_features("random", data)
    scores = score_images(make(held_out.fetch(range(400)).images), data, extractor, reference, subject={})
    assert word in scores.verdict()
    assert scores.verdict() in str(scores)
    assert ("near the real ones" in scores.verdict()) == (kind == "real")


def test_a_precision_above_that_of_real_images_is_flagged(shared_cache: None, digits: ImageData) -> None:
    extractor, reference = trusted_features("random", digits)
    scores = score_images(digits.fetch(range(300)).images, digits, extractor, reference, subject={})
    praised = replace(scores, values={**scores.values, "precision": Score(0.98, 0.97, 0.99)})
    assert "above that of real images" in praised.verdict()
    usual = replace(scores, values={**scores.values, "precision": Score(0.8, 0.7, 0.9)})
    assert "above that of real images" not in usual.verdict()
