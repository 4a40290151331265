"""The scaling goes with the weights: whatever writes them writes it, and nothing loads them without a word."""

import copy
import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import scalelong as sl
from families import case
from scalelong.attaching import KEY, scaling_of

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")

METHODS = ["cs", "uniform:0.6", sl.CustomScaling((1.0, 0.3)), "ls", "norm", "merge_norm:gain=true"]


class Concat(nn.Module):
    """Two long skips."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        x = self.middle(x).relu()
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).relu()
        return x


X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def scaled(method: Any = "cs", make: Any = Concat) -> Any:
    """A scaled network whose weights and gates were moved, as training does."""
    model = sl.scale_skips_(make(), method, (X,)).eval()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)))
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(one.eval()(X), other.eval()(X))


def loaded(state: dict[str, Any]) -> nn.Module:
    """A new network with the scaling and the weights of a state dict."""
    model = sl.load_scaling_(Concat(), state)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_state_dict_holds_the_scaling_in_every_format(method, tmp_path):
    model = scaled(method)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    for name in ("weights.pt", "weights.safetensors", "model.safetensors"):
        other = sl.load_scaling_(Concat(), tmp_path / name)
        assert sl.plan_of(other) == sl.plan_of(model)
        state = torch.load(tmp_path / name, weights_only=True) if name.endswith("pt") else load_file(tmp_path / name)
        other.load_state_dict(state)
        assert same(model, other)
        load_model(other, tmp_path / "model.safetensors")
        assert same(model, other)


def test_a_plain_network_refuses_the_weights_by_a_name_that_speaks():
    with pytest.raises(RuntimeError, match=r"Unexpected.*scalelong_scaling"):
        Concat().load_state_dict(scaled("cs").state_dict())


def test_a_scaled_network_warns_of_weights_without_scaling_and_of_parts_says_nothing():
    model = scaled("cs")
    with pytest.warns(sl.UnscaledWeightsWarning, match=r"scalelong_scaling is missing.*cs \(kappa=0.7.*unscale_"):
        model.load_state_dict(Concat().state_dict())
    model.load_state_dict({"middle.weight": torch.zeros(8, 8, 3, 3)}, strict=False)  # a warning would be an error
    assert not bool(model.middle.weight.any())


@pytest.mark.parametrize("other", ["cs:0.5", "ls", "uniform:0.7"])
def test_another_scaling_is_an_error_and_no_weight_is_touched(other):
    model, state = scaled("cs"), scaled(other).state_dict()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sl.ScalingMismatchError, match=r"saved with the scaling .*has cs \(kappa=0.7"):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_folded_and_unscaled_networks_are_plain():
    model = scaled("cs")
    sl.fold_(model)
    assert list(model.state_dict()) == list(Concat().state_dict())
    model = sl.unscale_(scaled("ls"))
    assert list(model.state_dict()) == list(Concat().state_dict())
    assert KEY not in vars(model)
    assert KEY not in sl.scale_skips_(Concat(), "none", (X,)).state_dict()


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_casts_and_averages_of_state_dicts_keep_it(method):
    model = scaled(method)
    halved = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    assert sl.is_scaled(sl.load_scaling_(Concat(), halved))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):  # the average that everybody writes by hand
        for name, value in model.state_dict().items():
            average[name].mul_(0.999).add_(value, alpha=0.001)
    torch.testing.assert_close(loaded(average)(X), model(X))
    if method == "cs":
        another = scaled("cs:0.3").state_dict()
        mixed = {name: 0.5 * (value + another[name]) for name, value in average.items()}
        with pytest.raises(sl.ScalingMismatchError, match=r"scalelong_scaling does not hold a scaling.*averaged"):
            sl.load_scaling_(Concat(), mixed)


class Lit(nn.Module):
    """What Lightning's modules are to us: a network under a name, and a checkpoint around its state dict."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet


class Teacher(nn.Module):
    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_a_checkpoint_of_a_module_around_it(method, tmp_path):
    lit = Lit(scaled(method))
    torch.save({"epoch": 3, "state_dict": lit.state_dict(), "optimizer": {"state": {}}}, tmp_path / "last.ckpt")
    other = Lit(Concat())
    sl.load_scaling_(other, tmp_path / "last.ckpt")
    other.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    assert same(lit.unet, other.unet)
    with pytest.raises(RuntimeError, match=r"unet\.scalelong_scaling"):
        Lit(Concat()).load_state_dict(lit.state_dict())


