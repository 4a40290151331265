"""Configurations: YAML and back, what is refused, what may change, recipes."""

import dataclasses
import subprocess
import sys
from dataclasses import replace

import pytest

from scalelong.config import (
    RECIPES,
    OptimizerConfig,
    TrainConfig,
    config_fields,
    conflicting_changes,
    default_folder,
    differences,
    dump_config,
    from_dict,
    load_config,
    recipe,
)
from scalelong.errors import InvalidConfigError


def field_names(config):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from field_names(value)
        else:
            yield field.name


def test_names_are_unique_so_that_they_can_be_flags():
    names = list(field_names(TrainConfig()))
    assert len(names) == len(set(names))
    assert not {"recipe", "config", "out", "dry_run"} & set(names)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_yaml(name, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(recipe(name)))
    assert load_config(tmp_path / "config.yaml") == recipe(name)


def test_yaml_is_forgiving_where_it_is_unambiguous(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {lr: 1e-4, betas: [0.9, 0.95], clip: null}\nhardware: {precision: no}\nsteps: 7\n")
    config = load_config(path)
    assert config.optimizer == OptimizerConfig(lr=1e-4, betas=(0.9, 0.95))
    assert config.hardware.precision == "fp32"
    assert config.steps == 7
    assert config.batch_size == TrainConfig().batch_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "unknown field stepz"),
        ("optimizer: {rate: 3}", "unknown field rate in optimizer"),
        ("optimizer: 3", "optimizer must be a group"),
        ("steps: many", "`steps` must be int"),
        ("steps: 1.5", "`steps` must be int"),
        ("steps: true", "`steps` must be int"),
        ("steps: 0", "`steps` must be at least 1"),
        ("diffusion: {prediction: noise}", "`prediction` must be one of epsilon, v, x0"),
        ("optimizer: {betas: [0.9]}", "`betas` must be"),
        ("optimizer: {lr: .nan}", "`lr` must be a number"),
        ("- a\n- b", "must hold fields"),
        ("a: [", "is not valid YAML"),
        ("logging: {sampler: magic}", "`sampler` must be one of"),
        ("guard: {on_nan: shrug}", "`on_nan` must be"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        load_config(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidConfigError, match="no configuration file"):
        load_config(tmp_path / "nothing.yaml")


def test_changes_that_a_run_may_and_may_not_go_on_with():
    before = TrainConfig()
    after = from_dict({"steps": 20_000, "logging": {"log_every": 7}, "images": {"workers": 3}}, before)
    assert set(differences(before, after)) == {"steps", "logging.log_every", "images.workers"}
    assert conflicting_changes(before, after) == {}
    other = from_dict({"optimizer": {"lr": 1.0}, "seed": 3, "model_options": {"depth": 4}}, before)
    assert set(conflicting_changes(before, other)) == {"optimizer.lr", "seed", "model_options.depth"}


def test_more_steps_conflict_when_the_decay_hangs_on_them():
    decaying = TrainConfig(optimizer=OptimizerConfig(decay="cosine"))
    assert "steps" in conflicting_changes(decaying, replace(decaying, steps=20_000))
    fixed = TrainConfig(optimizer=OptimizerConfig(decay="cosine", decay_steps=10_000))
    assert conflicting_changes(fixed, replace(fixed, steps=20_000)) == {}


def test_paper_recipes_carry_the_papers_numbers():
    cifar = recipe("cifar10-uvit-s2")
    assert (cifar.steps, cifar.batch_size, cifar.diffusion.schedule) == (500_000, 128, "vp")
    assert cifar.optimizer == OptimizerConfig(
        lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999), warmup=2500, ema_rate=0.9999, ema_warmup=False
    )
    assert cifar.images.flip
    assert recipe("celeba64-uvit-s4").optimizer.betas == (0.99, 0.99)
    large = recipe("imagenet64-uvit-l4")
    assert (large.steps, large.batch_size, large.optimizer.lr) == (300_000, 1024, 3e-4)
    with pytest.raises(InvalidConfigError, match="known: digits-tiny"):
        recipe("cifar11")


def test_default_folders_name_the_run():
    assert str(default_folder(recipe("fashion-tiny"))) == "runs/fashion-tiny-none-seed0"
    changed = replace(recipe("fashion-tiny"), scaling="cs:0.7", seed=2, steps=3)
    assert str(default_folder(changed)) == "runs/fashion-tiny-cs-0.7-seed2"
    others = {default_folder(replace(TrainConfig(), batch_size=size, data="/a/cats")) for size in (8, 16)}
    assert len(others) == 2
    assert all(folder.name.startswith("cats-uvit-none-seed0-") for folder in others)


def test_every_field_says_what_it_is_and_what_it_affects():
    for name, entry in config_fields().items():
        assert entry.metadata["help"].endswith(".") or "..." in entry.metadata["help"], name
        assert entry.metadata["affects"] in ("result", "speed", "nothing"), name


def test_configurations_need_no_torch():
    code = "import sys, scalelong.config as c; c.recipe('digits-tiny'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
