"""The coordinate check: how far each block moves in a few steps of training, over widths.

    table = sl.mup.coordinates(lambda width: Net(width), widths=(64, 128, 256, 512), inputs=(x, t), lr=2e-3)
    print(table)                  # slope of log change over log width, for every block
    table.plot("coords.png")

Under a right μP every block moves as far at width 1024 as at width 64: the slopes are about 0. Under the standard
parametrisation they are 0.7 to 2. The output's row stands apart: its first steps unlearn a random start, whose size
depends on the width by design, so that a right implementation has slopes from -0.5 to 0.5 there.

It is measured on one batch that is trained on again and again, without warm-up and decay: updates of fresh, noisy
batches are not aligned, and changes then fall with the width under a right μP as well (`batches="fresh"` shows it).
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_bytes, write_text
from ..models.call import evaluating, first_tensor, output_tensor
from ..models.uvit import UViT
from ..optional import needs
from ..randomness import derived_seed, generator
from ..scaling.dynamic import GatedSkipScaling
from ..skips.examples import ExampleInputs, example_call
from .groups import OutputStart, groups_of, require_output_start, start_kinds_
from .parameters import Given, Kinds, bare, head_sizes, kinds as kinds_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Make = Callable[[int], nn.Module]
Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model on batch i."""
Role = Literal["block", "input", "logits", "gate", "output"]

LIMIT = 0.15
"""Of the slopes of blocks."""
BATCH = 8
SHOWN = {"block": "", "input": " (input)", "logits": " (logits)", "gate": " (gate's input)", "output": ""}


