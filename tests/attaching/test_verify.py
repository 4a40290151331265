"""A scaled model is verified: when it is scaled, at the first forward with new inputs, and counted in every forward."""

import copy
import pickle
import random
import threading
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import scalelong as sl

C = 6


def images(size: int = 16, batch: int = 2) -> tuple[torch.Tensor]:
    torch.manual_seed(5)
    return (torch.randn(batch, 3, size, size),)


class Concat(nn.Module):
    """Three levels with concatenations, which the decoder's convolutions take: scaled by hooks."""

    joined = 2 * C

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, C, 3, 1, 1), nn.Conv2d(C, 3, 3, 1, 1)
        self.down = nn.ModuleList(nn.Conv2d(C, C, 3, 2, 1) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm2d(C) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(C, C, 2, 2) for _ in range(3))
        self.dec = nn.ModuleList(nn.Conv2d(self.joined, C, 3, 1, 1) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def encode(self, x):
        h, skips = F.silu(self.stem(x)), []
        for down, norm in zip(self.down, self.norm, strict=True):
            skips.append(h)
            h = self.dropout(F.silu(norm(down(h))))
        return h, skips

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(torch.cat([up(h), skips.pop()], 1)))
        return self.head(h)


class Added(Concat):
    """The same with additions in the text of the forward: scaled by rewriting."""

    joined = C

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(up(h) + skips.pop()))
        return self.head(h)


NETWORKS = [Concat, Added]
KAPPAS = (1.0, 0.5, 0.25)
CONFIG = sl.CustomScaling(KAPPAS)


def expected(scaled: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The formula, written out, with the weights of the model in a new one."""
    assert isinstance(scaled, Concat)
    model = type(scaled)().eval()
    h, skips = model.encode(x)
    for i, up, dec in zip((3, 2, 1), model.up, model.dec, strict=True):
        skip = KAPPAS[i - 1] * skips.pop()
        h = F.silu(dec(up(h) + skip if isinstance(model, Added) else torch.cat([up(h), skip], 1)))
    return model.head(h)


def misplaced(model: nn.Module) -> sl.SkipPlan:
    """A plan whose second and third skip are scaled in each other's place."""
    plan = sl.find_skips(model, images())
    second, third = plan[2], plan[3]
    swapped = (plan[1], replace(second, places=third.places), replace(third, places=second.places))
    return replace(plan, skips=swapped)


@pytest.mark.parametrize("make", NETWORKS)
def test_a_plan_that_scales_the_wrong_places_is_refused_and_undone(make):
    model = make().eval()
    before = model(*images())
    with pytest.raises(sl.VerificationError, match=r"long skip 2 .*long skip 3 .*Nothing was changed.*verify=False"):
        sl.scale_skips_(model, CONFIG, images(), plan=misplaced(model))
    assert not sl.is_scaled(model)
    assert torch.equal(model(*images()), before)
    sl.scale_skips_(model, CONFIG, images(), plan=misplaced(model), verify=False)
    assert not torch.allclose(model(*images()), expected(model, *images()))


@pytest.mark.parametrize("make", NETWORKS)
def test_a_scaling_is_verified_on_demand(make):
    model = make().eval()
    sl.scale_skips_(model, CONFIG, plan=misplaced(model))
    with pytest.raises(sl.VerificationError, match="long skip 2"):
        sl.verify(model, images())
    right = sl.scale_skips_(make().eval(), CONFIG, images())
    sl.verify(right, images(32))
    with pytest.raises(sl.VerificationError, match=r"does not run on these inputs.*channels"):
        sl.verify(right, (torch.randn(1, 4, 16, 16),))
    with torch.device("meta"):
        absent = sl.scale_skips_(make(), CONFIG, images())
    with pytest.raises(sl.UnsupportedModelError, match="meta"):
        sl.verify(absent, images())


@pytest.mark.parametrize("make", NETWORKS)
def test_a_scaled_model_runs_once_per_forward(make):
    """Whatever the inputs are: sizes, keywords and small numbers may be new."""
    model = sl.scale_skips_(make().eval(), CONFIG, images())
    runs = []
    model.get_submodule("head").register_forward_hook(lambda *_: runs.append(1))
    for size in (16, 32, 8):
        model(*images(size))
        model(x=images(size)[0])
    assert len(runs) == 6


class Reader:
    """Hooks that measure what goes in and out of a layer, and do other things each time, as a running mean does."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | None = None
        self.calls = 0

    def _read(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        joined = torch.cat([tensor.flatten()] * (self.calls % 3 + 1)) + 1.0
        size = torch.stack([torch.linalg.vector_norm(joined), F.layer_norm(joined, joined.shape).sum()])
        self.mean = size if self.mean is None else 0.9 * self.mean + 0.1 * size

    def before(self, module: nn.Module, args: Any) -> None:
        self._read(args[0])

    def behind(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._read(output)

    def put_on(self, model: nn.Module, prepend: bool) -> None:
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                layer.register_forward_pre_hook(self.before, prepend=prepend)
                layer.register_forward_hook(self.behind, prepend=prepend)


@pytest.mark.parametrize("make", NETWORKS)
def test_a_wrong_plan_is_refused_also_among_hooks_that_read(make):
    model = make().eval()
    sl.scale_skips_(model, CONFIG, plan=misplaced(model))
    Reader().put_on(model, prepend=True)
    with pytest.raises(sl.VerificationError, match="long skip 2"):
        sl.verify(model, images())


class Keeper(Concat):
    """Remembers things, in containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.log = deque([1, 2], maxlen=2), {"sizes": [[0]]}
        self.calls = 0

    def forward(self, x):
        self.history.append(len(x))
        self.log["sizes"][0].append(len(x))
        self.calls += 1
        return super().forward(x + 0.01 * torch.randn_like(x) + random.random())


def test_verification_leaves_no_trace():
    model = Keeper().train()
    model.down[0].eval()
    model(*images()).sum().backward()
    state, history, log = copy.deepcopy(model.state_dict()), list(model.history), copy.deepcopy(model.log)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    flags = [module.training for module in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    wanted = (torch.rand(3), random.random())
    inputs = images()
    torch.manual_seed(3)
    random.seed(3)
    sl.scale_skips_(model, CONFIG, inputs)
    assert torch.equal(torch.rand(3), wanted[0])
    assert random.random() == wanted[1]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert (list(model.history), model.log, model.calls) == (history, log, 1)
    assert [module.training for module in model.modules()] == flags
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients, strict=True))
    sl.unscale_(model)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not any(hooks)
    assert not any(name.startswith("_scalelong") for module in model.modules() for name in vars(module))


