"""diffusers' residual blocks that keep less, against the same blocks as they are."""

import copy
import pickle

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from scalelong.models import resnet, unet
from scalelong.models.dropout import PackedDropout
from scalelong.models.resnet import keep_less_
from scalelong.models.winograd import multiply_less_
from scalelong.skips import scale_skips_

# GroupNorm right behind the merges of small UNets divides most of a constant κ out, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")

SEED = 3


def network(**options) -> nn.Module:
    """With attention, shortcuts and dropout."""
    torch.manual_seed(0)
    made = unet("small", **{"sample_size": 16, "dropout": 0.2, "block_out_channels": (16, 24, 32), **options})
    return made.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def lean(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    keep_less_(made)
    multiply_less_(made)
    return made


def inputs(size: int = 16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, size, size, generator=generator).contiguous(memory_format=torch.channels_last)
    return x, torch.tensor([3.0, 100.0, 500.0, 999.0])


def trained(model: nn.Module, *given):
    """Outputs, gradients, and the next random number."""
    x, t = given or inputs()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(SEED)
    output = model(x, t).sample
    loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    wanted = {"x": x, **{name: weight for name, weight in model.named_parameters() if weight.requires_grad}}
    found = torch.autograd.grad(loss, [*wanted.values()])
    return {"output": output.detach(), **dict(zip(wanted, found, strict=True)), "next number": torch.rand(3)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Of the largest: gradients of biases before a norm are nothing but rounding.
        largest = max(value.abs().max().item(), 1e-2)
        torch.testing.assert_close(found[name] / largest, value / largest, atol=1e-4, rtol=0, msg=name)


def lean_calls(monkeypatch) -> list[nn.Module]:
    found = []
    real = resnet._residual_block
    monkeypatch.setattr(resnet, "_residual_block", lambda block, *args: (found.append(block), real(block, *args))[1])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": 0.0},
        {"block_out_channels": (16, 24, 128)},  # some convolutions by fewer multiplications
        {"resnet_time_scale_shift": "scale_shift"},
        {"upsample_type": "resnet", "downsample_type": "resnet"},
    ],
)
def test_outputs_gradients_and_random_numbers_are_those_of_the_layers(options):
    model = network(**options)
    assert_same(trained(lean(model)), trained(model))


@pytest.mark.parametrize("scaling", ["cs:0.7", "ls"])
def test_long_skips_are_scaled_as_before(scaling, monkeypatch):
    model = network()
    scale_skips_(model, scaling, inputs())
    calls = lean_calls(monkeypatch)
    assert_same(trained(lean(model)), trained(model))
    assert calls


def test_blocks_keep_less():
    def kept(model):
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found = {}

        def note(value):
            memory = value.untyped_storage()
            if memory.data_ptr() not in own:
                found[memory.data_ptr()] = (memory.nbytes(), value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            model(*inputs()).sample.sum()
        return sum(size for size, _ in found.values())

    model = network()
    assert kept(lean(model)) < 0.5 * kept(model)


def test_nothing_changes_without_gradients_and_in_eval_mode():
    model = network().eval()
    with torch.no_grad():
        assert torch.equal(lean(model)(*inputs()).sample, model(*inputs()).sample)
    assert torch.equal(lean(model)(*inputs()).sample, model(*inputs()).sample)
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected = model.train()(*inputs()).sample
        torch.manual_seed(SEED)
        assert torch.equal(lean(model)(*inputs()).sample, expected)


def a_hook(block):
    block.norm2.register_forward_hook(lambda module, args, output: output * 2)


def a_hook_before(block):
    block.nonlinearity.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def another_layer(block):
    block.norm1 = nn.Identity()


def another_edge(block):
    block.conv1.padding_mode = "circular"
    block.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]


def dropout_of_torch(block):
    block.dropout = nn.Dropout(0.5)


def one_by_hand(block):
    layer = block.conv2
    layer.forward = lambda x: 3 * layer._conv_forward(x, layer.weight, layer.bias)


@pytest.mark.parametrize("change", [a_hook, a_hook_before, another_layer, another_edge, dropout_of_torch, one_by_hand])
def test_what_others_do_to_a_layer_is_done(change, monkeypatch):
    model = network()
    changed = lean(model)
    for each in (model, changed):
        change(next(module for module in each.modules() if isinstance(module, ResnetBlock2D)))
    calls = lean_calls(monkeypatch)
    assert_same(trained(changed), trained(model))
    assert len(calls) == sum(isinstance(module, ResnetBlock2D) for module in model.modules()) - 1


def test_hooks_of_a_block_and_of_its_neighbours_are_called(monkeypatch):
    model, seen = lean(network()), []
    for block in model.modules():
        if isinstance(block, ResnetBlock2D):
            block.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    calls = lean_calls(monkeypatch)
    trained(model)
    assert len(seen) == len(calls) > 0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_whole_and_have_their_own_weights(again, monkeypatch):
    model = lean(network())
    expected, made = trained(model), again(model)
    assert_same(trained(made), expected)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert_same(trained(model), expected)
    calls = lean_calls(monkeypatch)
    trained(made)
    assert calls
    assert set(calls) <= set(made.modules())


def test_names_and_state_dicts_stay():
    model = network()
    made = lean(model)
    assert list(made.state_dict()) == list(model.state_dict())
    assert [name for name, _ in made.named_modules()] == [name for name, _ in model.named_modules()]
    assert all(isinstance(m, ResnetBlock2D) for m in made.modules() if type(m).__name__ == "ResnetBlock2D")
    assert any(isinstance(module, PackedDropout) for module in made.modules())


def test_gradients_can_be_differentiated_once_more():
    def second(model):
        block = next(module for module in model.modules() if isinstance(module, ResnetBlock2D))
        x = torch.linspace(-2, 2, 2 * 16 * 16).view(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        torch.manual_seed(SEED)
        output = block(x, torch.ones(2, 64))
        (first,) = torch.autograd.grad((output**2).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), [x, block.conv1.weight, block.norm2.weight])

    model = network()
    for found, expected in zip(second(lean(model)), second(model), strict=True):
        torch.testing.assert_close(found / expected.abs().max(), expected / expected.abs().max(), atol=1e-4, rtol=0)


def test_frozen_layers_have_no_gradient():
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("conv2" in name)
    assert_same(trained(lean(model)), trained(model))


def test_other_types_and_transforms_take_the_layers(monkeypatch):
    model = lean(network(dropout=0.0))
    calls = lean_calls(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        trained(model)
    x, t = inputs()
    torch.func.grad(lambda x: model(x, t).sample.sum())(x)
    copy.deepcopy(model).double()(x.double(), t)
    assert not calls
    model(x.contiguous(), t)  # not channels last, but the weights are
    assert calls


def test_gradient_checkpointing_computes_the_same():
    model = network()
    expected = trained(model)
    made = lean(model)
    made.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    assert_same(trained(made), expected)
