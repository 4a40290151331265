"""All studies in one table: claim, setting, effect with its interval, verdict. Computed from their raw results.

    python -m research.studies              # docs/evidence/studies.json, and the index page with the table
    python -m research.studies --print      # the table alone

A study has its own page, rule and plan; here is what each of them found. Shares of runs that survive are compared by
their difference, with Newcombe's 95 % interval; losses, steps and oscillation by ratios, as the study says.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from research import ablations, again, collapse, edge, head_start, quality, recipe, survival, unets
from research.pages import STUDIES_FILE, studies_table, write_index
from research.reproduce.items import ITEMS
from scalelong.experiments.results import Results, fisher_p
from scalelong.files import read_json_lines, write_text

FOLDER = Path("docs/evidence")
LEVEL = 0.05


@dataclass(frozen=True)
class Row:
    study: str
    """The folder of its page."""
    claim: str
    setting: str
    effect: str
    verdict: str


def newcombe(first: int, of_first: int, second: int, of_second: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares, from Wilson's interval of each (Newcombe 1998, method 10)."""
    one, two = first / of_first, second / of_second
    low_one, high_one = survival.wilson(first, of_first)
    low_two, high_two = survival.wilson(second, of_second)
    return (
        one - two - math.hypot(one - low_one, high_two - two),
        one - two + math.hypot(high_one - one, two - low_two),
    )


def shares(first: int, of_first: int, second: int, of_second: int) -> str:
    low, high = newcombe(first, of_first, second, of_second)
    difference = first / of_first - second / of_second
    counts = f"{first} of {of_first} survive against {second} of {of_second}"
    return f"{counts}: {100 * difference:+.0f} % ({100 * low:+.0f} to {100 * high:+.0f})"


def by_p(p: float, gain: float, test: str) -> str:
    word = "no difference by the rule" if p >= LEVEL else "**more survive**" if gain > 0 else "**fewer survive**"
    return f"{word}, p = {p:.2g} ({test})"


# The studies, one after the other


def edge_rows(folder: Path) -> Iterator[Row]:
    """The paper's claims at the edge of stability, and κ."""
    yield from paper_rows("edge", edge.ITEMS.values(), edge.results_of(folder))
    for row in edge.kappa_rows(folder):
        text = f"κ of estimator {row.choices}, {row.method}, against 0.7: loss"
        yield Row("edge", text, row.place, row.claim.interval_text(), row.verdict)


def again_rows(folder: Path) -> Iterator[Row]:
    """The paper's claims in its own setting and in the best one."""
    yield from paper_rows("again", again.ITEMS.values(), again.results_of(folder))


def paper_rows(study: str, items: Iterable[edge.Item], results: Results) -> Iterator[Row]:
    """About CS against no scaling, and about LS alone. The pages have those against 1/√2, the earlier looks, and those
    that no run has numbers for.
    """
    for item in items:
        claims = edge.claims_of(item, results)
        last = {claim.setting: claim for claim in claims if "at step" in claim.text}
        for claim in claims:
            about = "CS(0.7)" in claim.text or "LS" in claim.text.partition(":")[0] or "within" in claim.text
            earlier = claim.setting in last and claim is not last[claim.setting]
            if about and "1/√2" not in claim.text and not earlier and len(claim.known) > 1:
                title = item.title.partition(":")[0]
                yield Row(study, f"{title}: {claim.text}", claim.setting, claim.interval_text(), claim.verdict_text())


def quality_rows(folder: Path) -> Iterator[Row]:
    """Fréchet distances and losses at equal steps, and 10,000 steps. The page has those against 1/√2."""
    results = quality.results_of(folder)
    for item, (title, _) in quality.ITEMS.items():
        for claim in quality.claims_of(item, results):
            if "1/√2" not in claim.text:
                text = f"{title.partition(':')[0]}: {claim.text}"
                yield Row("quality", text, place_text(claim.setting), claim.interval_text(), claim.verdict_text())


def place_text(name: str) -> str:
    setting = quality.PLACES[name].setting
    return f"{name}: depth {setting.depth}, {setting.steps:,} steps"


