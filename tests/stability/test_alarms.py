import math

from scalelong.stability import AlarmRules
from scalelong.stability.alarms import REMEDIES, AlarmDetector

HEALTHY = {
    "loss": 0.2,
    "loss_max": 0.3,
    "gradient_norm/all": 1.0,
    "probe_block_rms/middle": 2.0,
    "probe_skip_rms/1": 1.0,
    "probe_skip_rms/2": 3.0,
    "kappa/1": 1.0,
    "kappa/2": 0.7,
    "headroom": 1e4,
    "activation_max": 6.0,
}


def after_healthy(changes: dict[str, float], rules: AlarmRules | None = None) -> list[str]:
    detector = AlarmDetector(rules or AlarmRules())
    for step in range(10):
        assert detector.check(step, HEALTHY) == []
    return [alarm.kind for alarm in detector.check(10, {**HEALTHY, **changes})]


def test_silent_while_nothing_changes():
    assert after_healthy({}) == []


def test_spikes_of_loss_gradient_and_features():
    assert after_healthy({"loss_max": 0.7}) == ["spike"]
    assert after_healthy({"gradient_norm/all": 11.0}) == ["spike"]
    assert after_healthy({"probe_block_rms/middle": 9.0}) == ["spike"]


def test_no_spike_before_there_is_a_past():
    detector = AlarmDetector(AlarmRules())
    detector.check(0, HEALTHY)
    assert detector.check(1, {**HEALTHY, "gradient_norm/all": 100.0}) == []


def test_collapse_of_a_feature_and_of_the_loss():
    assert after_healthy({"probe_block_rms/middle": 1e-3}) == ["collapse"]
    assert after_healthy({"loss": 1.0, "loss_max": 1.0}, AlarmRules(zero_loss=1.0, loss_spike=100)) == ["collapse"]


def test_a_network_that_has_not_learned_yet_has_not_collapsed():
    detector = AlarmDetector(AlarmRules(zero_loss=1.0))
    assert all(detector.check(step, {"loss": 1.0, "loss_max": 1.0}) == [] for step in range(30))


def test_overflow_margin():
    assert after_healthy({"headroom": 4.0}) == ["overflow margin"]


def test_dead_skip_by_feature_and_by_coefficient():
    assert after_healthy({"probe_skip_rms/2": 0.0}) == ["dead skip"]
    assert after_healthy({"kappa/2": 0.0}) == ["dead skip"]


def test_non_finite_is_one_alarm_whatever_else_is_wrong():
    assert after_healthy({"loss": math.nan, "headroom": 0.0, "gradient_norm/all": math.inf}) == ["non-finite"]


def test_a_standing_condition_is_reported_once_and_again_after_it_was_gone():
    detector = AlarmDetector(AlarmRules())
    bad = {**HEALTHY, "headroom": 2.0}
    kinds = [len(detector.check(step, reading)) for step, reading in enumerate([bad, bad, HEALTHY, bad])]
    assert kinds == [1, 0, 0, 1]


def test_every_alarm_says_what_to_try():
    detector = AlarmDetector(AlarmRules())
    (alarm,) = detector.check(3, {**HEALTHY, "headroom": 2.0})
    assert str(alarm).startswith("step 3: overflow margin:")
    assert "bf16" in str(alarm)
    assert all(len(text) > 40 for text in REMEDIES.values())


def test_an_absurd_rate_is_named_and_a_scaled_model_is_not_told_to_scale():
    detector = AlarmDetector(AlarmRules(feature_spike=1e9))
    for step, size in enumerate((1.0, 1.1, 50.0)):
        reading = {"kappa/1": 1.0, "block_rms/a": 1.0, "block_rms/b": size, "update_ratio/b": 0.6}
        assert detector.check(step, reading, lr=3.0, scaled=True) == []
    detector.rules = AlarmRules()
    broken = {"kappa/1": math.nan, "block_rms/a": math.nan, "block_rms/b": math.nan}
    (alarm,) = detector.check(4, broken, lr=3.0, scaled=True)
    shown = str(alarm)
    assert "The learning rate is 3, and a step changes weights by 60%" in shown
    assert "block_rms/b left first: it had grown 50 times" in shown
    assert "kappa" not in shown
    assert "scale" not in shown
    (alarm,) = AlarmDetector(AlarmRules()).check(1, broken)
    assert "scale_skips_(model, 'cs')" in str(alarm)
    assert not any(mark in str(alarm) for mark in "{}")
