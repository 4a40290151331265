"""Sampling that runs the inner part of a U at every k-th step only, for any network whose long skips are found.

    with cached(unet, depth=1, every=3) as cache:
        images = pipeline(...).images
    print(cache)

At a full step everything runs, and the results of the modules inside long skip `depth` are kept. At the steps in
between only the shell runs: what lies outside that skip. Its merge takes the main path of the last full step
(DeepCache, arXiv 2312.00858). Which modules lie inside follows from one recorded forward: those whose results reach
the output through the main path of that merge alone. They return what was kept, so that none of their layers runs.

It is right or refused, as scaling is: on the first inputs a step from the cache is compared with a forward whose merge
is given the kept main path by a dispatch mode, which shares no code with it.
"""

import inspect
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CacheError, InvalidConfigError, UnsupportedModelError, VerificationError
from ..tracing import Call, Merge, Trace, untouched
from .attach import attached, paused
from .find import Patterns, record_forward, select_skips
from .host import native_plan, unwrap
from .reruns import tensors_in
from .sequence import TIMES, Steps
from .verify import changing_operand, difference, verifying

Schedule = Collection[int] | Callable[[int], bool]

_KEY = "_scalelong_cache"


def cached(
    model: nn.Module,
    *,
    depth: int = 1,
    every: int = 3,
    full: Schedule | None = None,
    time: str | None = None,
    passes: int | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
) -> "Cached":
    """A context in which the model, while it samples, runs its inner part at some steps only. Nothing is left behind.

    depth: the long skip whose shell runs at every step; 1 is the outermost, and the cheapest.
    every: the inner part runs at steps 0, every, 2 every, ... With 1 the model computes what it always does.
    full: instead, the numbers of these steps, or a function that says whether a step is one of them. `full_steps`
        places them where images change most.
    time: the argument of the model that says how far sampling is, if it has none of the usual names. Forwards with
        equal times are one step: guidance in two forwards keeps two caches.
    passes: so many forwards are one step, whatever their times. For models without a time, and for solvers that call
        the model several times at one time and mean several steps.
    include, exclude: as for `find_skips`.

    A sequence of steps begins anew when the time goes back, and after `reset()`. Training and gradients are refused,
    and so is a condition or a size that changes in the middle of a sequence.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise InvalidConfigError(f"depth must be the number of a long skip, from 1, got {depth!r}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidConfigError(f"every must be a whole number of steps, at least 1, got {every!r}")
    if passes is not None and (isinstance(passes, bool) or not isinstance(passes, int) or passes < 1):
        raise InvalidConfigError(f"passes must be a whole number, at least 1, got {passes!r}")
    is_full = _schedule(every, full)
    times = TIMES if time is None else (time,)
    return Cached(_host(model), depth, is_full, times, passes, (include, exclude), verify)


def cache_(model: nn.Module, **options: Any) -> "Cached":
    """The same without a `with`: the model keeps its cache until `uncache_(model)`. The options are those of `cached`.

    cache = cache_(pipeline.unet, depth=1, every=3)
    images = pipeline(...).images
    uncache_(pipeline.unet)
    """
    return cached(model, **options).__enter__()


def uncache_(model: nn.Module) -> nn.Module:
    """Undo `cache_`. The model computes what it did before, bit for bit. Returns the model."""
    host = _host(model, compiled=True)
    cache = host.__dict__.get(_KEY)
    if cache is None:
        raise CacheError(f"this {type(host).__name__} has no cache; `cache_` gives it one")
    cache.__exit__()
    return model


def full_steps(steps: int, count: int, *, centre: float | None = None, power: float = 1.4) -> list[int]:
    """The numbers of `count` full steps among `steps`, closest to each other around `centre` (DeepCache, Eq. 10).

    Evenly spaced numbers l become sign(l) |l|^power + centre. Power 1 spaces the steps evenly; the centre is by default
    that of all steps. Step 0 is always among them, and numbers that coincide count once.
    """
    centre = steps / 2 if centre is None else centre
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in (steps, count))
    if not whole or count > steps or power < 1 or not 0 <= centre <= steps:
        raise InvalidConfigError(
            f"full_steps needs 1 <= count <= steps, a power of at least 1 and a centre from 0 to steps; got "
            f"steps={steps!r}, count={count!r}, centre={centre!r}, power={power!r}"
        )

    low, high = -(centre ** (1 / power)), (steps - centre) ** (1 / power)
    found = {0}
    for number in range(count):
        place = low + (high - low) * number / count
        found.add(min(steps - 1, int((abs(place) ** power) * (1 if place > 0 else -1) + centre + 1e-9)))
    return sorted(found)


def _host(model: Any, compiled: bool = False) -> nn.Module:
    if not isinstance(model, nn.Module):
        part = next((name for name in ("unet", "transformer") if isinstance(getattr(model, name, None), nn.Module)), "")
        advice = f": give its .{part}" if part else ""
        raise UnsupportedModelError(
            f"the inner part of an nn.Module can be cached, not of a {type(model).__name__}{advice}"
        )
    host = unwrap(model)
    if not compiled and any(_is_compiled(module) for module in (model, host)):
        _refuse_compiled(host, "it")
    return host


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _refuse_compiled(host: nn.Module, what: str) -> NoReturn:
    raise CacheError(
        f"{type(host).__name__} is compiled ({what}), and compiled code does not ask whether a module should run: "
        f"use the model as it is without torch.compile, or compile blocks that lie whole inside or outside the skip"
    )


def _called_by_compiler() -> bool:
    """Whether a compiled function is on the stack: the compiler runs hooks as they are where it cannot trace them."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    place, frame = sys.modules["torch._dynamo.eval_frame"].__file__, sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == place:
            return True
        frame = frame.f_back
    return False


