"""Pages of results, in Markdown: those of `scalelong reproduce` and of the recipe. Made of the raw results alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scalelong.experiments.figures import save
from scalelong.files import write_text
from scalelong.runs.config import TrainConfig, flatten, to_dict

from .reproduce.claims import RESULTS, Claim, Quantity, Study, StudyResults, Verdict, overall

# Pages of results, in Markdown: one per item, and an index with all verdicts. Made of the raw results alone.

RULE = """\
Every claim is about one number per seed, mostly the ratio of two methods under equal seeds: equal initial weights,
data, noise and times. From these numbers follows the interval that holds their mean with 90 % confidence (Student's t).
A claim is

- **reproduced** if the whole interval lies where the paper says,
- **contradicted** if the whole interval lies on the opposite side,
- one that **cannot be judged** if fewer than two seeds have the number: there is no interval,
- **not reproduced at this scale** otherwise: what was seen may be chance.

A figure or table is reproduced if all of its claims are, contradicted if at least half of them are, cannot be judged if
none of its claims can, and is otherwise not reproduced at this scale. Of many claims, some are judged by chance: one in
twenty, in either direction, if there is no effect at all. Nobody edits verdicts: `scalelong reproduce --redraw` makes
these pages of the raw results alone."""


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
        fenced(command(results)),
        *(f"![{name}]({name}.png)" for name in item.figures),
        "## Claims",
        claims_table(claims, results.seeds),
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
    return document(parts)


def command(results: StudyResults) -> str:
    return f"scalelong reproduce {results.item} --scale {results.scale} --seeds {results.seeds}"


def versions(results: StudyResults) -> str:
    return ", ".join(f"{name} {version}" for name, version in results.versions.items()) or "unknown versions"


DECIDED = (Verdict.REPRODUCED, Verdict.CONTRADICTED)


def verdict_of(claims: Sequence[Claim]) -> Verdict:
    return overall([claim.verdict for claim in claims])


def counts(claims: Sequence[Claim]) -> str:
    """How many claims got which verdict."""
    verdicts = [claim.verdict for claim in claims]
    reproduced, contradicted = verdicts.count(Verdict.REPRODUCED), verdicts.count(Verdict.CONTRADICTED)
    unjudged = verdicts.count(Verdict.CANNOT_BE_JUDGED)
    open_ones = f", {unjudged} cannot be judged" if unjudged else ""
    return f"{reproduced} of {len(claims)} claims reproduced, {contradicted} contradicted{open_ones}"


def summary(item: Study, results: StudyResults) -> str:
    claims = item.claims(results)
    return f"{item.name}: {verdict_of(claims)} ({counts(claims)})"


def claims_table(claims: Sequence[Claim], seeds: int) -> str:
    rows = [
        [
            claim.text,
            claim.setting,
            *_padded([claim.text_of(value) for value in claim.values], seeds),
            claim.interval_text(),
            f"**{claim.verdict}**" if claim.verdict in DECIDED else str(claim.verdict),
        ]
        for claim in claims
    ]
    return table(["claim", "setting", *_seeds(seeds), "mean (90 % interval)", "verdict"], rows)


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
    heads = ["setting", "method", *_seeds(results.seeds), "mean", *(["FID in the paper"] if paper else [])]
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
            rows.append([link, *about, f"**{verdict_of(claims)}**", counts(claims)])
    parts = [
        "# Evidence",
        "The paper's figures and tables again, by command. Each page has the command, all seeds and the claims.",
        "Fréchet distances compare the runs of one page with each other, and not with what `scalelong eval` prints: "
        "those of docs/evidence were measured with the classifier's features, the default before anchors "
        "(docs/evaluation.md).",
        table(["figure or table", "scale", "seeds", "steps", "verdict", "claims"], rows),
        "## The rule",
        RULE,
        "## To repeat it",
        "```\nscalelong reproduce all --out docs/evidence         # trains; the same command continues\n"
        "scalelong reproduce --redraw docs/evidence          # pages and figures from the raw results\n"
        "scalelong reproduce all --scale paper --dry-run     # the plan for GPUs\n```",
    ]
    if (out / "kappa").is_dir():
        raw = "[the raw results](kappa/validation.json) of kappa"
        parts.append(f"Also here: {raw}, how well κ can be chosen, told in [theory.md](../theory.md).")
    return document(parts)


# Markdown


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str) -> str:
    """Plain text as it is."""
    return f"```\n{text}\n```"


def document(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


def _seeds(count: int) -> list[str]:
    return [f"seed {seed}" for seed in range(count)]


def _padded(cells: list[str], count: int) -> list[str]:
    return cells + ["-"] * (count - len(cells))


def _plain(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