def survival_rows(folder: Path) -> Iterator[Row]:
    """Over all settings in which both were run, paired by seed."""
    records = survival.read_all(folder)
    starts = [study for name, study in survival.STUDIES.items() if name.startswith("start-")]
    others = [study for name, study in survival.STUDIES.items() if name.startswith("ls-") and name != "ls-choice"]
    reference, mended, former = survival.CONFIRMED
    asked = (
        ("CS folded", "none", starts, "CS(0.7) as a start against none"),
        ("CS folded", "CS attached", starts, "CS(0.7) as a start against CS attached"),
        ("rates alone", "none", starts, "the rates of CS without its start against none"),
        (mended, reference, others, "LS with bounded gates against CS"),
        (mended, former, others, "LS with bounded gates against LS as it was"),
    )
    for first, second, studies, text in asked:
        alive: list[dict[Any, bool]] = [{}, {}]
        for study in studies:
            for found, arm in zip(alive, (first, second), strict=True):
                found |= survival.survivors(study, arm, records) if arm in study.arms else {}
        both = sorted(set(alive[0]) & set(alive[1]), key=repr)
        if both:
            counts = [sum(found[key] for key in both) for found in alive]
            p = survival.mcnemar([(alive[0][key], alive[1][key]) for key in both])[2]
            setting = "deep U-ViTs, " + ", ".join(sorted({f"{key[0].data} at {key[1]:g}" for key in both}))
            effect = shares(counts[0], len(both), counts[1], len(both))
            yield Row("survival", text, setting, effect, by_p(p, counts[0] - counts[1], "McNemar"))


def ablation_rows(folder: Path) -> Iterator[Row]:
    """Every arm against the baseline of its study, by Fisher's test with Holm's correction."""
    records = survival.read_all(folder)
    families = [("starts", "changes"), *((name,) for name in ablations.STUDIES if name not in ("starts", "changes"))]
    for names in families:
        if names[0].startswith("buys"):
            continue
        baseline = ablations.STUDIES[names[0]].baseline
        base = ablations.cell(names[0], baseline, records)
        arms = dict.fromkeys(arm for name in names for arm in ablations.planned(name, records).arms if arm != baseline)
        cells = {arm: found for arm in arms for name in names if (found := ablations.cell(name, arm, records))}
        if not base or not cells:
            continue
        counts = {arm: (ablations.alive(found), len(found)) for arm, found in cells.items()}
        tests = {arm: ablations.fisher(*of, ablations.alive(base), len(base)) for arm, of in counts.items()}
        corrected = ablations.corrected_tests(names, baseline, tests, records)
        setting = ablations.STUDIES[names[0]].question if len(names) == 1 else "depth 24, at 1.6e-2"
        for arm, of in counts.items():
            effect = shares(*of, ablations.alive(base), len(base))
            gain = of[0] / of[1] - ablations.alive(base) / len(base)
            yield Row(
                "ablations", f"{arm} against {baseline}", setting, effect, by_p(corrected[arm], gain, "Fisher, Holm")
            )


