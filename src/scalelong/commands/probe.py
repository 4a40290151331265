"""`scalelong probe RUN`: what each layer knows about classes at each noise level, by linear classifiers.

A table and a heat map of accuracies over layers and times; the layer and time that are best on validation images, their
accuracy on test images with an interval, and beside it, always, the untrained network and raw pixels. Labels are those
of the run's data; fitted are images that it was trained on, chosen and tested images that it held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import (
    DATA,
    add_checkpoint_options,
    add_output_options,
    constant_in,
    listed,
    seed_number,
    speaker,
    trained_run,
    whole_number,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "--protocol",
        choices=constant_in("evaluation.probe", "PROTOCOLS"),
        default="ridge",
        help="ridge: closed form (default); logistic; ddae: as published, which chooses on the test images",
    )
    made.add_argument("--times", help="noise levels from 0 to 999 (default: 1,25,50,100,250,500; ddae: 1,11,21)")
    made.add_argument("--layers", help="modules, comma-separated, * for anything (default: blocks and the last norm)")
    made.add_argument(
        "--pool",
        choices=constant_in("evaluation.probe", "POOLS"),
        default="mean",
        help="mean over positions (default), or none: all positions in a row",
    )
    made.add_argument("--draws", type=whole_number, default=1, help="draws of the noise, averaged (default: 1)")
    made.add_argument(
        "--images", type=whole_number, default=10_000, help="fit at most so many, test at most so many (default: 10000)"
    )
    made.add_argument("--data", help=f"other images for all parts; {DATA}")
    made.add_argument("--split", help="choose and test on this part of the data set, such as test")
    made.add_argument("--no-augment", action="store_true", help="with ddae: no flips and crops")
    made.add_argument("--seed", type=seed_number, default=0, help="of parts and noise (default: %(default)s)")
    add_checkpoint_options(made)
    made.add_argument("--batch-size", type=whole_number, default=256, help="default: %(default)s")
    made.add_argument("--device", help="default: an accelerator if there is one")
    made.add_argument("--out", type=Path, help="folder of the results (default: probe in the run)")
    add_output_options(made, "the result")
    return made


def run(options: argparse.Namespace) -> int:
    from ..console import Progress
    from ..evaluation import probe_run
    from ..files import make_folder
    from ..optional import needs
    from ..runs.samples import processes

    trained = trained_run(options.run, options)
    needs("matplotlib.figure", "report", "drawing a probe")  # before the work, not after it
    with Progress("noise levels", enabled=False if options.quiet or options.json else None) as progress:
        found = probe_run(
            trained,
            data=options.data,
            split=options.split,
            layers=None if options.layers is None else listed(options.layers, str, "--layers"),
            times=None if options.times is None else listed(options.times, float, "--times"),
            protocol=options.protocol,
            pool=options.pool,
            draws=options.draws,
            images=options.images,
            augment=not options.no_augment,
            seed=options.seed,
            batch_size=options.batch_size,
            device=options.device or processes().device,
            progress=progress,
            say=speaker(options),
        )
    out = make_folder(options.out or options.run / "probe")
    name = f"step-{trained.step}-{trained.weights.replace(':', '').replace('%', '')}-{options.protocol}"
    name += "" if options.pool == "mean" else f"-pool-{options.pool}"
    found.save(out / f"{name}.json")
    found.save_plot(out / f"{name}.png")
    print(found.to_json() if options.json else found)
    if not options.json and not options.quiet:
        print(f"written: {out / name}.json, {out / name}.png")
    return 0