def test_of_several_scaled_networks_one_must_be_named():
    both = Teacher(scaled("cs"), scaled("ls"))
    assert sl.is_scaled(both)
    for function in (sl.coefficients, sl.plan_of, sl.unscale_, sl.fold_, scaling_of):
        with pytest.raises(sl.AmbiguousSkipsError, match=r"2 scaled networks.*student.*teacher.*model\.student"):
            function(both)
    with pytest.raises(sl.ScalingMismatchError, match=r"prefix='student\.' \(Concat\), prefix='teacher\.'"):
        sl.load_scaling_(Concat(), both.state_dict())
    other = sl.load_scaling_(Concat(), both.state_dict(), prefix="teacher.")
    assert isinstance(scaling_of(other).config, sl.LearnableScaling)
    with pytest.raises(sl.ScalingMismatchError, match=r"prefix='student\.'"):
        sl.load_scaling_(Concat(), both.state_dict(), prefix="unet.")


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_averaged_models_and_compiled_ones(method):
    model = scaled(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    average.update_parameters(model)
    assert same(model, loaded({k.removeprefix("module."): v for k, v in average.module.state_dict().items()}))
    others: list[Any] = [average, torch.compile(scaled(method), backend="eager"), nn.DataParallel(scaled(method))]
    for wrapped in others:
        assert sl.is_scaled(wrapped)
        assert len(sl.coefficients(wrapped, X)) == 2
        assert KEY in "".join(wrapped.state_dict())
        assert sl.load_scaling_(Concat(), wrapped.state_dict()) is not None
        sl.unscale_(wrapped)
        assert not sl.is_scaled(wrapped)


def test_files_that_hold_no_scaling_and_files_that_would_run_code(tmp_path):
    save_file(Concat().state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(sl.ScalingMismatchError, match=r"no scaling was found in .*plain.*'scalelong_scaling'"):
        sl.load_scaling_(Concat(), tmp_path / "plain.safetensors")
    with pytest.raises(sl.ScalingMismatchError, match="no scaling was found"):
        sl.load_scaling_(Concat(), {})
    torch.save(scaled("cs"), tmp_path / "whole.pt")
    with pytest.raises(sl.ScalingMismatchError, match="cannot be read without running code"):
        sl.load_scaling_(Concat(), tmp_path / "whole.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(b"pickle")
    with pytest.raises(sl.ScalingMismatchError, match="dcp_to_torch_save"):
        sl.load_scaling_(Concat(), tmp_path / "folder")


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "scaling.safetensors"
    sl.save_scaling(scaled("ls"), path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["scalelong"])
    save_file(load_file(path), path, metadata={"scalelong": json.dumps({**about, "format": 9})})
    with pytest.raises(sl.ScalingMismatchError, match="format 9"):
        sl.load_scaling_(Concat(), path)


# PEFT: an adapter is saved alone, and says how its base model is scaled.


def with_lora(model: nn.Module, targets: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options)).eval()
    with torch.no_grad():
        for n, parameter in enumerate(p for p in adapted.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)))
    return adapted


@pytest.mark.parametrize("method", ["cs", "ls"])
@pytest.mark.parametrize("targets", ["middle", r"up\..*", r"down\..*"])
def test_an_adapter_brings_its_scaling(method, targets, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = with_lora(scaled(method), targets, modules_to_save=["skip_scaling"])
    assert sl.is_scaled(adapted)
    assert len(sl.plan_of(adapted)) == len(sl.coefficients(adapted, X)) == 2
    adapted.save_pretrained(tmp_path)
    base = Concat()
    base.load_state_dict(sl.unscale_(scaled(method)).state_dict())
    sl.load_scaling_(base, tmp_path)
    other = peft.PeftModel.from_pretrained(base, tmp_path)
    assert same(adapted, other)
    if method == "ls":
        adapted(X).square().sum().backward()
        gates = [p for name, p in adapted.named_parameters() if "skip_scaling" in name and p.requires_grad]
        assert gates
        assert all(p.grad is not None for p in gates), "the gates that PEFT trains are those that act"
    else:
        with pytest.raises(sl.ScalingMismatchError, match=r"kappa=0\.7"):
            peft.PeftModel.from_pretrained(scaled("cs:0.5"), tmp_path)


def test_gates_are_no_linear_layers_for_tools_that_look_for_those():
    adapted = with_lora(sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2, scaling="ls"), "all-linear")
    assert not [name for name, _ in adapted.named_modules() if "skip_scaling" in name and "lora" in name]
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    assert torch.allclose(adapted(x, t), adapted.merge_and_unload()(x, t), atol=1e-5)