def range_rows(folder: Path) -> Iterator[Row]:
    """CS(0.7) as a start against none, over three rates."""
    for path in sorted(folder.glob("*/range.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rates = f"{found['rates'][0]:g} to {found['rates'][-1]:g}"
        for entry in found["differences"]:
            alive, other, runs = entry["survived"], entry["baseline_survived"], entry["runs"]
            setting = f"{found['title']}, {rates}"
            effect = shares(alive, runs, other, runs)
            yield Row(
                "ranges", "CS(0.7) as a start against none", setting, effect, by_p(entry["p"], alive - other, "McNemar")
            )


def collapse_rows(folder: Path) -> Iterator[Row]:
    """Of the runs that the detector stopped: who ends well if it is rolled back, and who if it is left alone."""
    lines = read_json_lines(folder / collapse.RUNS)
    place = itemgetter("data", "lr", "seed")
    stopped = {place(line) for line in lines if line["mode"] == "stop" and not line["finished"]}
    well = {
        mode: [
            bool(line["finished"] and line["held_out"] is not None and line["held_out"] < survival.COLLAPSED)
            for line in lines
            if line["mode"] == mode and place(line) in stopped
        ]
        for mode in ("rollback", "ignore")
    }
    saved, left = well["rollback"], well["ignore"]
    p = fisher_p(sum(saved), len(saved), sum(left), len(left))
    effect = shares(sum(saved), len(saved), sum(left), len(left)).replace("survive", "end well")
    verdict = by_p(p, sum(saved) - sum(left), "Fisher").replace("survive", "end well")
    setting = "U-ViT of depth 24, garments and CIFAR-10"
    yield Row("collapse", "`--on-collapse rollback` against ignoring a collapse", setting, effect, verdict)


def recipe_rows(folder: Path) -> Iterator[Row]:
    for row in recipe.claims(folder):
        saved, interval = row["steps saved, times"], row["90 % interval"]
        effect = f"{saved} times fewer steps ({interval})" if interval else f"{saved} of {row['seeds']} seeds"
        word = {"saves": "**saves steps**", "none": "saves nothing", "open": "cannot be judged"}[row["verdict"]]
        yield Row("recipe", row["change"], row["setting"], effect, f"{word}, {row['seeds']} seeds")


def start_rows(folder: Path) -> Iterator[Row]:
    """Steps saved at widths of 128 and 256, and whether that is a factor or a head start."""
    records = head_start.read(folder)
    for claim in head_start.savings(records):
        setting = f"depth 8, width {claim.width}, {claim.until} steps, best of four rates"
        effect = f"{claim.text} times fewer steps"
        yield Row("starts", f"{claim.arm} against {claim.other}", setting, effect, f"{claim.verdict}, 8 seeds")
    for claim in head_start.changes(records):
        ratio, difference = claim.ratio_change, claim.difference_change
        effect = (
            f"times saved × {math.exp(ratio.low):.2f} to {math.exp(ratio.high):.2f}, "
            f"steps saved {difference.low:+.0f} to {difference.high:+.0f}"
        )
        text = f"{claim.arm} against {head_start.AUTHORS}: factor or head start?"
        setting = f"depth 8, width {claim.width}, from step {claim.early} to {claim.late}"
        yield Row("starts", text, setting, effect, claim.verdict)


def unet_rows(folder: Path) -> Iterator[Row]:
    """Each arm against the plain UNet: losses at the best rates, survivors at the high ones."""
    records = unets.read(folder)
    for claim in unets.loss_claims(records):
        yield Row("unets", f"loss: {claim.arm} against none", "a UNet, best of four rates", claim.text, claim.verdict)
    for claim in unets.survival_claims(records):
        setting = "a UNet at " + " and ".join(f"{rate:g}" for rate in claim.rates)
        effect = shares(claim.survivors, claim.runs, claim.baseline_survivors, claim.runs)
        gain = claim.survivors - claim.baseline_survivors
        yield Row("unets", f"{claim.arm} against none", setting, effect, by_p(claim.p, gain, "McNemar, Holm"))


SOURCES = {
    "edge": edge_rows,
    "again": again_rows,
    "quality": quality_rows,
    "survival": survival_rows,
    "ablations": ablation_rows,
    "ranges": range_rows,
    "collapse": collapse_rows,
    "recipe": recipe_rows,
    "starts": start_rows,
    "unets": unet_rows,
}


def all_rows(folder: Path) -> list[dict[str, str]]:
    return [asdict(row) for name, rows in SOURCES.items() if (folder / name).is_dir() for row in rows(folder / name)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.studies", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the evidence (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="print the table and write nothing")
    options = parser.parse_args(arguments)
    rows = all_rows(options.folder)
    if options.print:
        print(studies_table(rows))
        return
    lines = ",\n".join(f" {json.dumps(row, ensure_ascii=False)}" for row in rows)
    write_text(options.folder / STUDIES_FILE, f"[\n{lines}\n]\n")
    write_index(options.folder, ITEMS.values())


if __name__ == "__main__":
    main()
