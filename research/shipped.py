"""Train a network of the package again, as its card says, score it and pack it.

python -m research.shipped digits-class --out src/scalelong/runs/trained
"""

import argparse
import json
from pathlib import Path

from scalelong.config import CONFIG, load_config
from scalelong.evaluation import score_run
from scalelong.export import model_card
from scalelong.files import write_text
from scalelong.runs import CARD, NETWORKS, SCORES, load_run, pack, packed_folder
from scalelong.training import train


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
