"""Print one page about the long skips of a model, on the data that it is to be trained on.

It says where they are, how large, how much the output depends on each, how much of a constant κ is left by
normalisation, and which scaling to take, if any.

On a folder of images it looks at the network that `scalelong train` would train there.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import shared
from .parser import Parser

if TYPE_CHECKING:
    from ..stability import Diagnosis

logger = logging.getLogger(__name__)

EXAMPLES = """\
  scalelong diagnose photos/                            the network that train would take
  scalelong diagnose runs/mine                          the latest weights of a run
  scalelong diagnose photos/ --model my_unet.py         your own network
  scalelong diagnose --recipe digits-tiny --kappa-range with the range of κ of the paper's Section 4.1
"""


def diagnose_parser() -> Parser:
    made = Parser("diagnose", __doc__ or "", EXAMPLES, "[RUN|IMAGES] [OPTIONS]")
    made.flag("target", "a run folder, or images, as --data", nargs="?", metavar="RUN|IMAGES")
    shared.add_run_flags(made)
    made.flag("--model", "another model, as for train, or file.py with model() and example_inputs(), as for find")
    made.flag("--size --resolution", "size of the images (default: the model's)", kind=int)
    made.flag("--kappa-range", "also print the range of κ that Section 4.1 gives for the data", False)
    shared.add_out_flag(made, "also write diagnosis.json into this folder, for `scalelong report`")
    shared.add_device_flag(made)
    shared.add_output_flags(made, "the diagnosis")
    return made


def run_diagnose(options: argparse.Namespace) -> int:
    from ..experiments import write_diagnosis

    diagnosis, data, schedule = _diagnosis(options)
    print(diagnosis.to_json() if options.json else diagnosis)
    if options.kappa_range and not options.json:
        from ..theory import kappa_range

        images = None if data is None else shared.some_images(data, options.size)
        print(f"\n{kappa_range(len(diagnosis.skips), images, schedule)}\nno measurement shows that it beats 0.7")
    if options.out:
        logger.info(f"written: {write_diagnosis(diagnosis, options.out)}")
    return 0


def _diagnosis(options: argparse.Namespace) -> tuple[Diagnosis, str | None, str]:
    """The diagnosis, the data that it is about, and the noise schedule."""
    from ..config import CONFIG, SCHEDULE, TrainConfig, with_values
    from ..experiments import diagnose_config, diagnose_run
    from ..runs import load_run

    if options.target and options.data is None and not (Path(options.target) / CONFIG).exists():
        options.data, options.target = options.target, None
    if options.target:
        trained = load_run(options.target, weights="raw", trust=options.trust)
        trained.model.to(shared.device_of(options.device))
        return diagnose_run(trained), trained.config.data, trained.config.diffusion.schedule
    if options.model and options.model.partition(":")[0].endswith(".py"):
        return _of_file(options), options.data, SCHEDULE
    if options.recipe or options.config or not (options.model or options.data):
        config = shared.run_config(options)
        if options.model and options.model != config.model:
            config = replace(config, model=options.model, model_options={})
        if options.size:
            config = replace(config, images=replace(config.images, size=options.size))
    else:
        size = options.size or _size_of_model(options.model)
        values = {"data": options.data or "digits", "model": options.model, "images.size": size}
        values = {name: value for name, value in values.items() if value is not None}
        config = shared.sized_config(with_values(TrainConfig(), values), values)
    logger.info(shared.network_line(config))
    return diagnose_config(config, shared.device_of(options.device)), config.data, config.diffusion.schedule


def _size_of_model(model: str | None) -> int | None:
    """The size of images that a config.json of diffusers names."""
    from .find import json_object

    size = json_object(model).get("sample_size") if model is not None and model.endswith(".json") else None
    return max(size) if isinstance(size, list) else size


def _of_file(options: argparse.Namespace) -> Diagnosis:
    """A Python file, as `scalelong find` takes it: model() and example_inputs(), or file.py:Name.

    Without example_inputs() the model is given noisy images of --data, and times.
    """
    import torch

    from ..errors import ExampleInputsError
    from ..models import call_arguments
    from ..noise import NoiseProcess, even_fractions
    from ..stability import diagnose
    from .find import load_model

    model, inputs = load_model(options.model, {})
    if inputs is None and options.data is not None:
        x0, process = shared.some_images(options.data, options.size)[:16], NoiseProcess()
        t = process.times(even_fractions(len(x0)))
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
        inputs = call_arguments(model, process.add_noise(x0, noise, t), t)
    try:
        return diagnose(model.to(shared.device_of(options.device)), inputs)
    except ExampleInputsError as error:
        raise ExampleInputsError(
            f"{error}. On the command line: a function example_inputs() in {options.model.partition(':')[0]}, or "
            f"--data with images that the model takes"
        ) from error
