"""`scalelong ema RUN`: the length of the moving average, chosen after training.

For a run that kept two lengths (`scalelong train ... --ema-lengths 5% 10%`). Without --length, the held-out loss of
several lengths is printed, with that of the run's own average and of the raw weights. With --length, the weights of
that length are written as safetensors. `sample`, `eval` and `export` take every length directly: --weights ema:10%.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .options import add_output_options, add_trust_option, speaker, split, whole_number

LENGTHS = "4%,5%,7%,10%,13%,16%,20%"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong ema",
        description=__doc__.replace("%", "%%") if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("--length", help="write the weights of this length: 10%% or 0.1, a share of the run")
    made.add_argument("--out", type=Path, help="the file to write (default: ema-LENGTH.safetensors in the run)")
    made.add_argument("--lengths", default=LENGTHS, help=f"lengths to compare (default: {LENGTHS})".replace("%", "%%"))
    made.add_argument("--checkpoint", type=whole_number, metavar="STEP", help="checkpoint (default: the newest)")
    add_trust_option(made)
    add_output_options(made, "the losses")
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import show_table
    from ..runs.averages import AverageLength

    if options.length is not None:
        _write(options, AverageLength.parse(options.length, "--length"))
        return
    lengths = [str(AverageLength.parse(length, "--lengths")) for length in split(options.lengths)]
    losses, step = _losses(options, ["raw", "ema", *(f"ema:{length}" for length in lengths)])
    best = min(losses, key=lambda weights: losses[weights])
    if options.json:
        print(json.dumps({"step": step, "held_out_loss": losses, "best": best}, indent=1))
        return
    show_table(
        [
            {"weights": name, "held-out loss": f"{loss:.5f}", "": "best" if name == best else ""}
            for name, loss in losses.items()
        ],
        left=True,
    )
    speaker(options)(f"step {step}; to use one: scalelong sample {options.run} --weights {best}")


def _write(options: argparse.Namespace, length: Any) -> None:
    from ..export import export_safetensors
    from ..files import require_file_place
    from ..runs.load import load_run

    name = f"ema-{str(length).replace('%', 'pct')}.safetensors"
    out = options.out or options.run / name
    require_file_place(out)
    trained = load_run(options.run, weights=f"ema:{length}", step=options.checkpoint, trust=options.trust, log=print)
    written = export_safetensors(trained, out)
    if options.json:
        print(json.dumps({"step": trained.step, "weights": trained.weights, "file": str(written)}))
    else:
        print(f"{trained.weights.replace('ema', 'EMA')} weights of step {trained.step}: {written}")


def _losses(options: argparse.Namespace, wanted: list[str]) -> tuple[dict[str, float], int]:
    """The held-out loss of each, all on the same images, noise and times."""
    from ..console import Progress, silent
    from ..diffusion.inputs import held_out_loss
    from ..errors import InvalidConfigError
    from ..runs.load import load_run
    from ..runs.model import load_run_data

    first = load_run(options.run, weights=wanted[-1], step=options.checkpoint, trust=options.trust)
    if not first.config.images.held_out:
        raise InvalidConfigError(
            f"{options.run} held no images out, so lengths cannot be compared by their held-out loss. Compare scores "
            f"(scalelong eval {options.run} --weights ema:10%), or train with --held-out; --length writes one"
        )
    data = load_run_data(first.config, silent, Progress("reading images", enabled=not (options.quiet or options.json)))
    assert data.held_out is not None
    maker, losses = data.inputs(), {}
    for weights in wanted:
        trained = load_run(options.run, weights=weights, step=first.step, trust=options.trust, log=silent)
        losses[weights] = held_out_loss(trained.network, maker, first.config.diffusion.prediction, data.held_out)
    return losses, first.step