def test_frozen_gates_are_said_and_missed_in_the_adapter(tmp_path):
    adapted = with_lora(scaled("ls"), "middle")
    with pytest.warns(sl.FrozenGatesWarning, match=r'modules_to_save=\["skip_scaling"\]'):
        adapted(X)
    adapted.save_pretrained(tmp_path)
    with pytest.raises(sl.ScalingMismatchError, match=r"gates.*modules_to_save"):
        sl.load_scaling_(Concat(), tmp_path)


def test_folding_names_layers_with_adapters_and_changes_nothing():
    adapted = with_lora(scaled("cs"), r"up\.0")
    before, output = copy.deepcopy(adapted.state_dict()), adapted(X)
    with pytest.raises(sl.UnsupportedModelError, match=r"up\.0.*merge_and_unload"):
        sl.fold_(adapted)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    assert torch.equal(adapted(X), output)
    merged = adapted.merge_and_unload()
    assert sl.fold_(merged).folded == (1, 2)
    torch.testing.assert_close(merged(X), output)


def test_an_adapter_is_scaled_as_one_with_its_layer():
    """A hook on the layer inside an adapter would leave the adapter's own input unscaled."""
    adapted = with_lora(scaled("cs:0.5"), r"up\..*")
    merged = copy.deepcopy(adapted).merge_and_unload()
    torch.testing.assert_close(adapted(X), merged(X))
    with sl.unscaled(adapted), torch.no_grad():
        plain = adapted(X)
    assert not torch.allclose(plain, adapted(X))


def test_a_model_is_never_left_half_folded(monkeypatch):
    model = scaled("uniform:0.5")
    before, output = copy.deepcopy(model.state_dict()), model(X)
    calls = []

    original = torch.Tensor.mul_

    def fails(weight: torch.Tensor, factor: float) -> torch.Tensor:
        calls.append(factor)
        if len(calls) == 3:
            raise MemoryError
        return original(weight, factor)

    monkeypatch.setattr(torch.Tensor, "mul_", fails)
    with pytest.raises(MemoryError):
        sl.fold_(model)
    monkeypatch.undo()
    assert len(calls) == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(X), output)


# What was done to a model, and what it refuses.


def test_a_summary_is_short_and_true():
    assert str(sl.summary(Concat())) == "Concat: long skips not scaled"
    text = str(sl.summary(scaled("cs:0.5")))
    assert text.splitlines()[0].startswith("Concat: 2 long skips scaled by cs (kappa=0.5")
    assert "no parameters added" in text
    assert text.splitlines()[1:] == ["  κ_1 = 1  (down.0 to up.1)", "  κ_2 = 0.5  (down.1 to up.0)"]
    learned = sl.scale_skips_(Concat(), "ls", plan=sl.find_skips(Concat(), (X,)))
    found = sl.summary(learned)
    assert found.parameters == sum(p.numel() for p in scaling_of(learned).parameters()) > 0
    assert found.coefficients == (None, None)
    assert "depends on the data" in repr(found)
    learned(X)
    assert sl.summary(Lit(learned)).coefficients[1] == pytest.approx(0.7, abs=0.05)


class Wrapped(Tensor):
    """A tensor with something beside it, as MONAI's MetaTensor is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_tensor_subclasses_are_followed(method):
    inputs = X.as_subclass(Wrapped)
    assert sl.find_skips(Concat(), (inputs,)) == sl.find_skips(Concat(), (X,))
    model = sl.scale_skips_(Concat(), method, {"x": inputs}).eval()
    assert torch.equal(model(inputs), model(X))
    assert type(model(inputs)) is Wrapped


def test_keys_are_those_of_the_plain_model_where_that_is_asked_for():
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=4, heads=2)
    plain = list(model.state_dict())
    sl.scale_skips_(model, "cs")
    assert list(model.state_dict()) == [*plain, KEY]
    with sl.without_records():
        assert list(model.state_dict()) == plain
        sl.UViT(image_size=8, patch_size=4, dim=16, depth=4, heads=2).load_state_dict(model.state_dict())


def test_of_a_model_that_a_checkpoint_holds_twice_the_first_is_taken():
    """Lightning's average of weights writes `state_dict`, the average, and `current_model_state`."""
    averaged, current = (case("hand-written").scaled("ls") for _ in range(2))
    with torch.no_grad():
        for parameter in sl.scaling_of(averaged).parameters():
            parameter.fill_(0.25)
    states = [{f"unet.{name}": value for name, value in model.state_dict().items()} for model in (averaged, current)]
    other = copy.deepcopy(case("hand-written").model)
    sl.load_scaling_(other, {"state_dict": states[0], "current_model_state": states[1]})
    assert all(bool((parameter == 0.25).all()) for parameter in sl.scaling_of(other).parameters())