@dataclass(frozen=True)
class Moved:
    """One row of one network: its size at the start, and the size of its change after 1, 2, ... steps (RMS)."""

    parametrisation: str
    at: int
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
    """All that was measured. Print it, `plot` it, `save` it."""

    records: list[Moved]
    values: tuple[int, ...]
    """The widths, or depths."""
    base: int
    lr: float
    steps: int
    seeds: int
    axis: str = "width"
    batches: str = "fixed"
    title: str = ""

    @property
    def parametrisations(self) -> list[str]:
        return list(dict.fromkeys(record.parametrisation for record in self.records))

    def names(self, *roles: Role) -> list[str]:
        return list(dict.fromkeys(record.row for record in self.records if record.role in roles))

    def slope(self, parametrisation: str, row: str, k: int | None = None) -> Slope:
        """Of the change after k steps, or of the size at the start (k = 0)."""
        k = self.steps if k is None else k
        found = [r for r in self.records if r.parametrisation == parametrisation and r.row == row]
        slopes = []
        for seed in sorted({record.seed for record in found}):
            mine = [record for record in found if record.seed == seed]
            sizes = [record.start if k == 0 else record.changes[k - 1] for record in mine]
            slopes.append(log_slope([record.at for record in mine], sizes))
        return Slope(*(round(value, 4) for value in (fmean(slopes), min(slopes), max(slopes))))

    def worst(self, parametrisation: str, k: int | None = None) -> tuple[str, float]:
        """The block whose mean slope is the largest in magnitude."""
        found = {row: self.slope(parametrisation, row, k).mean for row in self.names("block")}
        row = max(found, key=lambda name: math.inf if math.isnan(found[name]) else abs(found[name]))
        return row, found[row]

    def holds(self, parametrisation: str, limit: float = LIMIT) -> bool:
        """Whether every block moves alike at all widths, after one step and after the last."""
        return all(abs(self.worst(parametrisation, k)[1]) <= limit for k in {1, self.steps})

    def rows(self) -> list[dict[str, str]]:
        """A row per block; the output's last."""
        order: tuple[Role, ...] = ("input", "block", "logits", "gate", "output")
        roles = {record.row: record.role for record in self.records}
        names = [row for role in order for row in self.names(role)]
        blocks = self.names("input", "block")
        names = [*blocks, *(row for row in names if row not in blocks)]
        rows = []
        for row in names:
            cells = {"row": f"{row}{SHOWN[roles[row]]}"}
            for parametrisation in self.parametrisations:
                for k in sorted({1, self.steps}):
                    cells[f"{parametrisation}, k={k}"] = str(self.slope(parametrisation, row, k))
            rows.append(cells)
        for row in self.names("output"):
            cells = {"row": f"{row}, size at start"}
            for parametrisation in self.parametrisations:
                cells[f"{parametrisation}, k=1"] = str(self.slope(parametrisation, row, 0))
            rows.append(cells)
        return rows

    def verdict(self) -> list[str]:
        lines = []
        for parametrisation in self.parametrisations:
            found = [(k, *self.worst(parametrisation, k)) for k in sorted({1, self.steps})]
            said = ", ".join(f"{slope:+.2f} ({row}) after {k}" for k, row, slope in found)
            holds = "every block moves alike" if self.holds(parametrisation) else "blocks do not move alike"
            lines.append(f"{parametrisation}: {holds}; steepest slope {said} (limit ±{LIMIT:g})")
        lines.append("the output's rows are not judged: their first steps unlearn the start (docs/mup.md)")
        if self.seeds < 3:
            lines.append(f"{self.seeds} seed(s): slopes of single networks scatter by ±0.1, take at least 3")
        if self.batches == "fresh":
            lines.append("fresh batches: updates are not aligned, and under a right μP slopes are about -0.3")
        if "standard" in self.parametrisations and self.axis == "width" and self.holds("standard"):
            lines.append("the standard parametrisation holds as well: the rate may be too low to tell them apart")
        return lines

    def __str__(self) -> str:
        values = ", ".join(map(str, self.values))
        head = f"{self.title}\n" if self.title else ""
        batches = "one batch" if self.batches == "fixed" else "fresh batches"
        head += (
            f"slope of log change over log {self.axis}, {self.axis}s {values}, base {self.base}, AdamW {self.lr:g}, "
            f"k steps on {batches}, mean [range] of {self.seeds} seeds"
        )
        return "\n".join([head, text_table(self.rows(), left=("row",)), *self.verdict()])

    def to_json(self) -> str:
        values = {name: value for name, value in vars(self).items() if name != "records"}
        slopes = {
            name: {
                row: {k: _plain(asdict(self.slope(name, row, k))) for k in (0, 1, self.steps)} for row in self._all()
            }
            for name in self.parametrisations
        }
        verdict = {name: self.holds(name) for name in self.parametrisations}
        records = [_plain(asdict(record)) for record in self.records]
        # A line for each record: there are many.
        head = json.dumps({**values, "holds": verdict, "slopes": slopes})
        return f'{head[:-1]}, "records": [\n' + ",\n".join(map(json.dumps, records)) + "\n]}"

    @classmethod
    def from_json(cls, text: str) -> "Coordinates":
        values = json.loads(text)
        records = [
            Moved(**{**each, "start": _number(each["start"]), "changes": tuple(map(_number, each["changes"]))})
            for each in values["records"]
        ]
        known = {name: values[name] for name in ("base", "lr", "steps", "seeds", "axis", "batches", "title")}
        return cls(records, tuple(values["values"]), **known)

    def _all(self) -> list[str]:
        return list(dict.fromkeys(record.row for record in self.records))

    def save(self, folder: str | PathLike[str]) -> Path:
        """coords.json, coords.txt and coords.png."""
        place = Path(folder)
        write_text(place / "coords.json", self.to_json() + "\n")
        write_text(place / "coords.txt", f"{self}\n")
        self.plot(place / "coords.png")
        return place

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """A panel per parametrisation: the change of each row over the widths, all seeds' mean; the output dashed."""
        made = needs("matplotlib.figure", "report", "drawing coordinates").Figure
        count = len(self.parametrisations)
        figure: Figure = made(figsize=(4.3 * count, 3.8), layout="constrained", dpi=110)
        panels = figure.subplots(1, count, squeeze=False, sharey=True)[0]
        blocks = self.names("input", "block")
        shades = needs("matplotlib", "report", "drawing coordinates").colormaps["viridis"]
        for axes, parametrisation in zip(panels, self.parametrisations, strict=True):
            for row in [*blocks, *self.names("output")]:
                means = [self._mean(parametrisation, row, value) for value in self.values]
                output = row not in blocks
                color = "#d55e00" if output else shades(blocks.index(row) / max(1, len(blocks) - 1) * 0.9)
                few = output or row in (blocks[0], blocks[-1])
                axes.plot(
                    self.values,
                    means,
                    color=color,
                    linestyle="--" if output else "-",
                    marker="o",
                    markersize=3,
                    linewidth=1.3,
                    label=row if few else None,
                )
            axes.set(xscale="log", yscale="log", xlabel=self.axis, title=parametrisation)
            axes.set_xticks(self.values, [str(value) for value in self.values])
            axes.minorticks_off()
            axes.legend(frameon=False, fontsize=7)
        panels[0].set_ylabel(f"change after {self.steps} steps (RMS)")
        if path is not None:
            content = io.BytesIO()
            figure.savefig(content, format=Path(path).suffix.removeprefix(".") or "png")
            write_bytes(Path(path), content.getvalue())
        return figure

    def _mean(self, parametrisation: str, row: str, value: int) -> float:
        found = [
            record.changes[-1]
            for record in self.records
            if record.parametrisation == parametrisation and record.row == row and record.at == value
        ]
        return fmean(found) if found else math.nan


