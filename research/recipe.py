"""The evidence for the recipe: curves of comparisons as small JSON files, and a page with tables and figures from them.

    python -m research.recipe gather RUNS docs/evidence/recipe/NAME.json --title TITLE
    python -m research.recipe redraw docs/evidence/recipe
    python -m research.recipe claims docs/evidence/recipe       # what docs/recipe.md says, with intervals

`gather` reads the folder of a comparison into records (`scalelong.experiments.results`) and keeps their held-out
curves, and in what they differ. `redraw` needs these files alone.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scalelong.console import text_table
from scalelong.errors import InvalidConfigError
from scalelong.experiments.compare import COMMANDS
from scalelong.experiments.figures import colour_of, legend, log_scale, panels, save
from scalelong.experiments.records import COLLAPSED, Curve, RunRecord, read_run, steps_to
from scalelong.experiments.results import Results, interval, spread
from scalelong.experiments.runs import exit_code
from scalelong.files import write_text
from scalelong.runs.config import flatten, load_config, to_dict

from .pages import document, fenced

# From the folders of a comparison to one small file

DIGITS = 5
LEFT_OUT = ("seed", "logging.", "checkpoints.", "guard.", "hardware.", "text.", "steps")


def gather(folder: Path, title: str, command: str | None = None) -> dict[str, Any]:
    """The held-out curves of all runs in a folder, and in what their configurations differ."""
    paths = sorted(path.parent for path in folder.glob("*-seed*/config.yaml"))
    if not paths:
        raise InvalidConfigError(f"there are no runs in {folder}: looked for NAME-seedN/config.yaml")
    if command is None:
        if not (folder / COMMANDS).exists():
            raise InvalidConfigError(f"{folder / COMMANDS} is missing: say with --command what made these runs")
        command = (folder / COMMANDS).read_text(encoding="utf-8").strip()
    configs = [flatten(to_dict(load_config(path / "config.yaml"))) for path in paths]
    names = [name for name in {**{n: 0 for c in configs for n in c}} if not name.startswith(LEFT_OUT)]
    apart = [name for name in names if len({repr(config.get(name)) for config in configs}) > 1]
    common = {name: configs[0][name] for name in names if name not in apart and name in configs[0]}
    runs = [
        _stored(path, {name: config[name] for name in apart if name in config}, config)
        for path, config in zip(paths, configs, strict=True)
    ]
    return {"title": title, "command": command, "common": common, "runs": runs}


def _stored(path: Path, differs: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    # The name of the folder, not that of the variant: committed files call runs so.
    record = read_run(path, method=re.sub(r"-seed\d+$", "", path.name), config=config)
    scores = record.curves.get("frechet")
    return {
        "name": record.method,
        "seed": record.seed,
        "differs": differs,
        "diverged": record.diverged is not None,
        "steps": list(record.held_out.steps),
        "held_out_loss": list(record.held_out.rounded(DIGITS).values),
        **({"frechet": list(scores.rounded(DIGITS).values)} if scores else {}),
    }


# One comparison, read back from its file, and the questions that the page asks of it


@dataclass(frozen=True, kw_only=True)
class Evidence(Results):
    """Records of a comparison, from its file."""

    name: str
    title: str
    command: str
    common: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Evidence":
        found = json.loads(path.read_text(encoding="utf-8"))
        about = {key: found[key] for key in ("title", "command", "common")}
        return cls([_record(run) for run in found["runs"]], name=path.stem, **about)

    @property
    def differs(self) -> dict[str, dict[str, Any]]:
        return {run.method: run.differs for run in self.runs}

    @property
    def steps(self) -> int:
        return max((run.held_out.steps[-1] for run in self.runs if len(run.held_out)), default=0)

    def last(self, name: str) -> list[float]:
        return [run.held_out.values[-1] for run in self.in_order(name) if len(run.held_out)]

    def collapsed(self, name: str) -> int:
        return sum(run.collapsed for run in self.in_order(name))

    def speedups(self, name: str, share: float = 1.0) -> dict[int, float | None]:
        """By seed: the steps that the baseline needed for its best loss, divided by those that the variant needs.

        The best within this share of the baseline's run: what it reached before it collapsed counts. None: the variant
        does not get there within the steps that were run.
        """
        found: dict[int, float | None] = {}
        bases = {run.seed: run.held_out for run in self.in_order(self.baseline)}
        for run in self.in_order(name):
            base = bases.get(run.seed, Curve())
            target = base.best(round(share * base.steps[-1])) if len(base) else None
            if target is None:
                continue
            mine, theirs = steps_to(run.held_out, target), steps_to(base, target)
            found[run.seed] = theirs / mine if mine and theirs else None
        return found

    def rows(self) -> list[dict[str, str]]:
        order = sorted(self.methods(), key=lambda name: fmean(self.last(name) or [math.inf]))
        fragile = any(self.collapsed(name) for name in order)
        scored = any(run.frechet is not None for run in self.runs)
        diverged = any(run.diverged is not None for run in self.runs)
        return [
            {
                "variant": name,
                "held-out loss, mean (range)": spread(self.last(name), "{:.4f}"),
                "of seeds": " ".join(f"{value:.4f}" for value in self.last(name)),
                **{
                    f"baseline's steps / own, {when}": self._ratios(name, share)
                    for when, share in (("at half of the run", 0.5), ("at its end", 1.0))
                },
                **({"Fréchet distance": self._scores(name)} if scored else {}),
                **({"collapsed": f"{self.collapsed(name)} of {len(self.in_order(name))}"} if fragile else {}),
                **({"diverged": str(sum(run.diverged is not None for run in self.in_order(name)))} if diverged else {}),
            }
            for name in order
        ]

    def in_order(self, name: str) -> list[RunRecord]:
        """The runs of a variant, in the order of the file."""
        return [run for run in self.runs if run.method == name]

    def _ratios(self, name: str, share: float) -> str:
        if name == self.baseline:
            return "baseline"
        found = self.speedups(name, share).values()
        return " ".join("not reached" if ratio is None else f"{ratio:.2f}" for ratio in found) or "-"

    def _scores(self, name: str) -> str:
        return " ".join(f"{run.frechet:.2f}" for run in self.in_order(name) if run.frechet is not None) or "-"


def _record(run: dict[str, Any]) -> RunRecord:
    return RunRecord(
        method=run["name"],
        seed=run["seed"],
        differs=run["differs"],
        held_out=Curve(tuple(run["steps"]), tuple(run["held_out_loss"])),
        frechet=run["frechet"][-1] if "frechet" in run else None,
        diverged="it diverged" if run["diverged"] else None,
    )


# The page with a table and a figure of every comparison

TITLE_WIDTH = 80


def redraw(folder: Path) -> None:
    found = [Evidence.read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise InvalidConfigError(f"there are no results in {folder}: looked for *.json")
    for entry in found:
        draw(entry, folder / f"{entry.name}.png")
    write_text(folder / "README.md", page(found))


def page(evidence: Sequence[Evidence]) -> str:
    parts = [
        "# Raw results of the recipe",
        "Written by `python -m research.recipe redraw docs/evidence/recipe`"
        " from the JSON files beside it. Losses are errors in ε on held-out images, of averaged weights, with the "
        "same noise and times for all variants of a seed. Steps are those to the best loss that the baseline "
        "had at half or at the end of its run. A run has collapsed if its loss ends at more than "
        f"{COLLAPSED:g} times its best. What they mean: [findings](findings.md).",
    ]
    for entry in evidence:
        changes = "\n".join(
            f"- `{name}`: " + (", ".join(f"{key.split('.')[-1]} {value}" for key, value in differs.items()) or "-")
            for name, differs in entry.differs.items()
        )
        parts += [
            f"## {entry.title}",
            f"{entry.steps} steps.",
            fenced(entry.command),
            changes,
            fenced(text_table(entry.rows())),
            f"![{entry.title}]({entry.name}.png)",
        ]
    return document(parts)


def draw(entry: Evidence, path: Path) -> None:
    """Every seed of every variant; what is compared is the whole curve, so that no mean hides a collapse."""
    figure, (axes,) = panels(1, height=4.2, width=7, dpi=110)
    styles: Any = ("-", "--", ":")
    for position, name in enumerate(entry.methods()):
        for number, run in enumerate(entry.in_order(name)):
            axes.plot(
                run.held_out.steps,
                run.held_out.values,
                styles[position // 8 % 3],
                color=colour_of(position),
                linewidth=1,
                alpha=0.8,
                label=name if number == 0 else None,
            )
    axes.set(xlabel="training step", ylabel="held-out loss")
    log_scale(axes)
    axes.set_title(textwrap.fill(entry.title, TITLE_WIDTH), fontsize=10)
    legend(axes)
    save(figure, path)


# What the page for users says: steps saved, with an interval


@dataclass(frozen=True)
class Claim:
    """A variant of a comparison against its baseline."""

    evidence: str
    variant: str
    change: str
    setting: str


CLAIMS = (
    Claim("deep-best", "unit-tau", "unit gain, branches at 0.3", "depth 24, batches of 8, best of three rates"),
    Claim("deep-unit", "unit", "unit gain", "depth 24, batches of 8, 4e-3"),
    Claim("depth16-tuned", "unit-tau", "unit gain, branches at 0.3", "depth 16, 1,500 steps, 4e-3"),
    Claim("residual-unit", "unit-tau", "unit gain, branches at 0.3", "depth 8, best of four rates"),
    Claim("residual", "unit", "unit gain", "depth 8, best of four rates"),
    Claim("cifar10-best", "unit-tau", "unit gain, branches at 0.3", "depth 8, CIFAR-10, best of two rates"),
    Claim("cifar10-32", "unit-tau", "unit gain, branches at 0.3", "depth 8, CIFAR-10 at 32x32, 4e-3"),
    Claim("width128", "unit-tau", "unit gain, branches at 0.3", "depth 8, width 128, 4e-3"),
    Claim("digits-unit", "unit", "unit gain", "digits-tiny (depth 6), 2e-3"),
    Claim("digits-class-unit", "unit", "unit gain", "digits-class-tiny (depth 4), 1e-3"),
    Claim("fashion-tiny", "unit", "unit gain", "fashion-tiny (depth 4), 2e-3"),
    Claim("fashion-tiny", "unit-tau", "unit gain, branches at 0.3", "fashion-tiny (depth 4), 2e-3"),
    Claim("deep-scaling", "cs", "CS(0.7)", "depth 24, batches of 8, 4e-3"),
    Claim("frechet", "cs", "CS(0.7)", "depth 8, unit gain, branches at 0.3"),
    Claim("unet-behind", "none-8e-3", "8e-3 instead of 2e-3", "a UNet"),
    Claim("unet-behind", "behind", "CS(0.7) behind norms", "a UNet, 2e-3"),
)
WORTH = 1.05
"""A smaller saving is called none."""


def claims(folder: Path) -> list[dict[str, str]]:
    """The baseline's steps divided by those of the variant, at the end: geometric mean, 90 % interval of Student's t.

    A variant that does not reach the baseline's best loss in some seed has no mean; it counts as saving nothing.
    """
    rows: list[dict[str, str]] = []
    for claim in CLAIMS:
        ratios = list(Evidence.read(folder / f"{claim.evidence}.json").speedups(claim.variant).values())
        reached = [math.log(ratio) for ratio in ratios if ratio is not None]
        row = {"change": claim.change, "setting": claim.setting, "seeds": str(len(ratios))}
        if len(reached) < len(ratios):
            row |= {
                "steps saved, times": f"not reached in {len(ratios) - len(reached)}",
                "90 % interval": "",
                "verdict": "none",
            }
        else:
            low, high = map(math.exp, interval(reached))
            verdict = "saves" if low > WORTH else "none" if high < WORTH else "open"
            row |= {
                "steps saved, times": f"{math.exp(fmean(reached)):.2f}",
                "90 % interval": f"{low:.2f} to {high:.2f}",
                "verdict": verdict,
            }
        rows.append(row)
    return rows


# The command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.recipe", description=__doc__)
    commands = parser.add_subparsers(dest="command_name", required=True)
    gathering = commands.add_parser("gather")
    gathering.add_argument("runs", type=Path)
    gathering.add_argument("out", type=Path)
    gathering.add_argument("--title", required=True)
    gathering.add_argument("--command", help="default: what `scalelong compare` noted beside the runs")
    commands.add_parser("redraw").add_argument("folder", type=Path)
    commands.add_parser("claims").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    return exit_code(lambda: _work(options))


def _work(options: argparse.Namespace) -> None:
    if options.command_name == "redraw":
        redraw(options.folder)
    elif options.command_name == "claims":
        print(text_table(claims(options.folder)))
    else:
        found = gather(options.runs, options.title, options.command)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(found, indent=None, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
