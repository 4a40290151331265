"""Linear probes: classifiers against least squares, features by hand, chance, refusals, the published protocol."""

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
from scalelong.data import load_data, to_float
from scalelong.data.dataset import MemoryData
from scalelong.errors import (
    ConditionError,
    EvaluationError,
    FeatureError,
    InvalidSamplesError,
    LabelError,
)
from scalelong.evaluation import CLASSIFIERS, ddae
from scalelong.evaluation.linear_classifiers import minimise_logistic_, standardised
from scalelong.evaluation.parts import labelled, split
from scalelong.evaluation.probe import Bench, Noiser, Reader
from scalelong.runs import DiffusionConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.training import train

BASELINES = {"untrained network", "untrained network, same t", "pixels, same t", "clean pixels"}


def tiny(**changes: Any) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(
        **{"image_size": 8, "patch_size": 4, "channels": 1, "dim": 16, "depth": 2, "heads": 2, **changes}
    ).eval()


@pytest.fixture(scope="module")
def pair() -> tuple[Tensor, Tensor]:
    """600 digits."""
    data = load_data("digits", limit=600)
    batch = data.fetch(torch.arange(len(data)))
    assert batch.labels is not None
    return batch.images, batch.labels


def blobs(count: int, dim: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (count,), generator=drawn)
    return centres[labels] + 1.5 * torch.randn(count, dim, generator=drawn), labels


# Classifiers


@pytest.mark.parametrize(("count", "dim"), [(80, 7), (30, 50)])
@pytest.mark.parametrize("penalty", [1e-4, 1e-1, 10.0])
def test_ridge_is_augmented_least_squares(count, dim, penalty):
    """The same minimum by another way: penalties as further rows, the intercept as a column that they leave out."""
    (x, y), (other, _) = blobs(count, dim, 4, 1), blobs(60, dim, 4, 2)
    (found,) = CLASSIFIERS["ridge"](x, y, 4, [other], [penalty])[0]
    a = x.double()
    mean, deviation = a.mean(0), a.std(0, unbiased=False)
    a, b = ((each.double() - mean) / deviation for each in (x, other))
    rows = torch.cat([a, (count * penalty) ** 0.5 * torch.eye(dim, dtype=torch.float64)])
    column = torch.cat([torch.ones(count, 1), torch.zeros(dim, 1)]).double()
    targets = torch.cat([F.one_hot(y, 4).double(), torch.zeros(dim, 4, dtype=torch.float64)])
    weights = torch.linalg.lstsq(torch.cat([rows, column], 1), targets, driver="gelsd").solution
    assert torch.equal(found, (b @ weights[:-1] + weights[-1]).argmax(1))


def test_logistic_is_at_its_minimum():
    x, y = blobs(120, 6, 3, 1)
    x, _ = standardised(x, [])
    for penalty in (1e-3, 1e-1):
        weights = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        minimise_logistic_(weights, bias, x, y, penalty)
        weights, bias = weights.detach(), bias.detach()
        share = torch.softmax(x @ weights + bias, 1) - F.one_hot(y, 3)
        assert float((x.T @ share / len(x) + penalty * weights).abs().max()) < 1e-5
        assert float(share.mean(0).abs().max()) < 1e-5


def test_classifiers_recognise_and_constant_features_are_harmless():
    (x, y), (other, truth) = blobs(300, 12, 4, 1), blobs(200, 12, 4, 2)
    for fit in CLASSIFIERS.values():
        ours = fit(x, y, 4, [other], [1e-3])[0][0]
        assert float((ours == truth).double().mean()) > 0.8
        rescaled = fit(1e4 * x - 7, y, 4, [1e4 * other - 7], [1e-3])[0][0]
        assert float((ours == rescaled).double().mean()) > 0.98, "units do not matter"
        flat = torch.full((len(x), 1), 0.1)
        with_flat = fit(torch.cat([x, flat], 1), y, 4, [torch.cat([other, torch.full((200, 1), 5.0)], 1)], [1e-3])
        assert torch.equal(with_flat[0][0], fit(x, y, 4, [other], [1e-3])[0][0])
    with pytest.raises(FeatureError, match="not all finite"):
        CLASSIFIERS["ridge"](x / 0, y, 4, [other], [1.0])


# Parts


