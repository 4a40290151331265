"""`sl.merge(x, skip, i)`: the author of a network names its merges, and exactly these are scaled."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scalelong as sl

C, X = 8, torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))


class Up(nn.Module):
    """One level of the decoder, which merges."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Conv2d(2 * C if how == "cat" else C, C, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor, i: int) -> Tensor:
        return self.layer(sl.merge(x, skip, i, how=self.how)).tanh()  # pyright: ignore[reportArgumentType]


class Named(nn.Module):
    """A U of three levels. `tied`: all levels of the decoder are one module, which the search refuses."""

    def __init__(self, how: str = "cat", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Conv2d(C, C, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList([Up(how)] * 3 if tied else [Up(how) for _ in range(3)])
        self.kappas = (1.0, 1.0, 1.0)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for i in (3, 2, 1):
            skip = skips[i - 1] * self.kappas[i - 1]  # the reference, written out
            up = self.up[i - 1]
            x = checkpoint(up, x, skip, i, use_reentrant=False) if self.checkpoints else up(x, skip, i)  # pyright: ignore
        return x


class Twice(nn.Module):
    """The same U for an image and for its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Named()

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) + self.net(x.flip(-1)).flip(-1)) / 2


MODELS: dict[str, Any] = {
    "cat": Named,
    "add": lambda: Named("add"),
    "tied": lambda: Named(tied=True),
    "tied add": lambda: Named("add", tied=True),
    "twice": Twice,
}


def reference(model: nn.Module, x: Tensor = X) -> Tensor:
    """CS with κ = 0.5, by the network's own code."""
    other = copy.deepcopy(model)
    net: Any = getattr(other, "net", other)
    net.kappas = (1.0, 0.5, 0.25)
    return other(x)


@pytest.mark.parametrize("name", MODELS)
def test_exactly_the_named_merges_are_scaled_and_it_is_undone(name):
    model = MODELS[name]().eval()
    plain, wanted = model(X), reference(model)
    plan = sl.find_skips(model, (X,))
    assert [skip.index for skip in plan] == [1, 2, 3]
    assert "sl.merge in" in str(plan)
    sl.scale_skips_(model, "cs:0.5", (X,))
    torch.testing.assert_close(model(X), wanted)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    sl.verify(model, (X[:1],))
    sl.unscale_(model)
    assert torch.equal(model(X), plain)
    for other in copies:
        torch.testing.assert_close(other(X), wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "method", ["ls", "merge_norm:everywhere=true", "merge_norm:on=concatenation,everywhere=true", "mp:0.3"]
)
def test_every_method_is_verified_saved_and_loaded(name, method, tmp_path):
    model = MODELS[name]().eval()
    if "concatenation" in method and "add" in name:
        with pytest.raises(sl.UnsupportedModelError, match="concatenate"):
            sl.scale_skips_(model, method, (X,))
        return
    sl.scale_skips_(model, method, (X,))
    wanted = model(X)
    assert not torch.allclose(wanted, MODELS[name]().eval()(X))
    sl.save_scaling(model, tmp_path / "scaling.safetensors")
    for source in (tmp_path / "scaling.safetensors", model.state_dict()):
        other = MODELS[name]().eval()
        sl.load_scaling_(other, source)
        assert torch.equal(other(X), wanted)


def test_a_start_and_folding_are_exact_where_each_skip_is_merged_once():
    model, started = Named().eval(), Named().eval()
    sl.scale_skips_(model, "cs:0.5", (X,))
    wanted = model(X)
    sl.start_skips_(started, "cs:0.5", (X,))
    torch.testing.assert_close(started(X), wanted)
    assert sl.fold_(model, (X,)).folded == (1, 2, 3)
    torch.testing.assert_close(model(X), wanted)
    with pytest.raises(sl.UnfoldableSkipsError, match="several times"):
        sl.start_skips_(Twice(), "cs:0.5", (X,))


@pytest.mark.parametrize("name", ["cat", "tied", "twice"])
@pytest.mark.parametrize("method", ["cs:0.5", "ls"])
def test_compiled_as_a_whole(name, method):
    torch._dynamo.reset()  # one forward may be compiled eight times for different models, by all tests together
    plain, scaled = MODELS[name]().eval(), sl.scale_skips_(MODELS[name]().eval(), method, (X,))
    for model in (plain, scaled):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), model(X))
    assert not torch.allclose(plain(X), scaled(X))
    if method != "ls":  # torch warns of the coefficients that gates remember
        torch.testing.assert_close(torch.export.export(scaled, (X,)).module()(X), scaled(X))


def test_blocks_that_are_computed_again_are_scaled_again():
    gradients = []
    for again in (False, True):
        model: Any = sl.scale_skips_(Named(), "cs:0.5", (X,))
        model.checkpoints = again
        model(X).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


class Loose(Named):
    """A checkpoint around a function: what it computes again has no module."""

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down[0](x)
        merged: Any = checkpoint(lambda x, skip: sl.merge(x, skip, 1), self.down[1](skip), skip, use_reentrant=False)
        return self.up[0].layer(merged)  # pyright: ignore[reportCallIssue]


def test_a_function_that_is_computed_again_is_refused():
    Loose()(X).sum().backward()
    with pytest.raises(sl.VerificationError, match="not a function"):
        sl.scale_skips_(Loose(), "uniform:0.5", (X,))


class Wrong(Named):
    number = 2

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down[0](x)
        return self.up[0](self.down[1](skip), skip, self.number)


def test_what_is_refused():
    with pytest.raises(sl.InvalidConfigError, match="from 1, the outermost"):
        sl.scale_skips_(Wrong(), "cs", (X,))
    with pytest.raises(sl.InvalidConfigError, match="'cat' or 'add'"):
        sl.merge(X, X, 1, how="stack")  # pyright: ignore[reportArgumentType]
    model = Wrong()
    model.number = 1
    sl.scale_skips_(model, "uniform:0.5", (X,))
    model.number = 2
    with pytest.raises(sl.SkipMismatchError, match="reached 0 times"):
        model(X)


def test_another_model_after_an_exception_is_not_scaled():
    scaled, plain = sl.scale_skips_(Named().eval(), "cs:0.5", (X,)), Named().eval()
    wanted = plain(X)
    with pytest.raises(RuntimeError):
        scaled(X[:, :3])
    scaled.up[2].register_forward_pre_hook(lambda *_: 1 / 0)  # pyright: ignore
    with pytest.raises(ZeroDivisionError):
        scaled(X)
    assert torch.equal(plain(X), wanted)
    assert torch.equal(sl.merge(X, X, 1, how="add"), X + X)
