"""Finding: negatives, ambiguity, patterns, meta and fake tensors, and leaving no trace."""

import copy
import random
import re
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from families import DIFFUSERS, FAMILIES, available, build
from scalelong.attaching import scale_skips_
from scalelong.errors import (
    AmbiguousSkipsError,
    ExampleInputsError,
    InvalidConfigError,
    NoLongSkipsError,
    UnsupportedModelError,
)
from scalelong.finding import SkipPlan, find_skips

IMAGE = (torch.randn(2, 3, 16, 16),)


def resnet(blocks: int) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    widths = [4, 4, 8, 16]
    return nets.ResNet("basic", [blocks] * 4, widths, spatial_dims=2, n_input_channels=3, num_classes=5)


def dense(*layers: int) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    common = {"spatial_dims": 2, "in_channels": 3, "out_channels": 5}
    return nets.DenseNet(init_features=4, growth_rate=2, block_config=layers, **common)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# More of these stand in finding_networks.py.
WITHOUT = {
    "ResNet": (lambda: resnet(2), IMAGE),
    "ResNet, one block a stage": (lambda: resnet(1), IMAGE),
    "DenseNet": (lambda: dense(3, 3), IMAGE),
    "DenseNet, short": (lambda: dense(2), IMAGE),
    "DenseNet, long": (lambda: dense(6), IMAGE),
    "transformer": (transformer, (torch.randn(2, 6, 8),)),
    "autoencoder": (lambda: nn.Sequential(zoo.conv(3, 4, 2), nn.Upsample(scale_factor=2), zoo.conv(4, 3)), IMAGE),
}
AMBIGUOUS = {
    "UNet++": zoo.UNetPlusPlus,
    "UNet3+": zoo.UNet3Plus,
    "two decoders": zoo.TwoDecoders,
    "stacked hourglasses": lambda: zoo.HourglassNet(2),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_networks_without_long_skips(name):
    make, inputs = WITHOUT[name]
    with pytest.raises(NoLongSkipsError, match=r"looked at \d+ operations"):
        find_skips(make(), inputs)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_networks_are_refused_with_a_way_out(name):
    model = AMBIGUOUS[name]()
    with pytest.raises(AmbiguousSkipsError, match=r"error\.plan\.select") as caught:
        find_skips(model, IMAGE)
    plan = caught.value.plan
    assert plan is not None
    assert len(plan) >= 3
    chosen = plan.select([1, len(plan)])
    assert [skip.index for skip in chosen] == [1, 2]
    assert [site.index for site in chosen.sites] == [1, 2]
    scale_skips_(model, "uniform:0.5", plan=chosen)


def test_include_and_exclude():
    model = zoo.UNetPlusPlus()
    plan = find_skips(model, IMAGE, include=["x02", "x11"], exclude="x01")
    assert {skip.consumer for skip in plan} == {"x02", "x11"}
    hand = zoo.HandWritten()
    assert [skip.producer for skip in find_skips(hand, IMAGE, exclude="e1")] == ["e2", "e3"]
    assert [skip.producer for skip in find_skips(hand, IMAGE, include="d3")] == ["e3"]
    with pytest.raises(NoLongSkipsError, match="include='nothing'"):
        find_skips(hand, IMAGE, include="nothing")
    assert len(find_skips(zoo.HourglassNet(2), IMAGE, exclude="stacks.1*")) == 3


def test_select_takes_known_numbers_once():
    plan = find_skips(zoo.HandWritten(), IMAGE)
    for wrong in ([0], [4], [1, 1], []):
        with pytest.raises(InvalidConfigError, match="select"):
            plan.select(wrong)


def test_plan_reads_as_a_table_and_survives_a_file(tmp_path):
    plan = find_skips(zoo.HandWritten(), IMAGE)
    lines = str(plan).splitlines()
    assert lines[0] == "HandWritten: 3 long skips, outermost first"
    assert lines[2].split()[:4] == ["1", "e1", "d1", "cat"]
    assert "2x4x16x16" in lines[2]
    assert "yes: d1.layers.0" in lines[2]
    plan.save(tmp_path / "plan.json")
    assert SkipPlan.load(tmp_path / "plan.json") == plan
    assert plan[1].producer == "e1"
    with pytest.raises(IndexError):
        plan[0]
    (tmp_path / "bad.json").write_text("{}")
    for path in ("bad.json", "absent.json"):
        with pytest.raises(InvalidConfigError):
            SkipPlan.load(tmp_path / path)


def test_a_plan_that_was_edited_is_refused_in_words():
    good = find_skips(zoo.HandWritten(), IMAGE).to_dict()
    for change in (
        {"skips": [3]},
        {"model": 3},
        {"repeats": "x"},
        {"skips": [{**good["skips"][0], "shape": "x"}]},
        {"skips": [{**good["skips"][0], "fold": [{"module": 1}]}]},
        {"skips": [{**good["skips"][0], "attachment": {"path": 3}}]},
        {"skips": [{**good["skips"][0], "surplus": 1}]},
    ):
        with pytest.raises(InvalidConfigError, match="make it again") as caught:
            SkipPlan.from_dict({**good, **change})
        assert not re.search("object (is|has) no|unexpected|Error|argument", str(caught.value))
    with pytest.raises(InvalidConfigError, match="make it again"):
        SkipPlan.from_json("[" * 100_000)


def test_the_first_skip_may_be_the_raw_input():
    plan = find_skips(zoo.OneDimensional(), (torch.randn(1, 1, 16),))
    assert plan[1].producer == "input 0"


def test_groupnorm_cancellation_counts_whole_groups():
    # 8 main and 8 skip channels in 4 groups of 4: both skip groups are whole. 16 and 8 in 4 groups of 6: one is.
    plan = find_skips(zoo.GuidedDiffusion(), (*IMAGE, torch.ones(2)))
    assert [skip.readers.cancelled for skip in plan] == [1.0, 1.0, 0.75, 1.0]
    assert all(skip.readers.norm == "GroupNorm(4)" and skip.readers.bypass for skip in plan)


@pytest.mark.parametrize("name", [name for name in DIFFUSERS if name != "HunyuanDiT2DModel"])
def test_inputs_of_diffusers_unets_come_from_their_configuration(name):
    family = DIFFUSERS[name]
    if not available(family):
        pytest.skip("needs diffusers")
    assert len(find_skips(build(family))) == family.count


def test_meta_and_fake_models_are_planned_without_memory():
    with torch.device("meta"):
        meta = zoo.HandWritten(1024)
    plan = find_skips(meta, IMAGE)
    assert [skip.site.channels for skip in plan] == [1024, 2048, 4096]
    with FakeTensorMode():
        fake = zoo.HandWritten(1024)
    assert find_skips(fake, IMAGE) == plan


def test_errors_say_what_to_do():
    with pytest.raises(ExampleInputsError, match=r"dict\(x=\.\.\.\)"):
        find_skips(zoo.HandWritten())
    with pytest.raises(ExampleInputsError, match="tuple"):
        find_skips(zoo.HandWritten(), "image")  # pyright: ignore
    with pytest.raises(ExampleInputsError, match="could not run"):
        find_skips(zoo.HandWritten(), (torch.zeros(1, 5, 16, 16),))
    with pytest.raises(UnsupportedModelError):
        find_skips(lambda x: x, IMAGE)  # pyright: ignore


def test_programs_of_export_are_refused_by_name():
    program = torch.export.export(zoo.HandWritten().eval(), IMAGE)
    for model in (program.module(), torch.export.unflatten(program)):
        with pytest.raises(UnsupportedModelError, match="scale the model, then export it"):
            scale_skips_(model, "cs", IMAGE)


class Restless(zoo.HandWritten):
    """Changes everything that a forward can change, and may fail at the end."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.norm, self.dropout = nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.plain, self.seen, self.calls, self.fails = torch.zeros(2), [], 0, fails

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # pyright: ignore
        self.plain.add_(random.random())
        self.seen.append(x)
        self.calls += 1
        self.last = x
        out = super().forward(self.dropout(self.norm(x)) + 0 * torch.rand(1))
        if self.fails:
            raise RuntimeError("at the end")
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model = Restless(fails).train()
    model.e1.eval()
    model.register_forward_hook(lambda *_: None)
    attributes = {module: dict(vars(module)) for module in model.modules()}
    hooks = [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()]
    state, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    with pytest.raises(ExampleInputsError, match="at the end") if fails else nullcontext():
        assert len(find_skips(model, IMAGE)) == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()] == hooks
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.plain, torch.zeros(2))
    assert not model.seen
    for module, before in attributes.items():
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[key] is value for key, value in before.items())


def test_finding_does_not_touch_compiled_code():
    model = zoo.HandWritten().eval()
    runs = []

    def backend(graph, _):
        runs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(*IMAGE)
        before = len(runs)
        assert len(find_skips(compiled, IMAGE)) == 3  # pyright: ignore
        compiled(*IMAGE)
    assert len(runs) == before


def test_a_scaled_model_has_the_same_plan():
    model = zoo.CatThenFunction().eval()
    plan = find_skips(model, IMAGE)
    expected = scale_skips_(model, "cs", plan=plan)(*IMAGE)
    assert find_skips(model, IMAGE) == plan
    assert torch.equal(model(*IMAGE), expected)


def test_freeu_does_not_hide_the_skips():
    family = FAMILIES["UNet2DConditionModel SD"]
    if not available(family):
        pytest.skip("needs diffusers")
    model = build(family)
    plan = find_skips(model)
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)  # pyright: ignore
    assert find_skips(model) == plan
    assert model.up_blocks[0].s1 == 0.9  # pyright: ignore
