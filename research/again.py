"""The paper's figures and tables once more: in its own setting taken to this width, in the best one, and at the edge.

    python -m research.again run        # train what is missing, one JSON line per run
    python -m research.again redraw     # results.md and figures, from the JSON files alone

The rules were committed before the runs: docs/evidence/again/plan.md. Training and fates are those of
`research.survival`, readings and most claims those of `research.edge`. Interrupt at any time: the same command goes on
with the runs that are missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research import edge, survival
from research.commands import add_parts, parts_of, study_parser
from research.edge import Item
from research.pages import claims_table, document, table
from research.reproduce import fig3, fig7
from research.reproduce.claims import LOSS, Claim, below, scaling_below
from research.reproduce.items import DIRECTION, modules_alike
from research.reproduce.settings import (
    CS,
    LS,
    LS_ACTIVATIONS,
    LS_IE,
    LS_PER_SKIP,
    LS_RATIOS,
    LS_SCALAR,
    REVERSED,
)
from research.survival import Arm, Run, Setting
from scalelong.experiments.figures import colour_of, draw_seeds, legend, panels, save
from scalelong.experiments.records import RunRecord
from scalelong.experiments.results import Results
from scalelong.files import write_text
from scalelong.noise import NoiseProcess
from scalelong.skips import coefficients
from scalelong.theory import noise_gain

FOLDER = Path("docs/evidence/again")
SEEDS, LONG_SEEDS = tuple(range(71_000, 71_008)), tuple(range(71_100, 71_108))


# Methods and settings

MODULES = (*LS_RATIOS, *LS_ACTIVATIONS, LS_IE, LS_SCALAR, LS_PER_SKIP)
"""The rows of Table 2 besides LS itself."""
PAPER, TABLE2 = edge.PAPER, ("none", "LS", *(method.label for method in MODULES))
OTHERS = ("CS(0.7) reversed", "stable τ = 0.1", "stable τ = 0.3", "ReZero")
METHODS = edge.METHODS | {method.label: Arm(attach=method.scaling) for method in MODULES}


@dataclass(frozen=True)
class Trial(edge.Trial):
    """A run with a method, trained as its setting says."""

    how: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Arm:
        """The line of a run does not say how it is trained: each setting has a file of its own."""
        arm = METHODS[self.arm]
        return replace(arm, **{**self.how, "network": {**self.how.get("network", {}), **arm.network}})


@dataclass(frozen=True)
class Place(edge.Place):
    how: dict[str, Any] = field(default_factory=dict)
    """What differs from `survival.Arm`: start, betas, course of the rate."""

    def runs(self, methods: Sequence[str] | None = None) -> list[edge.Trial]:
        chosen = [(method, seed) for method in (methods or self.methods) for seed in self.seeds]
        return [Trial(self.setting, method, self.lr, seed, self.how) for method, seed in chosen]


LIKE_PAPER: dict[str, Any] = {"betas": (0.99, 0.999), "network": {"final_start": "authors"}}
RATE = 2e-4 * 512 / 64
"""The authors', taken from their width to this one as the deviation of their start is."""
LIKE, BEST = Setting(data="garments", depth=12, steps=600), Setting(data="garments", depth=16, steps=400)
ALL = tuple(dict.fromkeys((*PAPER, *TABLE2, *OTHERS)))
PLACES: dict[str, Place] = {
    "paper-like": Place(LIKE, RATE, ALL, SEEDS, read=True, how=LIKE_PAPER),
    "best": Place(BEST, 4e-3, ALL, SEEDS, read=True, how={"linear": True, "network": {"init_std": "unit"}}),
    "edge": Place(edge.GARMENTS, 1.2e-2, tuple(dict.fromkeys((*PAPER, *TABLE2))), SEEDS),
    "paper-like, batch 2": Place(replace(LIKE, batch=2), RATE, PAPER, SEEDS, how=LIKE_PAPER),
    "paper-like, depth 24": Place(replace(LIKE, depth=24), RATE, PAPER, SEEDS, how=LIKE_PAPER),
}
FIRST = tuple(PLACES)
LONG = "paper-like, 5,000 steps"
PLACES[LONG] = Place(replace(LIKE, steps=5000), RATE, ("LS",), LONG_SEEDS, how=LIKE_PAPER)
"""In the order in which they are run: if time runs out, the last ones are not done, and the page says so. The long
setting is the second part of the plan."""


