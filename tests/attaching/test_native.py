"""Scaling a model that knows its own long skips: U-ViT."""

import copy

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


def test_loading_into_another_network_is_refused(tmp_path):
    sl.save_scaling(tiny(scaling="ls"), tmp_path / "s.safetensors")
    differ = "they differ.*channels=32.*channels=64"
    for changes, says in [({"depth": 8}, "3 long skips.*has 4"), ({"dim": 64}, differ)]:
        model = tiny(**changes)
        with pytest.raises(sl.ScalingMismatchError, match=says):
            sl.load_scaling_(model, tmp_path / "s.safetensors")
        assert not sl.is_scaled(model)


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


def test_a_model_without_long_skips():
    with pytest.raises(sl.NoLongSkipsError):
        sl.scale_skips_(torch.nn.Linear(2, 2), "cs", (torch.zeros(1, 3, 2),))
