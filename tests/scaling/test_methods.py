"""The configurations: curves against closed forms, validation, shorthands, JSON, registration."""

import json
from dataclasses import dataclass

import pytest
import torch

import scalelong as sl
from scalelong.scaling import METHODS, FixedScaling, SkipSite, register_scaling


def sites(count: int, **values) -> list[SkipSite]:
    return [SkipSite(index=i, channels=8, main_channels=8, **values) for i in range(1, count + 1)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (sl.NoScaling(), [1, 1, 1, 1]),
        (sl.UniformScaling(), [0.5**0.5] * 4),
        (sl.UniformScaling(0.3), [0.3] * 4),
        (sl.ConstantScaling(0.5), [1, 0.5, 0.25, 0.125]),
        (sl.ConstantScaling(0.5, reverse=True), [0.0625, 0.125, 0.25, 0.5]),
        (sl.ConstantScaling(1), [1, 1, 1, 1]),
        (sl.CustomScaling((1, 0.2, 0, 2)), [1, 0.2, 0, 2]),
    ],
)
def test_curves(config, expected):
    scaling = config.build(sites(4))
    assert [scaling.coefficient(i) for i in range(1, 5)] == pytest.approx(expected)
    skip = torch.randn(2, 8, 3, 3)
    for i, kappa in enumerate(expected, 1):
        torch.testing.assert_close(scaling.scale(skip, i), skip * kappa)
    assert not list(scaling.state_dict())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sl.ConstantScaling(0), r"\(0, 1\]"),
        (lambda: sl.ConstantScaling(1.01), r"\(0, 1\]"),
        (lambda: sl.ConstantScaling(-0.5), r"\(0, 1\]"),
        (lambda: sl.ConstantScaling(float("nan")), r"\(0, 1\]"),
        (lambda: sl.ConstantScaling("x"), r"\(0, 1\]"),  # pyright: ignore[reportArgumentType]
        (lambda: sl.ConstantScaling(True), r"\(0, 1\]"),
        (lambda: sl.UniformScaling(1.5), r"\(0, 1\]"),
        (lambda: sl.LearnableScaling(ratio=0), ">= 1"),
        (lambda: sl.LearnableScaling(ratio=2.5), ">= 1"),  # pyright: ignore[reportArgumentType]
        (lambda: sl.LearnableScaling(module="conv"), "'se', 'ie', 'scalar'"),
        (lambda: sl.LearnableScaling(activation="softplus9"), "'relu'"),
        (lambda: sl.LearnableScaling(gate="pixel"), "'token'"),
        (lambda: sl.LearnableScaling(start="zero"), "'cs', 'paper'"),
        (lambda: sl.LearnableScaling(kappa=2), r"\(0, 1\]"),
        (lambda: sl.NormScaling(norm="batch"), "'layer', 'rms'"),
        (lambda: sl.MagnitudePreserving(1.2), r"\[0, 1\]"),
        (lambda: sl.CustomScaling(()), "finite"),
        (lambda: sl.CustomScaling((0.5, -1)), "finite"),
        (lambda: sl.as_scaling("css"), "known: .*cs"),
        (lambda: sl.as_scaling("cs:gamma=1"), "kappa, reverse"),
        (lambda: sl.as_scaling("none:0.5"), "takes no value"),
        (lambda: sl.as_scaling("cs:0.7,kappa=0.6"), "write the value first"),
        (lambda: sl.as_scaling("cs:reverse=true,0.7"), "write the value first"),
        (lambda: sl.as_scaling({"kappa": 0.5}), "'method'"),
        (lambda: sl.as_scaling({"method": "cs", "gamma": 0.5}), "kappa, reverse"),
        (lambda: sl.as_scaling(0.5), "float"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_values_say_what_is_allowed(make, says):
    with pytest.raises(sl.InvalidConfigError, match=says):
        make()


ALL = [
    sl.NoScaling(),
    sl.UniformScaling(0.6),
    sl.ConstantScaling(0.55, reverse=True),
    sl.LearnableScaling(module="ie", shared=False, ratio=4, activation="mish", gate="channel", start="paper"),
    sl.NormScaling(0.9, norm="rms"),
    sl.MagnitudePreserving(0.3),
    sl.CustomScaling((1, 0.25)),
]


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.name)
def test_json_round_trip(config):
    values = json.loads(json.dumps(config.to_dict()))
    again = sl.as_scaling(values)
    assert again == config
    assert hash(again) == hash(config)
    assert values["method"] == config.name


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("none", sl.NoScaling()),
        ("uniform", sl.UniformScaling()),
        ("cs", sl.ConstantScaling(0.7)),
        ("cs:0.6", sl.ConstantScaling(0.6)),
        ("cs:0.7,behind_norms=true", sl.ConstantScaling(0.7, behind_norms=True)),
        ("cs:kappa=0.6,reverse=True", sl.ConstantScaling(0.6, reverse=True)),
        ("ls", sl.LearnableScaling()),
        ("ls:module=ie,shared=false,ratio=4", sl.LearnableScaling(module="ie", shared=False, ratio=4)),
        ("ls:scalar", sl.LearnableScaling(module="scalar")),
        ("norm", sl.NormScaling()),
        ("mp:0.4", sl.MagnitudePreserving(0.4)),
        ("custom:1,0.5", sl.CustomScaling((1, 0.5))),
    ],
)
def test_shorthands(text, config):
    assert sl.as_scaling(text) == config


@pytest.mark.parametrize("spec", ["custom", "custom:", {"method": "custom"}])
def test_a_method_that_needs_values_says_so(spec):
    with pytest.raises(sl.InvalidConfigError, match="'custom' needs kappas: write for example"):
        sl.as_scaling(spec)


def test_a_custom_curve_must_have_one_number_per_skip():
    with pytest.raises(sl.InvalidConfigError, match="2 coefficients were given for 3"):
        sl.CustomScaling((1, 0.5)).build(sites(3))


def test_users_register_their_own_method():
    @register_scaling
    @dataclass(frozen=True)
    class HarmonicScaling(FixedScaling):
        name = "harmonic_for_test"

        def curve(self, count: int) -> tuple[float, ...]:
            return tuple(1 / i for i in range(1, count + 1))

    try:
        model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=6, heads=2, scaling="harmonic_for_test")
        assert sl.coefficients(model) == pytest.approx([1, 1 / 2, 1 / 3])
    finally:
        del METHODS["harmonic_for_test"]


def test_a_taken_name_is_refused():
    with pytest.raises(sl.InvalidConfigError, match="already"):

        @register_scaling
        @dataclass(frozen=True)
        class Impostor(FixedScaling):
            name = "cs"

            def curve(self, count: int) -> tuple[float, ...]:
                return (1.0,) * count
