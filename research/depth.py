"""Does the best learning rate stay when a U-ViT becomes deeper, and with which κ_i?

    python -m research.depth run              # what is missing (digits; `run garments`: the other data set)
    python -m research.depth redraw           # page of results and figure, from the raw results alone

Depths 8, 24 and 40, with residual branches as they are, × (depth / 8)^-1/2 and × (depth / 8)^-1, and with CS, of which
κ is held, or the inmost κ_i. Settings and rules were committed before the runs: docs/evidence/mup/plan.md, "Depth".
Interrupt at any time.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from research import mup
from research.mup import FOLDER, NARROW, SEEDS, Cell, Row, Trained
from scalelong.console import text_table
from scalelong.experiments.figures import colour_of, legend, panels, save
from scalelong.experiments.runs import exit_code
from scalelong.files import write_text
from scalelong.randomness import seed_global

BASE, DEPTHS, WIDTH, KAPPA = 8, (24, 40), 32, 0.7
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
POWERS = {"as they are": 0.0, "depth^-1/2": 0.5, "depth^-1": 1.0}
"""Of the factor on residual branches, which is 1 at the base."""
KAPPAS = {
    "κ held": (0.5, False),
    "inmost κ_i held": (0.5, True),
    "depth^-1, κ held": (1.0, False),
    "depth^-1, inmost κ_i held": (1.0, True),
}
"""CS: the power of the factor on branches, and whether the exponent of κ is base / depth, or 1."""
SECOND_LOOK = dict.fromkeys(("depth^-1, κ held", "depth^-1, inmost κ_i held"), RATES[1:])
"""Rows that were added when the others had been seen, with their rates."""
CEILING = 0.43
"""Where the figure ends."""
NONE, CS = "none", "CS"
"""The rows at the base."""


def planned(data: str) -> Iterator[Cell]:
    for seed in SEEDS:
        yield from (Cell(data, BASE, BASE, name, rate, seed) for name in (NONE, CS) for rate in NARROW)
        for depth in DEPTHS:
            first = [name for name in (*POWERS, *KAPPAS) if name not in SECOND_LOOK]
            yield from (Cell(data, BASE, depth, name, rate, seed) for name in first for rate in RATES)
    for seed in SEEDS:
        for depth in DEPTHS:
            for name, rates in SECOND_LOOK.items():
                yield from (Cell(data, BASE, depth, name, rate, seed) for rate in rates)


def train(cell: Cell) -> Trained:
    """`width` of the cell is the depth."""
    with torch.random.fork_rng():
        seed_global(cell.seed, "weights")
        model = mup.network(cell.data, WIDTH, **options(cell.parametrisation, cell.width))
    return mup.fit(cell, model, model.parameters())


def options(name: str, depth: int) -> dict[str, Any]:
    power, stretched = KAPPAS[name] if name in KAPPAS else (POWERS.get(name, 0.0), False)
    branches = (depth / BASE) ** -power
    kappa = KAPPA ** (BASE / depth) if stretched else KAPPA
    scaled = name == CS or name in KAPPAS
    return {
        "depth": depth,
        "residual_scaling": "none" if branches == 1 else branches,
        "scaling": f"cs:{kappa}" if scaled else "none",
    }


# The page of results


def redraw() -> int:
    page = ["# Rates over depths: results", "", "Made by `python -m research.depth redraw`.", ""]
    drawn: list[Row] = []
    for data in mup.DATA:
        rows = mup.rows_of(mup.trained_in(FOLDER / f"depth-{data}.jsonl"))
        if not rows:
            page += [f"{data}: not run", ""]
            continue
        drawn += rows
        for base, names in ((NONE, POWERS), (CS, KAPPAS)):
            narrow = next(row for row in rows if row.parametrisation == base)
            mine = [narrow, *(row for row in rows if row.parametrisation in names)]
            page += [f"{data}, base {base}:", "", "```text", text_table(mup.table_of(mine, narrow, "depth")), "```", ""]
        page += [f"- {line}" for line in verdicts(data, rows)] + [""]
    draw(drawn, FOLDER / "depth.png")
    write_text(FOLDER / "depth.md", "\n".join(page))
    print("\n".join(page))
    return 0


def verdicts(data: str, rows: Sequence[Row]) -> list[str]:
    """By the rules of plan.md."""
    said = []
    bases = {row.parametrisation: row for row in rows if row.width == BASE}
    for names, base in ((POWERS, bases[NONE]), (KAPPAS, bases[CS])):
        for name in names:
            found = {row.width: row for row in rows if row.parametrisation == name}
            regrets = {depth: found[depth].regret(base) for depth in DEPTHS if depth in found}
            shown = ", ".join(
                f"{'not known' if regret is None else f'{regret:.1%}'} at {depth}" for depth, regret in regrets.items()
            )
            whole = len(regrets) == len(DEPTHS) and all(
                len(seen) == len(SEEDS) for row in found.values() for seen in row.losses.values()
            )
            if not whole:
                said.append(f"{data}, {name}: regret {shown or 'not known'}; not all runs are there: no verdict")
                continue
            holds = all(each is not None and each <= 0.01 for each in regrets.values())
            said.append(f"{data}, {name}: regret {shown}: the rate {'holds' if holds else 'does not hold'}")
    for depth in DEPTHS:
        best = {row.parametrisation: row.losses[row.best] for row in rows if row.width == depth}
        for name, losses in best.items():
            if name == "depth^-1/2" or "depth^-1/2" not in best:
                continue
            pairs = [losses[seed] - other for seed, other in best["depth^-1/2"].items() if seed in losses]
            sign = "above" if min(pairs) > 0 else "below" if max(pairs) < 0 else "on both sides of"
            said.append(
                f"{data}, depth {depth}, each at its best rate: {name} is {sign} depth^-1/2 without CS "
                f"({len(pairs)} of {len(SEEDS)} pairs, mean {fmean(pairs):+.4f})"
            )
    return said


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel per data set and depth: loss over rate, a line per row, every seed as a dot; what does not learn is at
    the top."""
    shown = [(data, depth) for data in dict.fromkeys(row.data for row in rows) for depth in (BASE, *DEPTHS)]
    names = list(dict.fromkeys((*POWERS, *KAPPAS)))
    colours = {NONE: "black", CS: "grey"} | {name: colour_of(i) for i, name in enumerate(names)}
    figure, axes = panels(len(shown), height=4.6, width=3.6)
    for place, (data, depth) in zip(axes, shown, strict=True):
        for row in rows:
            if (row.data, row.width) != (data, depth):
                continue
            color, name = colours[row.parametrisation], row.parametrisation
            for rate, seen in row.losses.items():
                values = [min(value, CEILING) for value in seen.values()]
                place.plot([rate] * len(seen), values, ".", color=color, alpha=0.5, markersize=4)
            means = [min(row.mean(rate), CEILING) for rate in row.rates]
            place.plot(row.rates, means, "--" if name in KAPPAS else "-", color=color, label=name)
        rates = sorted({rate for row in rows for rate in row.losses})
        place.set(xscale="log", xlabel="learning rate", title=f"{data}, depth {depth}", ylabel="held-out loss")
        place.set_ylim(0.365, CEILING + 0.003)
        place.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        place.minorticks_off()
        legend(place, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, columnspacing=1.0)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.depth", description="Best learning rates over depths.")
    parser.add_argument("what", choices=("run", "redraw"))
    parser.add_argument("names", nargs="*", help="data sets of run; digits if none is given")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what == "redraw":
        return redraw()
    for data in given.names or ["digits"]:
        mup.complete(FOLDER / f"depth-{data}.jsonl", planned(data), train)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