def _plain(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares of log y on log x; NaN where something did not move at all or is not finite."""
    if any(not (value > 0 and math.isfinite(value)) for value in y) or len(set(x)) < 2:
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
    attention: Literal["held", "rescaled"] = "held",
    batches: Literal["fixed", "fresh"] = "fixed",
    betas: tuple[float, float] = (0.9, 0.99),
    axis: Literal["width", "depth"] = "width",
    title: str = "",
    say: Callable[[str], None] | None = None,
) -> Coordinates:
    """Train `make(width)` for a few steps at each width, and measure by how much each block's output changes.

    `make` builds a new network. It is called under a fixed seed, and for the base on the meta device. Let the number of
    heads grow with the width. `base` is the width where the rate was tuned, the smallest by default.
    `parametrisations`: "standard", "mup", or "mup:unit", "mup:zero", "mup:0.5" with another output start.
    `inputs` are the inputs of one batch, `loss(model, i)` the loss of batch i. Without a loss the network is asked for
    fixed random numbers; U-ViT and diffusers' UNets need no inputs for that.
    `rows` names the modules to look at; by default the blocks (elements of module lists, children of the model).
    `batches="fresh"` trains on loss(model, 0), loss(model, 1), ... and looks at batch 0.
    `axis="depth"`: make takes a depth, and the groups of μP are those of the base's width, one and the same.
    """
    values = tuple(dict.fromkeys(int(value) for value in widths))
    if len(values) < 2 or steps < 1 or seeds < 1:
        raise InvalidConfigError(
            f"a coordinate check needs at least 2 {axis}s, 1 step and 1 seed, got {len(values)}, {steps} and {seeds}"
        )
    if batches not in ("fixed", "fresh") or axis not in ("width", "depth"):
        raise InvalidConfigError("batches must be fixed or fresh, and axis width or depth")
    starts = {name: _output_start(name) for name in parametrisations}
    base = min(values) if base is None else base
    ask = _loss(make, values, inputs) if loss is None else loss
    records: list[Moved] = []
    for value in values:
        found = _kinds_at(make, value, base, values, kinds, attention) if axis == "width" else None
        for name, start in starts.items():
            if start is not None and found is None:
                raise InvalidConfigError(
                    "along depth there is nothing for μP's groups to do: take --parametrisations standard, and scale "
                    "residual branches in the model"
                )
            for seed in range(seeds):
                if say is not None:
                    say(f"{name}, {axis} {value}, seed {seed}")
                model = _made(make, value, seed)
                measured = _measure(model, found, start, ask, lr, steps, betas, batches == "fresh", rows, axis)
                records += [Moved(name, value, seed, row, *entry) for row, entry in measured.items()]
    shared = [
        row
        for row in dict.fromkeys(record.row for record in records)
        if {record.at for record in records if record.row == row} == set(values)
    ]
    kept = [record for record in records if record.row in shared]
    if not any(record.role == "block" for record in kept):
        raise InvalidConfigError("no block was found at all widths: name the modules to look at with rows=[...]")
    return Coordinates(kept, values, base, lr, steps, seeds, axis, batches, title)


def _output_start(name: str) -> OutputStart | None:
    """None for the standard parametrisation."""
    if name == "standard":
        return None
    kind, _, start = name.partition(":")
    if kind != "mup":
        raise InvalidConfigError(f"a parametrisation is standard, mup or mup:OUTPUT_START, got {name!r}")
    return require_output_start(start or "strict")


def _made(make: Make, value: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "coordinates"))
        return make(value)


def _kinds_at(make: Make, value: int, base: int, values: tuple[int, ...], given: Given | None, attention: Any) -> Kinds:
    other = max(values) if max(values) != value else min(values)
    with torch.device("meta"):
        model, at_base, delta = make(value), make(base), make(other)
    return kinds_of(model, at_base, kinds=given, attention=attention, delta=delta)


def _measure(
    model: nn.Module,
    found: Kinds | None,
    start: OutputStart | None,
    loss: Loss,
    lr: float,
    steps: int,
    betas: tuple[float, float],
    fresh: bool,
    rows: Sequence[str] | None,
    axis: str,
) -> dict[str, tuple[Role, float, tuple[float, ...]]]:
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    if start is not None and found is not None:
        start_kinds_(bare(model), found, start)
        groups = groups_of(model, found, lr=lr, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0)
    watched = _watched(bare(model), found, rows, axis)
    before = _look(model, loss, watched)
    changes: dict[str, list[float]] = {name: [] for name in before}
    for i in range(steps):
        optimizer.zero_grad()
        loss(model, i if fresh else 0).backward()
        optimizer.step()
        after = _look(model, loss, watched)
        for name, values in before.items():
            changes[name].append(_rms(after[name] - values))
    return {name: (watched.roles[name], _rms(values), tuple(changes[name])) for name, values in before.items()}


def _rms(values: Tensor) -> float:
    """To six digits, which is what float32 has."""
    return float(f"{float(values.double().square().mean().sqrt()):.6g}")


# Which rows


@dataclass
class _Watched:
    """Names of rows, and the modules that they are read from."""

    roles: dict[str, Role] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    scaling: GatedSkipScaling | None = None


def _watched(model: nn.Module, found: Kinds | None, rows: Sequence[str] | None, axis: str) -> _Watched:
    watched = _Watched()
    for name in rows if rows is not None else _block_names(model):
        try:
            watched.modules[name] = model.get_submodule(name)
        except AttributeError as error:
            raise InvalidConfigError(f"the model has no module {name!r} to look at") from error
        watched.roles[name] = _role(name, found, model)
        if watched.roles[name] == "output" and rows is None:  # the model's own output says it all
            del watched.modules[name], watched.roles[name]
    if rows is None:
        for name, _ in head_sizes(model):
            attention = model.get_submodule(name)
            if hasattr(attention, "qkv") or (hasattr(attention, "to_q") and hasattr(attention, "to_k")):
                watched.attentions[name] = attention
                watched.roles[name] = "logits"
    scaling = getattr(model, "skip_scaling", None)
    if isinstance(scaling, GatedSkipScaling):
        watched.scaling = scaling
        watched.roles |= {f"gate {site.index}": "gate" for site in scaling.sites}
    watched.roles["output"] = "output"
    return _relative(watched, model) if axis == "depth" else watched


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
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        within = model.get_submodule(parent) if parent else model
        listed = isinstance(within, nn.ModuleList) or (isinstance(within, nn.Sequential) and "." not in parent)
        if parent == "" or listed or (leaf == "merge" and isinstance(model, UViT)):
            found.append(name)
    found = [name for name in found if "Norm" not in type(model.get_submodule(name)).__name__]
    for merge in [name for name in found if name.endswith(".merge")]:  # the first thing that its block does
        found.remove(merge)
        found.insert(found.index(merge.removesuffix(".merge")), merge)
    return found


def _role(name: str, found: Kinds | None, model: nn.Module) -> Role:
    """Modules without hidden weights are inputs; those with an output weight, or without anything that grows, belong
    to the output."""
    if found is None:  # along depth
        own = list(model.get_submodule(name).parameters())
        if name in ("to_patches", "final_conv", "conv_out"):
            return "output"
        return "input" if "." not in name and len(own) <= 2 else "block"
    kinds = {kind.kind for each, kind in found.items() if each.startswith(f"{name}.")}
    if "output" in kinds or kinds <= {"finite"}:
        return "output"
    return "block" if "hidden" in kinds else "input"


def _relative(watched: _Watched, model: nn.Module) -> _Watched:
    """Rows that networks of every depth have: the first and the last of each list."""
    made = _Watched(scaling=None)
    for name, module in watched.modules.items():
        head, _, rest = name.partition(".")
        blocks = getattr(model, head, None)
        if not isinstance(blocks, nn.ModuleList):
            made.modules[name], made.roles[name] = module, watched.roles[name]
            continue
        number, _, part = rest.partition(".")
        for end, position in (("first", 0), ("last", len(blocks) - 1)):
            if int(number) == position:
                row = f"{head}, {end}" + (f", {part}" if part else "")
                made.modules[row], made.roles[row] = module, watched.roles[name]
    made.roles["output"] = "output"
    return made


@torch.no_grad()
def _look(model: nn.Module, loss: Loss, watched: _Watched) -> dict[str, Tensor]:
    """The rows of a forward on batch 0, in evaluation mode."""
    seen: dict[str, Tensor] = {}
    with evaluating(model), _listening(model, watched, seen):
        loss(model, 0)
    return {name: seen[name] for name in watched.roles if name in seen}


@contextmanager
def _listening(model: nn.Module, watched: _Watched, seen: dict[str, Tensor]) -> Iterator[None]:
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                seen.setdefault(name, tensor.detach().clone())

        return hook

    try:
        for name, module in watched.modules.items():
            handles.append(module.register_forward_hook(keep(name)))
        for name, attention in watched.attentions.items():
            handles += _listen_to_logits(name, attention, seen)
        if watched.scaling is not None:
            handles += _listen_to_gates(watched.scaling, seen)
        handles.append(model.register_forward_hook(keep("output")))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _listen_to_logits(name: str, attention: Any, seen: dict[str, Tensor]) -> list[Any]:
    """q·k/√d of each head: what the softmax takes, up to norms on queries and keys."""
    heads = attention.heads if hasattr(attention, "heads") else attention.num_heads
    parts: dict[str, Tensor] = {}

    def split(tensor: Tensor) -> Tensor:
        return tensor.detach().unflatten(-1, (heads, -1)).transpose(-3, -2)  # (B, heads, L, d)

    def finish(query: Tensor, key: Tensor) -> None:
        logits = split(query) @ split(key).transpose(-1, -2) / math.sqrt(query.shape[-1] // heads)
        seen.setdefault(name, logits)

    def of_qkv(_: nn.Module, __: Any, output: Tensor) -> None:
        query, key, _value = output.chunk(3, dim=-1)
        finish(query, key)

    def of_query(_: nn.Module, __: Any, output: Tensor) -> None:
        parts["query"] = output

    def of_key(_: nn.Module, __: Any, output: Tensor) -> None:
        finish(parts["query"], output)

    if hasattr(attention, "qkv"):
        return [attention.qkv.register_forward_hook(of_qkv)]
    return [attention.to_q.register_forward_hook(of_query), attention.to_k.register_forward_hook(of_key)]


def _listen_to_gates(scaling: GatedSkipScaling, seen: dict[str, Tensor]) -> list[Any]:
    """The pooled features that go into ζ. One ζ may serve several skips: they come innermost first."""
    order = iter(sorted((site.index for site in scaling.sites), reverse=True))

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        index = next(order, None)
        if index is not None:
            seen[f"gate {index}"] = args[0].detach().clone()

    return [network.register_forward_pre_hook(hook) for network in scaling.networks]


# The task where none is given: fixed random numbers for fixed random inputs


def _loss(make: Make, values: tuple[int, ...], inputs: ExampleInputs) -> Loss:
    model = _made(make, min(values), 0)
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

    def loss(model: nn.Module, _: int) -> Tensor:
        return (output_tensor(model(*args, **kwargs)) - target).square().mean()

    return loss


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
