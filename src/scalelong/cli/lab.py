"""Studies: `scalelong lab theory`, `lab probe` and `lab tune`."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import shared
from .parser import Parser, floats, split

logger = logging.getLogger(__name__)

# scalelong lab theory

THEORY = "Check every theorem of the paper by measurement, on the network of Eq. (3) and on a small U-ViT."


def theory_parser() -> Parser:
    made = Parser("lab theory", THEORY, "  scalelong lab theory --data garments\n")
    made.flag("--data", "also look at this data; repeatable", [], kind=str, action="append")
    made.flag("--seeds", "networks per measurement", 300)
    shared.add_output_flags(made, "the tables by their titles")
    return made


def run_theory(options: argparse.Namespace) -> int:
    import torch

    from .. import theory
    from ..models import UViT

    shared.require_seeds(options.seeds, 2, ", so that there is a standard error")
    torch.manual_seed(0)
    data = {"uniform": torch.rand(2000, 1, 16, 16) * 2 - 1, **{spec: shared.some_images(spec) for spec in options.data}}
    sizes: Any = {"image_size": 16, "patch_size": 4, "channels": 1, "dim": 128, "depth": 12, "heads": 4}
    model = UViT(**sizes, init_std=0.02, final_start="authors", residual_scaling="none")
    batch = theory.noisy_batch(torch.rand(4, 1, 16, 16) * 2 - 1)
    found = theory.counterexample()
    false = "Theorem 3.4 as printed is false: N = 2, a_1 = diag(10, 0.1), b_1 = diag(0.1, 10), a_2 = I, b_2 swaps"
    bounds = {"stated bound": found.stated, "true norm": found.actual, "corrected bound": found.corrected}

    tables: dict[str, Sequence[dict[str, Any]]] = {}
    show = tables.__setitem__ if options.json else _show
    show(
        "Theorem 3.1, hidden features: measured / exact theory is 1",
        theory.feature_rows(options.seeds),
    )
    show("Lemma 3.2 and Figure 3 a, b: the size of x_t, and of ε next to it", theory.input_rows(data))
    show(
        "Theorem 3.3, gradients: measured / theory over all matrices is 1 for independent residuals only",
        theory.gradient_rows(options.seeds),
    )
    show(f"{false}, f_2 = 0", [bounds])
    show("Theorem 3.4, corrected: it always holds, and it is loose", theory.robustness_rows())
    show(
        "The same quantities of a U-ViT (width 128, depth 12) at the start",
        theory.model_rows(model, batch.inputs, batch.steps),
    )
    if options.json:
        print(json.dumps(tables, ensure_ascii=False))
    return 0


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from ..console import show_table

    show_table(rows, title)
    print()


# scalelong lab probe

PROBE = """\
Measure what each layer of a trained network knows about classes at each noise level, by linear classifiers.

The result is a table of accuracies over layers and times, and the accuracy on test images of the layer and time that
are best on validation images, with an interval, next to the untrained network and raw pixels. Labels are those of the
run's data; fitted are images that it was trained on, chosen and tested images that it held out."""


def probe_parser() -> Parser:
    made = Parser("lab probe", PROBE, "  scalelong lab probe runs/mine --times 1,100\n", "RUN [OPTIONS]")
    made.flag("run", "the run folder", kind=Path)
    made.flag("--times", "noise levels from 0 to 999 (default: 1,25,50,100,250,500)", kind=floats)
    made.flag("--layers", "modules, comma-separated, * for anything (default: the blocks)", kind=split)
    made.flag("--images", "fit at most so many, test at most so many", 10_000)
    made.flag("--data", f"other images for all parts; {shared.DATA}")
    made.flag("--split", "choose and test on this part of the data set, such as test")
    made.flag("--seed", "of parts and noise", 0)
    shared.add_checkpoint_flags(made)
    made.flag("--batch-size", "images at a time", 256)
    shared.add_device_flag(made)
    shared.add_out_flag(made, "folder of the results (default: probe in the run)")
    shared.add_output_flags(made, "the result")
    return made


def run_probe(options: argparse.Namespace) -> int:
    from ..evaluation import TIMES, probe_run
    from ..files import make_folder

    trained = shared.trained_run(options.run, options)
    out = shared.folder_in(options.run, "probe", options)
    trained.model.to(shared.device_of(options.device))
    names = ("data", "split", "layers", "images", "seed", "batch_size")
    given = {name: getattr(options, name) for name in names}
    found = probe_run(trained, times=options.times or TIMES, **given)
    name = f"step-{trained.step}-{trained.weights.replace(':', '').replace('%', '')}-ridge"
    found.save(make_folder(out) / f"{name}.json")
    print(found.to_json() if options.json else found)
    logger.info(f"written: {out / name}.json")
    return 0


# scalelong lab tune

TUNE = """\
Search the coefficients of the long skips with the lowest Fréchet distance, for a sampler and few steps.

This is Skip-Tuning: κ_i on a straight line from 1 to κ_inner, which is tried
on a grid. What is found is tested on other seeds and written to a
file for `scalelong sample RUN --tuned FILE`."""


def tune_parser() -> Parser:
    made = Parser("lab tune", TUNE, "  scalelong lab tune runs/mine --steps 5\n", "RUN [OPTIONS]")
    made.flag("run", "the run folder", kind=Path)
    made.flag("-n --n --num-images", "of a trial", 512)
    shared.add_sampling_flags(made, steps=10)
    shared.add_feature_flags(made)
    shared.add_out_flag(made, "folder of the results (default: tune in the run)")
    shared.add_output_flags(made, "the result")
    return made


def run_tune(options: argparse.Namespace) -> int:
    from ..console import Progress
    from ..experiments import tune_run
    from ..files import make_folder, read_text

    trained, settings = shared.trained_run(options.run, options), shared.sample_settings(options)
    out = shared.folder_in(trained.folder, "tune", options)
    with Progress("trials") as progress:
        device = shared.device_of(options.device)
        more = {"run": trained, "settings": settings, "device": device, "progress": progress}
        found = shared.call(tune_run, options, **more)
    file = make_folder(out) / f"linear-{settings.sampler}{settings.steps}.json"
    found.save(file)
    print(read_text(file) if options.json else found)
    logger.info(f"written: {file}")
    logger.info(f"to use it: scalelong sample {options.run} --steps {settings.steps} --tuned {file}")
    return 0
