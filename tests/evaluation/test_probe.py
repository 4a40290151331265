"""Linear probes: ridge against least squares, features by hand, chance, refusals, the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.cli import main
from scalelong.config import DiffusionConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.data import Annotations, MemoryData, load_data, to_float
from scalelong.errors import ConditionError, EvaluationError, MetadataError
from scalelong.evaluation.probe import PENALTIES, Parts, Reader, fit, judged, noised, ridge
from scalelong.training import train

BASELINES = {"untrained network", "pixels, same t", "clean pixels"}


def tiny(**changes: Any) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(
        **{"image_size": 8, "patch_size": 4, "channels": 1, "dim": 16, "depth": 2, "heads": 2, **changes}
    ).eval()


@pytest.fixture(scope="module")
def data():
    """600 digits."""
    return load_data("digits", limit=600)


def with_labels(data, labels: Tensor) -> MemoryData:
    return MemoryData("digits", data.images, Annotations(labels, data.classes))


@pytest.fixture(scope="module")
def found(data) -> sl.LinearProbe:
    return sl.linear_probe(tiny(), data, times=(1, 999))


def blobs(count: int, dim: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (count,), generator=drawn)
    return centres[labels] + 1.5 * torch.randn(count, dim, generator=drawn), labels


@pytest.mark.parametrize(("count", "dim"), [(80, 7), (30, 50)])
def test_ridge_is_augmented_least_squares(count, dim):
    """The same minimum by another way: penalties as further rows, the intercept as a column that they leave out."""
    (x, y), (other, _) = blobs(count, dim, 4, 1), blobs(60, dim, 4, 2)
    a = x.double()
    mean, deviation = a.mean(0), a.std(0, unbiased=False)
    a, b = ((each.double() - mean) / deviation for each in (x, other))
    column = torch.cat([torch.ones(count, 1), torch.zeros(dim, 1)]).double()
    targets = torch.cat([F.one_hot(y, 4).double(), torch.zeros(dim, 4, dtype=torch.float64)])
    for penalty, (found,) in list(zip(PENALTIES, ridge(x, y, 4, [other]), strict=True))[2:8]:
        rows = torch.cat([a, (count * penalty) ** 0.5 * torch.eye(dim, dtype=torch.float64)])
        weights = torch.linalg.lstsq(torch.cat([rows, column], 1), targets, driver="gelsd").solution
        assert torch.equal(found, (b @ weights[:-1] + weights[-1]).argmax(1))


def test_parts_are_disjoint_stratified_and_fixed_by_the_seed(data):
    parts, labels = Parts.of(data, None, 1000, 0), data.annotations.labels
    assert sorted(torch.cat([parts.fit, parts.validation, parts.test]).tolist()) == list(range(600))
    assert len({tuple(row) for row in parts.x0.flatten(1).tolist()}) == len(data.images.flatten(1).unique(dim=0))
    for part, share in ((parts.fit, 0.6), (parts.validation, 0.2), (parts.test, 0.2)):
        counts = torch.bincount(parts.labels[part], minlength=10)
        assert float((counts - share * torch.bincount(labels)).abs().max()) <= 1
    again, other = Parts.of(data, None, 1000, 0), Parts.of(data, None, 1000, 1)
    assert torch.equal(again.x0, parts.x0)
    assert not torch.equal(other.x0, parts.x0)
    few = Parts.of(data, None, 100, 0)
    assert max(len(few.fit), len(few.validation), len(few.test)) == 100
    assert int(torch.bincount(few.labels[few.fit]).min()) >= 8


def test_held_out_images_are_the_ones_that_are_tested(data):
    training, held_out = data.split(300)
    parts = Parts.of(training, held_out, 1000, 0)
    assert len(parts.fit) == 300
    tested = parts.x0[torch.cat([parts.validation, parts.test])].flatten(1).sum(1).sort().values
    expected = to_float(held_out.fetch(range(300)).images)
    torch.testing.assert_close(tested, expected.flatten(1).sum(1).sort().values)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda data: data.split(200)[1], EvaluationError, "30 images of each"),
        (lambda data: with_labels(data, torch.zeros(600, dtype=torch.long)), EvaluationError, "two classes"),
        (lambda data: MemoryData("mine", data.images), MetadataError, "needs labels, and 'mine' has none"),
    ],
)
def test_images_that_cannot_be_probed(data, make, error, words):
    with pytest.raises(error, match=words):
        sl.linear_probe(tiny(), make(data))


def test_features_are_means_over_the_patches_of_each_block(data):
    model = tiny(classes=11)
    x0 = to_float(data.images[:20])
    reader = Reader(model, torch.tensor(10), None, 8, x0)
    assert reader.names == ("encoder.0", "middle", "decoder.0")
    x, seen = noised(x0, 100, "vp", 3), {}
    handle = model.middle.register_forward_hook(lambda *call: seen.update(middle=call[2]))
    with torch.no_grad():
        model(x, torch.full((20,), 100.0), torch.full((20,), 10))
    handle.remove()
    torch.testing.assert_close(reader.read(x, 100)["middle"], seen["middle"][:, 2:].mean(1))
    assert torch.equal(noised(torch.cat([x0, x0]), 100, "vp", 3)[:20], x), "the noise is fixed, whatever follows"


class Net(nn.Module):
    """A small UNet of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.inner, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join, self.last_norm, self.out = nn.Conv2d(16, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = F.silu(self.first(x)) + 1e-3 * t.view(-1, 1, 1, 1)
        h = self.up(F.silu(self.inner(F.silu(self.down(skip)))))
        return self.out(self.last_norm(self.join(torch.cat([h, skip], 1))))


def test_any_network_with_long_skips_and_nothing_of_it_changes(data):
    torch.manual_seed(0)
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = sl.linear_probe(model, data, times=[50], schedule=torch.linspace(0.999, 0.01, 1000))
    assert "join" in found.network
    assert set(found.baselines) == BASELINES
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_network_that_cannot_be_drawn_again_must_be_given(data):
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(1))

    with pytest.raises(EvaluationError, match=r"extra .*untrained=NEW_NETWORK"):
        sl.linear_probe(Odd(), data, times=[50])
    assert sl.linear_probe(Odd(), data, times=[50], untrained=Odd).untrained


