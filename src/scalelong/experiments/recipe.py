"""The evidence for the recipe: curves of comparisons as small JSON files, and a page with tables and figures from them.

python -m scalelong.experiments.recipe gather RUNS docs/evidence/recipe/NAME.json --title TITLE --command COMMAND
python -m scalelong.experiments.recipe redraw docs/evidence/recipe
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError
from ..theory.table import text_table
from ..training.atomic import write_bytes, write_text
from ..training.config_io import flatten, load_config, to_dict
from .curves import Curve, read_curves, steps_to
from .figures import colour_of
from .runs import DIVERGED
from .script import exit_code
from .summary import baseline_of, spread

DIGITS = 5
LEFT_OUT = ("seed", "logging.", "checkpoints.", "guard.", "hardware.", "text.", "steps")


def gather(folder: Path, title: str, command: str) -> dict[str, Any]:
    """The held-out curves of all runs in a folder, and in what their configurations differ."""
    paths = sorted(path.parent for path in folder.glob("*-seed*/config.yaml"))
    if not paths:
        raise InvalidConfigError(f"there are no runs in {folder}: looked for NAME-seedN/config.yaml")
    configs = [flatten(to_dict(load_config(path / "config.yaml"))) for path in paths]
    names = [name for name in {**{n: 0 for c in configs for n in c}} if not name.startswith(LEFT_OUT)]
    apart = [name for name in names if len({repr(config.get(name)) for config in configs}) > 1]
    common = {name: configs[0][name] for name in names if name not in apart and name in configs[0]}
    runs = [
        _gathered(path, {name: config[name] for name in apart if name in config}, config["seed"])
        for path, config in zip(paths, configs, strict=True)
    ]
    return {"title": title, "command": command, "common": common, "runs": runs}


def _gathered(path: Path, differs: dict[str, Any], seed: int) -> dict[str, Any]:
    curves = read_curves(path)
    curve = curves.get("held_out_loss", Curve((), ()))
    scores = {"frechet": _rounded(curves["frechet"])} if "frechet" in curves else {}
    return {
        "name": re.sub(r"-seed\d+$", "", path.name),
        "seed": seed,
        "differs": differs,
        "diverged": (path / DIVERGED).exists(),
        "steps": list(curve.steps),
        "held_out_loss": _rounded(curve),
        **scores,
    }


def _rounded(curve: Curve) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in curve.values]


class Evidence:
    """One comparison, read back."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text(encoding="utf-8"))
        self.name, self.title, self.command = path.stem, found["title"], found["command"]
        self.common: dict[str, Any] = found["common"]
        self.differs = {run["name"]: run["differs"] for run in found["runs"]}
        self.diverged = {(run["name"], run["seed"]) for run in found["runs"] if run["diverged"]}
        self.frechet = {(run["name"], run["seed"]): run["frechet"][-1] for run in found["runs"] if "frechet" in run}
        self.curves: dict[str, dict[int, Curve]] = {}
        for run in found["runs"]:
            curve = Curve(tuple(run["steps"]), tuple(run["held_out_loss"]))
            self.curves.setdefault(run["name"], {})[run["seed"]] = curve
        self.baseline = baseline_of(list(self.curves))

    def last(self, name: str) -> list[float]:
        return [curve.values[-1] for curve in self.curves[name].values() if len(curve)]

    def speedups(self, name: str, share: float = 1.0) -> dict[int, float | None]:
        """By seed: the baseline's steps at this share of its run, divided by those that the variant needs for its loss.

        None: not within the steps that were run.
        """
        found: dict[int, float | None] = {}
        for seed, curve in self.curves[name].items():
            base = self.curves[self.baseline].get(seed)
            target = base.at(round(share * base.steps[-1])) if base is not None and len(base) else None
            if base is None or target is None:
                continue
            mine, theirs = steps_to(curve, target), steps_to(base, target)
            found[seed] = theirs / mine if mine and theirs else None
        return found

    def _ratios(self, name: str, share: float) -> str:
        if name == self.baseline:
            return "baseline"
        found = self.speedups(name, share).values()
        return " ".join("not reached" if ratio is None else f"{ratio:.2f}" for ratio in found) or "-"

    def _scores(self, name: str) -> str:
        return " ".join(f"{score:.2f}" for (mine, _), score in self.frechet.items() if mine == name) or "-"

    def rows(self) -> list[dict[str, str]]:
        order = sorted(self.curves, key=lambda name: min(self.last(name), default=9.0))
        return [
            {
                "variant": name,
                "held-out loss, mean (range)": spread(self.last(name), "{:.4f}"),
                "of seeds": " ".join(f"{value:.4f}" for value in self.last(name)),
                **{
                    f"baseline's steps / own, {when}": self._ratios(name, share)
                    for when, share in (("at half of the run", 0.5), ("at its end", 1.0))
                },
                **({"Fréchet distance": self._scores(name)} if self.frechet else {}),
                **({"diverged": str(sum(entry[0] == name for entry in self.diverged))} if self.diverged else {}),
            }
            for name in order
        ]


def page(evidence: Sequence[Evidence]) -> str:
    parts = [
        "# Raw results of the recipe\n\nWritten by `python -m scalelong.experiments.recipe redraw docs/evidence/recipe`"
        " from the JSON files beside it. Losses are errors in ε on held-out images, of averaged weights, with the "
        "same noise and times for all variants of a seed. What they mean: [recipe](../../recipe.md).\n"
    ]
    for entry in evidence:
        changes = "\n".join(
            f"- `{name}`: " + (", ".join(f"{key.split('.')[-1]} {value}" for key, value in differs.items()) or "-")
            for name, differs in entry.differs.items()
        )
        steps = max(
            (curve.steps[-1] for found in entry.curves.values() for curve in found.values() if len(curve)), default=0
        )
        parts.append(
            f"## {entry.title}\n\n{steps} steps.\n\n```\n{entry.command}\n```\n\n{changes}\n\n"
            f"```\n{text_table(entry.rows())}\n```\n\n![{entry.title}]({entry.name}.png)\n"
        )
    return "\n".join(parts)


def draw(entry: Evidence, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained", dpi=110)
    for position, (name, curves) in enumerate(entry.curves.items()):
        for number, curve in enumerate(curves.values()):
            style: Any = ("-", "--", ":")[position // 8 % 3]
            axes.plot(
                curve.steps,
                curve.values,
                style,
                color=colour_of(position),
                linewidth=1,
                alpha=0.8,
                label=name if number == 0 else None,
            )
    axes.set(xlabel="training step", ylabel="held-out loss", yscale="log", title=entry.title)
    axes.legend(frameon=False, fontsize=7)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    write_bytes(path, content.getvalue())


def redraw(folder: Path) -> None:
    found = [Evidence(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise InvalidConfigError(f"there are no results in {folder}: looked for *.json")
    for entry in found:
        draw(entry, folder / f"{entry.name}.png")
    write_text(folder / "README.md", page(found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scalelong.experiments.recipe", description=__doc__)
    commands = parser.add_subparsers(dest="command_name", required=True)
    gathering = commands.add_parser("gather")
    gathering.add_argument("runs", type=Path)
    gathering.add_argument("out", type=Path)
    gathering.add_argument("--title", required=True)
    gathering.add_argument("--command", required=True)
    commands.add_parser("redraw").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    return exit_code(lambda: carry_out(options))


def carry_out(options: argparse.Namespace) -> None:
    if options.command_name == "redraw":
        redraw(options.folder)
    else:
        found = gather(options.runs, options.title, options.command)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(found, indent=None, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
