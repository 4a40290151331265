"""Find the long skips of any U-shaped model."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from ..errors import (
    AmbiguousSkipsError,
    ExampleInputsError,
    NoLongSkipsError,
    ScaleLongError,
    UnreachableSkipError,
    UnsupportedModelError,
)
from ..scaling import SkipSite
from ..tracing import Merge, Trace, record
from .candidates import Candidate, around_nothing, candidates, remembered
from .examples import ExampleInputs, example_call, without_freeu
from .known import KNOWN
from .native import native_plan, paused, unwrap
from .nest import Selection, innermost_around_nothing, proposal, select, select_all
from .plan import Attachment, LeftOut, LongSkip, Places, PlannedMerge, SkipPlan
from .reach import is_direct, merge_axis, obstacle, reach, reach_merged
from .readers import readers_of

Patterns = str | Sequence[str] | None


def find_skips(
    model: nn.Module,
    example_inputs: ExampleInputs = None,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    innermost: Literal["count", "leave out"] = "count",
) -> SkipPlan:
    """Where the long skips of the model are, and how each can be scaled. The model is left as it was.

    The model runs once on `example_inputs`, a tuple of positional or a dictionary of keyword arguments; for diffusers'
    UNets and U-ViT they can be left out. Meta and fake tensors will do. `include` and `exclude` are patterns
    (`"decoder.*"`) for the producer, the module of the merge, its kind or its place in the source (`"unet.py:12"`).

    In networks without a middle block the innermost decoder block gets one tensor twice, as its input and as its skip
    (`cat([x, x])`; MDTv2, Skip-DiT). Their code pops it from the list like all others, so it has a κ of its own: it
    counts as skip N, unless `innermost="leave out"`. What is left out is said below the table of the plan.

    Raises NoLongSkipsError if there are none and AmbiguousSkipsError if it is not certain which they are.
    """
    host = unwrap(model)
    if not isinstance(host, nn.Module) or isinstance(host, torch.jit.ScriptModule):
        raise UnsupportedModelError(f"long skips are found in nn.Modules, not in a {type(host).__name__}")
    if any(base.__module__.startswith("torch.export") for base in type(host).__mro__):
        raise UnsupportedModelError(
            "long skips are found in nn.Modules, not in a program of torch.export: scale the model, then export it"
        )
    plan = native_plan(host)
    if plan is not None:
        return plan
    args, kwargs = example_call(host, example_inputs)
    with paused(host):
        wanted = _Wanted(include, exclude, innermost == "count")
        known = KNOWN.get(type(host).__name__) if include is None and exclude is None else None
        if known is not None:
            with suppress(NoLongSkipsError):  # a class of the same name that is a different one
                return _find(host, args, kwargs, replace(wanted, include=known.include, exclude=known.exclude))
        return _find(host, args, kwargs, wanted)


def _find(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: "_Wanted") -> SkipPlan:
    plan = _plan_of(_record_forward(host, args, kwargs), wanted)
    if any(skip.places.skip is None for skip in plan):
        # A closer look, at the calls of plain functions as well.
        plan = _plan_of(_record_forward(host, args, kwargs, functions=True), wanted)
    return plan


@dataclass(frozen=True)
class _Wanted:
    """What the caller said about which merges are meant."""

    include: Patterns
    exclude: Patterns
    innermost: bool

    def accepts(self, trace: Trace, candidate: Candidate) -> bool:
        if self.include is None and self.exclude is None:
            return True
        merge = candidate.merge
        names = [trace.producer(candidate.start), trace.producer(candidate.skip_node), merge.kind, merge.site.text]
        names += [call.name for call in trace.calls if any(leaf == merge.node for _, leaf in call.inputs)]
        names += [call.name for call in merge.call.stack() if call.parent is not None][:1]
        return (self.include is None or _matches(names, self.include)) and not _matches(names, self.exclude)


def _matches(names: list[str], patterns: Patterns) -> bool:
    listed = [patterns] if isinstance(patterns, str) else patterns or []
    return any(fnmatchcase(name, pattern) for name in names for pattern in listed)


def _plan_of(trace: Trace, wanted: _Wanted) -> SkipPlan:
    if trace.later is not None:
        _refuse_memory(trace.later, wanted)
    selection = _select_skips(trace, wanted)
    chosen, left_out = selection.chosen, selection.left_out
    itself = [c for c in around_nothing(trace) if wanted.accepts(trace, c)]
    innermost = innermost_around_nothing(trace, chosen, itself) if wanted.innermost else None
    if innermost is not None:
        chosen = [*chosen, innermost]
    reason = "a tensor that is merged with itself"
    left_out = left_out + [(c, reason) for c in itself if innermost is None or c.end != innermost.end]
    return replace(_plan(trace, chosen, selection.repeats), left_out=_places_left_out(left_out))


def _places_left_out(found: list[tuple[Candidate, str]]) -> tuple[LeftOut, ...]:
    merges = {(c.end, c.merge.kind, c.merge.site.text, reason) for c, reason in found}
    counts = Counter(place for _, *place in sorted(merges) for place in [tuple(place)])
    return tuple(
        LeftOut(kind=kind, location=location, count=count, reason=reason)
        for (kind, location, reason), count in counts.items()
    )


def _select_skips(trace: Trace, wanted: _Wanted) -> Selection:
    """The merges of the long skips in a recorded forward, outermost first."""
    found, selection = [], Selection([])
    # Features have positions next to their channels. Only where none of these form a U, those of graphs may.
    for rank in (3, 2):
        found = [c for c in candidates(trace, rank) if wanted.accepts(trace, c)]
        selection = select(trace, found)
        if wanted.include is not None and not selection.chosen:
            selection = select_all(trace, found)
        if selection.chosen or selection.doubtful:
            break
    if selection.doubtful:
        raise _ambiguous(trace, selection)
    if not selection.chosen:
        raise _nothing(trace, found, wanted)
    if selection.hidden:
        raise _hidden(trace, selection)
    return selection


def _refuse_memory(later: Trace, wanted: _Wanted) -> None:
    """Refuse a model that merges features of the forward before: whether these are long skips, nothing says."""
    merges = [m for m in remembered(later) if not _matches([m.kind, m.site.text], wanted.exclude)]
    if merges:
        places = ", ".join(dict.fromkeys(merge.site.text for merge in merges))
        raise UnsupportedModelError(
            f"{type(later.model).__name__} keeps features of one forward and merges them in the next one, at {places}. "
            f"Whether these are long skips is not known, and the numbers of the others depend on it. Leave them out by "
            f"exclude={merges[0].site.text!r} if they are none, or scale them in the code of the model"
        )


def _record_forward(
    host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, functions: bool = False
) -> Trace:
    """One forward of the model as if it were not scaled."""
    try:
        with without_freeu(host):
            return record(host, args, kwargs, functions=functions)
    except ScaleLongError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:500]
        raise ExampleInputsError(
            f"{type(host).__name__} could not run on the example inputs, its code raises {type(error).__name__}: "
            f"{said}. Check the inputs, or how the model was built"
        ) from error


def _plan(trace: Trace, chosen: Sequence[Candidate], repeats: int) -> SkipPlan:
    skips = tuple(_describe(trace, candidate, i, repeats) for i, candidate in enumerate(chosen, start=1))
    return SkipPlan(type(trace.model).__name__, skips, repeats)


def _describe(trace: Trace, candidate: Candidate, index: int, repeats: int) -> LongSkip:
    merge = candidate.merge
    attachment = reach(trace, merge, candidate.operand, repeats)
    return LongSkip(
        index=index,
        producer=producer_of(trace, candidate),
        consumer=attachment.module
        if attachment is not None and attachment.kind == "concat argument"
        else merge.call.name,
        shape=merge.shapes[candidate.operand],
        site=_site(trace, candidate, index, attachment),
        merge=PlannedMerge(
            kind=merge.kind,
            location=merge.site.text,
            module=merge.call.name,
            occurrence=occurrence(trace, merge),
            operand=candidate.operand,
            main_operand=candidate.main,
        ),
        places=Places(
            skip=attachment,
            main=_main(trace, candidate, attachment, repeats),
            exact=_exact(trace, candidate, attachment, repeats),
            merged=reach_merged(trace, merge, candidate.operand, repeats),
            obstacle="" if attachment is not None else obstacle(trace, merge),
        ),
        readers=readers_of(trace, candidate, repeats),
    )


def occurrence(trace: Trace, merge: Merge) -> int:
    """Of the merges at one place of the source in one module: which it is."""
    same = [
        m.node
        for m in trace.merges
        if m.site.text == merge.site.text and m.call.name == merge.call.name and m.form is merge.form
    ]
    return same.index(merge.node)


def producer_of(trace: Trace, candidate: Candidate) -> str:
    source, last = trace.producer(candidate.start), trace.producer(candidate.skip_node)
    return source if source == last else f"{source} via {last}"


def _main(trace: Trace, candidate: Candidate, attachment: Attachment | None, repeats: int) -> Attachment | None:
    """Where the main path can be scaled: with the skip in one multiplication, if that is a slice of a concatenation."""
    merge = candidate.merge
    if attachment is None or attachment.length == attachment.channels or merge.axis is None:
        exact = reach(trace, merge, candidate.main, repeats, directly=True)
        return exact or reach(trace, merge, candidate.main, repeats)
    width = merge.shapes[candidate.main][merge.axis]
    return replace(attachment, start=merge.starts[candidate.main], length=width)


def _exact(trace: Trace, candidate: Candidate, attachment: Attachment | None, repeats: int) -> Attachment | None:
    merge, operand = candidate.merge, candidate.operand
    if attachment is None or is_direct(trace, merge, operand):
        return None
    exact = reach(trace, merge, operand, repeats, directly=True)
    return None if exact == attachment else exact


def _site(trace: Trace, candidate: Candidate, index: int, attachment: Attachment | None) -> SkipSite:
    merge = candidate.merge
    shape = merge.shapes[candidate.operand]
    axis = attachment.axis if attachment is not None else merge_axis(trace, merge, candidate.skip_node)
    is_last = axis == len(shape) - 1 and axis > 1
    return SkipSite(
        index=index,
        channels=shape[merge_axis(trace, merge, candidate.skip_node)],
        channel_axis=-1 if is_last else axis,
        main_channels=merge.shapes[candidate.main][merge.axis] if merge.axis is not None else None,
        tokens=shape[1] if len(shape) == 3 and is_last else None,
        fixed_tokens=len(shape) == 3 and is_last and _has_positions(trace, shape[1:]),
    )


def _has_positions(trace: Trace, shape: tuple[int, ...]) -> bool:
    """Whether the model has a vector for each position, so that the number of tokens can never change."""
    return any(p.shape[-2:] == shape and p.numel() == math.prod(shape) for p in trace.model.parameters())


def _ambiguous(trace: Trace, selection: Selection) -> AmbiguousSkipsError:
    everything = sorted([*selection.chosen, *selection.doubtful], key=lambda c: (c.start, -c.end))
    plan = _plan(trace, everything, 1)
    proposed = proposal(trace, selection)
    numbers = [everything.index(candidate) + 1 for candidate in proposed]
    if any(plan[number].places.skip is None for number in numbers):
        numbers = []  # advice that could not be followed
    advice = (
        f"plan=error.plan.select({numbers}) takes the longest nest of one decoder"
        if numbers
        else ("plan=error.plan.select([...]) takes them by number")
    )
    return AmbiguousSkipsError(
        f"{type(trace.model).__name__} has {len(everything)} candidates for long skips that do not form one nest, as "
        f"in UNet++, UNet3+ or stacked hourglasses:\n\n{plan}\n\nSay which are meant: with include= or exclude= "
        f"(patterns for the names above); {advice}",
        plan,
    )


def _hidden(trace: Trace, selection: Selection) -> UnreachableSkipError:
    merges = [c.merge for c in selection.hidden]
    first = merges[0]
    places = ", ".join(dict.fromkeys(f"{m.parts[0].name.rstrip('_')} at {m.site.text}" for m in merges))
    return UnreachableSkipError(
        f"{type(trace.model).__name__} has {len(selection.chosen)} long skips that can be scaled, and among them "
        f"features that are merged in another way: {places}. Whether these are long skips is not known, and the "
        f"numbers of the others depend on it. Merge by torch.cat or an addition there, or leave these merges out by "
        f"exclude={first.site.text!r} if they are no long skips"
    )


def _nothing(trace: Trace, found: list[Candidate], wanted: _Wanted) -> NoLongSkipsError:
    counts = Counter(merge.kind for merge in trace.merges)
    given = (wanted.include, wanted.exclude)
    patterns = "" if given == (None, None) else f" (include={wanted.include!r}, exclude={wanted.exclude!r})"
    shortcuts = sum(candidate.merge.form.is_scalable for candidate in found)
    return NoLongSkipsError(
        f"no long skip in {type(trace.model).__name__}{patterns}: looked at {len(trace.nodes)} operations in "
        f"{len(trace.calls)} module calls, with {counts['cat'] + counts['slice']} concatenations, "
        f"{counts['add'] + counts['stack']} additions and {counts['lerp']} interpolations of tensors. {shortcuts} of "
        f"them join a path with a shortcut around it, but these follow each other (residual and dense blocks) instead "
        f"of lying one inside the other, as in a U. Merges by a maximum, a product or attention are no long skips"
    )
