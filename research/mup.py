"""Does the best learning rate stay when a U-ViT becomes wider? Rates × widths × seeds, standard and μP.

    python -m research.mup run digits         # what is missing of one data set (garments: the other)
    python -m research.mup coords             # the coordinate checks
    python -m research.mup kappa              # CS in the forward pass against other starts and rates of the skip half
    python -m research.mup redraw             # page of results and figures, from the raw results alone

Nothing has to be downloaded: digits and garments come with the package. Settings and rules were committed before the
runs: docs/evidence/mup/plan.md. Interrupt at any time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import scalelong as sl
from scalelong.console import text_table
from scalelong.experiments.figures import colour_of, legend, panels, save
from scalelong.experiments.rates import RecipeTask
from scalelong.experiments.runs import exit_code
from scalelong.files import read_json_lines, write_text
from scalelong.models.call import Denoiser
from scalelong.models.uvit import SkipMerge
from scalelong.noise import losses, target
from scalelong.randomness import generator, seed_global
from scalelong.runs.config import DiffusionConfig, ImagesConfig, TrainConfig

FOLDER = Path("docs/evidence/mup")
HEAD, DEPTH = 16, 4
STEPS, WARMUP, BATCH, DECAY, BETAS = 300, 30, 16, 0.03, (0.9, 0.99)
SEEDS = (100, 101, 102)
DRAWS = 4
"""Of noise and time for each held-out image."""
DATA = {"digits": (8, 2, 297), "garments": (16, 4, 400)}
"""Size of images and patches, and images held out."""
GLIMPSE = "digits-coarse"
"""The digits in patches of 4×4: one seed, a minute."""
GLIMPSE_RATES = {
    "standard": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "strict": (8e-3, 1.6e-2, 3.2e-2),
    "unit": (8e-3, 1.6e-2, 3.2e-2),
}
NARROW = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Rates at the base, where all parametrisations are one."""
WIDE: dict[int, dict[int, dict[str, tuple[float, ...]]]] = {
    32: {
        128: {
            "standard": (2e-3, 4e-3, 8e-3, 1.6e-2),
            "strict": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
            "unit": (8e-3, 1.6e-2, 3.2e-2),
        }
    },
    64: {
        256: {
            "standard": (1e-3, 2e-3, 4e-3, 8e-3),
            "strict": (4e-3, 8e-3, 1.6e-2),
            "unit": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
        }
    },
}
"""By base and width."""
WIDEST = {
    "digits": {"strict": (8e-3,), "standard": (1e-3, 8e-3)},
    "garments": {"strict": (1.6e-2,), "standard": (2e-3, 1.6e-2)},
}
"""At width 512 from base 64: the base's best rate, and an eighth of it for the standard parametrisation."""


@dataclass(frozen=True)
class Cell:
    """One run before it is trained."""

    data: str
    base: int
    width: int
    parametrisation: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Trained(Cell):
    loss: float
    curve: tuple[float, ...]
    """Means of the training loss over tenths of the run."""
    seconds: float
    """Processor time."""


def planned(data: str) -> Iterator[Cell]:
    if data == GLIMPSE:
        yield from (Cell(data, 32, 32, "all", rate, SEEDS[0]) for rate in NARROW[1:])
        yield from (
            Cell(data, 32, 128, name, rate, SEEDS[0]) for name, rates in GLIMPSE_RATES.items() for rate in rates
        )
        return
    for base, targets in WIDE.items():
        for seed in SEEDS:
            yield from (Cell(data, base, base, "all", rate, seed) for rate in NARROW)
            for width, rows in targets.items():
                yield from (Cell(data, base, width, name, rate, seed) for name, rates in rows.items() for rate in rates)
    for seed in SEEDS:
        yield from (Cell(data, 64, 512, name, rate, seed) for name, rates in WIDEST[data].items() for rate in rates)


# A run


@lru_cache(maxsize=2)
def task_of(data: str) -> RecipeTask:
    size, _, held_out = DATA[data.removesuffix("-coarse")]
    config = TrainConfig(
        data=data.removesuffix("-coarse"),
        batch_size=BATCH,
        images=ImagesConfig(size=size, channels=1, held_out=held_out),
        diffusion=DiffusionConfig(prediction="v"),
    )
    return RecipeTask(config)