class Drops(Added):
    """May leave out a level."""

    left_out: tuple[int, ...] = ()

    def forward(self, x):
        h, skips = self.encode(x)
        for n, (up, dec) in enumerate(zip(self.up, self.dec, strict=True)):
            h, skip = up(h), skips.pop()
            h = F.silu(dec(h if n in self.left_out else h + skip))
        return self.head(h)


@pytest.mark.parametrize("left_out", [(0,), (1,), (2,), (0, 2)])
def test_a_skip_that_is_left_out_is_an_error_and_spoils_nothing(left_out):
    model = Drops().eval()
    sl.scale_skips_(model, CONFIG, images())
    model.left_out = left_out
    with pytest.raises(sl.SkipMismatchError, match="reached 0 times in this forward"):
        model(*images())
    model.left_out = ()
    torch.testing.assert_close(model(*images()), expected(model, *images()))


# Other ways to run a model.


@pytest.mark.parametrize("make", NETWORKS)
def test_compiled_as_a_whole_exported_and_called_functionally(make):
    model = sl.scale_skips_(make().eval(), CONFIG, images())
    with torch.no_grad():
        wanted = expected(model, *images())
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*images()), wanted)
        torch.testing.assert_close(compiled(*images()), wanted)
        torch.testing.assert_close(torch.export.export(model, images()).module()(*images()), wanted)
        torch.testing.assert_close(functional_call(model, dict(model.named_parameters()), images()), wanted)
        torch.testing.assert_close(torch.jit.trace(model, images())(*images()), wanted)  # pyright: ignore


def test_a_compiled_block_in_a_model_that_is_not_compiled():
    model: Any = sl.scale_skips_(Concat().eval(), CONFIG, images())
    with torch.no_grad():
        wanted = expected(model, *images())
        for block in model.dec:
            block.compile(backend="eager")
        for _ in range(3):
            torch.testing.assert_close(model(*images()), wanted)


@pytest.mark.parametrize("make", NETWORKS)
def test_threads_have_a_count_each(make):
    model = sl.scale_skips_(make().eval(), CONFIG, images())
    inputs, wanted = images(), expected(model, *images()).detach()
    results: list[bool] = []

    def work() -> None:
        for _ in range(20):
            with torch.no_grad():
                results.append(torch.allclose(model(*inputs), wanted, atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_a_block_may_be_called_by_itself_and_after_an_exception():
    model: Any = sl.scale_skips_(Concat().eval(), CONFIG, images())
    block, features = model.dec[0], torch.randn(1, 2 * C, 4, 4)
    assert torch.equal(block(features), block(features))
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 4, 16, 16))
    torch.testing.assert_close(model(*images()), expected(model, *images()))


# Functions, not classes, are rewritten.


class Inherited(Added):
    def forward(self, x):
        return super().forward(x)


class Own(Added):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(up(h) + skips.pop()))
        return self.head(h)


@pytest.mark.parametrize("make", [Own, Inherited, Concat])
def test_nothing_but_the_model_in_hand_changes(make):
    """No class, no function, no global variable, and after `unscale_` nothing of the model."""

    def outside():
        codes = [vars(cls)["forward"].__code__ for cls in make.__mro__ if "forward" in vars(cls)]
        return codes, [name for name in globals() if "scalelong" in name], [vars(cls).copy() for cls in make.__mro__]

    model = make().eval()
    before, inside = outside(), {name: set(vars(module)) for name, module in model.named_modules()}
    sl.scale_skips_(model, CONFIG, images())
    assert outside() == before
    sl.unscale_(model)
    assert outside() == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == inside


def test_two_models_of_one_class_with_different_plans():
    plan = sl.find_skips(Added().eval(), images())
    one = sl.scale_skips_(Added().eval(), sl.CustomScaling((0.5,)), images(), plan=plan.select([2]))
    other = sl.scale_skips_(Added().eval(), CONFIG, images())
    plain = Added().eval()(*images())
    torch.testing.assert_close(other(*images()), expected(other, *images()))
    assert not torch.allclose(one(*images()), plain)
    assert not torch.allclose(one(*images()), other(*images()))
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(copied(*images()), one(*images()))
