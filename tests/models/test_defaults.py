"""The defaults of new networks and runs stand in one place, and what exists does not follow them."""

import inspect

from scalelong.config import EARLIER, NEW_RUN, NEW_UVIT, TrainConfig, recipe
from scalelong.models import UViT, preset_arguments
from scalelong.models.official import official_arguments
from scalelong.runs import DataShape, build_model, uvit_arguments
from scalelong.training.sizing import Pictures, possible_runs

SHAPE = DataShape(3, 16, 16)


def test_a_new_network_has_the_defaults():
    parameters = inspect.signature(UViT).parameters
    assert {name: parameters[name].default for name in NEW_UVIT} == NEW_UVIT


def test_what_does_not_name_them_means_the_earlier_ones():
    assert EARLIER == {"init_std": "unit", "residual_scaling": "none"}
    bare = uvit_arguments(TrainConfig(data="x", model="uvit"), SHAPE)
    assert {name: bare[name] for name in EARLIER} == EARLIER
    assert preset_arguments("cifar10-s2")["residual_scaling"] == "none"
    assert official_arguments({"img_size": 8, "patch_size": 2})["residual_scaling"] == "none"


def sized() -> TrainConfig:
    return next(possible_runs(TrainConfig(data="x", model="uvit"), {"data", "model"}, Pictures(1000, 3, 16, 16)))[0]


def test_a_run_that_is_sized_has_the_defaults():
    config = sized()
    assert {name: getattr(config.optimizer, name) for name in NEW_RUN} == NEW_RUN
    assert {name: uvit_arguments(config, SHAPE)[name] for name in NEW_UVIT} == NEW_UVIT


def test_what_exists_keeps_the_earlier_ones():
    config = sized()
    assert build_model(config, SHAPE).residual_scaling == 0.3
    assert recipe("cifar10-uvit-s2").optimizer.optimizer == "adamw"
    earlier = TrainConfig(data="x", model="uvit", model_options={"dim": 32, "depth": 2, "heads": 2})
    assert build_model(earlier, SHAPE).residual_scaling == "none"


def test_wide_networks_are_trained_with_adamw():
    wide = TrainConfig(data="x", model="uvit", model_options={"dim": 256, "heads": 4})
    config = next(possible_runs(wide, {"data", "model"}, Pictures(1000, 3, 16, 16)))[0]
    assert config.optimizer.optimizer == "adamw"
    assert config.model_options["residual_scaling"] == 0.3