def network(data: str, width: int, **options: Any) -> sl.UViT:
    size, patch, _ = DATA[data.removesuffix("-coarse")]
    patch = 2 * patch if data == GLIMPSE else patch
    sizes: dict[str, Any] = {"image_size": size, "patch_size": patch, "channels": 1, "dim": width}
    return sl.UViT(**{**sizes, "depth": DEPTH, "heads": width // HEAD, **options})


def train(cell: Cell) -> Trained:
    with torch.random.fork_rng():
        seed_global(cell.seed, "weights")
        model = network(cell.data, cell.width)
    groups: Any = model.parameters()
    if cell.parametrisation in ("strict", "unit"):
        sl.mup.start_(model, base=cell.base, output_start=cell.parametrisation)
        groups = sl.mup.parameter_groups(model, base=cell.base, lr=cell.rate, weight_decay=DECAY)
    return fit(cell, model, groups)


def fit(cell: Cell, model: nn.Module, groups: Any) -> Trained:
    began, task = time.process_time(), task_of(cell.data)
    optimizer = torch.optim.AdamW(groups, lr=cell.rate, betas=BETAS, weight_decay=DECAY, fused=True)
    full = [group["lr"] for group in optimizer.param_groups]
    seen: list[float] = []
    for step in range(STEPS):
        share = min(1.0, (step + 1) / WARMUP) * (1 - max(0, step - WARMUP) / (STEPS - WARMUP))
        for group, lr in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = lr * share
        optimizer.zero_grad()
        loss = task.loss(Denoiser(model).given, generator(cell.seed, "mup", step))
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    tenth = STEPS // 10
    curve = tuple(round(fmean(seen[i : i + tenth]), 5) for i in range(0, STEPS, tenth))
    seconds = time.process_time() - began
    return Trained(**asdict(cell), loss=held_out(model, task), curve=curve, seconds=round(seconds, 1))


@torch.no_grad()
def held_out(model: nn.Module, task: RecipeTask) -> float:
    assert task.source.held_out is not None
    network, prediction = Denoiser(model.eval()), task.config.diffusion.prediction
    found = []
    for draw in range(DRAWS):
        for x0, noise, t, condition in replace(task.inputs, seed=draw).held_out(task.source.held_out):
            found.append(losses(network.given(condition), task.process, prediction, x0, noise, t))
    return float(torch.cat(found).double().mean())


def results() -> list[Trained]:
    return [each for name in [*DATA, GLIMPSE] for each in trained_in(FOLDER / f"{name}.jsonl")]


def run(data: str) -> int:
    complete(FOLDER / f"{data}.jsonl", planned(data), train)
    return 0


def complete(path: Path, planned: Iterable[Cell], train: Callable[[Cell], Trained]) -> None:
    """Trains what the file does not have yet."""
    done = {Cell(**{name: getattr(each, name) for name in Cell.__dataclass_fields__}) for each in trained_in(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for cell in planned:
        if cell in done:
            continue
        found = train(cell)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(
            f"{cell.data} {cell.width} {cell.parametrisation} {cell.rate:g} seed {cell.seed}: {found.loss:.4f}",
            flush=True,
        )


def trained_in(path: Path) -> list[Trained]:
    rows = read_json_lines(path) if path.exists() else []
    return [Trained(**{**row, "curve": tuple(row["curve"])}) for row in rows]


# The coordinate checks


def coords(which: Sequence[str]) -> int:
    made: dict[str, Any] = {
        "uvit": lambda: check((64, 128, 256, 512), 3, "U-ViT of depth 4, digits"),
        "uvit-wide": lambda: check((128, 256, 512, 1024), 1, "U-ViT of depth 4, digits, to width 1024"),
        "unet": unet_check,
        "ls-token": lambda: check((64, 128, 256), 3, "U-ViT with LS, token gates", scaling="ls:gate=token"),
        "ls-channel": lambda: check((64, 128, 256), 3, "U-ViT with LS, channel gates", scaling="ls:gate=channel"),
    }
    for name in which or made:
        found = made[name]()
        write_text(FOLDER / f"coords-{name}.json", found.to_json() + "\n")
        print(f"{found}\n", flush=True)
    return 0


def check(widths: Sequence[int], seeds: int, title: str, **options: Any) -> sl.mup.Coordinates:
    task = task_of("digits")

    def loss(model: nn.Module, i: int) -> torch.Tensor:
        return task.loss(Denoiser(model).given, generator(0, "coords", i))

    return sl.mup.coordinates(
        lambda width: network("digits", width, **options),
        widths,
        base=min(widths),
        lr=2e-3,
        steps=5,
        seeds=seeds,
        parametrisations=("standard", "mup", "mup:unit") if not options else ("standard", "mup"),
        loss=loss,
        title=title,
    )


def unet_check() -> sl.mup.Coordinates:
    from diffusers.models.unets.unet_2d import UNet2DModel

    def make(width: int) -> nn.Module:
        return UNet2DModel(
            sample_size=16,
            in_channels=1,
            out_channels=1,
            block_out_channels=(width, 2 * width),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
        )

    return sl.mup.coordinates(
        make,
        (32, 64, 128),
        lr=1e-3,
        seeds=2,
        parametrisations=("standard", "mup", "mup:unit"),
        title="UNet2DModel of diffusers",
    )


# κ in the forward pass, as another start, rate, decay and ε of the skip half of each merge

KAPPA_STEPS, KAPPA_RATE = 100, 1e-3
ALL = ("start", "rate", "decay", "eps")
VARIANTS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "start × κ, rate × κ, decay / κ, ε / κ": (ALL, None),
    "the same with one ε for all": (ALL[:3], None),
    "the same with one decay for all": (("start", "rate", "eps"), None),
    "all four, gradients clipped to a norm of 0.1": (ALL, 0.1),
    "folded before training: start × κ alone": (ALL[:1], None),
}


class SplitMerge(SkipMerge):
    """Main and skip half are parameters of their own, so that they can be in different groups."""

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.cat([self.main, self.skip], dim=1)  # pyright: ignore[reportArgumentType]


def kappa_run(scaled: tuple[str, ...] | None, clip: float | None) -> list[torch.Tensor]:
    """Losses, then the output: with CS(0.7) attached (None), or without it and what `scaled` names."""
    torch.manual_seed(0)
    model: Any = network("digits", 32, depth=6, scaling="none" if scaled is not None else "cs:0.7").double()
    factors: dict[str, float] = {}
    for position, block in enumerate(model.decoder):
        merge: Any = block.merge
        main, skip = merge.weight.detach().split(merge.dim, dim=1)
        del merge.weight
        merge.__class__ = SplitMerge
        merge.main, merge.skip = nn.Parameter(main.clone()), nn.Parameter(skip.clone())
        factors[f"decoder.{position}.merge.skip"] = 0.7 ** (len(model.decoder) - 1 - position)
    groups = []
    for name, parameter in model.named_parameters():
        a = {part: factors.get(name, 1.0) if part in (scaled or ()) else 1.0 for part in ALL}
        with torch.no_grad():
            parameter *= a["start"]
        values = {"lr": KAPPA_RATE * a["rate"], "weight_decay": DECAY / a["decay"], "eps": 1e-8 / a["eps"]}
        groups.append({"params": [parameter], **values})
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    task, found = task_of("digits"), []
    assert task.source.held_out is not None
    x0, noise, t, _ = next(iter(task.inputs.held_out(task.source.held_out)))
    x_t = task.process.add_noise(x0, noise, t)[:8].double()
    wanted, t = target(task.process, "v", x0, noise, t)[:8].double(), t[:8]
    for _ in range(KAPPA_STEPS):
        optimizer.zero_grad()
        loss = (model(x_t, t) - wanted).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(loss.detach())
    return [*found, model(x_t, t).detach()]


def kappa() -> int:
    rows = []
    for name, (scaled, clip) in VARIANTS.items():
        first, second = kappa_run(None, clip), kappa_run(scaled, clip)
        apart = max(float((a - b).abs()) for a, b in zip(first[:-1], second[:-1], strict=True))
        outputs = float((first[-1] - second[-1]).norm() / second[-1].norm())
        rows.append({"without CS": name, "losses": f"{apart:.0e}", "outputs, relative": f"{outputs:.0e}"})
    print(text_table(rows, left=("without CS",)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.mup", description="Best learning rates over widths, standard and μP."
    )
    parser.add_argument("what", choices=("run", "coords", "kappa", "redraw"))
    parser.add_argument("names", nargs="*", help="data sets of run, checks of coords")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what == "run":
        for data in given.names or DATA:
            run(data)
        return 0
    if given.what == "kappa":
        return kappa()
    return coords(given.names) if given.what == "coords" else redraw()


# The page of results


@dataclass(frozen=True)
class Row:
    """One width and parametrisation of one data set: losses by rate and seed."""

    data: str
    base: int
    width: int
    parametrisation: str
    losses: dict[float, dict[int, float]]

    def mean(self, rate: float) -> float:
        return fmean(self.losses[rate].values())

    @property
    def rates(self) -> list[float]:
        """Those that all seeds of the row have."""
        most = max(len(found) for found in self.losses.values())
        return sorted(rate for rate, found in self.losses.items() if len(found) == most)

    @property
    def best(self) -> float:
        return min(self.rates, key=self.mean)

    @property
    def bracketed(self) -> bool:
        return self.best not in (self.rates[0], self.rates[-1])

    def regret(self, narrow: "Row") -> float | None:
        """Of the best rate of the base; None if it was not run here."""
        taken = narrow.best
        return self.mean(taken) / self.mean(self.best) - 1 if taken in self.rates else None


def rows_of(found: Sequence[Trained]) -> list[Row]:
    cells: dict[tuple[str, int, int, str], dict[float, dict[int, float]]] = {}
    for each in found:
        key = (each.data, each.base, each.width, each.parametrisation)
        cells.setdefault(key, {}).setdefault(each.rate, {})[each.seed] = each.loss
    return [Row(*key, losses) for key, losses in sorted(cells.items())]


def table_of(rows: Sequence[Row], narrow: Row, size: str = "width") -> list[dict[str, str]]:
    shown = []
    for row in rows:
        regret = row.regret(narrow)
        end = "" if row.bracketed else f" (the {'largest' if row.best == row.rates[-1] else 'smallest'} tried)"
        losses = " ".join(f"{loss:.4f}" for _, loss in sorted(row.losses[row.best].items()))
        shown.append(
            {
                size: str(row.width),
                "parametrisation": row.parametrisation,
                "rates": " ".join(f"{rate:g}" for rate in row.rates),
                "mean loss": " ".join(f"{row.mean(rate):.4f}" for rate in row.rates),
                "best rate": f"{row.best:g}{end}",
                "all seeds there": losses,
                "regret": "not run" if regret is None else f"{regret:.1%}",
            }
        )
    return shown


def verdicts(rows: Sequence[Row], base: int, width: int) -> list[str]:
    """By the rules of plan.md."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.base == base and row.width in (base, width):
            found.setdefault(row.data, {})[row.parametrisation] = row
    complete = {
        data: each
        for data, each in found.items()
        if data in DATA and {"all", "standard", "strict", "unit"} <= set(each)
    }
    if not complete:
        return [f"{base} to {width}: not run"]
    seeds = min(len(seen) for each in complete.values() for row in each.values() for seen in row.losses.values())
    said = [] if seeds >= len(SEEDS) else [f"{seeds} of {len(SEEDS)} seeds were run: what follows is no verdict yet"]
    missing = [data for data in DATA if data not in complete]
    if missing:
        said.append(f"{base} to {width}: {', '.join(missing)} not run, so nothing is decided by rule; what was seen:")
    for data, each in complete.items():
        narrow = each["all"]
        moved = narrow.best / each["standard"].best
        lines = [f"{data}: standard's best rate falls by {moved:g}"]
        for name in ("standard", "strict", "unit"):
            regret = each[name].regret(narrow)
            lines.append(f"{name}'s regret {'not known' if regret is None else f'{regret:.1%}'}")
        said.append(", ".join(lines))
        best = {name: each[name].mean(each[name].best) for name in ("standard", "strict", "unit")}
        pairs = [
            each["strict"].losses[rate][seed] < each["unit"].losses[rate][seed]
            for rate in each["strict"].losses
            for seed in each["strict"].losses[rate]
            if seed in each["unit"].losses.get(rate, {})
        ]
        ends = ", ".join(f"{name} {loss:.4f}" for name, loss in best.items())
        said.append(f"{data}: best against best {ends}; strict is below unit in {sum(pairs)} of {len(pairs)} pairs")
    if missing:
        return said
    falls = [each["all"].best / each["standard"].best >= 2 for each in complete.values()]
    said.append(f"standard moves: {_decided(falls)}")
    for name in ("strict", "unit"):
        regrets = [each[name].regret(each["all"]) for each in complete.values()]
        said.append(f"{name} holds the rate: {_decided([each is not None and each <= 0.01 for each in regrets])}")
    better = [
        each["strict"].mean(each["strict"].best) < each["unit"].mean(each["unit"].best) for each in complete.values()
    ]
    said.append(
        f"strict as the default: {'confirmed' if all(better) else 'refuted' if not any(better) else 'undecided'}"
    )
    return said


def _decided(each: Sequence[bool]) -> str:
    return "yes" if all(each) else "no" if not any(each) else "undecided (one data set each way)"


def saving(found: Sequence[Trained], base: int, width: int) -> list[str]:
    """Processor time of a search at the base and one run, against the search at the target with one run."""
    lines = []
    for data in DATA:
        narrow = [each.seconds for each in found if (each.data, each.base, each.width) == (data, base, base)]
        wide = [each for each in found if (each.data, each.base, each.width) == (data, base, width)]
        standard = [each.seconds for each in wide if each.parametrisation == "standard"]
        if not narrow or not standard:
            continue
        one = fmean(each.seconds for each in wide)
        searched, again = sum(narrow) + one, sum(standard) + one
        lines.append(
            f"{data}, {base} to {width}: search at {base} and one run {searched:.0f} s, search at {width} and one run "
            f"{again:.0f} s ({again / searched:.1f} times as much)"
        )
    return lines


def redraw() -> int:
    found, page = results(), ["# μP for U-ViT: results", "", "Made by `python -m research.mup redraw`.", ""]
    rows = rows_of(found)
    for base, targets in WIDE.items():
        for width in targets:
            page += [f"## Base {base}, width {width}", ""]
            for data in (*DATA, GLIMPSE):
                mine = [row for row in rows if (row.data, row.base) == (data, base)]
                narrow = next((row for row in mine if row.width == base), None)
                if narrow is not None and mine:
                    page += [f"{data}:", "", "```text", text_table(table_of(mine, narrow)), "```", ""]
            page += [f"- {line}" for line in [*verdicts(rows, base, width), *saving(found, base, width)]] + [""]
            draw([row for row in rows if row.base == base], FOLDER / f"grid-{base}.png")
    for path in sorted(FOLDER.glob("coords-*.json")):
        table = sl.mup.Coordinates.from_json(path.read_text(encoding="utf-8"))
        table.plot(path.with_suffix(".png"))
        page += [f"## Coordinates: {path.stem.removeprefix('coords-')}", "", "```text", str(table), "```", ""]
    write_text(FOLDER / "results.md", "\n".join(page))
    return 0


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel per data set: loss over rate, a line per width and parametrisation, every seed as a dot."""
    if not rows:
        return
    names = list(dict.fromkeys(row.data for row in rows))
    figure, axes = panels(len(names), height=3.2, width=4.2)
    lines = list(dict.fromkeys((row.width, row.parametrisation) for row in rows))
    for place, data in zip(axes, names, strict=True):
        for row in rows:
            if row.data != data:
                continue
            color = colour_of(lines.index((row.width, row.parametrisation)))
            for rate, seen in row.losses.items():
                place.plot([rate] * len(seen), list(seen.values()), ".", color=color, alpha=0.5, markersize=4)
            label = f"{row.width}" if row.parametrisation == "all" else f"{row.width}, {row.parametrisation}"
            place.plot(row.rates, [row.mean(rate) for rate in row.rates], color=color, label=label)
            place.plot([row.best], [row.mean(row.best)], "o", color=color, markersize=7)
        place.set(xscale="log", xlabel="learning rate at the base", title=data, ylabel="held-out loss")
        rates = sorted({rate for row in rows for rate in row.losses})
        place.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        place.minorticks_off()
        legend(place)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(exit_code(main))
