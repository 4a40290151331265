"""Measure what each layer of a trained network knows about classes at each noise level, by linear classifiers.

The result is a table and a heat map of accuracies over layers and times, and the accuracy on test images of the layer
and time that are best on validation images, with an interval, next to the untrained network and raw pixels. Labels are
those of the run's data; fitted are images that it was trained on, chosen and tested images that it held out.
"""

import argparse
from pathlib import Path

from .options import (
    DATA,
    add_checkpoint_options,
    add_device_option,
    add_out_option,
    add_output_options,
    device_of,
    trained_run,
)
from .parser import Parser, numbers, split, whole_number


def parser() -> Parser:
    made = Parser("lab probe", __doc__ or "", "  scalelong lab probe runs/mine --times 1,100\n", "RUN [OPTIONS]")
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("--times", help="noise levels from 0 to 999 (default: 1,25,50,100,250,500)")
    made.add_argument("--layers", help="modules, comma-separated, * for anything (default: blocks and the last norm)")
    made.add_argument("--draws", type=whole_number, default=1, help="draws of the noise, averaged (default: 1)")
    made.add_argument(
        "--images", type=whole_number, default=10_000, help="fit at most so many, test at most so many (default: 10000)"
    )
    made.add_argument("--data", help=f"other images for all parts; {DATA}")
    made.add_argument("--split", help="choose and test on this part of the data set, such as test")
    made.add_argument("--seed", type=whole_number, default=0, help="of parts and noise (default: %(default)s)")
    add_checkpoint_options(made)
    made.add_argument("--batch-size", type=whole_number, default=256, help="default: %(default)s")
    add_device_option(made)
    add_out_option(made, "folder of the results (default: probe in the run)")
    add_output_options(made, "the result")
    return made


def run(options: argparse.Namespace) -> int:
    from ..console import Progress
    from ..evaluation import TIMES, probe_run
    from ..files import make_folder, require_folder_place
    from ..optional import needs

    if options.out:
        require_folder_place(options.out)
    trained = trained_run(options.run, options)
    needs("matplotlib.figure", "report", "drawing a probe")  # before the work, not after it
    with Progress("noise levels", enabled=False if options.quiet or options.json else None) as progress:
        found = probe_run(
            trained,
            data=options.data,
            split=options.split,
            layers=None if options.layers is None else split(options.layers),
            times=TIMES if options.times is None else numbers(options.times, float, "`times`"),
            draws=options.draws,
            images=options.images,
            seed=options.seed,
            batch_size=options.batch_size,
            device=device_of(options),
            progress=progress,
        )
    out = make_folder(options.out or options.run / "probe")
    name = f"step-{trained.step}-{trained.weights.replace(':', '').replace('%', '')}-ridge"
    found.save(out / f"{name}.json")
    found.save_plot(out / f"{name}.png")
    print(found.to_json() if options.json else found)
    if not options.json and not options.quiet:
        print(f"written: {out / name}.json, {out / name}.png")
    return 0
