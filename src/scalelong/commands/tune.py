"""`scalelong tune RUN`: what can be gained after training, for the sampler and the steps at hand.

Without --cache it searches the coefficients of the long skips with the lowest Fréchet distance (Skip-Tuning; with
--kind freeu those of FreeU), tests them on other seeds, and writes a file for `scalelong sample RUN --tuned FILE`.

With --cache it measures caches of the inner part (`scalelong sample --cache`) against fewer steps of the same sampler:
a table and a picture of time per image against Fréchet distance.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import (
    add_feature_options,
    add_output_options,
    add_sampling_options,
    listed,
    names_in,
    sample_settings,
    speaker,
    trained_run,
    whole_number,
)

if TYPE_CHECKING:
    from ..console import Progress
    from ..runs.load import Run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument(
        "-n", "--n", type=whole_number, help="images of a trial (default: 512), or of each setting with --cache (1000)"
    )
    add_sampling_options(made)
    made.set_defaults(steps=10)
    add_feature_options(made)
    search = made.add_argument_group("coefficients")
    search.add_argument(
        "--kind",
        choices=names_in("skips.tune", "KINDS"),
        default="linear",
        help="linear: from 1 at the outermost skip to κ_inner (default); free: each κ_i; freeu: b1, b2, s1, s2",
    )
    search.add_argument("--trials", type=whole_number, default=16, help="at most so many (default: %(default)s)")
    search.add_argument("--budget", help="at most so long, such as 10m: the search ends then, and the test follows")
    cache = made.add_argument_group("caches")
    cache.add_argument("--cache", action="store_true", help="measure caches instead of searching coefficients")
    cache.add_argument("--every", default="2,3,5", help="comma-separated (default: %(default)s)")
    cache.add_argument("--depths", help="comma-separated (default: the outermost long skip and a middle one)")
    cache.add_argument("--fewer", help="steps of plain sampling to compare with, comma-separated (default: seven)")
    made.add_argument("--out", type=Path, help="folder of the results (default: tune in the run)")
    add_output_options(made, "the result")
    return made


def run(options: argparse.Namespace) -> int:
    from ..console import Progress
    from ..files import make_folder, require_folder_place

    if options.out:
        require_folder_place(options.out)
    trained = trained_run(options.run, options)
    out = options.out or trained.folder / "tune"
    shared: dict[str, Any] = {
        "settings": sample_settings(options),
        "seed": options.seed,
        "features": options.features,
        "feature_weights": options.feature_weights,
        "batch_size": options.batch_size,
        "device": options.device or "cpu",
        "say": speaker(options),
    }
    with Progress("batches" if options.cache else "trials", enabled=False if options.quiet else None) as progress:
        found, files, drawn = (_caches if options.cache else _coefficients)(trained, options, shared, progress)
    make_folder(out)
    _write(found, files, drawn, out)
    print(_json(found) if options.json else found)
    if not options.json and not options.quiet:
        print(f"written: {', '.join(str(out / file) for file in files)}")
        if not options.cache:
            print(f"to use it: scalelong sample {options.run} --steps {options.steps} --tuned {out / files[0]}")
    return 0


def _coefficients(trained: Run, options: argparse.Namespace, shared: dict[str, Any], progress: Progress) -> Any:
    from ..experiments.tuning import draw_tuning, tune_run
    from ..runs.config import seconds_of

    found = tune_run(
        trained,
        kind=options.kind,
        n=options.n or 512,
        trials=options.trials,
        seconds=None if options.budget is None else seconds_of(options.budget),
        progress=progress,
        **shared,
    )
    name = f"{options.kind}-{options.sampler}{options.steps}"
    return found, (f"{name}.json", f"{name}.png"), draw_tuning


def _caches(trained: Run, options: argparse.Namespace, shared: dict[str, Any], progress: Progress) -> Any:
    from ..experiments.caching import cache_curve, draw_curves

    # Of every number that is listed, so that a typing error is told before an hour of sampling.
    every, depths, fewer = (
        None if text is None else listed(text, int, f"--{name}")
        for name, text in (("every", options.every), ("depths", options.depths), ("fewer", options.fewer))
    )
    for settings in [replace(shared["settings"], steps=steps) for steps in fewer or []]:
        settings.cache_arguments()
    found = cache_curve(
        trained, every=every or (), depths=depths, fewer=fewer, n=options.n or 1000, progress=progress, **shared
    )
    name = f"cache-{options.sampler}{options.steps}"
    return found, (f"{name}.json", f"{name}.png"), draw_curves


def _json(found: Any) -> str:
    import json

    return found.to_json() if hasattr(found, "to_json") else json.dumps(found.to_dict(), indent=1, ensure_ascii=False)


def _write(found: Any, files: tuple[str, str], drawn: Any, out: Path) -> None:
    from ..files import write_text

    data, picture = files
    write_text(out / data, _json(found))
    drawn([found], out / picture)
