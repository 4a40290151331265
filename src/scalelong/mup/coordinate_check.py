"""The coordinate check: how far each block moves in a few steps of training, over widths.

    found = sl.mup.coordinates(lambda width: Net(width), widths=(64, 128, 256, 512), inputs=(x, t), lr=2e-3)
    print(found)                  # slope of log change over log width, for every block

Under a right μP every block moves as far at width 1024 as at width 64: the slopes are about 0. Under the standard
parametrisation they are 0.7 to 2. The output's row is not judged: its first steps unlearn a random start, whose size
depends on the width by design, so that a right implementation has slopes from -0.5 to 0.5 there.

It is measured on one batch that is trained on again and again, without warm-up and decay: updates of fresh, noisy
batches are not aligned, and changes then fall with the width under a right μP as well.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from ..finding import ExampleInputs, example_call
from ..models import UViT, evaluating, first_tensor, output_tensor
from ..randomness import derived_seed, generator
from .groups import OutputStart, groups_of, require_output_start, start_kinds_
from .parameters import Given, Kinds, bare, head_sizes, kinds as kinds_of

logger = logging.getLogger(__name__)

Make = Callable[[int], nn.Module]
Loss = Callable[[nn.Module], Tensor]
MakeOptimizer = Callable[[nn.Module, Kinds | None, float], torch.optim.Optimizer]
"""From a network, its kinds under μP (None under the standard parametrisation) and the rate at the base."""
Role = Literal["input", "block", "output"]

LIMIT = 0.15
"""The largest slope of a block, in magnitude, that counts as moving alike."""
BATCH = 8


@dataclass(frozen=True)
class Moved:
    """One row of one network: its size at the start, and the size of its change after 1, 2, ... steps (RMS)."""

    parametrisation: str
    width: int
    seed: int
    row: str
    role: Role
    start: float
    changes: tuple[float, ...]


@dataclass(frozen=True)
class Slope:
    """d log(change) / d log(width), mean and range over the seeds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Coordinates:
    """All changes that were measured, and their slopes. Print it, or `save` it."""

    records: list[Moved]
    widths: tuple[int, ...]
    base: int
    lr: float
    steps: int
    seeds: int
    title: str = ""

    @property
    def parametrisations(self) -> list[str]:
        return list(dict.fromkeys(record.parametrisation for record in self.records))

    def names(self, *roles: Role) -> list[str]:
        return list(dict.fromkeys(record.row for record in self.records if record.role in roles))

    def slope(self, parametrisation: str, row: str, k: int | None = None) -> Slope:
        """The slope of the change after k steps (by default all), or of the size at the start (k = 0)."""
        k = self.steps if k is None else k
        found = [r for r in self.records if r.parametrisation == parametrisation and r.row == row]
        slopes = []
        for seed in range(self.seeds):
            mine = [record for record in found if record.seed == seed]
            sizes = [record.start if k == 0 else record.changes[k - 1] for record in mine]
            slopes.append(_log_slope([record.width for record in mine], sizes))
        return Slope(*(round(value, 4) for value in (fmean(slopes), min(slopes), max(slopes))))

    def worst(self, parametrisation: str, k: int | None = None) -> tuple[str, float]:
        """The block whose mean slope is the largest in magnitude."""
        found = {row: self.slope(parametrisation, row, k).mean for row in self.names("block")}
        row = max(found, key=lambda name: math.inf if math.isnan(found[name]) else abs(found[name]))
        return row, found[row]

    def holds(self, parametrisation: str, limit: float = LIMIT) -> bool:
        """True if every block moves alike at all widths, after one step and after the last."""
        return all(abs(self.worst(parametrisation, k)[1]) <= limit for k in {1, self.steps})

    def rows(self) -> list[dict[str, str]]:
        """A row for each input layer and block, then for the output."""
        inputs = self.names("input")
        rows = []
        for row in [*self.names("input", "block"), *self.names("output")]:
            cells = {"row": f"{row} (input)" if row in inputs else row}
            for parametrisation in self.parametrisations:
                for k in sorted({1, self.steps}):
                    cells[f"{parametrisation}, k={k}"] = str(self.slope(parametrisation, row, k))
            rows.append(cells)
        return rows

    def verdict(self) -> list[str]:
        lines = []
        for parametrisation in self.parametrisations:
            found = [(k, *self.worst(parametrisation, k)) for k in sorted({1, self.steps})]
            steepest = ", ".join(f"{slope:+.2f} ({row}) after {k}" for k, row, slope in found)
            holds = "every block moves alike" if self.holds(parametrisation) else "blocks do not move alike"
            lines.append(f"{parametrisation}: {holds}; steepest slope {steepest} (limit ±{LIMIT:g})")
        lines.append("the output's rows are not judged: their first steps unlearn the start (docs/mup.md)")
        if self.seeds < 3:
            lines.append(f"{self.seeds} seed(s): slopes of single networks scatter by ±0.1, take at least 3")
        if "standard" in self.parametrisations and self.holds("standard"):
            lines.append("the standard parametrisation holds as well: the rate may be too low to tell them apart")
        return lines

    def __str__(self) -> str:
        head = (
            f"slope of log change over log width, widths {', '.join(map(str, self.widths))}, base {self.base}, "
            f"rate {self.lr:g}, k steps on one batch, mean [range] of {self.seeds} seeds"
        )
        title = [self.title] if self.title else []
        return "\n".join([*title, head, text_table(self.rows(), left=("row",)), *self.verdict()])

    def to_json(self) -> str:
        values = {name: value for name, value in vars(self).items() if name != "records"}
        values["holds"] = {name: self.holds(name) for name in self.parametrisations}
        return json.dumps({**values, "records": [_finite(asdict(record)) for record in self.records]})

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write coords.json."""
        path = Path(folder) / "coords.json"
        write_text(path, self.to_json() + "\n")
        return path


def _finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, which JSON does not have."""
    return pytree.tree_map(lambda each: None if isinstance(each, float) and not math.isfinite(each) else each, value)


