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

NOTE = """
A small network that comes with the package, for trying things out and nothing else: it has seen very few pictures, and
its samples may resemble them. `python -m research.shipped {name}` trains it again. Scored before the weights were
halved. The weights have the licence of the package, Apache-2.0; the data: {licence}.
"""
LICENCES = {
    "digits": "UCI, Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0",
    "garments": "Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), its first 2000 training images at 16x16, MIT",
    "portraits": "DiceBear's adventurer, big-smile, personas and toon-head (CC BY 4.0) and pixel-art (CC0) at 32x32",
}


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
    trained = load_run(work)
    note = NOTE.format(name=options.name, licence=LICENCES[trained.config.data.removeprefix("captioned-")])
    write_text(folder / CARD, model_card(trained, "safetensors", [scores]) + note)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
