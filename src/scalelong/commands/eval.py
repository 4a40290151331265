"""`scalelong eval RUN|FOLDER ...`: Fréchet distance, precision and recall, each with a 95 % interval.

A RUN is sampled first (the images stay in its folder, so that the same command continues); a FOLDER of images is scored
as it is, against --data. Several runs or folders are compared, if they were scored in the same way.
"""

import argparse
from pathlib import Path

from ..data import load_data
from ..diffusion.solvers import SampleSettings
from ..errors import EvaluationError
from ..evaluation import Scores, comparison, score_folder, score_run
from ..runs.folder import CONFIG
from ..runs.load import load_run
from ..runs.samples import processes
from .sample import add_sampling_options


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scalelong eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", type=Path, nargs="+", metavar="RUN|FOLDER")
    parser.add_argument("-n", "--n", type=int, default=None, help="number of images (default: 1000; for a folder, all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first image (default: %(default)s)")
    add_sampling_options(parser)
    add_feature_options(parser)
    parser.add_argument("--data", help="what a FOLDER is compared with: a data set's name or path")
    parser.add_argument("--size", type=int, help="size of --data, if its images differ in size")
    return parser


def add_feature_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--features",
        default="classifier",
        help="classifier: a small one trained on the data (default); inception; or package.module:factory",
    )
    parser.add_argument("--feature-weights", type=Path, help="the weights of Inception, from torch-fidelity")


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    scores = [_score(subject, options) for subject in options.subjects]
    if len(scores) > 1 and processes().is_main_process:
        print(comparison(scores))
    return 0


def _score(subject: Path, options: argparse.Namespace) -> Scores:
    features = {"features": options.features, "feature_weights": options.feature_weights}
    if (subject / CONFIG).exists():
        run = load_run(subject, weights=options.weights, step=options.checkpoint)
        scores = score_run(
            run,
            n=1000 if options.n is None else options.n,
            seed=options.seed,
            settings=SampleSettings(sampler=options.sampler, steps=options.steps, guidance=options.guidance),
            batch_size=options.batch_size,
            device=options.device,
            **features,
        )
    elif not options.data:
        raise EvaluationError(f"{subject} is not a run; to score a folder of images, say with what: --data DATA")
    else:
        scores = score_folder(subject, load_data(options.data, size=options.size), n=options.n, **features)
    if processes().is_main_process:
        print(f"{subject}\n{scores}", flush=True)
    return scores