def test_parts_are_disjoint_stratified_and_fixed_by_the_seed(pair):
    images, labels = pair
    parts = split(labelled(pair), None, None, 0)
    rows = torch.cat([parts.fit, parts.validation, parts.test])
    assert rows.sort().values.tolist() == list(range(600))
    for part, share in ((parts.fit, 0.6), (parts.validation, 0.2), (parts.test, 0.2)):
        counts = torch.bincount(parts.labels[part], minlength=10)
        assert float((counts - share * torch.bincount(labels)).abs().max()) <= 1
    again, other = split(labelled(pair), None, None, 0), split(labelled(pair), None, None, 1)
    assert torch.equal(again.test, parts.test)
    assert not torch.equal(other.test, parts.test)
    assert torch.equal(parts.x0, to_float(images))
    few = split(labelled(pair), None, 100, 0)
    assert max(len(few.fit), len(few.validation), len(few.test)) <= 120
    assert len(few.x0) == len(few.fit) + len(few.validation) + len(few.test)


def test_held_out_images_are_the_ones_that_are_tested(pair):
    data = load_data("digits")
    fitted, apart = data.split(300, seed=0)
    parts = split(labelled(fitted), labelled(apart), None, 0)
    assert parts.apart
    assert len(parts.fit) == len(fitted)
    tested = parts.x0[torch.cat([parts.validation, parts.test])].flatten(1).sum(1).sort().values
    held = to_float(apart.fetch(torch.arange(300)).images).flatten(1).sum(1).sort().values
    torch.testing.assert_close(tested, held)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x, y: (x[:200], y[:200]), InvalidSamplesError, r"class '\d' .* has \d+ images, .* at least 30"),
        (lambda x, _: (x, torch.zeros(len(x), dtype=torch.long)), LabelError, "has 1 classes"),
        (lambda x, y: (x, y.float()), LabelError, "whole numbers"),
        (lambda x, y: (x, y - 1), LabelError, "from 0"),
        (lambda x, y: (x, y[:-1]), LabelError, "one for each of the 600"),
        (lambda x, _: x, sl.InvalidConfigError, "a pair"),
        (lambda x, _: MemoryData("mine", x), LabelError, "needs labels, and 'mine' has none"),
        (lambda *_: "shapes", sl.InvalidInputError, r"x must be \(B, 1, H, W\)"),
    ],
)
def test_images_that_cannot_be_probed(pair, make, error, words):
    with pytest.raises(error, match=words):
        sl.linear_probe(tiny(), make(*pair))


# Features


def test_features_are_means_over_the_patches_of_each_block(pair):
    model = tiny(classes=11)
    x0 = to_float(pair[0][:20])
    noiser = Noiser("vp", x0, 3)
    reader = Reader(model, torch.tensor(10), noiser, None, "mean", None, None, 8)
    assert reader.names == ("encoder.0", "middle", "decoder.0", "norm")
    x, seen = noiser.at(100, 0), {}
    handle = model.middle.register_forward_hook(lambda *call: seen.update(middle=call[2]))
    with torch.no_grad():
        model(x, torch.full((20,), 100.0), torch.full((20,), 10))
    handle.remove()
    torch.testing.assert_close(reader.read(x, 100)["middle"], seen["middle"][:, 2:].mean(1))
    whole = Reader(model, torch.tensor(10), noiser, ["middle"], "none", None, None, 8)
    torch.testing.assert_close(whole.read(x, 100)["middle"], seen["middle"][:, 2:].flatten(1))
    assert torch.equal(noiser.at(100, 0), x), "the noise is fixed"
    assert not torch.equal(noiser.at(100, 1), x)
    longer = Noiser("vp", torch.cat([x0, x0]), 3).at(100, 0)
    assert torch.equal(longer[:20], x), "whatever follows"