def _not_compiled() -> Any:
    """Compiled blocks run as they are written: a recording sees nothing of compiled code."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _schedule(every: int, full: Schedule | None) -> Callable[[int], bool]:
    if full is None:
        return lambda step: step % every == 0
    if callable(full):
        return full
    steps = set(full)
    if 0 not in steps:
        raise InvalidConfigError(f"the first step must be a full one: full={sorted(steps)} has no 0")
    return steps.__contains__


@dataclass(frozen=True)
class Inner:
    """The part of a forward that a cache stands in for."""

    calls: frozenset[tuple[str, int]]
    """The outermost module calls in it, by name and number."""
    counts: dict[str, int]
    """How often these modules are called in a forward, inside and outside it."""
    layers: int
    """Layers that do not run."""
    all_layers: int
    merge: Merge | None
    """That of the long skip; None for a model that merges itself."""
    operand: int
    block: str
    """The block that gets main path and skip, of a model that merges itself."""
    copies: bool = True
    """Whether callers get copies of what is kept, because some of them write into it."""


class Cached:
    """See `cached`. `full_steps`, `cached_steps` and `share` tell what was saved. It may be entered again."""

    def __init__(
        self,
        host: nn.Module,
        depth: int,
        is_full: Callable[[int], bool],
        times: tuple[str, ...],
        passes: int | None,
        patterns: tuple[Patterns, Patterns],
        verify: bool,
    ) -> None:
        self.host, self.depth = host, depth
        self.full_steps = self.cached_steps = 0
        self.inner: Inner | None = None
        """Of the most recent forward."""
        self._inners: dict[Any, Inner] = {}
        """By the kind of the inputs."""
        self._is_full, self._patterns, self._verify = is_full, patterns, verify
        self._steps = Steps(host, times, passes)
        self._mode, self._owner = "plain", 0
        self._counts: dict[str, int] = {}
        self._store: dict[tuple[str, int], Any] = {}
        self._stack = ExitStack()
        self._silence: ExitStack | None = None
        self._placed: dict[str, _StandIn] = {}
        self._scaling: Any = None

    @property
    def share(self) -> float:
        """The share of the model's layers that a step from the cache leaves out."""
        return 0.0 if self.inner is None else self.inner.layers / self.inner.all_layers

    def __str__(self) -> str:
        if self.inner is None:
            return f"cache around long skip {self.depth}: no step yet"
        return (
            f"cache around long skip {self.depth}: {self.full_steps} full forwards and {self.cached_steps} from the "
            f"cache, each without {self.inner.layers} of {self.inner.all_layers} layers"
        )

    def reset(self) -> None:
        """The next step begins a new image."""
        self._steps.close()

    def __enter__(self) -> "Cached":
        inside = [type(module).__name__ for module in self.host.modules() if _KEY in module.__dict__]
        if inside or any(isinstance(m.__dict__.get("forward"), _StandIn) for m in self.host.modules()):
            what = inside[0] if inside else type(self.host).__name__
            raise CacheError(f"this {what} is in a cache already; leave that one first (uncache_, or its `with`)")
        if _is_compiled(self.host):
            _refuse_compiled(self.host, "it")
        self.host.__dict__[_KEY] = self
        self._stack.callback(self.host.__dict__.pop, _KEY, None)
        before = self.host.register_forward_pre_hook(self._begin, with_kwargs=True)
        after = self.host.register_forward_hook(self._end, always_call=True)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        self._stack.callback(self._unplace)
        try:
            self._require_same_scaling()
        except CacheError:
            self._inners = {}
        for name in {name for inner in self._inners.values() for name, _ in inner.calls}:
            self._place(name)
        return self

    def __exit__(self, kind: Any = None, *_: object) -> None:
        self._stack.close()
        self._finish()
        if kind is None:
            self._steps.close()
        self._steps.drop()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """For copy, pickle and torch.save: a copy would go on from a cache that nobody can leave."""
        raise CacheError(
            f"this {type(self.host).__name__} is in a cache and cannot be copied or pickled: leave the `with` or call "
            f"uncache_ first"
        )

    # One forward

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or _called_by_compiler():
            _refuse_compiled(self.host, "it is called through torch.compile")
        thread = threading.get_ident()
        if verifying() or (self._mode == "check" and self._owner == thread):
            return  # a forward beside the one that is meant, to compare with
        if self._mode != "plain":
            self._require_alone()
        self._owner = thread
        self._require_sampling(args, kwargs)
        self._require_same_scaling()
        try:
            kind = self._steps.advance(args, kwargs)
            if kind not in self._inners:
                self._prepare(args, kwargs, kind)
        except BaseException:
            self._steps.drop()
            raise
        self.inner = self._inners[kind]
        self._counts = {}
        kept = self._steps.kept
        if kept is None or self._is_full(self._steps.number):
            self.full_steps += 1
            self._mode, self._store = "full", {}
        else:
            self.cached_steps += 1
            self._mode, self._store = "cached", kept
            self._expect_less()

    def _end(self, _: nn.Module, __: Any, result: Any) -> None:
        """Also after an exception, with no result."""
        if verifying() or self._mode in ("check", "plain") or self._owner != threading.get_ident():
            return
        mode, inner = self._mode, self.inner
        self._finish()
        if result is None or inner is None:
            self._steps.drop()
            return
        for name, count in inner.counts.items():
            if self._counts.get(name, 0) != count:
                self._steps.drop()
                raise CacheError(
                    f"this forward of {type(self.host).__name__} took another way than the first one: it called {name} "
                    f"{self._counts.get(name, 0)} times instead of {count}. A network that decides by its inputs which "
                    f"modules run cannot be cached"
                )
        self._steps.keep(self._store, fresh=mode == "full")

    def _finish(self) -> None:
        if self._silence is not None:
            self._silence.close()
            self._silence = None
        self._mode = "plain"

    def _require_alone(self) -> None:
        """A forward began and did not end: it is still running, or Ctrl-C ended it, which calls no hooks."""
        call = nn.Module._call_impl.__code__
        for thread, frame in sys._current_frames().items():
            running, at = 0, frame
            while at is not None:
                running += at.f_code is call and at.f_locals.get("self") is self.host
                at = at.f_back
            if running > (thread == threading.get_ident()):
                raise CacheError(
                    f"a forward of this {type(self.host).__name__} began while another one runs, in another thread or "
                    f"inside itself: a cache is for one loop of sampling at a time"
                )
        self._finish()
        self._steps.drop()

    def _require_sampling(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        host = self.host
        grad = torch.is_grad_enabled() and (
            any(p.requires_grad for p in host.parameters()) or any(t.requires_grad for t in tensors_in((args, kwargs)))
        )
        if grad or any(module.training for module in host.modules()):
            raise CacheError(
                "a cache is for sampling: call model.eval() and sample under torch.no_grad(); there are no gradients "
                "through what was computed at another step"
            )

    def _require_same_scaling(self) -> None:
        """What was found and checked is that of the model as it was scaled then."""
        now = (attached(self.host), getattr(self.host, "skip_scaling", None))
        if self._inners and any(a is not b for a, b in zip(now, self._scaling, strict=True)):
            raise CacheError(
                "the long skips were scaled, or unscaled, while the model was in a cache: leave it first (uncache_)"
            )

    def _expect_less(self) -> None:
        """Long skips in the inner part are not merged at this step, and the scaling must not miss them."""
        state = attached(self.host)
        self._silence = ExitStack()
        if state is not None:
            self._silence.enter_context(state.tally.partly())

    # The inner part

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any) -> None:
        """Find the inner part for inputs of a new kind, put stand-ins there, and check a step from the cache."""
        host = self.host
        if any(module is not host and _KEY in module.__dict__ for module in host.modules()):
            raise CacheError(f"a part of this {type(host).__name__} is in a cache of its own; leave that one first")
        self._scaling = (attached(host), getattr(host, "skip_scaling", None))
        self._mode = "check"
        before = set(self._placed)
        try:
            with _not_compiled():
                trace = record_forward(host, *_copied((args, kwargs)))
                inner = self.inner = _inner(host, trace, self.depth, self._patterns)
                for name in {name for name, _ in inner.calls}:
                    self._place(name)
                if self._verify:
                    inner = self._check((args, kwargs))
        except BaseException:
            self._unplace(keep=before)
            self.inner = None
            raise
        finally:
            self._mode = "plain"
        self._inners[kind] = inner

    def _place(self, name: str) -> None:
        if name in self._placed:
            return
        parts = name.split(".")
        around = [self.host.get_submodule(".".join(parts[:n])) for n in range(len(parts))]
        compiled = [".".join(parts[:n]) or "it" for n, module in enumerate(around) if _is_compiled(module)]
        if compiled:
            _refuse_compiled(self.host, compiled[0])
        self._placed[name] = _StandIn(self, name, self.host.get_submodule(name))

    def _unplace(self, keep: Collection[str] = ()) -> None:
        for name in [name for name in reversed(self._placed) if name not in keep]:
            self._placed.pop(name).remove()

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What an inner module returns: its result, which is kept at a full step, or what was kept."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        inner, key = self.inner, (name, number)
        if self._mode not in ("full", "cached") or inner is None or key not in inner.calls or verifying():
            return forward(*args, **kwargs)
        if self._mode == "cached":
            return _packed(self._store[key], inner.copies)
        result = forward(*args, **kwargs)
        self._store[key] = _packed(result, inner.copies)
        return result

    # The check

    def _check(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Inner:
        """A step from the cache, against a forward whose merge is given the kept main path."""
        other = _other_image(call)
        far = None
        with paused(self.host):
            main: list[Tensor] = []
            plain = self._run(call, "check", capture=main)
            wanted = self._run(other, "check", given=main)
            for copies in (False, True):
                assert self.inner is not None
                self.inner = replace(self.inner, copies=copies)
                self._store = {}
                full = self._run(call, "full")
                far = difference(self._run(call, "cached"), plain)
                far = difference(full, plain) if far is None else far
                far = difference(self._run(other, "cached"), wanted) if far is None else far
                # Once more: a caller may write into what it was given.
                far = difference(self._run(call, "cached"), plain) if far is None else far
                if far is None:
                    return self.inner
        raise VerificationError(
            f"a step from the cache differs by {far:.1e} from a forward that is given the main path of the last full "
            f"step at long skip {self.depth}: {type(self.host).__name__} keeps something between forwards, draws "
            f"random numbers that do not follow torch's seed, or reads the main path elsewhere as well (a gate on the "
            f"skip): take another depth. Nothing was changed"
        )

    def _run(
        self, call: Any, mode: str, *, capture: list[Tensor] | None = None, given: list[Tensor] | None = None
    ) -> list[Tensor]:
        args, kwargs = _copied(call)
        before = self._mode
        self._counts = {}
        with ExitStack() as stack:
            stack.enter_context(untouched(self.host))
            stack.enter_context(torch.no_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            random.seed(0)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            if capture is not None or given is not None:
                stack.enter_context(self._at_merge(capture, given))
            self._mode = mode
            try:
                output = self.host.forward(*args, **kwargs)
            finally:
                self._mode = before
        return [tensor.detach().clone() for tensor in tensors_in(output)]

    @contextmanager
    def _at_merge(self, capture: list[Tensor] | None, given: list[Tensor] | None) -> Iterator[None]:
        """Look at the main path where the merge takes it, or put another one in its place."""

        def change(tensor: Tensor) -> Tensor:
            if capture is not None:
                capture.append(tensor.detach().clone())
                return tensor
            assert given is not None
            return given[0].to(tensor)

        assert self.inner is not None
        if self.inner.merge is not None:
            with changing_operand(self.inner.merge, self.inner.operand, change):
                yield
            return

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return change(args[0]), *args[1:]

        handle = self.host.get_submodule(self.inner.block).register_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()


class _StandIn:
    """Stands where a module of the inner part is called: in its forward, or around its compiled call."""

    def __init__(self, cache: Cached, name: str, module: nn.Module) -> None:
        self.cache, self.name, self.module = cache, name, module
        self.place = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.own = module.__dict__.get(self.place)
        self.forward = getattr(module, self.place)
        self.__signature__ = inspect.signature(module.forward)
        module.__dict__[self.place] = self

    def remove(self) -> None:
        if self.own is None:
            del self.module.__dict__[self.place]
        else:
            self.module.__dict__[self.place] = self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cache.call(self.name, self.forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.cache.__reduce_ex__(protocol)


def _inner(host: nn.Module, trace: Trace, depth: int, patterns: tuple[Patterns, Patterns]) -> Inner:
    """What reaches the output through the main path at merge `depth` alone, as module calls."""
    merge, operand, block = None, -1, ""
    native = native_plan(host)
    if native is not None:
        _require_depth(depth, len(native))
        block = native.skips[depth - 1].consumer
        calls = [call for call in trace.calls if call.name == block]
        if not block or len(calls) != 1:
            raise CacheError(f"which block of {type(host).__name__} takes long skip {depth} is not known")
        main = calls[0].inputs[0][1]
    else:
        selection = select_skips(trace, *patterns)
        _require_depth(depth, len(selection.chosen))
        if selection.repeats > 1:
            raise CacheError(f"{type(host).__name__} runs its U {selection.repeats} times in one forward")
        candidate = selection.chosen[depth - 1]
        merge, operand, main = candidate.merge, candidate.main, candidate.main_node
    needed = _needed(trace, main)
    inner = [call for call in trace.calls if _is_inner(call, needed, main)]
    outermost = [call for call in inner if not any(other is not call and other in inner for other in call.stack())]
    if not outermost:
        raise CacheError(f"no module of {type(host).__name__} lies inside long skip {depth}")
    fresh = _fresh(trace, needed, main, outermost)
    if fresh is not None:
        raise CacheError(
            f"the main path that enters the merge of long skip {depth} is computed from {fresh} outside any module, "
            f"so that it cannot be kept: put that computation into a module, or take another depth"
        )
    layers = [node.index for node in trace.nodes if node.is_layer]
    left_out = sum(any(call.contains(node) for call in outermost) for node in layers)
    numbers = frozenset((call.name, call.number) for call in outermost)
    called = Counter(call.name for call in trace.calls)
    counts = {name: called[name] for name, _ in numbers}
    return Inner(numbers, counts, left_out, len(layers), merge, operand, block)


def _require_depth(depth: int, count: int) -> None:
    if depth > count:
        raise CacheError(f"depth={depth}, but there are {count} long skips: choose 1, the outermost, to {count}")


def _needed(trace: Trace, main: int) -> set[int]:
    """The nodes that the outputs depend on if the main path at the merge is given."""
    needed: set[int] = set()
    waiting = list(trace.outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node == main else trace.nodes[node].inputs
    return needed


def _is_inner(call: Call, needed: set[int], main: int) -> bool:
    """Whether nothing in the call is needed but the main path that it returns, nor what it does to lists."""
    if call.parent is None or call.end <= call.start or call.pops_list:
        return False
    inside = [node for node in range(call.start, call.end) if node in needed]
    return not inside or (inside == [main] and any(node == main for _, node in call.outputs))


def _fresh(trace: Trace, needed: set[int], main: int, kept: list[Call]) -> str | None:
    """A node of this step that the main path would be computed from; None if all of it comes from what is kept."""
    waiting, seen = [main], set()
    while waiting:
        node = waiting.pop()
        if node in seen or any(call.contains(node) for call in kept):
            continue
        seen.add(node)
        at = trace.nodes[node]
        if (node in needed and node != main) or not at.inputs:
            return f"{at.name} {tuple(at.shape)}" + (f" in {at.call.name}" if at.call and at.call.name else "")
        waiting += at.inputs
    return None


def _packed(value: Any, copies: bool) -> Any:
    """Containers of its own, because callers empty and extend them; tensors too where callers write into them."""
    return pytree.tree_map(lambda leaf: leaf.clone() if copies and isinstance(leaf, Tensor) else leaf, value)


def _copied(call: Any) -> tuple[Any, Any]:
    args, kwargs = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, call)
    return args, kwargs


def _other_image(call: Any) -> Any:
    """The same call with another image: noise on the first floating-point tensor with positions."""
    done = False
    generator = torch.Generator().manual_seed(1)

    def changed(value: Any) -> Any:
        nonlocal done
        if done or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return value
        done = True
        return value + torch.randn(value.shape, generator=generator).to(value)

    return pytree.tree_map(changed, call)
