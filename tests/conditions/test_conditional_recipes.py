"""The recipes for classes and texts build the networks that the paper, and the small examples, are about."""

import torch

from scalelong.config import recipe
from scalelong.models import Denoiser, UViT
from scalelong.runs import DataShape, build_model


def millions(name: str, shape: DataShape) -> float:
    with torch.device("meta"):
        model = build_model(recipe(name), shape)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def test_text_to_image_on_mscoco() -> None:
    latents = DataShape(4, 32, 32)
    assert round(millions("mscoco256-uvit-s2", latents)) == 45
    assert round(millions("mscoco256-uvit-s2-deep", latents)) == 58
    assert abs(millions("mscoco256-unet", latents) - 53) < 5
    config = recipe("mscoco256-uvit-s2")
    assert (config.steps, config.batch_size, config.optimizer.betas) == (1_000_000, 256, (0.9, 0.9))
    assert (config.diffusion.schedule, config.diffusion.condition_dropout) == ("sd", 0.1)


def test_small_recipes_are_told_what_to_draw() -> None:
    classes = tuple("0123456789")
    by_class = build_model(recipe("digits-class-tiny"), DataShape(1, 8, 8, classes))
    assert isinstance(by_class, UViT)
    assert by_class.classes == 11
    config = recipe("shapes-text-tiny")
    shape = DataShape(3, 16, 16)
    by_text = build_model(config, shape)
    condition = shape.example_condition(config, 2)
    assert condition is not None
    assert Denoiser(by_text)(torch.randn(2, 3, 16, 16), torch.ones(2), condition).shape == (2, 3, 16, 16)