class Net(nn.Module):
    """A small UNet of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.inner, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join, self.last_norm, self.out = nn.Conv2d(16, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = F.silu(self.first(x)) + 1e-3 * t.view(-1, 1, 1, 1)
        h = self.up(F.silu(self.inner(F.silu(self.down(skip)))))
        return self.out(self.last_norm(self.join(torch.cat([h, skip], 1))))


@pytest.fixture(scope="module")
def found(pair) -> sl.LinearProbe:
    return sl.linear_probe(tiny(), pair, times=(1, 999))


def test_any_network_with_long_skips_and_nothing_of_it_changes(pair):
    torch.manual_seed(0)
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = sl.linear_probe(model, pair, times=[50])
    assert "join" in found.network.layers
    assert found.network.layers[-1] == "last_norm"
    assert set(found.baselines) == BASELINES
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    other = sl.linear_probe(model, pair, times=[50], schedule=torch.linspace(0.999, 0.01, 1000), pool="none")
    assert other.network.accuracy[0][0] > found.network.accuracy[0][0], "all positions say more than their mean"


def test_a_network_that_cannot_be_drawn_anew_must_be_given(pair):
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(1))

    with pytest.raises(EvaluationError, match=r"extra .*untrained=NEW_NETWORK"):
        sl.linear_probe(Odd(), pair, times=[50])
    assert sl.linear_probe(Odd(), pair, times=[50], untrained=Odd).untrained.layers


# What is found


def test_the_same_seed_gives_the_same_table_and_untrained_is_untrained(found, pair):
    again = sl.linear_probe(tiny(), pair, times=(1, 999))
    assert again.to_dict() == found.to_dict()
    other = sl.linear_probe(tiny(), pair, times=(1, 999), seed=1)
    assert other.network.accuracy != found.network.accuracy
    # The network is not trained either: the gain is that of another draw of the weights.
    gain = found.baselines["untrained network"].gain
    assert gain is not None
    assert abs(gain.value) < 0.2


def test_noise_and_permuted_labels_are_recognised_by_chance_alone(found, pair):
    """At t = 999 nothing of the image is left; and of labels that mean nothing, nothing can be learned."""
    for table in (found.network, found.untrained, found.pixels):
        assert max(row[1] for row in table.accuracy) < 0.23  # of 120 images, the best of nine penalties
    assert found.pixels.accuracy[0][0] > 0.8
    images, labels = pair
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    nothing = sl.linear_probe(tiny(), (images, shuffled), times=(1,))
    assert nothing.chosen.test.low < 0.1 < nothing.chosen.test.high + 0.02
    assert nothing.baselines["clean pixels"].test.low < 0.12


def test_the_choice_is_made_on_validation_images_and_the_test_is_of_others(pair):
    """A layer that knows the labels of the test images alone is not chosen; one that knows the others is, and fails."""
    parts = split(labelled(pair), None, None, 0)
    bench = Bench(parts, CLASSIFIERS["ridge"], (1e-3, 1e-1), "clean pixels")
    truth, drawn = F.one_hot(parts.labels, 10).float(), torch.Generator().manual_seed(0)
    empty = torch.randn(600, 10, generator=drawn)
    knows_test, knows_others = truth.clone(), truth.clone()
    knows_test[parts.validation] = empty[parts.validation]
    knows_others[parts.test] = empty[parts.test]
    for contender in ("network", "untrained"):
        bench.add(contender, "a", 1.0, knows_test)
        bench.add(contender, "b", 1.0, knows_others)
    bench.add("pixels", "pixels", 1.0, empty)
    bench.add("clean", "clean pixels", None, truth)
    told = {"model": "", "data": "", "protocol": "ridge", "pool": "mean", "draws": 1, "seed": 0, "classes": 10}
    told |= {"images": {"fit": 360, "validation": 120, "test": 120}, "seen": True, "about": {}}
    result = bench.result(["a", "b"], [1.0], told)
    assert (result.chosen.layer, result.chosen.validation) == ("b", 1.0)
    assert result.chosen.test.value < 0.3
    clean = result.baselines["clean pixels"]
    assert clean.test.value == 1.0
    assert clean.gain is not None
    assert clean.gain.high < -0.6
    assert clean.gain.value == pytest.approx(result.chosen.test.value - 1)


def test_features_that_do_not_fit_into_memory_are_refused(pair, monkeypatch):
    monkeypatch.setattr("scalelong.evaluation.probe.MOST_NUMBERS", 600 * 16 * 4 - 1)
    with pytest.raises(EvaluationError, match="4 layers of 16 features for 600 images"):
        sl.linear_probe(tiny(), pair, times=[1])
    assert sl.linear_probe(tiny(), pair, times=[1], layers=["dec*"], batch_size=599).network.layers == ("decoder.0",)


def test_half_precision(pair):
    found = sl.linear_probe(tiny().to(torch.bfloat16), pair, times=[1], layers=["middle"])
    assert found.chosen.test.value > 0.4


def test_draws_are_averaged_and_their_spread_told(pair):
    one = [sl.linear_probe(tiny(), pair, times=[100], layers=["middle"], penalties=[1e-2]).network.accuracy[0][0]]
    three = sl.linear_probe(tiny(), pair, times=[100], layers=["middle"], penalties=[1e-2], draws=3)
    assert three.network.deviation[0][0] > 0
    assert three.network.accuracy[0][0] != one[0]
    assert "3 draws" in str(three)


def test_it_is_printed_drawn_and_kept(found, tmp_path):
    text = str(found)
    for part in ("encoder.0", "middle", "norm", "untrained network", "clean pixels", "t = 999", "chance 10.0"):
        assert part in text
    assert "<table" in found._repr_html_()
    figure = found.plot()
    assert [len(axes.images) for axes in figure.axes[:2]] == [1, 1]
    assert figure.axes[0].images[0].get_array().shape == (5, 2)
    found.save_plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    found.save(tmp_path / "probe.json")
    assert sl.LinearProbe.load(tmp_path / "probe.json") == found
    (tmp_path / "bad.json").write_text(json.dumps({"format": 1, "chosen": 3}))
    for name, words in (("bad.json", "damaged"), ("none.json", "missing")):
        with pytest.raises(EvaluationError, match=words):
            sl.LinearProbe.load(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "svm"}, "protocol must be one of ridge, logistic, ddae"),
        ({"pool": "max"}, "pool must be one of"),
        ({"times": [1000]}, "from 0 to 999"),
        ({"times": []}, "different numbers"),
        ({"draws": 0}, "draws must be"),
        ({"penalties": [0.0]}, "above 0"),
        ({"layers": ["midle"]}, "has no layer midle"),
        ({"device": "abacus"}, "--device abacus cannot be used"),
    ],
)
def test_settings_that_are_refused(pair, changes, words):
    with pytest.raises(sl.InvalidConfigError, match=words):
        sl.linear_probe(tiny(), pair, **changes)


def test_a_conditional_network_needs_its_null_label(pair):
    with pytest.raises(ConditionError, match="null condition"):
        sl.linear_probe(tiny(classes=11), pair, times=[1])
    with pytest.raises(ConditionError, match="would be the answer"):
        sl.linear_probe(tiny(classes=11), pair, times=[1], condition=pair[1])
    found = sl.linear_probe(tiny(classes=11), pair, times=[1], condition=torch.tensor(10), layers=["middle"])
    assert found.network.layers == ("middle",)


# The published protocol


def test_the_published_protocol_says_what_it_chooses_on(pair, monkeypatch):
    monkeypatch.setattr(ddae, "EPOCHS", 2)
    found = sl.linear_probe(tiny(), pair, times=[1], protocol="ddae")
    assert found.chosen_on == "test"
    assert "ON THE TEST IMAGES" in str(found)
    assert found.network.layers == ("decoder.0",)
    assert found.images["validation"] == 0
    assert found.to_dict() == sl.linear_probe(tiny(), pair, times=[1], protocol="ddae").to_dict()
    x = torch.arange(2 * 64.0).view(2, 1, 8, 8)
    assert ddae.flipped_and_cropped(x, torch.Generator().manual_seed(0)).shape == x.shape


# The command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    config = TrainConfig(
        data="digits",
        model="uvit",
        model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "self_conditioning": "middle"},
        steps=3,
        batch_size=8,
        images=ImagesConfig(size=8, channels=1, held_out=300),
        diffusion=DiffusionConfig(condition="class"),
        optimizer=OptimizerConfig(lr=1e-3, ema_rate=0.99, ema_warmup=False),
        logging=LoggingConfig(trackers=(), samples_every=0),
    )
    train(config, folder / "guided")
    labels_only = replace(config, diffusion=DiffusionConfig(condition="class", condition_dropout=0.0))
    train(labels_only, folder / "labels")
    plain = replace(config, images=ImagesConfig(size=8, channels=1), diffusion=DiffusionConfig())
    train(plain, folder / "seen")
    return folder


FAST = ["--times", "1,100", "--images", "600"]


def test_the_command(runs, capsys):
    assert main(["probe", str(runs / "guided"), *FAST, "--json"]) == 0
    found = sl.LinearProbe.from_dict(json.loads(capsys.readouterr().out))
    assert found.images["fit"] == 600
    assert found.images["validation"] + found.images["test"] == 300
    assert not found.seen
    assert found.about["weights"] == "ema"
    assert "random start" in found.about["remarks"][0]
    folder = runs / "guided" / "probe"
    assert {file.name for file in folder.iterdir()} == {"step-3-ema-ridge.json", "step-3-ema-ridge.png"}
    assert sl.LinearProbe.load(folder / "step-3-ema-ridge.json") == found
    assert main(["probe", str(runs / "guided"), *FAST, "--layers", "enc*,decoder.0.mlp", "--weights", "raw"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("encoder.0", "decoder.0.mlp", "untrained network"))


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("labels", [], "without a null condition"),
        ("seen", [], "held no images out"),
        ("guided", ["--layers", "nope"], "has no layer nope"),
        ("guided", ["--times", "1;2"], "--times must be numbers"),
    ],
)
def test_runs_that_are_refused(runs, run, flags, words, capsys):
    assert main(["probe", str(runs / run), *FAST[2:], *flags]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "bug" not in error


def test_other_images(runs, capsys):
    assert main(["probe", str(runs / "seen"), *FAST, "--data", "digits", "--quiet"]) == 0
    assert "all images are of one data set" in capsys.readouterr().out
