"""Score images: Fréchet distance, precision, recall and near-copies, with 95 % intervals.

Next to each score stands what held-out real images, noise, blurred and shuffled images reach with the same features.
A RUN is sampled first; the images stay in its folder, so that the same command continues. A FOLDER of images is scored
as it is, against --data. Several runs or folders are compared, if they were scored in the same way. The statistics of
the data are computed once and kept.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import shared
from .parser import Parser, split

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..evaluation import Scores
    from ..runs import Run

logger = logging.getLogger(__name__)

LENGTHS = "4%,5%,7%,10%,13%,16%,20%"

EXAMPLES = """\
  scalelong eval runs/mine                              1000 samples against the data of the run
  scalelong eval pictures/ --data photos/               any folder of images
  scalelong eval runs/mine --ema-lengths                the held-out loss of averages of several lengths
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
    made.flag("--statistics", "also write mu and sigma of the data as .npz", kind=Path, metavar="FILE")
    text = f"instead: held-out losses of averages of a run that kept two; default: {LENGTHS}"
    made.flag("--ema-lengths", text, nargs="?", const=LENGTHS)
    shared.add_output_flags(made, "the scores")
    return made


def run_eval(options: argparse.Namespace) -> int:
    from ..console import show_table
    from ..evaluation import comparison_rows, require_comparable
    from ..files import require_file_place
    from ..runs import process_state

    if options.statistics:
        require_file_place(options.statistics)
    if options.model:
        options.targets = [shared.model_folder(options.model), *options.targets]
    _require_targets(options)
    if options.ema_lengths:
        return _compare_lengths(options)
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
        made = ("sampler", "steps", "guidance", "weights", "checkpoint", "tuned", "ema_lengths")
        given = [f"`{name}`" for name in made if getattr(options, name) is not None]
        if given:
            raise EvaluationError(
                f"{target} is a folder of images, which are scored as they are: leave out {', '.join(given)}"
            )


def _score(target: Path, options: argparse.Namespace) -> Scores:
    from ..console import Progress
    from ..data import load_data
    from ..evaluation import export_npz, reference_data, score_folder, score_run, trusted_features
    from ..runs import process_state

    if _is_run(target):
        trained = shared.trained_run(target, options)
        if options.data or options.size:
            trained = replace(trained, config=_against(trained, options.data, options.size))
        data = reference_data(trained.config) if options.statistics else None
        n = 1000 if options.n is None else options.n
        scores = shared.call(score_run, options, run=trained, n=n, settings=shared.sample_settings(options))
    else:
        data = load_data(options.data, size=options.size, progress=Progress("reading images"))
        scores = shared.call(score_folder, options, path=target, data=data)
    if process_state().is_main_process:
        if options.statistics and data is not None:
            _, reference = trusted_features(options.features, data, options.feature_weights)
            export_npz(reference, options.statistics)
        if not options.json:
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


def _compare_lengths(options: argparse.Namespace) -> int:
    """The held-out loss of raw and averaged weights, all on the same images, noise and times."""
    from ..config import AverageLength
    from ..console import Progress, show_table
    from ..diffusion import held_out_loss
    from ..errors import InvalidConfigError
    from ..runs import load_run, load_run_data

    if len(options.targets) != 1:
        eval_parser().error("--ema-lengths is for one run")
    folder = options.targets[0]
    lengths = [str(AverageLength.parse(length, "`ema_lengths`")) for length in split(options.ema_lengths)]
    wanted = ["raw", "ema", *(f"ema:{length}" for length in lengths)]
    first = load_run(folder, weights=wanted[-1], step=options.checkpoint, trust=options.trust)
    if not first.config.images.held_out:
        raise InvalidConfigError(
            f"{folder} held no images out, so lengths cannot be compared by their held-out loss. Compare scores "
            f"(scalelong eval {folder} --weights ema:10%), or train with --held-out"
        )
    data = load_run_data(first.config, Progress("reading images", enabled=not options.json))
    assert data.held_out is not None
    device = shared.device_of(options.device)
    maker, losses = data.inputs(device), {}
    for weights in wanted:
        trained = load_run(folder, weights=weights, step=first.step, trust=options.trust)
        trained.model.to(device)
        losses[weights] = held_out_loss(trained.network, maker, first.config.diffusion.prediction, data.held_out)
    best = min(losses, key=lambda weights: losses[weights])
    if options.json:
        print(json.dumps({"step": first.step, "held_out_loss": losses, "best": best}, indent=1))
        return 0
    marks = {best: "best"}
    rows = [{"weights": name, "held-out loss": f"{losses[name]:.5f}", "": marks.get(name, "")} for name in losses]
    show_table(rows, left=True)
    logger.info(f"step {first.step}; to use one: scalelong sample {folder} --weights {best}")
    return 0
