"""merge_norm where it is not simply attached: norms that are there already, additions, folding, old networks."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scalelong as sl
from families import call, case
from scalelong.attaching import plan_of, scaling_of
from zoo import NormedMerges, RMSNorm

IMAGE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([10.0, 800.0]))


def tiny(**changes) -> sl.UViT:
    torch.manual_seed(0)
    return sl.UViT(**{"image_size": 8, "patch_size": 2, "dim": 32, "depth": 4, "heads": 4, **changes})


def test_the_main_path_of_a_uvit_enters_every_merge_normalised():
    model, seen = tiny(scaling="merge_norm"), []
    for block in model.decoder:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(*IMAGE)
    for main in seen:
        torch.testing.assert_close(main, F.layer_norm(main, (32,)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["UNet2DModel DDPM", "HunyuanDiT2DModel", "MONAI DiffusionModelUNet"])
def test_a_norm_that_follows_every_merge_is_named_and_nothing_is_attached(name, caplog):
    c = case(name)
    model = copy.deepcopy(c.model)
    with caplog.at_level(logging.WARNING, "scalelong"):
        sl.scale_skips_(model, "merge_norm", c.inputs)
    norms = sl.summary(model).norms
    assert len(norms) == len(c.plan)
    for skip in plan_of(model):
        module = model.get_submodule(skip.readers.norm_module)
        assert isinstance(module, nn.GroupNorm | nn.LayerNorm)
        assert skip.readers.norm_module in norms[skip.index]
        assert skip.readers.norm_module in caplog.text
    with torch.no_grad():
        assert torch.equal(call(model, c.inputs), c.output)
    assert all(not m._forward_pre_hooks for m in model.modules())


TOKENS = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm, nn.RMSNorm])
def test_only_merges_without_a_norm_get_one(norm):
    model = NormedMerges(norm, plain=1)
    sl.scale_skips_(model, "merge_norm:kappa=0.5", TOKENS)
    assert list(sl.summary(model).norms) == [2, 3]
    assert scaling_of(model).constants(3) == (1.0, 0.25)  # after the norm, where nothing divides it out


@pytest.mark.parametrize("name", ["U-ViT, authors'", "MONAI UNet", "MONAI BasicUNet"])
def test_merges_without_a_norm_get_one_each(name):
    c = case(name)
    model = sl.scale_skips_(copy.deepcopy(c.model), "merge_norm", c.inputs)
    assert not sl.summary(model).norms
    with torch.no_grad():
        assert not torch.allclose(call(model, c.inputs), c.output)


@pytest.mark.parametrize("name", ["additive", "HDiT", "MONAI SegResNet", "hourglass", "additive tokens"])
def test_additions_are_refused_with_what_to_call_instead(name):
    c = case(name)
    model = copy.deepcopy(c.model)
    with pytest.raises(sl.UnsupportedModelError, match=r"added.*lower learning rate, or with Muon"):
        sl.scale_skips_(model, "merge_norm", c.inputs)
    assert not sl.is_scaled(model)


@pytest.mark.parametrize("model", [tiny(), case("hand-written").model], ids=["U-ViT", "UNet"])
def test_a_norm_is_not_folded(model):
    inputs = IMAGE if isinstance(model, sl.UViT) else case("hand-written").inputs
    model = sl.scale_skips_(copy.deepcopy(model), "merge_norm:kappa=0.7", inputs)
    report = sl.fold_(model)
    assert not report.folded
    assert all("norm" in reason for reason in report.kept.values())
    with pytest.raises(sl.UnfoldableSkipsError, match="norm"):
        sl.start_skips_(sl.unscale_(model), "merge_norm", inputs)


def test_a_network_of_0_2_with_norms_in_its_merges_keeps_them():
    model = tiny(merge_norm=True)
    expected = model(*IMAGE)
    sl.scale_skips_(model, "merge_norm")
    assert torch.equal(model(*IMAGE), expected)
    assert len(sl.summary(model).norms) == 2


def test_the_norm_on_the_skip_says_that_it_does_not_hold():
    with pytest.warns(UserWarning, match="merge_norm"):
        sl.scale_skips_(tiny(), "norm")