# Looking at runs


class Reader(edge.Reader):
    """Besides, at the end: the loss under extra noise, how the network amplifies it, and what LS gives for noise."""

    def reads(self, run: Run, step: int) -> bool:
        return run.arm in PAPER and super().reads(run, step)  # Figure 1 is about the paper's four methods

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        return super().end(run, state) | {"noise": self.under_noise(run, state), "kappas": self.gates(run, state)}

    @torch.no_grad()
    def under_noise(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        """As `research.reproduce.fig3` measures it. The same extra noise for all runs."""
        model = self.filled(run, state)
        extra = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(13))

        def loss(sigma: float) -> float:
            return float((model(self.x + sigma * extra, self.t) - self.noise).square().mean())

        gain = noise_gain(model, self.x[: fig3.PROBE], self.t[: fig3.PROBE], sigma=fig3.GAIN_SIGMA)
        losses = {str(sigma): edge.short(loss(sigma)) for sigma in (0.0, *fig3.SIGMAS)}
        return {"losses": losses, "gain": edge.short(gain)}

    @torch.no_grad()
    def gates(self, run: Run, state: dict[str, Tensor]) -> list[float | None]:
        """As `research.reproduce.fig7` measures them; nothing where nothing is attached."""
        if run.spec.attach is None:
            return []
        model, count = self.filled(run, state), fig7.NOISES
        noise = torch.randn(count, *self.x.shape[1:], generator=torch.Generator().manual_seed(0))
        model(noise, NoiseProcess().times(torch.ones(count)))
        return [edge.short(value) for value in coefficients(model)]


