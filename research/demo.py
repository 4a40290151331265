"""Does the demo say the same for other base seeds?

    python -m research.demo 10 11 12       # runs what is missing of these base seeds, minutes each
    python -m research.demo --page         # the table, from what is there

A base seed n takes the seeds 100 n to 100 n + 3, so that no two share a run. What is kept of each is in
docs/evidence/demo/seeds.json: survivors by method, and the sentence that says who is lost.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from scalelong.console import text_table
from scalelong.experiments.demo import METHODS, run_demo
from scalelong.files import write_text

FILE = Path("docs/evidence/demo/seeds.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for seed in options.seeds:
        if str(seed) in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run_demo(Path(folder), seed=seed, jobs=options.jobs)
        survivors = {method: list(result.survivors(method)) for method in result.methods}
        found[str(seed)] = {"survivors": survivors, "sentence": result.sentence}
        print(f"{seed}: {found[str(seed)]}", flush=True)
        FILE.parent.mkdir(parents=True, exist_ok=True)
        write_text(FILE, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(page(found))


def page(found: dict[str, Any]) -> str:
    names = [method.partition(": ")[0] for method in METHODS]
    rows = [
        {"base seed": seed} | {name: "{} of {}".format(*found[seed]["survivors"][name]) for name in names}
        for seed in sorted(found, key=int)
    ]
    said = Counter(entry["sentence"] for entry in found.values())
    lines = [f"{count} of {len(found)} base seeds: {sentence}" for sentence, count in said.most_common()]
    return "\n".join([text_table(rows), "", *lines])


if __name__ == "__main__":
    main()
