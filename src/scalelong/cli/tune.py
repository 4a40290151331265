"""Search the coefficients of the long skips with the lowest Fréchet distance, for a sampler and few steps.

This is Skip-Tuning, or FreeU's coefficients with --kind freeu. What is found is tested on other seeds and written to a
file for `scalelong sample RUN --tuned FILE`.
"""

import argparse
import json
from pathlib import Path

from ..config import seconds_of
from .options import (
    add_feature_options,
    add_out_option,
    add_output_options,
    add_sampling_options,
    device_of,
    sample_settings,
    speaker,
    trained_run,
)
from .parser import Parser, whole_number


def parser() -> Parser:
    made = Parser("lab tune", __doc__ or "", "  scalelong lab tune runs/mine --steps 5 --trials 12\n", "RUN [OPTIONS]")
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("-n", "--n", "--num-images", type=whole_number, default=512, help="of a trial (default: 512)")
    add_sampling_options(made, steps=10)
    add_feature_options(made)
    made.add_argument(
        "--kind",
        choices=("linear", "free", "freeu"),
        default="linear",
        help="linear: from 1 at the outermost skip to κ_inner (default); free: each κ_i; freeu: b1, b2, s1, s2",
    )
    made.add_argument("--trials", type=whole_number, default=16, help="at most so many (default: %(default)s)")
    made.add_argument("--budget", help="at most so long, such as 10m: the search ends then, and the test follows")
    add_out_option(made, "folder of the results (default: tune in the run)")
    add_output_options(made, "the result")
    return made


def run(options: argparse.Namespace) -> int:
    from ..console import Progress
    from ..experiments import tune_run
    from ..files import make_folder, require_folder_place, write_text

    if options.out:
        require_folder_place(options.out)
    trained, settings = trained_run(options.run, options), sample_settings(options)
    with Progress("trials", enabled=False if options.quiet else None) as progress:
        found = tune_run(
            trained,
            kind=options.kind,
            n=options.n,
            trials=options.trials,
            seconds=None if options.budget is None else seconds_of(options.budget),
            settings=settings,
            seed=options.seed,
            features=options.features,
            feature_weights=options.feature_weights,
            batch_size=options.batch_size,
            device=device_of(options),
            progress=progress,
            say=speaker(options),
        )
    out = make_folder(options.out or trained.folder / "tune")
    file = out / f"{options.kind}-{settings.sampler}{settings.steps}.json"
    written = json.dumps(found.to_dict(), indent=1, ensure_ascii=False)
    write_text(file, written)
    print(written if options.json else found)
    if not options.json and not options.quiet:
        print(f"written: {file}")
        print(f"to use it: scalelong sample {options.run} --steps {settings.steps} --tuned {file}")
    return 0