def run(names: Iterable[str], folder: Path) -> None:
    """Train what is missing of the settings, a method after the other, all seeds of a method side by side."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    images, held_out = survival.load_images("garments", None), edge.held_out_images("garments", None)
    for name in names:
        place, path = PLACES[name], folder / file_name(name)
        done = {survival.key_of(line) for line in survival.read(path)}
        missing = [run for run in place.runs() if run.key not in done]
        print(f"{name}: {len(missing)} of {len(place.runs())} runs are missing", flush=True)
        for method in place.methods:
            if waiting := [run for run in missing if run.arm == method]:
                survival.train(waiting, images, partial(keep, path), Reader(place, images, held_out))


def keep(path: Path, run: Run, result: dict[str, Any]) -> None:
    # Neither the smoothed training losses nor gates on single batches are made anything of.
    edge.keep(path, run, {name: value for name, value in result.items() if name not in ("curve", "gates")})


def file_name(name: str) -> str:
    return f"{name.replace(', ', '-').replace(' ', '').replace(',', '')}.jsonl"


# Claims


def record_of(name: str, line: dict[str, Any]) -> RunRecord:
    """A network that did not survive has no rise of its loss and no gates."""
    found = edge.record_of(name, line)
    more = {**line["noise"], "kappas": line["kappas"]} if line["survived"] else {}
    return replace(found, measured=found.measured | more)


def results_of(folder: Path) -> Results:
    """The runs of the methods of which all seeds are there."""
    found = [(name, edge.whole_methods(place, folder / file_name(name))) for name, place in PLACES.items()]
    return Results([record_of(name, line) for name, lines in found for line in lines])


def losses(results: Results, name: str) -> list[Claim]:
    return scaling_below(results, [name], [LOSS])


def table2(results: Results, name: str) -> list[Claim]:
    return modules_alike(results, name, LOSS)


def looks(name: str) -> tuple[int, ...]:
    """Of Table 4: the first quarter is not judged."""
    return tuple(PLACES[name].setting.steps * share // 4 for share in (2, 3, 4))


def table4(results: Results, name: str) -> list[Claim]:
    return [below(results, name, CS, REVERSED, edge.loss_at(step), DIRECTION) for step in looks(name)]


def of_gates(results: Results, name: str) -> list[Claim]:
    return fig7.of_setting(results, name, LS)


MAIN = ("paper-like", "best")
HARDER = ("paper-like, batch 2", "paper-like, depth 24")
ITEMS = {
    "fig1": Item("Figure 1: oscillation of features and gradients", MAIN, edge.fig1),
    "fig3": Item("Figure 3 (c): extra noise on the input", FIRST, fig3.noise_claims),
    "fig5": Item("Figure 5: training curves", (*MAIN, *HARDER), edge.fig5, ("none", "CS(0.7)", "LS")),
    "fig6": Item("Figure 6: batch sizes and depths", HARDER, losses),
    "fig7": Item("Figure 7: what LS learns", FIRST, of_gates, ("LS",)),
    "fig7 long": Item("Figure 7, second part: what LS learns in 5,000 steps", (LONG,), of_gates, ("LS",)),
    "table1": Item("Table 1: quality after training (loss)", MAIN, losses),
    "table2": Item("Table 2: the network inside LS", (*MAIN, "edge"), table2, TABLE2),
    "table3": Item("Table 3: scaling of block outputs", MAIN, edge.table3, ("CS(0.7)", "LS", *OTHERS[1:])),
    "table4": Item("Table 4: direction of the decay", MAIN, table4, ("CS(0.7)", "CS(0.7) reversed")),
}


# Page and figures


def redraw(folder: Path) -> None:
    """results.md and the figures, from the JSON files of the folder alone."""
    results = results_of(folder)
    edge.draw_losses(results, folder / "losses.png")
    draw_gates(results, folder / "gates.png")
    write_text(folder / "results.md", page(folder))


def page(folder: Path) -> str:
    results = results_of(folder)
    heads = ["figure or table", "settings", "verdict", "claims"]
    parts = [
        "# The paper's figures and tables once more: all results",
        "Written by `python -m research.again redraw` from the JSON lines beside it. Meaning: [README](README.md); "
        "rules: [plan](plan.md). Intervals of an item hold together with 90 % (Bonferroni). "
        + edge.run_of_plan(PLACES, results),
        "## Verdicts",
        table(heads, [edge.item_row(item, results) for item in ITEMS.values()]),
        "## Who survives",
        edge.survivors_table(results),
        "![Losses](losses.png)",
        "![κ_i that LS learns](gates.png)",
    ]
    for item in ITEMS.values():
        if claims := edge.claims_of(item, results):
            parts += [f"## {item.title}", claims_table(claims, PLACES[claims[0].setting].seeds)]
    return document([*parts, "## Held-out loss at the end", edge.losses_table(results), "## κ_i", gates_table(results)])


def gates_table(results: Results) -> str:
    """What LS gives for noise at the end, of every run that survived."""
    runs = [(name, run) for name in edge.places_of(results) for run in results.of(LS.label, name)]
    rows = [
        [name, str(run.seed), " ".join(f"{value:.2f}" for value in run.measured["kappas"])]
        for name, run in runs
        if run.measured.get("kappas")
    ]
    return table(["setting", "seed", "κ_1, κ_2, ..."], rows)


def draw_gates(results: Results, path: Path) -> None:
    places = [name for name in edge.places_of(results) if results.of(LS.label, name)]
    figure, axes = panels(max(1, len(places)))
    for axis, name in zip(axes, places, strict=False):
        lines = [run.measured["kappas"] for run in results.of(LS.label, name) if run.measured.get("kappas")]
        draw_seeds(axis, [(range(1, len(line) + 1), line) for line in lines], LS.label, colour_of(0))
        numbers = range(1, PLACES[name].setting.depth // 2 + 1)
        low, high = ([kappa ** (i - 1) for i in numbers] for kappa in fig7.BAND)
        axis.fill_between(numbers, low, high, color=colour_of(1), alpha=0.25, linewidth=0, label="CS, κ of 0.5 to 0.95")
        axis.set(title=name, xlabel="long skip i (1 is the outermost)", ylabel=r"$\kappa_i$", ylim=(0, 1.05))
        axis.tick_params(labelsize=7)
    legend(axes[0])
    save(figure, path)


def main() -> None:
    parser, commands = study_parser("again", __doc__, FOLDER)
    add_parts(commands["run"], PLACES)
    options = parser.parse_args()
    if options.command == "run":
        run(parts_of(parser, options.parts, PLACES), options.folder)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
