"""Pages of results, in Markdown: those of `scalelong lab reproduce` and of the recipe, made of raw results."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scalelong.config import TrainConfig, flatten, to_dict
from scalelong.files import write_text

from ..page import table
from .claims import RESULTS, Claim, Quantity, Study, StudyResults, Verdict, overall
from .figures import save

# Pages of results, in Markdown: one per item, and an index with all verdicts. Made of the raw results alone.

RULE = """\
Every claim is about one number per seed, mostly the ratio of two methods under equal seeds: equal initial weights,
data, noise and times. From these numbers follows the interval that holds their mean with 90 % confidence (Student's t).
Beside the claim stands the size of the effect in the paper: the ratio of its FIDs, its factor of steps, or 10 % where
it shows a figure without numbers. A claim

- is **reproduced** if the whole interval lies where the paper says,
- is **contradicted** if the whole interval lies on the opposite side,
- has **no effect larger than x** if it is neither, and the interval leaves out the paper's effect, on either side of
  none: x is its farther end. A loss moves less than a FID does, so where losses are compared read x itself,
- **cannot be judged at this scale** otherwise: both the paper's effect and none are possible.

A figure or table is reproduced if all of its claims are. It is contradicted, has no effect of the paper's size, or
cannot be judged, if at least half of its claims say so, in this order; otherwise it is mixed. Of many claims, some are
judged by chance: one in twenty, in either direction, if there is no effect at all. No verdict is edited:
`scalelong lab reproduce --redraw` makes these pages of the raw results alone."""


def write_item(item: Study, results: StudyResults, out: Path) -> None:
    folder = out / item.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in item.figures.items():
        save(draw(results), folder / f"{name}.png")
    write_text(folder / "README.md", page(item, results))


def page(item: Study, results: StudyResults) -> str:
    claims = item.claims(results)
    parts = [
        f"# {item.title}",
        f"**{verdict_of(claims)}**: {counts(claims)}.",
        f"**The paper.** {item.paper}",
        f"**Here.** {item.here} Scale `{results.scale}`, {results.seeds} seeds, all of them shown.",
        f"```\n{command(results)}\n```",
        *(f"![{name}]({name}.png)" for name in item.figures),
        "## Claims",
        claims_table(claims, range(results.seeds)),
        "The rule is on the [index page](../README.md).",
        "## Measured",
        *(
            measured_table(item, results, quantity)
            for quantity in item.quantities
            if any(quantity.of(run) is not None for run in results.runs)
        ),
        "## Settings",
        settings_table(results),
        f"Raw results: [{RESULTS}]({RESULTS}), made with {versions(results)}.",
    ]
    return "\n\n".join(parts) + "\n"


def command(results: StudyResults) -> str:
    return f"scalelong lab reproduce {results.item} --scale {results.scale} --seeds {results.seeds}"


def versions(results: StudyResults) -> str:
    return ", ".join(f"{name} {version}" for name, version in results.versions.items()) or "unknown versions"


def verdict_of(claims: Sequence[Claim]) -> Verdict:
    return overall([claim.verdict for claim in claims])


def counts(claims: Sequence[Claim]) -> str:
    """How many claims got which verdict."""
    verdicts = [claim.verdict for claim in claims]
    told = {
        Verdict.REPRODUCED: f"of {len(claims)} claims reproduced",
        Verdict.CONTRADICTED: "contradicted",
        Verdict.NO_EFFECT: "without an effect of the paper's size",
        Verdict.CANNOT_BE_JUDGED: "cannot be judged",
    }
    parts = [f"{verdicts.count(verdict)} {text}" for verdict, text in told.items()]
    return ", ".join(parts[:2] + [part for part in parts[2:] if not part.startswith("0 ")])


def summary(item: Study, results: StudyResults) -> str:
    claims = item.claims(results)
    return f"{item.name}: {verdict_of(claims)} ({counts(claims)})"


def claims_table(claims: Sequence[Claim], seeds: Sequence[int]) -> str:
    rows = [
        [
            claim.text,
            claim.setting,
            *_padded([claim.text_of(value) for value in claim.values], len(seeds)),
            claim.interval_text(),
            claim.effect_text(),
            claim.verdict_text(),
        ]
        for claim in claims
    ]
    return table(["claim", "setting", *_seeds(seeds), "mean (interval)", "in the paper", "verdict"], rows)


def measured_table(item: Study, results: StudyResults, quantity: Quantity) -> str:
    """All seeds of all arms."""
    paper = bool(item.published) and quantity is item.quantities[0]
    rows = []
    for setting in results.settings:
        for method in results.methods(setting):
            runs = results.of(method, setting)
            values = [quantity.of(run) for run in runs]
            known = [value for value in values if value is not None]
            row = [setting, method, *_padded([quantity.text(value) for value in values], results.seeds)]
            row.append(quantity.text(fmean(known)) if known else "-")
            rows.append(row + ([item.published.get(method, "")] if paper else []))
    heads = ["setting", "method", *_seeds(range(results.seeds)), "mean", *(["FID in the paper"] if paper else [])]
    return f"### {quantity.name}\n\n{table(heads, rows)}"


def settings_table(results: StudyResults) -> str:
    rows = []
    for name, values in results.settings.items():
        model = ", ".join(
            f"{key.removeprefix('model_options.')} {_plain(value)}"
            for key, value in values.items()
            if key.startswith("model_options.")
        )
        known = {**flatten(to_dict(TrainConfig())), **values}
        network = f"{known['model'].rpartition(':')[2]}{': ' if model else ''}{model}"
        size = known["images.size"]
        data = f"{known['data']}, {size}x{size}" if size else known["data"]
        numbers = [str(known[key]) for key in ("steps", "batch_size", "optimizer.lr")]
        rows.append([name, data, *numbers, network, seconds(results, name)])
    return table(["setting", "data", "steps", "batch", "learning rate", "network", "seconds of training"], rows)


def steps(results: StudyResults) -> str:
    """How many steps the runs have, by setting."""
    return ", ".join(
        map(str, sorted({values.get("steps", TrainConfig().steps) for values in results.settings.values()}))
    )


def seconds(results: StudyResults, setting: str) -> str:
    """The seconds that a run of the setting took: the median, for machines have other things to do as well."""
    known = [run.seconds for run in results.runs if run.setting == setting and run.seconds is not None]
    return f"{median(known):.0f}" if known else "-"


def write_index(out: Path, items: Iterable[Study]) -> None:
    write_text(out / "README.md", index(out, items))


def index(out: Path, items: Iterable[Study]) -> str:
    """All verdicts, of the raw results that are in the folder."""
    rows = []
    for item in items:
        if (out / item.name / RESULTS).exists():
            results = StudyResults.read(out / item.name)
            claims = item.claims(results)
            link = f"[{item.title}]({item.name}/README.md)"
            about = [str(results.scale), str(results.seeds), steps(results)]
            verdict = f"**{verdict_of(claims)}**"
            rows.append([link, *about, verdict, counts(claims)])
    parts = [
        "# Evidence",
        "This page repeats the paper's figures and tables by command. Each item has a page of its own, with its "
        "command, all seeds and a verdict on each claim.",
        "Fréchet distances on one page can be compared with each other. They cannot be compared with what "
        "`scalelong eval` prints, which uses different features ([evaluation](../evaluation.md)). The studies "
        "[quality](quality/README.md) and [probe](probe/README.md) use the features of `scalelong eval`.",
        table(["figure or table", "scale", "seeds", "steps", "verdict", "claims"], rows),
        "## The rule",
        RULE,
        "## To repeat it",
        "```\nscalelong lab reproduce all --out docs/evidence         # trains; the same command continues\n"
        "scalelong lab reproduce --redraw docs/evidence          # pages and figures from the raw results\n"
        "scalelong lab reproduce all --scale paper --dry-run     # the plan for GPUs\n```",
    ]
    if (out / STUDIES_FILE).exists():
        parts.insert(
            2,
            "The table has three seeds for each method. Its networks are shallow, and every method survives its "
            "learning rate, so small effects stay hidden. Three studies ask again with eight seeds; their plans were "
            "committed before the first run:\n\n"
            "- [again](again/README.md): the paper's own setting at this width, and the best setting found\n"
            "- [edge](edge/README.md): learning rates at which runs break\n"
            "- [quality](quality/README.md): Fréchet distances after 10,000 steps",
        )
        rows = json.loads((out / STUDIES_FILE).read_text(encoding="utf-8"))
        parts += [
            "## All studies",
            "The verdicts of the other studies. Each study judges its claims by the rule on its own page. The code of "
            "commit 47c1161 made these rows (`git show 47c1161:research/studies.py`), except those of unet-collapse, "
            "which is a plan of `research.study`. Seven studies have no row here, but tables of their own: "
            "[μP](mup/README.md), [probe](probe/README.md), [what lasts](lasts/README.md), "
            "[what it buys](buys/README.md), [fewer steps](faster/README.md), [twice the width](wider/README.md), "
            "[bfloat16](bf16/README.md).",
            studies_table(rows),
        ]
    if (out / "kappa").is_dir():
        parts.append(
            "[theory](../theory.md) tells how well κ can be chosen, by [these results](kappa/validation.json)."
        )
    return "\n\n".join(parts) + "\n"


STUDIES_FILE = "studies.json"


def studies_table(rows: Sequence[dict[str, str]]) -> str:
    """A row for each claim of a study, with a link to its page."""
    cells = [[f"[{row['study']}]({row['study']}/README.md)", *list(row.values())[1:]] for row in rows]
    return table(["study", "claim", "setting", "effect (interval)", "verdict"], cells)


def _seeds(seeds: Iterable[int]) -> list[str]:
    return [f"seed {seed}" for seed in seeds]


def _padded(cells: list[str], count: int) -> list[str]:
    return cells + ["-"] * (count - len(cells))


def _plain(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
