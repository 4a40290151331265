"""How stable a training run is, from within anyone's loop: `StabilityMonitor`.

    with StabilityMonitor(model, every=10, probe_batch=(x, t), path="stability.jsonl") as monitor:
        for batch in batches:
            loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            monitor.step(loss)

Between readings nothing but the loss is touched. At a reading, sizes of features, gradients and updates stay on their
device until all of them are read at once, so that an accelerator waits once per reading, never once per step.
"""

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..attaching import host_of
from ..console import html_lines, html_table, text_table
from ..errors import ExampleInputsError, InvalidConfigError, NotScaledError
from ..finding import ExampleInputs, SkipPlan, example_call, unwrap
from ..optional import needs
from ..scaling import SkipScaling
from .alarms import WINDOW, Alarm, AlarmDetector, AlarmRules, Oscillation, oscillation
from .features import (
    Meter,
    attach_meter,
    block_names,
    has_bare_merges,
    measure,
    on_device_of,
    parameters_by_block,
    plan_for,
)
from .guard import RATE_FACTOR
from .trackers import JsonLines, Writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Gradient norms and relative updates per block, around the steps of whatever optimiser trains the model


class UpdateWatch:
    """While `on`, keeps the norms of gradients, weights and updates of the next optimiser step, on the device."""

    def __init__(self, groups: dict[str, list[nn.Parameter]]) -> None:
        self.on = False
        self.lr: float | None = None
        """The learning rate of the last step that was read, the highest of all groups."""
        self.groups = groups
        self._block_of = {id(parameter): name for name, group in groups.items() for parameter in group}
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self.clear()
        # Hooks of all optimisers: the loop need not say which one is its own. They are global, so they hold this object
        # weakly, and go when nothing else holds it: a monitor that was dropped must not keep the model.
        handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(_weakly(self._before_step)),
            register_optimizer_step_post_hook(_weakly(self._after_step)),
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        self.gradients: dict[str, list[Tensor]] = {}
        self.weights: dict[str, list[Tensor]] = {}
        self.updates: dict[str, list[Tensor]] = {}

    def close(self) -> None:
        self._remove_hooks()

    def _mine(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [p for p in parameters if p.grad is not None and id(p) in self._block_of]

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.on:
            return
        mine = self._mine(optimizer)
        rate = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=None)
        # A guard that has gone back lowers the rate for the step alone.
        self.lr = None if rate is None else rate * getattr(optimizer, RATE_FACTOR, 1.0)
        gradients = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in mine if p.grad is not None]
        self._add(self.gradients, mine, gradients)
        self._before = [(p, p.detach().clone()) for p in mine]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if not self._before:
            return
        mine, before = [p for p, _ in self._before], [value for _, value in self._before]
        self._before = []
        self._add(self.weights, mine, before)
        for parameter, value in zip(mine, before, strict=True):
            value.sub_(parameter.detach())  # in place: a reading needs one copy of the weights
        self._add(self.updates, mine, before)

    def _add(self, into: dict[str, list[Tensor]], parameters: list[nn.Parameter], values: list[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None
            norm = torch.linalg.vector_norm(value, dtype=wide)
            # A sharded tensor (FSDP2) gives the norm of all shards; its class is slow to import.
            whole = getattr(norm, "full_tensor", None)
            norm = norm if whole is None else whole()
            into.setdefault(self._block_of[id(parameter)], []).append(norm)

    def readings(self) -> dict[str, Tensor]:
        """Squared norms are added up per block; nothing is read from the device here."""
        result = {f"gradient_norm/{name}": _joint(norms) for name, norms in self.gradients.items()}
        if result:
            result["gradient_norm/all"] = _joint(list(result.values()))
        for name, norms in self.updates.items():
            weight = _joint(self.weights[name])
            result[f"update_ratio/{name}"] = _joint(norms) / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        return result


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does nothing once the object of the method is gone."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _joint(norms: list[Tensor]) -> Tensor:
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


# The monitor

logger = logging.getLogger(__name__)

WIDE = 1e30
"""Formats whose largest number is above this (all but fp16) have room for any activation that trains."""
SHOWN = 5
"""Alarms that a notebook shows: the latest."""


class StabilityMonitor:
    """Per long skip and per block: features, gradients, updates and coefficients, with alarms.

    `every`: steps between readings.
    `probe_batch`: arguments of the model (a tuple, or a dictionary of keywords) on which features are read as well; it
    stays the same, so that what changes is the network. Oscillation scores need it.
    `plan`: the long skips, if they are not to be found by `find_skips` on the probe batch.
    `path`, `writers`: where readings go: a JSON Lines file, and objects such as `Tracker(run)`.
    `on_alarm`: called with each alarm; left out, alarms are logged as warnings.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        probe_batch: ExampleInputs = None,
        plan: SkipPlan | None = None,
        path: str | PathLike[str] | None = None,
        writers: Sequence[Writer] = (),
        rules: AlarmRules | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise InvalidConfigError(f"every must be a whole number of steps, at least 1, got {every!r}")
        self.host, self.every = unwrap(model), every
        try:
            self.plan = plan or plan_for(model, probe_batch)
        except ExampleInputsError as error:
            raise ExampleInputsError(str(error).replace("example_inputs", "probe_batch")) from error
        self.probe_call = None
        if probe_batch is not None:
            self.probe_call = on_device_of(self.host, *example_call(self.host, probe_batch))
        self.writers = [*([JsonLines(path)] if path is not None else []), *writers]
        self.on_alarm = on_alarm or (lambda alarm: logger.warning("%s", alarm))
        self.alarms: list[Alarm] = []
        self.history: list[dict[str, float]] = []
        self.steps = 0
        self._detector = AlarmDetector(rules or AlarmRules())
        self._meter = Meter(training_only=True)
        self._remove_hooks = weakref.finalize(self, _remove, attach_meter(self.host, self.plan, self._meter))
        self._updates = UpdateWatch(parameters_by_block(self.host, block_names(self.host, self.plan)))
        self._losses: list[Tensor] = []
        self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model and close the files."""
        self._remove_hooks()
        self._updates.close()
        for writer in self.writers:
            writer.close()

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None) -> dict[str, float] | None:
        """To be called after every optimiser step. Gives the reading where one is due, otherwise None.

        `step` is the number of steps done, where that is not the number of calls (a resumed run).
        """
        self.steps = self.steps + 1 if step is None else step
        if loss is not None:
            self._losses.append(torch.as_tensor(loss).detach().float().mean())
        reading = self._read() if self.steps % self.every == 0 else None
        self._arm()
        return reading

    def begin_at(self, step: int) -> None:
        """Go on after a step: of a run that is resumed, or that went back to a checkpoint."""
        self.steps = step
        self._losses = []
        self._arm()

    def oscillation(self, name: str, window: int = WINDOW, zero_loss: float = 1.0) -> Oscillation:
        """The scores of a quantity such as "probe_block_rms/middle" over the history, gated by the recorded loss."""
        series = [reading[name] for reading in self.history if name in reading]
        losses = [reading["loss"] for reading in self.history if "loss" in reading]
        if not series:
            known = ", ".join(sorted({name for reading in self.history for name in reading})) or "nothing"
            raise InvalidConfigError(f"{name!r} was not recorded; recorded: {known}")
        return oscillation(series, window=window, loss=losses[-1] if losses else None, zero_loss=zero_loss)

    def plot(self) -> "Figure":
        """Loss, gradient norm, and κ_i and size of each long skip over the steps: a figure of matplotlib."""
        return draw_readings(self.history, self.alarms)

    def __str__(self) -> str:
        if not self.history:
            return self._heading()
        return "\n".join([self._heading(), text_table(reading_rows(self.history[-1])), *self._last_alarms()])

    def _repr_html_(self) -> str:
        if not self.history:
            return html_lines([self._heading()])
        return html_table(reading_rows(self.history[-1]), self._heading()) + html_lines(self._last_alarms())

    def _heading(self) -> str:
        name = type(self.host).__name__
        if not self.history:
            return f"{name}: no reading yet, one comes every {self.every} steps"
        return f"{name}: the reading at step {self.history[-1]['step']:g}"

    def _last_alarms(self) -> list[str]:
        count = len(self.alarms)
        said = [f"{count} alarm{'s' if count != 1 else ''}{':' if count else ''}", *map(str, self.alarms[-SHOWN:])]
        return said + ([f"and {count - SHOWN} before these"] if count > SHOWN else [])

    def _arm(self) -> None:
        """Read during the step before a reading, and in no other."""
        due = (self.steps + 1) % self.every == 0
        self._meter.on = self._updates.on = due
        if due:
            self._meter.clear()
            self._updates.clear()

    def _read(self) -> dict[str, float]:
        on_device = {**self._coefficients(), **_features(self._meter, ""), **self._updates.readings()}
        limits = dict(self._meter.limits)
        if self.probe_call is not None:
            on_device |= _features(measure(self.host, self.plan, *self.probe_call), "probe_")
        # All losses since the last reading go along, under their numbers.
        on_device |= {f"losses/{number}": loss for number, loss in enumerate(self._losses)}
        reading = _to_numbers(on_device)
        losses = [reading.pop(f"losses/{number}") for number in range(len(self._losses))]
        self._losses = []
        if losses:
            # Sums and maxima keep NaN, so a single bad step shows.
            largest = math.nan if any(map(math.isnan, losses)) else max(losses)
            reading |= {"loss": sum(losses) / len(losses), "loss_max": largest}
        peaks = {name: reading.pop(f"block_max/{name}") for name in limits}
        for name in [name for name in reading if name.startswith("probe_block_max/")]:
            del reading[name]
        if peaks:
            reading["activation_max"] = max(peaks.values(), key=lambda peak: math.inf if math.isnan(peak) else peak)
            narrow = {name: peak for name, peak in peaks.items() if limits[name] < WIDE}
            if narrow:
                reading["headroom"] = min(limits[name] / max(peak, 1e-30) for name, peak in narrow.items())
        self._publish(reading, losses)
        return reading

    def _publish(self, reading: dict[str, float], losses: list[float]) -> None:
        self.history.append({"step": self.steps, **reading})
        bare = has_bare_merges(self.host, self.plan)
        alarms = self._detector.check(self.steps, reading, losses=losses, lr=self._updates.lr, bare=bare)
        self.alarms += alarms
        for writer in self.writers:
            writer.write(self.steps, reading, alarms)
        for alarm in alarms:
            self.on_alarm(alarm)

    def _coefficients(self) -> dict[str, Tensor | float]:
        """κ_i of the most recent forward; 1 where the model is not scaled."""
        scaling = _scaling(self.host)
        found: dict[str, Tensor | float] = {}
        for skip in self.plan:
            try:
                value = 1.0 if scaling is None else scaling.coefficient(skip.index)
            except NotScaledError:  # a coefficient that depends on the data, before the first forward
                continue
            found[f"kappa/{skip.index}"] = value.mean() if isinstance(value, Tensor) else value
        return found


def _scaling(host: nn.Module) -> SkipScaling | None:
    return host_of(host).scaling


def _features(meter: Meter, prefix: str) -> dict[str, Tensor | float]:
    found: dict[str, Tensor | float] = {f"{prefix}skip_rms/{i}": meter.skips[i][0] for i in sorted(meter.skips)}
    found |= {f"{prefix}block_rms/{name}": size[0] for name, size in meter.blocks.items()}
    found |= {f"{prefix}similarity/{name}": value for name, value in meter.alike.items()}
    return found | {f"{prefix}block_max/{name}": size[1] for name, size in meter.blocks.items()}


def _to_numbers(values: dict[str, Tensor | float]) -> dict[str, float]:
    """All device tensors in one transfer per device."""
    result: dict[str, float] = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append((name, value))
    for entries in by_device.values():
        numbers = torch.stack([value.float().reshape(()) for _, value in entries]).tolist()
        result |= dict(zip((name for name, _ in entries), numbers, strict=True))
    return {name: result[name] for name in values}


# Readings for people: the last one as rows, all of them as a figure

Reading = Mapping[str, float]

LEGEND = 8
"""Lines that a legend names; of more, it names the first and the last: the outermost and the innermost."""
SINGLE = {
    "loss": "loss",
    "loss_max": "largest loss",
    "gradient_norm/all": "gradient norm",
    "activation_max": "largest activation",
    "headroom": "headroom of fp16, times",
}
PER_SKIP = {"kappa/": "κ_i", "skip_rms/": "RMS", "probe_skip_rms/": "RMS on the probe batch"}
DRAWN = {
    "loss": "loss",
    "gradient_norm/all": "gradient norm",
    "activation_max": "largest activation",
    "kappa/": "κ_i",
    "skip_rms/": "RMS of each long skip",
    "similarity/": "similarity of tokens in each block",
}
"""What is drawn: a quantity, or all whose names begin so; those of the probe batch where there is one."""


def reading_rows(reading: Reading) -> list[dict[str, str]]:
    """What is true of the whole model first, then every long skip, outermost first."""
    rows = [{"quantity": label, "value": f"{reading[name]:.4g}"} for name, label in SINGLE.items() if name in reading]
    alike = {name: reading[name] for name in names_of([reading], "similarity/")}
    if alike:
        most = max(alike, key=lambda name: alike[name])
        rows.append({"quantity": "most alike tokens", "value": f"{alike[most]:.3g} in {most.partition('/')[2]}"})
    for index in sorted({int(name.partition("/")[2]) for name in reading if name.startswith(tuple(PER_SKIP))}):
        found = {label: reading.get(f"{name}{index}") for name, label in PER_SKIP.items()}
        parts = [f"{label} {value:.4g}" for label, value in found.items() if value is not None]
        rows.append({"quantity": f"long skip {index}", "value": ", ".join(parts)})
    return rows


def draw_readings(history: Sequence[Reading], alarms: Sequence[Alarm] = ()) -> "Figure":
    """Six panels over the steps. Alarms are vertical lines in all of them."""
    figure = needs("matplotlib.figure", "report", "drawing readings").Figure(figsize=(11, 5.6), layout="constrained")
    many = needs("matplotlib", "report", "drawing readings").colormaps["viridis"]
    for axes, (kind, title) in zip(figure.subplots(2, 3, sharex=True).flatten().tolist(), DRAWN.items(), strict=True):
        names = names_of(history, kind)
        for place, name in enumerate(names):
            colour = many(0.9 * place / (len(names) - 1)) if len(names) > 1 else "#0072b2"
            named = len(names) <= LEGEND or place in (0, len(names) - 1)
            # An underscore is matplotlib's sign for "not in the legend".
            _draw(axes, history, name, color=colour, label=name.partition("/")[2] if named else "_")
        if len(names) > 1:
            axes.legend(fontsize=7, frameon=False, ncols=2)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        _finish(axes, [alarm.step for alarm in alarms], log=kind not in ("kappa/", "similarity/"))
    return figure


def names_of(history: Sequence[Reading], kind: str) -> list[str]:
    """The quantities of a kind, in the order of the network. The probe batch stays the same: what changes there is the
    network."""
    known = dict.fromkeys(name for reading in history for name in reading)
    probed = [name for name in known if name.startswith(f"probe_{kind}")]
    return probed or [name for name in known if name == kind or (kind.endswith("/") and name.startswith(kind))]


def _draw(axes: "Axes", history: Sequence[Reading], name: str, **style: Any) -> None:
    """What was not recorded or is not finite leaves a gap."""
    points = [(reading["step"], reading[name]) for reading in history if name in reading]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    marker = "o" if len(points) <= 40 else ""
    axes.plot([step for step, _ in points], values, marker=marker, markersize=3, linewidth=1.3, **style)


def _finish(axes: "Axes", alarms: Sequence[float], log: bool) -> None:
    lines: list[Any] = list(axes.lines)
    drawn = [value for line in lines for value in line.get_ydata() if math.isfinite(value)]
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#8a8a8a")
    # Over a wide range only; narrow ones are easier to read on a plain axis, which always has numbers.
    elif log and min(drawn) > 0 and max(drawn) > 10 * min(drawn):
        axes.set_yscale("log")
    for step in sorted(set(alarms)):
        axes.axvline(step, color="#cc3311", linestyle=":", linewidth=1)
