"""Scaling a model that knows its own long skips: U-ViT."""

import copy
import pickle

import pytest
import torch

import scalelong as sl

METHODS = ["uniform", "cs", "ls", "ls:module=ie,gate=channel", "ls:module=scalar", "norm", "mp:0.3", "custom:1,0.5,0"]
METHODS += ["merge_norm", "merge_norm:both,norm=rms,kappa=0.7,gain=true", "merge_norm:concatenation,kappa=0.7"]


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 6, "heads": 4, **changes})


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([10.0, 800.0])


@pytest.mark.parametrize("method", METHODS)
def test_scaling_later_equals_scaling_at_construction(method, batch):
    built = tiny(scaling=method)
    later = sl.scale_skips_(tiny(), method)
    torch.testing.assert_close(later(*batch), built(*batch))
    assert set(later.state_dict()) == set(built.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_unscale_restores_bit_for_bit(method, batch):
    model = tiny()
    before, weights = model(*batch), copy.deepcopy(model.state_dict())
    sl.scale_skips_(model, method)
    scaled = model(*batch)
    assert not torch.equal(scaled, before)
    with sl.unscaled(model):
        assert torch.equal(model(*batch), before)
    assert torch.equal(model(*batch), scaled)
    with pytest.raises(RuntimeError, match="inside"), sl.unscaled(model):
        raise RuntimeError("inside")
    assert torch.equal(model(*batch), scaled)
    sl.unscale_(model)
    assert torch.equal(model(*batch), before)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_twice_raises(batch):
    model = sl.scale_skips_(tiny(), "cs")
    with pytest.raises(sl.AlreadyScaledError, match=r"ConstantScaling.*unscale_"):
        sl.scale_skips_(model, "cs")
    sl.unscale_(model)
    with pytest.raises(sl.NotScaledError):
        sl.unscale_(model)


def test_kappa_one_changes_nothing_and_zero_cuts_the_skip(batch):
    plain = tiny()
    assert torch.equal(sl.scale_skips_(tiny(), sl.ConstantScaling(1.0))(*batch), plain(*batch))
    cut = sl.scale_skips_(tiny(), "custom:0,0,0")
    for block in plain.decoder:
        with torch.no_grad():
            block.merge.weight[:, 32:] = 0  # pyright: ignore
    torch.testing.assert_close(cut(*batch), plain(*batch))


def test_coefficients(batch):
    assert sl.coefficients(tiny()) == [1.0, 1.0, 1.0]
    assert sl.coefficients(tiny(scaling="cs:0.5")) == [1.0, 0.5, 0.25]
    model = tiny(scaling="ls")
    with pytest.raises(sl.NotScaledError):
        sl.coefficients(model)
    assert sl.coefficients(model, *batch) == pytest.approx([0.999, 0.7, 0.49])
    gates = sl.coefficients(model, *batch, reduce=False)
    assert [gate.shape for gate in gates] == [(2, 1, model.dim)] * 3
    assert not any(gate.requires_grad for gate in gates)
    by_token = sl.coefficients(tiny(scaling="ls:start=paper"), *batch, reduce=False)
    assert [gate.shape for gate in by_token] == [(2, 17, 1)] * 3


@pytest.mark.parametrize("method", ["uniform", "cs", "mp:0.3", "custom:1,0.5,0"])
def test_folding_keeps_the_function(method, batch):
    model = tiny(scaling=method)
    expected = model(*batch)
    report = sl.fold_(model)
    assert report.folded == (1, 2, 3)
    torch.testing.assert_close(model(*batch), expected, rtol=1e-6, atol=1e-6)
    assert not sl.is_scaled(model)
    again = model(*batch)
    assert sl.fold_(model).folded == ()
    assert torch.equal(model(*batch), again), "folding twice is harmless"


def test_learned_gates_cannot_be_folded(batch):
    model = tiny(scaling="ls")
    expected = model(*batch)
    assert set(sl.fold_(model).kept) == {1, 2, 3}
    assert torch.equal(model(*batch), expected)


def test_inverse_folding_lets_training_go_on_from_a_checkpoint(batch):
    model = tiny()
    expected = model(*batch)
    sl.scale_skips_(model, "cs:0.5")
    sl.fold_(model, inverse=True)
    assert sl.coefficients(model) == [1.0, 0.5, 0.25]
    torch.testing.assert_close(model(*batch), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_save_and_load(method, batch, tmp_path):
    model = tiny(scaling=method)
    for parameter in model.skip_scaling.parameters():
        torch.nn.init.normal_(parameter)
    sl.save_scaling(model, tmp_path / "scaling.safetensors")
    other = sl.load_scaling_(tiny(), tmp_path / "scaling.safetensors")
    assert torch.equal(other(*batch), model(*batch))
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.safetensors"]


def test_loading_into_another_network_is_refused(tmp_path):
    sl.save_scaling(tiny(scaling="ls"), tmp_path / "s.safetensors")
    for changes, says in [({"depth": 8}, "3 long skips.*has 4"), ({"dim": 64}, "long skip 1 differs.*channels")]:
        model = tiny(**changes)
        with pytest.raises(sl.ScalingMismatchError, match=says):
            sl.load_scaling_(model, tmp_path / "s.safetensors")
        assert not sl.is_scaled(model)


@pytest.mark.parametrize("method", METHODS)
def test_copies_are_isolated_and_pickles_keep_the_scaling(method, batch):
    model = tiny(scaling=method)
    expected = model(*batch)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(*batch), expected)
    with torch.no_grad():
        for parameter in twin.skip_scaling.parameters():
            parameter.fill_(-3.0)
    assert torch.equal(model(*batch), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*batch), expected)


def test_a_checkpoint_of_the_plain_network_loads_strictly(batch):
    plain = tiny()
    scaled = tiny(scaling="ls")
    gates = copy.deepcopy(scaled.skip_scaling.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.01)
    with pytest.warns(sl.UnscaledWeightsWarning):
        scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled.encoder[0].mlp.expand.weight, plain.encoder[0].mlp.expand.weight)  # pyright: ignore
    assert all(torch.equal(value, gates[name]) for name, value in scaled.skip_scaling.state_dict().items())
    broken = {k: v for k, v in scaled.state_dict().items() if k != "skip_scaling.networks.0.reduce.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*networks.0.reduce.weight"):
        scaled.load_state_dict(broken)


def test_a_compiled_and_run_model_notices(batch):
    torch.compiler.reset()
    model = tiny()
    compiled = torch.compile(model, backend="eager")
    compiled(*batch)
    sl.scale_skips_(compiled, "custom:0,0,0")  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(compiled(*batch), sl.scale_skips_(tiny(), "custom:0,0,0")(*batch))


def test_a_model_without_long_skips():
    with pytest.raises(sl.NoLongSkipsError):
        sl.scale_skips_(torch.nn.Linear(2, 2), "cs", (torch.zeros(1, 3, 2),))
