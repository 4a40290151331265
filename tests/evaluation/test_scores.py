"""From images to scores: validation, reference statistics, protocols, and the commands."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.cli import main
from scalelong.config import SCORE_TITLES, recipe
from scalelong.data import ImageData, load_data
from scalelong.diffusion import SampleSettings
from scalelong.errors import EvaluationError, ProtocolMismatchError
from scalelong.evaluation import (
    SCORES,
    Evidence,
    Moments,
    RandomFeatures,
    Score,
    Scores,
    comparison,
    features as reference_module,
    reference_of,
    require_comparable,
    score_folder,
    score_images,
    score_run,
    stored_scores,
)
from scalelong.evaluation.features import features_of
from scalelong.runs import load_run
from scalelong.training import train

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def extractor(shared_cache: None) -> RandomFeatures:
    return RandomFeatures(1)


def test_broken_samples_are_refused(extractor: RandomFeatures, digits: ImageData) -> None:
    good, reference = digits.fetch(range(20)).images, reference_of(digits, extractor)
    for bad, message in ((good.float(), "must be uint8"), (good[:, :, :4], "must be uint8"), (good[:2], "at least 4")):
        with pytest.raises(EvaluationError, match=message):
            score_images(bad, digits, extractor, reference, subject={})


def test_reference_is_computed_once_and_belongs_to_its_data(
    digits: ImageData, extractor: RandomFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reference_of(digits, extractor)
    features = features_of(extractor, digits.fetch(range(len(digits))).images)
    torch.testing.assert_close(first.moments.covariance, Moments.of(features).covariance)
    assert first.moments.n == len(digits)
    assert first.data == digits.fingerprint()
    part, _ = digits.split(100)
    assert reference_of(part, extractor).file != first.file
    monkeypatch.setattr(reference_module, "_compute", lambda *_: pytest.fail("computed again"))
    again = reference_of(digits, extractor)
    assert torch.equal(again.moments.covariance, first.moments.covariance)
    first.file.write_bytes(b"damaged")
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        reference_of(digits, extractor)
    first.file.unlink()


@pytest.fixture
def real_scores(digits: ImageData, extractor: RandomFeatures) -> Scores:
    """Real images, scored as if they were samples."""
    reference = reference_of(digits, extractor)
    images = digits.fetch(range(0, 1797, 6)).images
    made_by = {"sampler": "ddim", "sampler_steps": 50, "guidance": 1.0, "weights": "ema"}
    return score_images(images, digits, extractor, reference, subject={"run": "a", "step": 1}, **made_by)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", 7),
        ("sampler", "ddpm"),
        ("features_sha256", "f" * 64),
        ("data_sha256", "d" * 64),
    ],
)
def test_unequal_protocols_are_not_compared(real_scores: Scores, field: str, value: object) -> None:
    other = replace(real_scores, protocol=replace(real_scores.protocol, **{field: value}))
    with pytest.raises(ProtocolMismatchError, match=f"{field}: .* and {value!r}"):
        comparison([real_scores, other])


def test_equal_protocols_are_compared_best_first(real_scores: Scores) -> None:
    worse = replace(
        real_scores,
        values=real_scores.values | {"frechet": replace(real_scores.frechet, value=99.0)},
        subject={"run": "b", "step": 2},
        protocol=replace(real_scores.protocol, data="the/same/elsewhere"),
    )
    lines = comparison([worse, real_scores]).splitlines()
    assert lines[1].startswith("a step 1")
    assert lines[2].startswith("b step 2")


def test_eval_of_a_folder(
    shared_cache: None, digits: ImageData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    for i, image in enumerate(digits.fetch(range(40)).images):
        Image.fromarray(image[0].numpy()).save(folder / f"{i}.png")
    assert main(["eval", str(folder), "--data", "digits", "--statistics", str(tmp_path / "stats.npz")]) == 0
    assert "Fréchet distance" in capsys.readouterr().out
    with np.load(tmp_path / "stats.npz") as arrays:
        assert arrays["mu"].shape == (256,)
        assert arrays["sigma"].shape == (256, 256)
    (scores,) = stored_scores(folder)
    assert scores.protocol.images == 40
    assert scores.protocol.sampler is None
    assert main(["eval", str(folder), "--data", "digits", "--n", "41"]) == 1
    assert "41 images are needed" in capsys.readouterr().err
    assert main(["eval", str(folder)]) == 1
    assert "--data" in capsys.readouterr().err
    Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(folder / "larger.png")
    assert main(["eval", str(folder), "--data", "digits"]) == 1


def test_a_new_score_is_a_title_and_a_function(real_scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    def spread(evidence: Evidence) -> Score:
        value = float(evidence.features.std())
        return Score(value, value, value)

    monkeypatch.setitem(SCORE_TITLES, "spread", "spread of features")
    monkeypatch.setitem(SCORES, "spread", spread)
    real = torch.randn(50, 4)
    evidence = Evidence(torch.randn(20, 4), Moments.of(real), real[:20], real)
    scores = Scores.of(evidence, real_scores.protocol, {"run": "a"})
    assert scores.spread.value == pytest.approx(float(evidence.features.std()))
    assert "spread of features" in str(scores)
    assert "spread of features" in comparison([scores, scores])
    assert Scores.from_dict(scores.to_dict()) == scores
    with pytest.raises(AttributeError, match="nothing"):
        _ = scores.nothing


def test_stored_scores_keep_their_format(real_scores: Scores) -> None:
    """Files of earlier versions are read, and the names in new files are the same."""
    written = json.loads(json.dumps(real_scores.to_dict()))
    assert Scores.from_dict(written) == real_scores
    assert set(written) == {"protocol", *SCORES, "subject", "anchors"}
    assert {"frechet", "precision", "recall"} <= set(SCORES)
    retired = {"kernel": written["frechet"], "agreement": written["precision"]}
    assert Scores.from_dict({**written, **retired}) == real_scores
    earlier = Scores.from_dict({name: value for name, value in written.items() if name not in ("anchors", "copies")})
    assert earlier.frechet == real_scores.frechet
    assert "no anchors" in str(earlier)
    with pytest.raises(EvaluationError, match="lack frechet"):
        Scores.from_dict({name: value for name, value in written.items() if name != "frechet"})


def test_precision_belongs_to_the_protocol(shared_cache: None, tmp_path: Path) -> None:
    """Scores of samples in bf16 and in float32 are not mixed, and a run and its folder of samples agree."""
    base = recipe("digits-tiny")
    config = replace(
        base,
        steps=1,
        batch_size=2,
        model_options={"patch_size": 4, "dim": 8, "depth": 2, "heads": 2},
        logging=replace(base.logging, samples_every=0, trackers=()),
    )
    train(config, tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run")
    in_bf16, in_float32 = (
        score_run(run, n=20, settings=SampleSettings(steps=1, precision=precision), features="random")
        for precision in ("bf16", "no")
    )
    with pytest.raises(ProtocolMismatchError):
        require_comparable([in_bf16, in_float32])
    again = score_folder(in_bf16.subject["images"], load_data("digits"), features="random")
    assert again.protocol.sampler == in_bf16.protocol.sampler
