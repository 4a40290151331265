"""scalelong diagnose: one page about the long skips of a model, before training or of a run."""

import argparse
from dataclasses import replace
from pathlib import Path

from ..experiments.runs import diagnose_config, diagnose_run, write_diagnosis
from ..runs.config import load_config
from ..runs.load import load_run
from ..runs.recipes import RECIPES, recipe


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scalelong diagnose",
        description="Where the long skips of a model are, how large they are, how much the output depends on each, how "
        "much of a constant κ is left by normalisation, and which scaling to take, on the data it is to be trained on.",
    )
    parser.add_argument("run", nargs="?", type=Path, help="a run folder: diagnose its latest weights")
    parser.add_argument("--recipe", choices=list(RECIPES), default="digits-tiny", help="(default: %(default)s)")
    parser.add_argument("--config", type=Path, help="a YAML file with other values than the recipe's")
    parser.add_argument("--model", help="another model, as for `scalelong train`: unet/cifar10, package.module:factory")
    parser.add_argument("--data", help="other images: a folder, a file or the name of a data set")
    parser.add_argument("--out", type=Path, help="also write diagnosis.json into this folder, for `scalelong report`")
    options = parser.parse_args(arguments)
    if options.run:
        diagnosis = diagnose_run(load_run(options.run, weights="raw"))
    else:
        config = recipe(options.recipe)
        config = load_config(options.config, config) if options.config else config
        if options.model and options.model != config.model:
            config = replace(config, model=options.model, model_options={})
        diagnosis = diagnose_config(replace(config, data=options.data or config.data))
    print(diagnosis)
    if options.out:
        print(f"written: {write_diagnosis(diagnosis, options.out)}")
    return 0
