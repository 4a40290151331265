"""Train a network of the package again, as its card says, score it and pack it.

python -m research.shipped digits-class --out src/scalelong/runs/trained
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from scalelong.config import CONFIG, DATA, RUN, load_config
from scalelong.errors import CheckpointError
from scalelong.evaluation import score_run
from scalelong.export import model_card
from scalelong.files import new_folder, read_json, write_bytes, write_text
from scalelong.runs import CARD, NETWORKS, SCORES, WEIGHTS, load_run, packed_folder, saved_steps, step_folder
from scalelong.runs.checkpoint import EMA, read_tensors
from scalelong.training import train


def pack(run_folder: Path, target: Path) -> Path:
    """A run as a network of the package: averaged weights in half precision, without what training alone needs."""
    steps = saved_steps(run_folder / "checkpoints")
    if not steps:
        raise CheckpointError(f"{run_folder} has no checkpoint: train it first")
    weights = read_tensors(step_folder(run_folder / "checkpoints", steps[-1]) / EMA)
    if target.exists():
        shutil.rmtree(target)
    with new_folder(target) as folder:
        for name in (CONFIG, DATA):
            write_bytes(folder / name, (run_folder / name).read_bytes())
        write_text(folder / RUN, json.dumps({"id": read_json(run_folder / RUN)["id"], "step": steps[-1]}))
        halved = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
        save_file({name: value.contiguous() for name, value in halved.items()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)
    return target


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path("runs/made"))
    parser.add_argument("--images", type=int, default=1000, help="images that are scored (default: 1000)")
    options = parser.parse_args(arguments)
    work = options.out / f"{options.name}-run"
    train(load_config(packed_folder(options.name) / CONFIG), work)
    scores = score_run(load_run(work), n=options.images)
    folder = pack(work, options.out / options.name)
    # Without places on the machine where it was made.
    line = scores.to_dict() | {"subject": {"run": options.name, "step": scores.subject["step"], "seed": 0}}
    write_text(folder / SCORES, json.dumps(line, ensure_ascii=False) + "\n")
    write_text(folder / CARD, model_card(load_run(work), "shipped", [scores]).replace("NAME", options.name))
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
