"""Score images: Fréchet and kernel distance, precision, recall and near-copies, with 95 % intervals.

Next to each score stands what held-out real images, noise, blurred and shuffled images reach with the same features.
A RUN is sampled first; the images stay in its folder, so that the same command continues. A FOLDER of images is scored
as it is, against --data. Several runs or folders are compared, if they were scored in the same way. The statistics of
the data are computed once and kept.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import shared
from .parser import Parser

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..evaluation import Scores
    from ..runs import Run

EXAMPLES = """\
  scalelong eval runs/mine                              1000 samples against the data of the run
  scalelong eval pictures/ --data photos/               any folder of images
  scalelong eval runs/mine --weights ema:10%            another average of the weights
"""


def eval_parser() -> Parser:
    made = Parser("eval", __doc__ or "", EXAMPLES, "RUN|FOLDER ... [OPTIONS]")
    made.flag("targets", "run folders, or folders of images", kind=Path, nargs="*", metavar="RUN|FOLDER")
    shared.add_model_flag(made)
    made.flag("-n --n --num-images", "number of images (default: 1000; for a folder, all)", kind=int)
    shared.add_sampling_flags(made)
    shared.add_feature_flags(made)
    made.flag("--data", f"what to compare with (default: the data of the run); {shared.DATA}")
    made.flag("--size --resolution", "size of --data, if its images differ in size", kind=int)
    shared.add_output_flags(made, "the scores")
    return made


def run_eval(options: argparse.Namespace) -> int:
    from ..console import show_table
    from ..evaluation import comparison_rows, require_comparable
    from ..runs import process_state

    if options.model:
        options.targets = [shared.model_folder(options.model), *options.targets]
    _require_targets(options)
    scores = [_score(target, options) for target in options.targets]
    if not process_state().is_main_process:
        return 0
    if options.json:
        print(json.dumps([entry.to_dict() for entry in scores], ensure_ascii=False, indent=1))
    if len(scores) > 1:
        require_comparable(scores)
        if not options.json:
            show_table(comparison_rows(scores), left=True, rule=False)
    return 0


def _is_run(target: Path) -> bool:
    from ..config import CONFIG

    return (target / CONFIG).exists()


def _require_targets(options: argparse.Namespace) -> None:
    """Check all of them before any is scored: to score one may take hours."""
    from ..errors import EvaluationError

    if not options.targets:
        eval_parser().error("give run folders or folders of images, or --model NAME")
    for target in options.targets:
        if not target.is_dir():
            found = "is a file" if target.exists() else "is not there"
            raise EvaluationError(f"{target} {found}: give run folders, or folders of images together with --data DATA")
        if _is_run(target):
            continue
        if not options.data:
            raise EvaluationError(f"{target} is not a run; to score a folder of images, say with what: --data DATA")
        made = ("sampler", "steps", "guidance", "weights", "checkpoint")
        given = [f"`{name}`" for name in made if getattr(options, name) is not None]
        if given:
            raise EvaluationError(
                f"{target} is a folder of images, which are scored as they are: leave out {', '.join(given)}"
            )


def _score(target: Path, options: argparse.Namespace) -> Scores:
    from ..console import Progress
    from ..data import load_data
    from ..evaluation import score_folder, score_run
    from ..runs import process_state

    if _is_run(target):
        trained = shared.trained_run(target, options)
        if options.data or options.size:
            trained = replace(trained, config=_against(trained, options.data, options.size))
        n = 1000 if options.n is None else options.n
        scores = shared.call(score_run, options, run=trained, n=n, settings=shared.sample_settings(options))
    else:
        data = load_data(options.data, size=options.size, progress=Progress("reading images"))
        scores = shared.call(score_folder, options, path=target, data=data)
    if process_state().is_main_process and not options.json:
        print(f"{target}\n{scores}", flush=True)
    return scores


def _against(trained: Run, data: str | None, size: int | None) -> TrainConfig:
    """The configuration with other data to compare with, in the size and the channels of the samples."""
    config, shape = trained.config, trained.shape
    images = replace(config.images, size=size or config.images.size)
    if config.images.autoencoder is None:
        side = shape.height if shape.height == shape.width else None
        images = replace(images, size=images.size or side, channels=images.channels or shape.channels)
    return replace(config, data=data or config.data, images=images)
