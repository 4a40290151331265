"""What scaling, verifying and looking at coefficients leave as it was, and what is said about gates."""

import gc
import random
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import scalelong as sl
import zoo
from scalelong.tracing import isolated_run

pytestmark = pytest.mark.filterwarnings("ignore:GroupNorm")


class Normalises(nn.Module):
    """Writes to its weights in the training forward, as edm2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.mid = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.norm = nn.BatchNorm2d(4)
        self.up, self.head = nn.Conv2d(8, 4, 3, 1, 1), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mid.weight.copy_(F.normalize(self.mid.weight, dim=1))
                self.up.weight.data = self.up.weight.data / 2
        outer = self.stem(x)
        inner = self.down(F.relu(outer))
        h = F.dropout(F.relu(self.mid(self.norm(inner))), 0.1, self.training)
        h = self.up(torch.cat([h, inner], 1))
        return self.head(torch.cat([F.relu(h), outer], 1))


IMAGE = (torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8),)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "scalelong" not in name}


def assert_same(model, before):
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_weights_that_a_forward_writes_are_left_alone(method):
    model = Normalises()
    before = state_of(model)
    sl.scale_skips_(model, method, IMAGE)
    assert_same(model, before)
    sl.verify(model, IMAGE)
    assert_same(model, before)


def test_coefficients_leave_statistics_and_random_states_alone():
    model = sl.scale_skips_(Normalises().train(), "ls", IMAGE)
    before, states = state_of(model), (torch.get_rng_state(), random.getstate())
    found = sl.coefficients(model, *IMAGE)
    assert len(found) == 2
    assert_same(model, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert model.training


def test_other_devices_are_not_seeded(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeded.append(seed))
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: seeded.append(seed))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded.append(seed))
    model = sl.scale_skips_(Normalises(), "ls", IMAGE)
    sl.verify(model, IMAGE)
    sl.fold_(sl.scale_skips_(sl.unscale_(model), "cs:0.5", IMAGE))
    assert not seeded


def test_generators_of_all_devices_are_restored(monkeypatch):
    """A generator of the CPU stands for that of a GPU which holds no weight of the model."""
    other = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (other,))
    before = other.get_state()
    sl.scale_skips_(Normalises(), "ls", IMAGE)
    assert torch.equal(other.get_state(), before)


def test_an_isolated_run_copies_no_weights_that_are_not_written():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = state_of(model)
    with isolated_run(model) as snapshot:
        model.train()(torch.ones(4, 8))
        assert not snapshot.weights._copies
        snapshot.restore()
        assert_same(model, before)
        with torch.no_grad():
            model[0].weight.add_(1)  # type: ignore[operator]
        assert len(snapshot.weights._copies) == 1
    assert_same(model, before)


def test_example_inputs_are_not_kept_alive():
    image = torch.randn(4, 3, 32, 32)
    seen = weakref.ref(image)
    model = sl.scale_skips_(Normalises(), "cs:0.5", (image,))
    del image
    gc.collect()
    assert seen() is None
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        wanted = model.eval()(x)
        assert sl.fold_(model).folded == (1, 2)
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("make", [Normalises, lambda: sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2)])
def test_gates_that_no_optimiser_trains_are_named(make):
    model = make()
    inputs = IMAGE if isinstance(model, Normalises) else None
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(sl.FrozenGatesWarning, match="add_param_group"):
        sl.scale_skips_(model, "ls", inputs)
    optimizer.add_param_group({"params": sl.scaling_of(model).parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sl.scale_skips_(make(), "ls", inputs)
        sl.scale_skips_(sl.unscale_(model), "cs", inputs)


@pytest.mark.parametrize("make", [Normalises, lambda: sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2)])
def test_gates_that_a_wrapper_would_not_know_are_refused(make):
    wrapped = nn.DataParallel(make())
    with pytest.raises(sl.UnsupportedModelError, match="scale the long skips first"):
        sl.scale_skips_(wrapped, "ls", IMAGE if isinstance(wrapped.module, Normalises) else None)
    assert not sl.is_scaled(wrapped)


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_replicas_of_data_parallel_use_their_own_gates(method):
    """As `torch.nn.parallel.replicate` makes them: plain tensors in the place of parameters."""
    model = sl.scale_skips_(Normalises().eval(), method, IMAGE)
    wanted = model(*IMAGE)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        replica._modules = {name: replicas[child] for name, child in module._modules.items() if child is not None}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(replica, name, parameter.detach().clone())
    with torch.no_grad():
        for parameter in sl.scaling_of(model).parameters():
            parameter.fill_(5.0)  # as if on a device that the replica does not see
    torch.testing.assert_close(replicas[model](*IMAGE), wanted)
    assert method == "cs" or not torch.allclose(model(*IMAGE), wanted)


def test_replicas_of_a_rewritten_model_are_refused():
    model = sl.scale_skips_(zoo.Additive().eval(), "cs", (torch.randn(2, 3, 16, 16),))
    with pytest.raises(sl.UnsupportedModelError, match="DistributedDataParallel"):
        model._replicate_for_data_parallel()(torch.randn(2, 3, 16, 16))


def test_what_was_compiled_of_the_model_is_compiled_again_and_nothing_else():
    model, other = Normalises().eval(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    count = CompileCounter()
    compiled, as_part = torch.compile(model, backend=count), torch.compile(lambda x: model(x) + 1, backend="eager")
    compiled_other = torch.compile(other, backend=count)
    with torch.no_grad():
        compiled_other(torch.randn(2, 4))
        plain = compiled(*IMAGE), as_part(*IMAGE)
        sl.scale_skips_(model, "cs:0.5", IMAGE)
        for run, offset, before in ((compiled, 0, plain[0]), (as_part, 1, plain[1])):
            torch.testing.assert_close(run(*IMAGE), model(*IMAGE) + offset)
            assert not torch.allclose(run(*IMAGE), before)
        sl.unscale_(model)
        torch.testing.assert_close(compiled(*IMAGE), plain[0])
        graphs = count.frame_count
        compiled_other(torch.randn(2, 4))
        assert count.frame_count == graphs
