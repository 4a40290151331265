"""Variants of a comparison, and starts of the merges through the trainer."""

from dataclasses import replace

import pytest

from scalelong.config import TrainConfig
from scalelong.errors import InvalidConfigError
from scalelong.experiments import Variant, as_variant, plan_runs


def test_a_method_is_a_variant():
    assert as_variant("cs:0.7") == Variant("cs:0.7", {"scaling": "cs:0.7"})
    with pytest.raises(InvalidConfigError, match="unknown scaling"):
        as_variant("huh")


def test_fields_of_groups_and_options_of_the_model():
    given = "fast: scaling=ls:module=ie,shared=false lr=2e-3 betas=[0.9,0.99] model_options.merge_start=additive"
    config = as_variant(given).apply(TrainConfig(model_options={"depth": 4}))
    assert config.scaling == "ls:module=ie,shared=false"
    assert config.optimizer.lr == 2e-3
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.model_options == {"depth": 4, "merge_start": "additive"}
    assert config.optimizer.weight_decay == TrainConfig().optimizer.weight_decay


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: merge_start=additive", "model_options.merge_start"),
        ("a: lr", "looks like"),
        ("a: lr=fast", r"lr. must be float, got 'fast'"),
        ("a: scaling=huh", "unknown scaling"),
    ],
)
def test_bad_variants_are_refused(text, message):
    with pytest.raises(InvalidConfigError, match=message):
        as_variant(text).apply(TrainConfig())


def test_variants_and_methods_in_one_plan(tmp_path):
    runs = plan_runs(TrainConfig(), ["none", "quick: lr=4e-4", Variant("x", {"batch_size": 8})], [0, 1], tmp_path)
    assert [run.name for run in runs[:3]] == ["none-seed0", "quick-seed0", "x-seed0"]
    assert runs[1].config == replace(runs[0].config, optimizer=replace(runs[0].config.optimizer, lr=4e-4))
    assert runs[5].config.batch_size == 8
    with pytest.raises(InvalidConfigError, match="given twice"):
        plan_runs(TrainConfig(), ["none", "none: lr=1"], [0], tmp_path)
