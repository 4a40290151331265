"""Run folders without training: the files that a report reads, with curves whose values are known."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelong.config import TrainConfig, dump_config, recipe
from scalelong.stability import RateRange, RateRun

STEPS = 100
KAPPAS = {"none": (1.0, 1.0, 1.0, 1.0), "cs:0.7": (1.0, 0.7, 0.49, 0.343), "ls": (0.98, 0.71, 0.5, 0.3)}


def make_run(folder: Path, method: str, seed: int = 0, *, kappas: bool = True, **changes: object) -> Path:
    from PIL import Image

    config: TrainConfig = replace(recipe("digits-tiny"), scaling=method, seed=seed, steps=STEPS, **changes)  # pyright: ignore[reportArgumentType]
    (folder / "samples").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{STEPS:08d}").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "environment.json").write_text(json.dumps({"scalelong": "1", "note": "</script><b>&"}))
    about = {"name": "digits", "channels": 1, "height": 8, "width": 8, "classes": None}
    (folder / "data.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(method, seed, kappas)))
    for number, step in enumerate((50, 100)):
        Image.new("L", (16, 16), 40 + 100 * number).save(folder / "samples" / f"step-{step:08d}.png")
    return folder


def lines(method: str, seed: int, kappas: bool = True) -> list[dict[str, float]]:
    faster = {"none": 1.0, "cs:0.7": 1.25, "ls": 0.8}.get(method, 1.0)
    found: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        loss = math.exp(-faster * step / 50) + 0.01 * seed
        line: dict[str, float] = {"step": step, "loss": loss * 1.1, "gradient_norm": 1.0, "seconds_per_step": 0.01}
        if kappas:
            line |= {f"kappa/{i}": kappa for i, kappa in enumerate(KAPPAS[method], start=1)}
        line |= {f"probe_skip_rms/{i}": 1.0 + i for i in range(1, 5)}
        line |= {f"probe_block_rms/{name}": 2.0 + 0.1 * math.sin(step) for name in ("encoder.0", "middle", "decoder.0")}
        if step % 5 == 0:
            line["held_out_loss"] = loss
        found.append(line)
    return found


def made_up_range(survivors: dict[str, dict[float, int]], seeds: int = 8, **changes: Any) -> RateRange:
    """The first n seeds of each cell survive."""
    runs = [
        RateRun(
            method=method,
            rate=rate,
            seed=seed,
            outcome="survived" if seed < count else "collapsed",
            steps=300,
            best=0.1,
            best_step=200,
            last=0.1 if seed < count else None,
            curve=[[1, 1.0], [300, 0.1]],
            left_first=None if seed < count else {"where": "block decoder.3", "step": 200, "factor": 2.5},
        )
        for method, cells in survivors.items()
        for rate, count in cells.items()
        for seed in range(seeds)
    ]
    options = {"steps": 300, "warmup": 50, "reference_loss": 1.0, "rule": "rule", **changes}
    rates = tuple(sorted({run.rate for run in runs}))
    return RateRange(methods=tuple(survivors), rates=rates, seeds=tuple(range(seeds)), runs=tuple(runs), **options)
