"""scalelong diagnose: one page about the long skips of a model, before training or of a run."""

import argparse
from dataclasses import replace
from pathlib import Path

from .options import add_run_options, run_config


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong diagnose",
        description="Where the long skips of a model are, how large they are, how much the output depends on each, how "
        "much of a constant κ is left by normalisation, and which scaling to take, on the data it is to be trained on.",
    )
    made.add_argument("run", nargs="?", type=Path, help="a run folder: diagnose its latest weights")
    add_run_options(made)
    made.add_argument("--model", help="another model, as for `scalelong train`: unet/cifar10, package.module:factory")
    made.add_argument("--out", type=Path, help="also write diagnosis.json into this folder, for `scalelong report`")
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments.runs import diagnose_config, diagnose_run, write_diagnosis
    from ..runs.load import load_run

    if options.run:
        diagnosis = diagnose_run(load_run(options.run, weights="raw"))
    else:
        config = run_config(options)
        if options.model and options.model != config.model:
            config = replace(config, model=options.model, model_options={})
        diagnosis = diagnose_config(config)
    print(diagnosis)
    if options.out:
        print(f"written: {write_diagnosis(diagnosis, options.out)}")
    return 0
