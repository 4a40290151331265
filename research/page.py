"""The page of a study: its verdict by the plan's rule, its tables and its figure. Made of the runs' lines alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scalelong.experiments import interval
from scalelong.files import write_text

from .study import LOST, Plan, Results, Run


def write_page(plan: Plan, results: Results, path: Path, out: Path) -> str:
    """Write README.md and the figure; returns the verdict."""
    verdict, tables = lasts_tables(plan, results) if plan.kind == "lasts" else buys_tables(plan, results)
    figure = draw(plan, results, out)
    rule = "; ".join(f"{name} {value}" for name, value in vars(plan.rule).items())
    planned = f"{len(plan.seeds)} seeds ({plan.seeds[0]} to {plan.seeds[-1]})"
    parts = [
        f"# {plan.title}",
        plan.question,
        f"**{verdict}**",
        f"![held-out loss]({figure})" if figure else "",
        *tables,
        "## How it was measured",
        f"Plan: `{path.name}`, kind {plan.kind}, {planned}, baseline {plan.baseline}. Rule: {rule}. "
        "The held-out loss is that of averaged weights on fixed images, times and noise; an answer of zero has 1.",
        table(["cell", "setting"], [[name, _fields(setting)] for name, setting in plan.cells.items()]),
        table(
            ["arm", "options"],
            [[name, _fields(arm) or "the cell's network, AdamW"] for name, arm in plan.arms.items()],
        ),
        plan.notes,
        f"`python -m research.study {path.name}` continues and repeats it. Raw results: [runs.jsonl](runs.jsonl).",
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "README.md", "\n\n".join(part for part in parts if part) + "\n")
    return verdict


def _fields(thing: Any) -> str:
    default = type(thing)()
    changed = {name: value for name, value in vars(thing).items() if value != getattr(default, name)}
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What lasts


def lasts_tables(plan: Plan, results: Results) -> tuple[str, list[str]]:
    rows, lasting = [], {arm: [] for arm in plan.arms}
    finished = wanted = 0
    for cell in plan.cells:
        for arm in plan.arms:
            for rate in plan.rates_of(cell, arm):
                known = [run for seed in plan.seeds if results.of(run := Run(cell, arm, rate, seed))]
                finished, wanted = finished + len(known), wanted + len(plan.seeds)
                if known:
                    alive = sum(bool(results.alive(run)) for run in known)
                    lasting[arm].append(alive >= plan.rule.lasts * len(known))
                rows.append([cell, arm, f"{rate:g}", *_fates(plan, results, known)])
    winners = [arm for arm, found in lasting.items() if found and all(found)]
    said = f"Lasts in every cell: {', '.join(winners)}." if winners else "No arm lasts in every cell."
    said += "" if finished == wanted else f" {finished} of {wanted} runs are finished."
    heads = ["cell", "arm", "rate", "alive", "collapsed at step", "held-out loss of those alive"]
    return said, [
        "## Who lasts",
        table(
            ["arm", "alive", "lasts in cells", f"against {plan.baseline}", "p (McNemar, Holm)"],
            _against_baseline(plan, results, lasting),
        ),
        "## By cell",
        table([*heads, "ratio to the best arm (interval)", "seconds"], rows),
    ]


def _fates(plan: Plan, results: Results, runs: Sequence[Run]) -> list[str]:
    """Of the finished runs of an arm at a rate: who is alive, where the others collapsed, loss and cost."""
    lines = [results.of(run) or {} for run in runs]
    alive = [run for run in runs if results.alive(run)]
    lost = ", ".join(map(str, sorted(line["collapsed"] for line in lines if line["collapsed"])))
    rollbacks = ", ".join(str(line["rollbacks"]) for line in lines if "rollbacks" in line)
    losses = [results.loss(run) or 1.0 for run in alive]
    return [
        f"{len(alive)} of {len(runs)}",
        lost + (f" (rollbacks: {rollbacks})" if rollbacks else ""),
        f"{math.exp(fmean(map(math.log, losses))):.4f}" if losses else "-",
        _against(plan, results, runs),
        f"{fmean(line['seconds'] for line in lines):.0f}" if lines else "-",
    ]


def _against_baseline(plan: Plan, results: Results, lasting: Mapping[str, Sequence[bool]]) -> list[list[str]]:
    """A row for each arm: how many of its runs are alive, and whether that differs from the baseline."""
    pairs: dict[str, list[tuple[bool, bool]]] = {arm: [] for arm in plan.arms}
    for run in plan.runs(plan.seeds):
        other = Run(run.cell, plan.baseline, run.rate, run.seed)
        if results.of(run) and results.of(other):
            pairs[run.arm].append((bool(results.alive(run)), bool(results.alive(other))))
    tests = holm({arm: mcnemar(found) for arm, found in pairs.items() if arm != plan.baseline and found})
    rows = []
    for arm, found in pairs.items():
        alive, base = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
        word, p = "no difference", tests.get(arm, 1.0)
        if p < plan.rule.level:
            word = "more" if alive > base else "fewer"
        judged = ["-", "-"] if arm == plan.baseline else [word, f"{p:.2g}"]
        rows.append([arm, f"{alive} of {len(found)}", f"{sum(lasting[arm])} of {len(lasting[arm])}", *judged])
    return rows


def _against(plan: Plan, results: Results, runs: Sequence[Run]) -> str:
    """The loss as a ratio to that of the arm that is alive most often and has the lowest loss, over shared seeds."""
    if not runs:
        return "-"
    cell, rate = runs[0].cell, runs[0].rate
    alive = {
        arm: {
            seed: results.loss(run) or 1.0
            for seed in plan.seeds
            if results.of(run := Run(cell, arm, rate, seed)) and results.alive(run)
        }
        for arm in plan.arms
    }
    best = min(alive, key=lambda arm: (-len(alive[arm]), fmean(alive[arm].values()) if alive[arm] else 1.0))
    mine, theirs = alive[runs[0].arm], alive[best]
    ratios = [math.log(mine[seed] / theirs[seed]) for seed in mine.keys() & theirs.keys()]
    if runs[0].arm == best and theirs:
        return "the best"
    return ratio_text(ratios, digits=3) if len(ratios) > 1 else "-"


def ratio_text(logs: Sequence[float], digits: int = 2) -> str:
    """A mean ratio, and the interval that holds it with 90 % confidence."""
    mean, low, high = (f"{math.exp(value):.{digits}f}" for value in (fmean(logs), *interval(logs)))
    return f"{mean} ({low} to {high})"


def mcnemar(pairs: Sequence[tuple[bool, bool]]) -> float:
    """The exact two-sided p of McNemar's test: pairs that differ are as likely to differ either way."""
    first, second = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    count = first + second
    if count == 0:
        return 1.0
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(min(first, second) + 1)) / 2**count)


