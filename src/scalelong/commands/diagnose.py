"""scalelong diagnose: one page about the long skips of a model, before training or of a run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_output_options, add_run_options, load_images, run_config

if TYPE_CHECKING:
    from ..runs.config import TrainConfig
    from ..stability import Diagnosis

SIZE = 32
"""Pixels a side of images that differ in size, where neither the model nor the command says how large."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong diagnose",
        description="Where the long skips of a model are, how large they are, how much the output depends on each, how "
        "much of a constant κ is left by normalisation, and which scaling to take, on the data it is to be trained on.",
    )
    made.add_argument("run", nargs="?", type=Path, help="a run folder: diagnose its latest weights")
    add_run_options(made)
    made.add_argument(
        "--model",
        help="another model, as for `scalelong train` (unet/cifar10, a config.json of diffusers, "
        "package.module:factory), or file.py with model() and example_inputs(), as for `scalelong find`",
    )
    made.add_argument("--size", type=int, help="size of the images (default: that of the model, or of the data)")
    made.add_argument("--out", type=Path, help="also write diagnosis.json into this folder, for `scalelong report`")
    add_output_options(made, "the diagnosis")
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments.runs import write_diagnosis
    from ..files import require_folder_place

    if options.out:
        require_folder_place(options.out)
    diagnosis = _diagnosis(options)
    print(diagnosis.to_json() if options.json else diagnosis)
    if options.out:
        written = write_diagnosis(diagnosis, options.out)
        if not options.json and not options.quiet:
            print(f"written: {written}")
    return 0


def _diagnosis(options: argparse.Namespace) -> Diagnosis:
    from ..experiments.runs import diagnose_config, diagnose_run
    from ..runs.load import load_run

    if options.run:
        return diagnose_run(load_run(options.run, weights="raw", trust=options.trust))
    if options.model and options.model.partition(":")[0].endswith(".py"):
        return _of_file(options)
    config = run_config(options)
    if options.model and options.model != config.model:
        config = replace(config, model=options.model, model_options={})
    if not options.recipe and not options.config and (options.model or options.data):
        config = _fitting(config, options)
    elif options.size:
        config = replace(config, images=replace(config.images, size=options.size))
    return diagnose_config(config)


def _of_file(options: argparse.Namespace) -> Diagnosis:
    """A Python file, as `scalelong find` takes it: model() and example_inputs(), or file.py:Name.

    Without example_inputs() the model is given noisy images of --data, and times if it takes any.
    """
    from ..errors import ExampleInputsError
    from ..stability import diagnose
    from .find import load_model

    model, inputs = load_model(options.model, {})
    images = None if options.data is None else load_images(options.data, size=options.size)
    if inputs is None and images is not None:
        inputs = _noisy(model, images)
    try:
        return diagnose(model, inputs, images=images)
    except ExampleInputsError as error:
        raise ExampleInputsError(
            f"{error}. On the command line: a function example_inputs() in {options.model.partition(':')[0]}, or "
            f"--data with images that the model takes"
        ) from error


def _noisy(model: Any, images: Any) -> Any:
    """Noisy images, and times if the model must be given a second argument; None if it needs others."""
    import inspect

    import torch

    from ..noise import NoiseProcess, even_fractions

    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return None
    needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    x0, process = images[:16], NoiseProcess()
    t = process.times(even_fractions(len(x0)))
    x = process.add_noise(x0, torch.randn(x0.shape, generator=torch.Generator().manual_seed(0)), t)
    return {1: (x,), 2: (x, t)}.get(needed)


def _fitting(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """The default recipe is for digits of 8 pixels: with other images or another model its sizes do not count."""
    from ..data import load_data
    from ..errors import MixedSizesError

    known = _model_values(config.model)
    size, channels = options.size or known.get("sample_size"), known.get("in_channels")
    if isinstance(size, list):
        size = max(size)
    if size is None and options.data:
        try:
            load_data(config.data, limit=64)
        except MixedSizesError:
            size = SIZE
    images = replace(config.images, size=size, channels=channels if channels in (1, 3, 4) else None, held_out=0)
    given = {name: value for name, value in config.model_options.items() if name != "patch_size"}
    return replace(config, images=images, model_options=given)


def _model_values(model: str) -> dict[str, Any]:
    """What config.json of diffusers says about the images."""
    from .find import json_object

    return json_object(model) if model.endswith(".json") else {}
