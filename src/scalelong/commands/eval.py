"""`scalelong eval RUN|FOLDER ...`: Fréchet and kernel distance, precision, recall and near-copies, with 95 % intervals.

Beside each stands what held-out real images, noise, blurred and shuffled images score with the same features.

A RUN is sampled first (the images stay in its folder, so that the same command continues); a FOLDER of images is scored
as it is, against --data. Several runs or folders are compared, if they were scored in the same way.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .options import (
    DATA,
    add_feature_options,
    add_model_option,
    add_output_options,
    add_sampling_options,
    model_folder,
    sample_settings,
    speaker,
    trained_run,
    whole_number,
)

if TYPE_CHECKING:
    from ..evaluation import Scores


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("targets", type=Path, nargs="*", metavar="RUN|FOLDER")
    add_model_option(made)
    made.add_argument(
        "-n", "--n", type=whole_number, default=None, help="number of images (default: 1000; for a folder, all)"
    )
    add_sampling_options(made)
    add_feature_options(made)
    made.add_argument("--data", help=f"what a FOLDER is compared with; {DATA}")
    made.add_argument("--size", type=whole_number, help="size of --data, if its images differ in size")
    add_output_options(made, "the scores")
    return made


def run(options: argparse.Namespace) -> int:
    from ..console import show_table
    from ..evaluation import comparison_rows, require_comparable
    from ..runs.samples import processes

    if options.model:
        options.targets = [model_folder(options.model), *options.targets]
    _require_targets(options)
    scores = [_score(target, options) for target in options.targets]
    if not processes().is_main_process:
        return 0
    if options.json:
        print(json.dumps([entry.to_dict() for entry in scores], ensure_ascii=False, indent=1))
    if len(scores) > 1:
        require_comparable(scores)
        if not options.json:
            show_table(comparison_rows(scores), left=True, rule=False)
    return 0


def _require_targets(options: argparse.Namespace) -> None:
    """Before any of them is scored: to score one may take hours."""
    from ..errors import EvaluationError
    from ..runs.folder import CONFIG

    if not options.targets:
        parser().error("give run folders or folders of images, or --model NAME")
    for target in options.targets:
        if not target.is_dir():
            found = "is a file" if target.exists() else "is not there"
            raise EvaluationError(f"{target} {found}: give run folders, or folders of images together with --data DATA")
        if not (target / CONFIG).exists() and not options.data:
            raise EvaluationError(f"{target} is not a run; to score a folder of images, say with what: --data DATA")


def _score(target: Path, options: argparse.Namespace) -> Scores:
    from ..console import Progress
    from ..data import load_data
    from ..evaluation import score_folder, score_run
    from ..runs.folder import CONFIG
    from ..runs.samples import processes

    say = speaker(options)
    features = {"features": options.features, "feature_weights": options.feature_weights, "say": say}
    if (target / CONFIG).exists():
        scores = score_run(
            trained_run(target, options),
            n=1000 if options.n is None else options.n,
            seed=options.seed,
            settings=sample_settings(options),
            batch_size=options.batch_size,
            device=options.device,
            **features,
        )
    else:
        data = load_data(options.data, size=options.size, progress=Progress("reading images"))
        scores = score_folder(target, data, n=options.n, **features)
    if processes().is_main_process and not options.json:
        print(f"{target}\n{scores}", flush=True)
    return scores