def holm(tests: Mapping[str, float]) -> dict[str, float]:
    """p values corrected for their number (Holm 1979)."""
    found, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(tests.items(), key=lambda entry: entry[1])):
        largest = found[name] = max(largest, min(1.0, (len(tests) - rank) * p))
    return found


# What it buys


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which the held-out loss of a curve first reaches a loss, between two scores by a straight line."""
    before: Sequence[float] | None = None
    for point in curve:
        if point[2] <= loss:
            if before is None or before[2] == point[2]:
                return float(point[0])
            share = (math.log(before[2]) - math.log(loss)) / (math.log(before[2]) - math.log(point[2]))
            return before[0] + share * (point[0] - before[0])
        before = point
    return None


def buys_tables(plan: Plan, results: Results) -> tuple[str, list[str]]:
    rows, tuning, reached, finished = [], [], [], True
    for cell in plan.cells:
        base_rate = results.best_rate(cell, plan.baseline)
        for arm in plan.arms:
            rate = results.best_rate(cell, arm)
            tuning += [_tuning_row(plan, results, cell, arm, rate)]
            if rate is None or base_rate is None:
                finished = False
                continue
            logs, missed, losses, seconds = [], 0, [], []
            for seed in plan.seeds:
                mine, base = (
                    results.of(Run(cell, arm, rate, seed)),
                    results.of(Run(cell, plan.baseline, base_rate, seed)),
                )
                if mine is None or base is None or base["held_out"] is None:
                    finished = False
                    continue
                losses.append(results.loss(Run(cell, arm, rate, seed)) or 1.0)
                seconds.append(mine["seconds"])
                steps = steps_to(mine["curve"], base["held_out"])
                if steps is None:
                    missed += 1
                else:
                    logs.append(math.log((plan.arms[plan.baseline].steps or plan.cells[cell].steps) / steps))
            verdict, text = _bought(plan, arm, logs, missed)
            if verdict.startswith("**"):
                reached.append(f"{arm} ({cell}: {text})")
            mean = f"{math.exp(fmean(map(math.log, losses))):.4f}" if losses else "-"
            cost = f"{fmean(seconds):.0f}" if seconds else "-"
            rows.append([cell, arm, f"{rate:g}", str(len(losses)), mean, text, verdict, cost])
    aim = f"{plan.rule.aim:g} times fewer steps"
    said = f"{aim} are reached by {'; '.join(reached)}." if reached else f"No arm is shown to need {aim}."
    heads = ["cell", "arm", "rate", "seeds", "held-out loss at the end", "times fewer steps (interval)", "verdict"]
    return said + ("" if finished else " Not all runs are finished."), [
        "## Steps to the final loss of the baseline",
        table([*heads, "seconds"], rows),
        "## The rates",
        "Mean held-out loss at the end over the tuning seeds. An arm whose best rate is the first or the last of its "
        "rates is not bracketed.",
        table(["cell", "arm", "losses by rate", "best", "bracketed"], tuning),
    ]


def _bought(plan: Plan, arm: str, logs: Sequence[float], missed: int) -> tuple[str, str]:
    if arm == plan.baseline:
        return "baseline", "1"
    if missed or len(logs) < 2:
        word = "needs more steps" if missed > len(logs) else "cannot be judged"
        return word, f"not reached in {missed} of {missed + len(logs)} seeds" if missed else "-"
    low, high = interval(logs)
    text = ratio_text(logs)
    if low >= math.log(plan.rule.aim):
        return f"**at least {plan.rule.aim:g} times fewer**", text
    return ("saves steps" if low > 0 else "needs more steps" if high < 0 else "cannot be judged"), text


def _tuning_row(plan: Plan, results: Results, cell: str, arm: str, best: float | None) -> list[str]:
    rates = plan.rates_of(cell, arm)
    cells = []
    for rate in rates:
        losses = [results.loss(Run(cell, arm, rate, seed)) for seed in plan.tuning_seeds]
        known = [loss for loss in losses if loss is not None]
        cells.append(f"{rate:g}: {fmean(known):.4f}" if known else f"{rate:g}: -")
    bracketed = "-" if best is None else "yes" if rates[0] < best < rates[-1] else "no"
    return [cell, arm, ", ".join(cells), f"{best:g}" if best else "-", bracketed]


# The figure


def draw(plan: Plan, results: Results, out: Path) -> str | None:
    """Held-out loss over steps, a panel for each cell; lines end where runs collapse."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    chosen = {
        (cell, arm): rates
        for cell in plan.cells
        for arm in plan.arms
        if (rates := _drawn_rates(plan, results, cell, arm))
    }
    if not chosen:
        return None
    figure = Figure(figsize=(6 * len(plan.cells), 4.5))
    axes = figure.subplots(1, len(plan.cells), squeeze=False)
    for axis, cell in zip(axes[0], plan.cells, strict=True):
        for number, arm in enumerate(plan.arms):
            colour = colormaps["tab10" if len(plan.arms) <= 10 else "tab20"](number)
            for rate in chosen.get((cell, arm), ()):
                lines = [results.of(Run(cell, arm, rate, seed)) for seed in plan.seeds]
                for line in [line for line in lines if line and line["curve"]]:
                    steps, losses = [point[0] for point in line["curve"]], [point[2] for point in line["curve"]]
                    axis.plot(steps, losses, color=colour, alpha=0.6, linewidth=1)
                    if line["collapsed"]:
                        axis.plot(steps[-1], losses[-1], "x", color=colour)
            axis.plot([], [], color=colour, label=arm)
        axis.set(title=cell, xlabel="step", ylabel="held-out loss", yscale="log")
        axis.set_ylim(top=min(axis.get_ylim()[1], 2 * LOST))
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "losses.png", dpi=100)
    return "losses.png"


def _drawn_rates(plan: Plan, results: Results, cell: str, arm: str) -> tuple[float, ...]:
    if plan.kind == "lasts":
        return plan.rates_of(cell, arm)
    best = results.best_rate(cell, arm)
    return () if best is None else (best,)
