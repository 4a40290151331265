"""The three estimators of κ."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from scalelong.errors import InvalidConfigError
from scalelong.kappa import (
    KappaChoice,
    PilotRun,
    SilentSkipsError,
    balanced_scaling,
    choose_kappa,
    kappa_for_sum,
    noise_ratio_targets,
)
from scalelong.models import UViT
from scalelong.scaling import BalancedScaling, ConstantScaling, as_scaling
from scalelong.scaling.constant import PAPER_RATIO, paper_kappa
from scalelong.skips import coefficients, is_scaled, scale_skips_
from scalelong.theory import noisy_batch, sampled_statistics, skip_sensitivities


def small_uvit(depth: int = 6, **options) -> UViT:
    return UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=depth, heads=2, **options)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(64, 1, 8, 8) * 2 - 1


# --- Σ κ^(2(j-1)) = S


@pytest.mark.parametrize(
    ("count", "for_mean", "for_tail"),
    [(3, 0.431, 1), (4, 0.426, 1), (6, 0.425, 0.963), (8, 0.425, 0.927), (12, 0.425, 0.904), (20, 0.425, 0.896)],
)
def test_kappa_for_the_papers_targets(count, for_mean, for_tail) -> None:
    assert kappa_for_sum(1.22, count).kappa == pytest.approx(for_mean, abs=5e-4)
    assert kappa_for_sum(5, count).kappa == pytest.approx(for_tail, abs=5e-4)


def test_infeasible_targets_are_capped_and_said() -> None:
    for count in (1, 2, 3, 4, 5):
        solution = kappa_for_sum(5, count)
        assert solution.kappa == 1
        assert solution.limit is not None
        assert "capped" in solution.limit
    below = kappa_for_sum(0.9, 6)
    assert below.kappa == pytest.approx(0.1)
    assert below.limit is not None


# --- estimator A


def test_targets_by_the_fast_formula_are_those_of_sampling() -> None:
    images = torch.rand(300, 1, 1, 1).sqrt() * (torch.rand(300, 1, 24, 24) * 2 - 1)
    ratios = sampled_statistics(images, "vp", draws=30).ratio
    targets = noise_ratio_targets(images, "vp")
    assert targets.mean == pytest.approx(float(ratios.mean()), rel=0.02)
    assert targets.high == pytest.approx(float(ratios.quantile(0.97)), rel=0.06)


def test_many_images_are_summarised_without_loss() -> None:
    few = torch.rand(3000, 1, 1, 1) * torch.ones(1, 1, 4, 4)
    many = few.repeat(5, 1, 1, 1)
    torch.testing.assert_close(
        torch.tensor(noise_ratio_targets(many)), torch.tensor(noise_ratio_targets(few)), rtol=5e-3, atol=0
    )


def test_uniform_data_is_the_default() -> None:
    assumed = choose_kappa(skips=8)
    measured = choose_kappa(skips=8, data=torch.rand(500, 3, 16, 16) * 2 - 1)
    assert measured.low == pytest.approx(assumed.low, abs=0.01)
    assert measured.high == pytest.approx(assumed.high, abs=0.01)
    assert assumed.low <= assumed.kappa <= assumed.high


def test_brighter_data_wants_a_smaller_kappa() -> None:
    dim, bright = torch.full((10, 1, 4, 4), 0.3), torch.full((10, 1, 4, 4), 0.95)
    assert choose_kappa(skips=8, data=bright).kappa < choose_kappa(skips=8, data=dim).kappa


def test_answer_is_readable_and_serialisable() -> None:
    choice = choose_kappa(skips=4)
    assert "κ =" in str(choice)
    assert all(reason in str(choice) for reason in choice.reasons)
    assert json.loads(choice.to_json())["kappa"] == choice.kappa
    assert choice.scaling() == ConstantScaling(choice.kappa)


def test_data_may_come_from_a_function(images) -> None:
    assert choose_kappa(skips=6, data=lambda: images) == choose_kappa(skips=6, data=images.repeat(32, 1, 1, 1))


# --- kappa="auto"


def test_auto_is_resolved_by_the_number_of_skips() -> None:
    config = as_scaling("cs:auto")
    assert config == ConstantScaling(kappa="auto")
    for count in (1, 3, 8):
        expected = ConstantScaling(choose_kappa(skips=count, schedule="ddpm").kappa).curve(count)
        assert ConstantScaling("auto").curve(count) == expected
    model = scale_skips_(small_uvit(), config)
    assert coefficients(model) == pytest.approx(list(ConstantScaling("auto").curve(3)))
    # What a checkpoint remembers is a number.
    assert isinstance(model.skip_scaling.config.kappa, float)  # pyright: ignore
    assert ConstantScaling("auto", reverse=True).curve(3) == pytest.approx(
        ConstantScaling(choose_kappa(skips=3, schedule="ddpm").kappa, reverse=True).curve(3)
    )


@pytest.mark.parametrize("kappa", ["automatic", None, 0, 1.5, True])
def test_other_words_than_auto_are_refused(kappa) -> None:
    with pytest.raises(InvalidConfigError, match="kappa"):
        ConstantScaling(kappa)


# --- estimator B


def test_network_estimate_solves_its_equation(images) -> None:
    model = small_uvit(depth=8)
    # Larger weights than usual, so that the inner skips matter: as it comes, so small a U-ViT asks for no scaling.
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.35)
    choice = choose_kappa(model, images, method="network")
    assert (choice.skips, is_scaled(model)) == (4, False)
    assert 0.1 < choice.low < choice.high < 1
    batch = noisy_batch(images[:32])
    for kappa, target in ((choice.low, choice.details["mean"]), (choice.high, choice.details["high"])):
        weights = skip_sensitivities(model, batch.inputs, batch.steps, scaling=ConstantScaling(kappa))
        total = sum(weight / weights[0] * kappa ** (2 * j) for j, weight in enumerate(weights))
        assert total == pytest.approx(target, rel=0.02)


def test_network_estimate_is_capped_where_skips_fade_by_themselves(images) -> None:
    choice = choose_kappa(small_uvit(), images * 0.1, method="network")
    assert choice.kappa == 1
    assert any("capped" in reason for reason in choice.reasons)
    assert "learning rate" in choice.reasons[-1]
    assert choice.details["sensitivities"][0] == 1


def test_silent_skips_are_named(images) -> None:
    model = small_uvit()
    nn.init.zeros_(model.to_patches.weight)
    with pytest.raises(SilentSkipsError, match="initialised to zero"):
        choose_kappa(model, images, method="network")


def test_balanced_scaling_makes_contributions_fall_as_eq_8(images) -> None:
    weights = (1.0, 4.0, 0.01, 1.0)
    curve = BalancedScaling(weights, 0.5).curve(4)
    for i, (kappa, weight) in enumerate(zip(curve, weights, strict=True)):
        assert kappa == 1 or kappa**2 * weight == pytest.approx(0.5 ** (2 * i))
        assert kappa**2 * weight <= 0.5 ** (2 * i) * (1 + 1e-12)
    assert BalancedScaling((1.0, 1.0, 1.0), 0.7).curve(3) == pytest.approx(ConstantScaling(0.7).curve(3))
    assert BalancedScaling((2.0, 0.0)).curve(2) == (1.0, 1.0)
    model = small_uvit()
    config = balanced_scaling(model, images, kappa=0.6)
    assert len(config.weights) == 3
    assert as_scaling(json.loads(config.to_json())) == config
    scale_skips_(model, config)
    assert coefficients(model) == pytest.approx(list(config.curve(3)))


@pytest.mark.parametrize("weights", [(), (0.0, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_bad_weights_are_refused(weights) -> None:
    with pytest.raises(InvalidConfigError, match="weight"):
        BalancedScaling(weights)
    with pytest.raises(InvalidConfigError, match="2 weights"):
        BalancedScaling((1.0, 1.0)).curve(3)


# --- estimator C


def test_pilot_runs_with_equal_seeds_are_equal(images) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        run = PilotRun(small_uvit(depth=2), images[16:], images[:16], seed=seed, batch_size=4)
        found = [run.held_out_loss()]
        for _ in range(2):
            run.advance(3)
            found.append(run.held_out_loss())
        return found

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_pilot_learns(images) -> None:
    run = PilotRun(small_uvit(depth=2), images[16:], images[:16], learning_rate=4e-3, warmup=5)
    before = run.held_out_loss()
    run.advance(60)
    assert run.held_out_loss() < 0.9 * before


def test_pilot_counts_its_cost_and_drops_the_worse(images) -> None:
    choice = choose_kappa(
        lambda: small_uvit(depth=4), images, method="pilot", grid=(1, 0.8, 0.6, 0.4), steps=8, seeds=2, batch_size=4
    )
    assert isinstance(choice, KappaChoice)
    assert choice.kappa in (1, 0.8, 0.6, 0.4)
    assert choice.low <= choice.kappa <= choice.high
    # 4 values to a quarter, 2 to the half and to the end, 2 seeds each.
    assert choice.details["training_steps"] == 2 * (4 * 2 + 2 * 6)
    losses = choice.details["losses"]
    assert sorted(len(rungs) for rungs in losses.values()) == [1, 1, 3, 3]
    dropped = [kappa for kappa, rungs in losses.items() if len(rungs) == 1]
    kept = [kappa for kappa in losses if kappa not in dropped]
    assert max(sum(losses[kappa][2]) for kappa in kept) <= min(sum(losses[kappa][2]) for kappa in dropped)
    assert choice.skips == 2
    assert json.loads(choice.to_json())["details"]["training_steps"] == 40


def test_pilot_does_not_touch_the_model(images) -> None:
    model = small_uvit(depth=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_kappa(model, images, method="pilot", grid=(1, 0.5), steps=4, seeds=1, batch_size=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not is_scaled(model)


def test_pilot_finds_the_one_kappa_that_trains(images) -> None:
    """A network that explodes unless its inner skips are almost cut."""

    class Explosive(UViT):
        def forward(self, *arguments, **keywords):
            output = super().forward(*arguments, **keywords)
            kappas = coefficients(self)
            return output + 100 * max(kappas[1] - 0.3, 0.0)

    choice = choose_kappa(
        lambda: Explosive(image_size=8, patch_size=4, channels=1, dim=16, depth=4, heads=2),
        images,
        method="pilot",
        grid=(1, 0.7, 0.5, 0.3),
        steps=8,
        seeds=1,
        batch_size=4,
    )
    assert choice.kappa == 0.3


def test_diverged_pilots_say_so(images) -> None:
    class Broken(UViT):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, **keywords) * math.nan

    def build() -> nn.Module:
        return Broken(image_size=8, patch_size=4, channels=1, dim=16, depth=2, heads=2)

    with pytest.raises(InvalidConfigError, match="diverged"):
        choose_kappa(build, images, method="pilot", grid=(1, 0.5), steps=4, seeds=1, batch_size=4)


def test_models_with_other_arguments(images) -> None:
    model = small_uvit(classes=3)

    def with_labels(noisy: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        return noisy, steps, torch.zeros(len(noisy), dtype=torch.long)

    assert choose_kappa(model, images, method="network", inputs=with_labels).skips == 3
    choice = choose_kappa(
        model, images, method="pilot", inputs=with_labels, grid=(1, 0.5), steps=4, seeds=1, batch_size=4
    )
    assert choice.skips == 3


# --- the door


def test_missing_things_are_named(images) -> None:
    with pytest.raises(InvalidConfigError, match="number of long skips"):
        choose_kappa(data=images)
    with pytest.raises(InvalidConfigError, match="both a model and data"):
        choose_kappa(small_uvit(), method="network")
    with pytest.raises(InvalidConfigError, match="method must be one of"):
        choose_kappa(skips=3, method="guess")
    with pytest.raises(InvalidConfigError, match="belong to method='pilot'"):
        choose_kappa(skips=3, steps=10)
    with pytest.raises(InvalidConfigError, match="at least 1"):
        choose_kappa(skips=0)
    with pytest.raises(InvalidConfigError, match="not finite"):
        choose_kappa(skips=3, data=torch.full((2, 1, 2, 2), math.nan))
    with pytest.raises(InvalidConfigError, match="floating-point"):
        choose_kappa(skips=3, data=torch.zeros(2, 1, 2, 2, dtype=torch.uint8))


def test_skips_are_counted_in_the_model(images) -> None:
    assert choose_kappa(small_uvit(depth=8), images).skips == 4
    assert choose_kappa(small_uvit(depth=8)).skips == 4


def test_sensitivities_follow_kappa(images) -> None:
    """With norms in the network w_j depends on κ, which is why it is measured anew."""
    model = small_uvit()
    arguments = (images[:4], torch.tensor([0, 300, 600, 900]))
    at_one = skip_sensitivities(model, *arguments)
    at_half = skip_sensitivities(model, *arguments, scaling=ConstantScaling(0.5))
    assert at_one[2] / at_one[0] != pytest.approx(at_half[2] / at_half[0], rel=0.01)


def test_auto_is_what_the_estimator_answers_for_the_paper_s_data() -> None:
    """Scaling stands below this package, so that it holds the constant and the bisection itself."""
    assert noise_ratio_targets(schedule="ddpm").high == pytest.approx(PAPER_RATIO, rel=1e-12)
    for skips in (*range(1, 30), 64, 200):
        assert paper_kappa(skips) == choose_kappa(skips=skips, schedule="ddpm").kappa
        assert ConstantScaling("auto").resolved(skips).kappa == paper_kappa(skips)