def _log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares of log y on log x; NaN where something did not move at all or is not finite."""
    if any(not (value > 0 and math.isfinite(value)) for value in y):
        return math.nan
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    middle, height = fmean(a for a, _ in logs), fmean(b for _, b in logs)
    return sum((a - middle) * (b - height) for a, b in logs) / sum((a - middle) ** 2 for a, _ in logs)


# Measuring


def coordinates(
    make: Make,
    widths: Sequence[int],
    *,
    lr: float = 2e-3,
    steps: int = 5,
    seeds: int = 3,
    base: int | None = None,
    parametrisations: Sequence[str] = ("standard", "mup"),
    inputs: ExampleInputs = None,
    loss: Loss | None = None,
    rows: Sequence[str] | None = None,
    kinds: Given | None = None,
    optimizer: MakeOptimizer | None = None,
    title: str = "",
) -> Coordinates:
    """Train `make(width)` for a few steps at each width, and measure by how much each block's output changes.

    `make` builds a new network. It is called under a fixed seed, and for the base on the meta device. Let the number of
    heads grow with the width. `base` is the width where the rate was tuned, the smallest by default.
    `parametrisations`: "standard", "mup", or "mup:unit", "mup:zero", "mup:0.5" with a different output start.
    `inputs` are the inputs of one batch, `loss(model)` the loss on one batch, always the same. Without a loss the
    network is trained towards fixed random numbers; U-ViT and diffusers' UNets need no inputs for that.
    `rows` names the modules to look at; by default the blocks (elements of module lists, children of the model).
    `optimizer(model, kinds, lr)` makes an optimiser other than AdamW; it should not decay weights.
    """
    values = tuple(dict.fromkeys(int(value) for value in widths))
    if len(values) < 2 or steps < 1 or seeds < 1:
        raise InvalidConfigError(
            f"a coordinate check needs at least 2 widths, 1 step and 1 seed, got {len(values)}, {steps} and {seeds}"
        )
    starts = {name: _output_start(name) for name in parametrisations}
    base = min(values) if base is None else base
    loss = _random_task(make, min(values), inputs) if loss is None else loss
    records: list[Moved] = []
    for width in values:
        other = max(values) if max(values) != width else min(values)
        with torch.device("meta"):
            model, at_base, delta = make(width), make(base), make(other)
        found = kinds_of(model, at_base, kinds=kinds, delta=delta)
        for name, start in starts.items():
            for seed in range(seeds):
                logger.info("%s, width %d, seed %d", name, width, seed)
                model = _made(make, width, seed)
                if start is not None:
                    start_kinds_(bare(model), found, start)
                made = (optimizer or _adamw)(model, None if start is None else found, lr)
                watched = _watched(bare(model), found, rows)
                for row, (before, changes) in _train(model, made, loss, steps, list(watched)).items():
                    records.append(Moved(name, width, seed, row, watched[row], before, changes))
    if not any(record.role == "block" for record in records):
        raise InvalidConfigError("the network has no block: name the modules to look at with rows=[...]")
    return Coordinates(records, values, base, lr, steps, seeds, title)


def _adamw(model: nn.Module, kinds: Kinds | None, lr: float) -> torch.optim.Optimizer:
    groups: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kinds is not None:
        groups = groups_of(model, kinds, lr=lr, weight_decay=0.0)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)


def _output_start(name: str) -> OutputStart | None:
    """The output start that a parametrisation names; None for the standard one."""
    if name == "standard":
        return None
    kind, _, start = name.partition(":")
    if kind != "mup":
        raise InvalidConfigError(f"a parametrisation is standard, mup or mup:OUTPUT_START, got {name!r}")
    return require_output_start(start or "strict")


def _made(make: Make, width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "coordinates"))
        return make(width)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int, rows: list[str]
) -> dict[str, tuple[float, tuple[float, ...]]]:
    """The size of each row at the start, and of its change after every step."""
    before = _look(model, loss, rows)
    changes: dict[str, list[float]] = {name: [] for name in before}
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        after = _look(model, loss, rows)
        for name, values in before.items():
            changes[name].append(_rms(after[name] - values))
    return {name: (_rms(values), tuple(changes[name])) for name, values in before.items()}


@torch.no_grad()
def _look(model: nn.Module, loss: Loss, rows: list[str]) -> dict[str, Tensor]:
    """The output of each row's module in a forward in evaluation mode."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                seen.setdefault(name, tensor.detach().clone())

        return hook

    host = bare(model)
    handles = [
        (model if name == "output" else host.get_submodule(name)).register_forward_hook(keep(name)) for name in rows
    ]
    try:
        with evaluating(model):
            loss(model)
    finally:
        for handle in handles:
            handle.remove()
    return {name: seen[name] for name in rows if name in seen}