def test_the_seed_decides_and_untrained_is_untrained(found, data):
    assert sl.linear_probe(tiny(), data, times=(1, 999)) == found
    assert sl.linear_probe(tiny(), data, times=(1, 999), seed=1).network != found.network
    # The network is not trained either: the gain is that of another draw of the weights.
    gain = found.baselines["untrained network"].gain
    assert gain is not None
    assert abs(gain.value) < 0.2


def test_noise_and_permuted_labels_are_recognised_by_chance_alone(found, data):
    """At t = 999 nothing of the image is left; and from permuted labels nothing can be learned."""
    for accuracies in (*found.network.values(), *found.untrained.values(), found.pixels):
        assert accuracies[1] < 0.25  # of 120 images, the best of nine penalties
    assert found.pixels[0] > 0.8
    shuffled = data.annotations.labels[torch.randperm(600, generator=torch.Generator().manual_seed(0))]
    nothing = sl.linear_probe(tiny(), with_labels(data, shuffled), times=(1,))
    assert nothing.chosen.test.low < 0.12
    assert nothing.baselines["clean pixels"].test.low < 0.12


def test_the_choice_is_made_on_validation_images_and_the_test_is_of_others(data):
    """A layer that knows the labels of the test images alone is not chosen; one that knows the others is, and fails."""
    parts = Parts.of(data, None, 1000, 0)
    truth, drawn = F.one_hot(parts.labels, 10).float(), torch.Generator().manual_seed(0)
    empty = torch.randn(600, 10, generator=drawn)
    knows_test, knows_others = truth.clone(), truth.clone()
    knows_test[parts.validation] = empty[parts.validation]
    knows_others[parts.test] = empty[parts.test]
    fits = {("pixels", "pixels", 1.0): fit(empty, parts), ("pixels", "clean pixels", None): fit(truth, parts)}
    for contender in ("network", "untrained"):
        fits[contender, "a", 1.0], fits[contender, "b", 1.0] = fit(knows_test, parts), fit(knows_others, parts)
    about = {"model": "", "data": "", "seed": 0, "classes": 10, "images": {}, "seen": True, "about": {}}
    result = judged(fits, ["a", "b"], [1.0], **about)
    assert (result.chosen.layer, result.chosen.validation) == ("b", 1.0)
    assert result.chosen.test.value < 0.3
    clean = result.baselines["clean pixels"]
    assert clean.test.value == 1.0
    assert clean.gain is not None
    assert clean.gain.high < -0.6
    assert clean.gain.value == pytest.approx(result.chosen.test.value - 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"times": [1000]}, "from 0 to 999"),
        ({"times": []}, "different numbers"),
        ({"layers": ["midle"]}, "has no layer midle"),
    ],
)
def test_settings_that_are_refused(data, changes, words):
    with pytest.raises(sl.InvalidConfigError, match=words):
        sl.linear_probe(tiny(), data, **changes)


def test_a_conditional_network_needs_its_null_label(data):
    with pytest.raises(ConditionError, match="null condition"):
        sl.linear_probe(tiny(classes=11), data, times=[1])
    with pytest.raises(ConditionError, match="would be the answer"):
        sl.linear_probe(tiny(classes=11), data, times=[1], condition=data.annotations.labels)
    found = sl.linear_probe(tiny(classes=11), data, times=[1], condition=torch.tensor(10), layers=["middle"])
    assert list(found.network) == ["middle"]


# The command

FAST = ["--times", "1,100", "--images", "600"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    config = TrainConfig(
        data="digits",
        model="uvit",
        model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
        steps=2,
        batch_size=8,
        images=ImagesConfig(size=8, channels=1, held_out=300),
        diffusion=DiffusionConfig(condition="class"),
        optimizer=OptimizerConfig(lr=1e-3),
        logging=LoggingConfig(trackers=(), samples_every=0),
    )
    train(config, folder / "guided")
    train(replace(config, diffusion=DiffusionConfig(condition="class", condition_dropout=0.0)), folder / "labels")
    train(replace(config, images=ImagesConfig(size=8, channels=1), diffusion=DiffusionConfig()), folder / "seen")
    return folder


def test_the_command(runs, capsys):
    command = ["lab", "probe", str(runs / "guided"), *FAST, "--layers", "enc*,decoder.0.mlp"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"]["fit"] == 600
    assert found["images"]["validation"] + found["images"]["test"] == 300
    assert not found["seen"]
    assert found["about"]["weights"] == "ema"
    assert list(found["network"]) == ["encoder.0", "decoder.0.mlp"]
    folder = runs / "guided" / "probe"
    assert {file.name for file in folder.iterdir()} == {"step-2-ema-ridge.json"}
    assert json.loads((folder / "step-2-ema-ridge.json").read_text()) == found
    assert main(["lab", "probe", str(runs / "seen"), *FAST, "--data", "digits", "--quiet"]) == 0
    assert "all images are of one data set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("labels", [], "without a null condition"),
        ("seen", [], "held no images out"),
        ("guided", ["--layers", "nope"], "has no layer nope"),
    ],
)
def test_runs_that_are_refused(runs, run, flags, words, capsys):
    assert main(["lab", "probe", str(runs / run), *FAST[2:], *flags]) == 1
    assert words in capsys.readouterr().err
