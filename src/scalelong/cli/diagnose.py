"""Print one page about the long skips of a model, on the data that it is to be trained on.

It says where they are, how large, how much the output depends on each, how much of a constant κ is left by
normalisation, and which scaling to take, if any.

On a folder of images it looks at the network that `scalelong train` would train there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import (
    add_device_option,
    add_out_option,
    add_output_options,
    add_run_options,
    device_of,
    load_images,
    run_config,
    sized_config,
)
from .parser import Parser, whole_number

if TYPE_CHECKING:
    from ..stability import Diagnosis

EXAMPLES = """\
  scalelong diagnose --data photos/                     the network that train would take
  scalelong diagnose runs/mine                          the latest weights of a run
  scalelong diagnose --model my_unet.py --data photos/  your own network
  scalelong diagnose --recipe digits-tiny --kappa-range with the range of κ of the paper's Section 4.1
"""


def parser() -> Parser:
    made = Parser("diagnose", __doc__ or "", EXAMPLES, "[RUN] [OPTIONS]")
    made.add_argument("run", nargs="?", type=Path, help="a run folder: diagnose its latest weights")
    add_run_options(made)
    made.add_argument(
        "--model",
        help="another model, as for `scalelong train` (unet/cifar10, a config.json of diffusers, "
        "package.module:factory), or file.py with model() and example_inputs(), as for `scalelong find`",
    )
    made.add_argument("--size", "--resolution", type=whole_number, help="size of the images (default: the model's)")
    made.add_argument(
        "--kappa-range", action="store_true", help="also print the range of κ that Section 4.1 gives for the data"
    )
    add_out_option(made, "also write diagnosis.json into this folder, for `scalelong report`")
    add_device_option(made)
    add_output_options(made, "the diagnosis")
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments import write_diagnosis
    from ..files import require_folder_place

    if options.out:
        require_folder_place(options.out)
    diagnosis, data, schedule = _diagnosis(options)
    print(diagnosis.to_json() if options.json else diagnosis)
    if options.kappa_range and not options.json:
        from ..theory import kappa_range

        images = None if data is None else load_images(data, size=options.size)
        print(f"\n{kappa_range(len(diagnosis.skips), images, schedule)}\nno measurement shows that it beats 0.7")
    if options.out:
        written = write_diagnosis(diagnosis, options.out)
        if not options.json and not options.quiet:
            print(f"written: {written}")
    return 0


def _diagnosis(options: argparse.Namespace) -> tuple[Diagnosis, str | None, str]:
    """The diagnosis, the data that it is about, and the noise schedule."""
    from ..config import SCHEDULE
    from ..experiments import diagnose_config, diagnose_run
    from ..runs import load_run

    if options.run:
        trained = load_run(options.run, weights="raw", trust=options.trust)
        trained.model.to(device_of(options))
        return diagnose_run(trained), trained.config.data, trained.config.diffusion.schedule
    if options.model and options.model.partition(":")[0].endswith(".py"):
        return _of_file(options), options.data, SCHEDULE
    if options.recipe or options.config or not (options.model or options.data):
        config = run_config(options)
        if options.model and options.model != config.model:
            config = replace(config, model=options.model, model_options={})
        if options.size:
            config = replace(config, images=replace(config.images, size=options.size))
    else:
        options.size = options.size or _size_of_model(options.model)
        config = sized_config(options, options.data or "digits")
    return diagnose_config(config), config.data, config.diffusion.schedule


def _size_of_model(model: str | None) -> int | None:
    """The size of images that a config.json of diffusers names."""
    from .find import json_object

    size = json_object(model).get("sample_size") if model is not None and model.endswith(".json") else None
    return max(size) if isinstance(size, list) else size


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
