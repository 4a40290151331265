"""Find the long skips of any U-shaped model."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from ..errors import (
    AmbiguousSkipsError,
    ExampleInputsError,
    InvalidConfigError,
    NoLongSkipsError,
    ScaleLongError,
    UnreachableSkipError,
    UnsupportedModelError,
)
from ..scaling import SkipSite
from ..tracing import Merge, Trace, record
from .axes import merge_axis
from .candidates import Candidate, around_nothing, candidates, longest_chain, remembered
from .known import CHOICES, STATE, ExampleInputs, example_call, native_plan, unwrap, without_freeu
from .nest import Selection, innermost_around_nothing, select, select_all
from .plan import LeftOut, LongSkip, PlannedMerge, Readers, SkipPlan
from .reach import places_of
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
    """Find the long skips of the model, and how each can be scaled. The model is left as it was.

    The model runs once on `example_inputs`, a tuple of positional or a dictionary of keyword arguments; for diffusers'
    UNets and U-ViT they can be left out. Meta and fake tensors will do. `include` and `exclude` are patterns
    (`"decoder.*"`) for the producer, the module of the merge, its kind or its place in the source (`"unet.py:12"`).

    In networks without a middle block the innermost decoder block gets one tensor twice, as its input and as its skip
    (`cat([x, x])`; MDTv2, Skip-DiT). Their code pops it from the list like all others, so it has a κ of its own: it
    counts as skip N, unless `innermost="leave out"`. The plan names what it leaves out below its table.

    Raises NoLongSkipsError if there are none and AmbiguousSkipsError if it is not certain which they are.
    """
    host = unwrap(model)
    if not isinstance(host, nn.Module) or isinstance(host, torch.jit.ScriptModule):
        raise UnsupportedModelError(f"long skips are found in nn.Modules, not in a {type(host).__name__}")
    if any(base.__module__.startswith("torch.export") for base in type(host).__mro__):
        raise UnsupportedModelError("a program of torch.export is not searched: scale the model, then export it")
    plan = native_plan(host)
    if plan is not None:
        return plan
    args, kwargs = example_call(host, example_inputs)
    state = host.__dict__.get(STATE)
    with nullcontext() if state is None else state.paused(host):
        wanted = _Wanted(include, exclude, innermost == "count")
        known = CHOICES.get(type(host).__name__) if include is None and exclude is None else None
        if known is not None:
            with suppress(NoLongSkipsError):  # a class of the same name that is a different one
                return _find(host, args, kwargs, replace(wanted, include=known[0], exclude=known[1]))
        return _find(host, args, kwargs, wanted)


def _find(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: "_Wanted") -> SkipPlan:
    # A second, closer look only where it is needed: at the calls of plain functions as well.
    for functions in (False, True):
        try:
            with without_freeu(host):
                trace = record(host, args, kwargs, functions=functions)
        except ScaleLongError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())[:500]
            raise ExampleInputsError(
                f"{type(host).__name__} could not run on the example inputs, its code raises {type(error).__name__}: "
                f"{words}. Check the inputs, or how the model was built"
            ) from error
        plan = _plan_of(trace, wanted)
        if all(skip.places.skip is not None for skip in plan):
            break
    return plan


@dataclass(frozen=True)
class _Wanted:
    """The merges that the caller means."""

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
    if any(merge.named for merge in trace.merges):
        return _named_plan(trace)
    if trace.later is not None:
        _refuse_memory(trace.later, wanted)
    itself = [c for c in around_nothing(trace) if wanted.accepts(trace, c)]
    selection = _select_skips(trace, wanted, itself)
    chosen, left_out = selection.chosen, selection.left_out
    innermost = innermost_around_nothing(chosen, itself) if wanted.innermost else None
    if innermost is not None:
        chosen = [*chosen, innermost]
    reason = "a tensor that is merged with itself"
    left_out = left_out + [(c, reason) for c in itself if innermost is None or c.end != innermost.end]
    merges = sorted({(c.end, c.merge.kind, c.merge.site.text, reason) for c, reason in left_out})
    counts = Counter(merge[1:] for merge in merges)
    places = [LeftOut(kind=k, location=at, count=n, reason=reason) for (k, at, reason), n in counts.items()]
    return replace(_plan(trace, chosen, selection.repeats), left_out=tuple(places))


def _named_plan(trace: Trace) -> SkipPlan:
    """The plan of a model that names its merges itself, by `scalelong.merge(x, skip, i)`."""
    merges: defaultdict[int, list[Merge]] = defaultdict(list)
    for merge in trace.merges:
        if merge.named is not None:
            merges[merge.named[0]].append(merge)
    if sorted(merges) != list(range(1, len(merges) + 1)):
        raise InvalidConfigError(
            f"scalelong.merge numbers the long skips from 1, the outermost, to N; this {type(trace.model).__name__} "
            f"has {', '.join(map(str, sorted(merges)))}"
        )
    found = {c.end: c for rank in (2, 3) for c in candidates(trace, rank) if c.operand == 1}
    skips = []
    for index, (first, *others) in sorted(merges.items()):
        if None in first.operands:
            raise UnsupportedModelError(f"an operand of scalelong.merge {index} does not depend on the inputs")
        candidate = found.get(first.node) or Candidate(trace, first, 1, 0, first.operands[1] or 0, 0, 0)
        skip = _describe(trace, candidate, index, 1)
        several = Readers(unfoldable="it is merged several times in a forward")
        skips.append(skip.replace(readers=several) if others else skip)
    return SkipPlan(type(trace.model).__name__, tuple(skips), max(map(len, merges.values())))


def _select_skips(trace: Trace, wanted: _Wanted, itself: Sequence[Candidate]) -> Selection:
    """The merges of the long skips in a recorded forward, outermost first."""
    found, selection = [], Selection([])
    # Features have positions next to their channels. Only where none of these form a U, those of graphs may.
    for rank in (3, 2):
        found = [c for c in candidates(trace, rank) if wanted.accepts(trace, c)]
        selection = select(trace, found, itself if wanted.innermost else ())
        if wanted.include is not None and not selection.chosen:
            selection = select_all(found)
        if selection.chosen or selection.doubtful:
            break
    if selection.doubtful:
        raise _ambiguous(trace, selection)
    if not selection.chosen:
        raise _nothing(trace, found, wanted)
    if selection.hidden:
        raise _hidden(trace, selection, wanted, itself)
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


def _plan(trace: Trace, chosen: Sequence[Candidate], repeats: int) -> SkipPlan:
    skips = tuple(_describe(trace, candidate, i, repeats) for i, candidate in enumerate(chosen, start=1))
    return SkipPlan(type(trace.model).__name__, skips, repeats)


def _describe(trace: Trace, candidate: Candidate, index: int, repeats: int) -> LongSkip:
    if any(call.is_mapped and candidate.start <= call.start < candidate.end for call in trace.calls):
        raise UnsupportedModelError(
            f"the merge at {candidate.merge.site.text} runs under torch.vmap, where modules do not see the shapes of "
            f"the features, so that {type(trace.model).__name__} cannot be scaled. Call the network on the whole batch "
            f"there, without vmap"
        )
    merge, places = candidate.merge, places_of(trace, candidate, repeats)
    place, shape = places.skip, merge.shapes[candidate.operand]
    source, last = trace.producer(candidate.start), trace.producer(candidate.skip_node)
    place_in_source = (merge.site.text, merge.call.name, merge.kind)
    here = [m.node for m in trace.merges if (m.site.text, m.call.name, m.kind) == place_in_source]
    own_axis = merge_axis(trace, merge, candidate.skip_node)
    axis = own_axis if place is None else place.axis
    is_last = axis == len(shape) - 1 and axis > 1
    are_tokens = len(shape) == 3 and is_last
    # With a vector for each position, the number of tokens can never change.
    positions = [p for p in trace.model.parameters() if p.shape[-2:] == shape[1:] and p.numel() == math.prod(shape[1:])]
    return LongSkip(
        index=index,
        producer=source if source == last else f"{source} via {last}",
        consumer=place.module if place is not None and place.kind == "concat argument" else merge.call.name,
        shape=shape,
        site=SkipSite(
            index=index,
            channels=shape[own_axis],
            channel_axis=-1 if is_last else axis,
            main_channels=merge.shapes[candidate.main][merge.axis] if merge.axis is not None else None,
            tokens=shape[1] if are_tokens else None,
            fixed_tokens=are_tokens and bool(positions),
        ),
        merge=PlannedMerge(
            kind=merge.kind,
            location=merge.site.text,
            module=merge.call.name,
            occurrence=here.index(merge.node),
            operand=candidate.operand,
            main_operand=candidate.main,
        ),
        places=places,
        readers=readers_of(trace, candidate, repeats),
    )


def _ambiguous(trace: Trace, selection: Selection) -> AmbiguousSkipsError:
    everything = sorted([*selection.chosen, *selection.doubtful], key=lambda c: (c.start, -c.end))
    plan = _plan(trace, everything, 1)
    if len(longest_chain(everything)) == len(everything):
        doubtful = sorted(n for n, c in enumerate(everything, 1) if c in selection.doubtful)
        reason = f"; whether {', '.join(map(str, doubtful))} is one of them or belongs to a block, nothing says"
    else:
        reason = " that do not form one nest, as in UNet++, UNet3+ or stacked hourglasses"
    return AmbiguousSkipsError(
        f"{type(trace.model).__name__} has {len(everything)} candidates for long skips{reason}:\n\n{plan}\n\nSay "
        f"which are meant: with include= or exclude= (patterns for the names above), by number with "
        f"plan=error.plan.select([...]), or in the code of the model with scalelong.merge(x, skip, i), also where one "
        f"U runs several times in a forward",
        plan,
    )


def _hidden(trace: Trace, selection: Selection, wanted: _Wanted, itself: Sequence[Candidate]) -> UnreachableSkipError:
    merges = [c.merge for c in selection.hidden]
    places = ", ".join(dict.fromkeys(f"{m.name.rstrip('_')} at {m.site.text}" for m in merges))
    # What is proposed was tried.
    known = [wanted.exclude] if isinstance(wanted.exclude, str) else [*(wanted.exclude or ())]
    exclude = [*known, *dict.fromkeys(m.site.text for m in merges)]
    try:
        _select_skips(trace, replace(wanted, exclude=exclude), itself)
        patterns = exclude[0] if len(exclude) == 1 else exclude
        way = f", or leave these merges out by exclude={patterns!r} if they are no long skips"
    except ScaleLongError:
        way = ", or name all merges by scalelong.merge(x, skip, i)"
    return UnreachableSkipError(
        f"{type(trace.model).__name__} has {len(selection.chosen)} long skips that can be scaled, and among them "
        f"features that are merged in a different way: {places}. Whether these are long skips is not known, and the "
        f"numbers of the others depend on it. Merge by torch.cat or an addition there{way}"
    )


def _nothing(trace: Trace, found: list[Candidate], wanted: _Wanted) -> NoLongSkipsError:
    counts = Counter(merge.kind for merge in trace.merges)
    given = (wanted.include, wanted.exclude)
    patterns = "" if given == (None, None) else f" (include={wanted.include!r}, exclude={wanted.exclude!r})"
    shortcuts = sum(candidate.merge.is_scalable for candidate in found)
    return NoLongSkipsError(
        f"no long skip in {type(trace.model).__name__}{patterns}: looked at {len(trace.nodes)} operations in "
        f"{len(trace.calls)} module calls, with {counts['cat']} concatenations, {counts['add']} additions and "
        f"{counts['lerp']} interpolations of tensors. {shortcuts} of them join a path with a shortcut around it, but "
        f"these follow each other (residual and dense blocks) instead of lying one inside the other, as in a U. Long "
        f"skips that are merged in other ways (slice assignments, stacks) can be named by scalelong.merge(x, skip, i)"
    )