def _rms(values: Tensor) -> float:
    """To six digits, which is what float32 has."""
    return float(f"{float(values.double().square().mean().sqrt()):.6g}")


# Which rows


def _watched(model: nn.Module, found: Kinds, rows: Sequence[str] | None) -> dict[str, Role]:
    watched: dict[str, Role] = {}
    for name in rows if rows is not None else _block_names(model):
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise InvalidConfigError(f"the model has no module {name!r} to look at") from error
        kinds = {kind.kind for each, kind in found.items() if each.startswith(f"{name}.")}
        # Modules without hidden weights are inputs. Those with an output weight, or in which nothing grows, belong to
        # the output, and the model's own output says it all.
        role: Role = "block" if "hidden" in kinds else "input"
        role = "output" if "output" in kinds or kinds <= {"finite"} else role
        if role != "output" or rows is not None:
            watched[name] = role
    return {**watched, "output": "output"}


def _block_names(model: nn.Module) -> list[str]:
    """Children of the model, elements of lists at any place, and the merges of U-ViT, as far as they have weights."""
    found = []
    within_heads = tuple(f"{name}." for name, _ in head_sizes(model) if name)
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if name.startswith(within_heads):  # diffusers' to_out is a list
            continue
        if not name or next(module.parameters(), None) is None or name.partition(".")[0] == "skip_scaling":
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or "Norm" in type(module).__name__:
            continue
        within = model.get_submodule(parent) if parent else model
        listed = isinstance(within, nn.ModuleList) or (isinstance(within, nn.Sequential) and "." not in parent)
        if parent == "" or listed or (leaf == "merge" and isinstance(model, UViT)):
            found.append(name)
    for merge in [name for name in found if name.endswith(".merge")]:  # the first thing that its block does
        found.remove(merge)
        found.insert(found.index(merge.removesuffix(".merge")), merge)
    return found


# The task where none is given: fixed random numbers for fixed random inputs


def _random_task(make: Make, width: int, inputs: ExampleInputs) -> Loss:
    model = _made(make, width, 0)
    source = generator(0, "coordinates", "task")
    if inputs is None and isinstance(bare(model), UViT):
        args, kwargs = (), _uvit_inputs(bare(model), source)
    else:
        args, kwargs = example_call(model, inputs)
        if inputs is None:
            args, kwargs = pytree.tree_map(lambda value: _random_like(value, source), (args, kwargs))
    with evaluating(model), torch.no_grad():
        output = output_tensor(model(*args, **kwargs))
    target = torch.randn(output.shape, generator=source).to(output)
    return lambda model: (output_tensor(model(*args, **kwargs)) - target).square().mean()


def _uvit_inputs(model: Any, source: torch.Generator) -> dict[str, Any]:
    inputs = {
        "x": torch.randn(BATCH, model.channels, *model.image_size, generator=source),
        "t": torch.linspace(0, 999, BATCH),
    }
    if model.classes:
        inputs["y"] = torch.arange(BATCH) % model.classes
    if model.context_dim:
        inputs["context"] = torch.randn(BATCH, model.context_length, model.context_dim, generator=source)
    return inputs


def _random_like(value: Any, source: torch.Generator) -> Any:
    """A batch of random numbers in place of the one zero of an example; times spread over the schedule."""
    if not isinstance(value, Tensor) or value.shape[:1] != (1,):
        return value
    if value.is_floating_point():
        return torch.randn(BATCH, *value.shape[1:], generator=source)
    return torch.linspace(0, 999, BATCH).long() if int(value.max()) == 1 else value.repeat(BATCH)
