import pytest

from scalelong.experiments.results import Curve, ratio_text, spread, steps_ratio, steps_to


def curve(*values: float) -> Curve:
    return Curve(tuple(range(10, 10 * len(values) + 1, 10)), values)


def test_the_crossing_is_interpolated():
    assert steps_to(curve(1.0, 0.6, 0.2), 0.5) == pytest.approx(22.5)
    assert steps_to(curve(1.0, 0.6, 0.2), 0.2) == 30
    assert steps_to(curve(0.1, 0.6), 0.2) == 10


def test_a_target_that_is_never_reached():
    assert steps_to(curve(1.0, 0.6, 0.3), 0.2) is None
    assert steps_to(Curve((), ()), 0.2) is None


def test_the_first_crossing_counts_even_if_the_loss_rises_again():
    assert steps_to(curve(1.0, 0.2, 0.9, 0.1), 0.2) == 20


def test_the_ratio_is_against_the_baselines_last_loss():
    baseline = curve(1.0, 0.8, 0.6, 0.4)
    assert steps_ratio(baseline, baseline) == 1
    assert steps_ratio(curve(0.8, 0.4, 0.3, 0.2), baseline) == pytest.approx(0.5)
    assert steps_ratio(curve(1.0, 0.9, 0.8, 0.7), baseline) is None
    assert steps_ratio(Curve((), ()), baseline) is None


def test_a_baseline_that_got_worse_at_the_end_was_there_before():
    baseline = curve(1.0, 0.4, 0.3, 0.5)
    ratio = steps_ratio(curve(1.0, 0.5, 0.3, 0.3), baseline)
    assert ratio == pytest.approx(20 / (10 + 10 * 0.5 / 0.6))


def test_values_between_records():
    assert curve(1.0, 0.5).at(15) == pytest.approx(0.75)
    assert curve(1.0, 0.5).at(10) == 1.0
    assert curve(1.0, 0.5).at(25) is None
    assert curve(0.3).at(10) == 0.3


def test_texts_show_the_spread_and_what_is_missing():
    assert spread([0.1, 0.3, None], "{:.1f}") == "0.2 (0.1 to 0.3)"
    assert spread([None], "{:.1f}") == "-"
    assert ratio_text([0.5, None]) == "× 0.50, not reached by 1 of 2 seeds"
    assert ratio_text([None]) == "not reached"


def test_recorded_values_are_given_back_to_the_last_bit():
    """Or else a curve would not reach its own last value."""
    found = Curve((250, 300), (0.32813, 0.22883))
    assert found.at(300) == 0.22883
    assert steps_to(found, found.at(300) or 0) == 300
