"""What a scaled model does in other people's hands: EMA, wrappers, hooks, warnings, mismatches."""

import io
import warnings

import pytest
import torch
from torch import nn

import scalelong as sl
import zoo
from families import Family, build, image
from scalelong.attaching import plan_of
from scalelong.errors import (
    CancelledScalingWarning,
    CannotReadError,
    ScalingMismatchError,
    SkipMismatchError,
    UnreachableSkipError,
)
from scalelong.finding import find_skips

IMAGE = (torch.randn(2, 3, 16, 16),)


def hand_written() -> nn.Module:
    return build(Family(zoo.HandWritten, image(), 3))


def test_an_explicit_formula_agrees():
    """The textbook network with its coefficients written into the source."""
    model = hand_written()
    assert isinstance(model, zoo.HandWritten)
    x = IMAGE[0]
    with torch.no_grad():
        e1 = model.e1(x)
        e2 = model.e2(nn.functional.max_pool2d(e1, 2))
        e3 = model.e3(nn.functional.max_pool2d(e2, 2))
        m = model.mid(nn.functional.max_pool2d(e3, 2))
        d3 = model.d3(torch.cat([model.u3(m), 0.6**2 * e3], 1))
        d2 = model.d2(torch.cat([0.6 * e2, model.u2(d3)], 1))
        expected = model.out(model.d1(torch.cat([model.u1(d2), e1], 1)))
        sl.scale_skips_(model, "cs:0.6", IMAGE)
        torch.testing.assert_close(model(x), expected)
    assert sl.coefficients(model) == pytest.approx([1.0, 0.6, 0.36])


def test_twice_raises_also_through_a_parent_or_child():
    model = hand_written()
    sl.scale_skips_(model, "cs", IMAGE)
    with pytest.raises(sl.AlreadyScaledError, match=r"ConstantScaling.*unscale_"):
        sl.scale_skips_(model, "ls", IMAGE)
    with pytest.raises(sl.AlreadyScaledError, match="part"):
        sl.scale_skips_(nn.Sequential(model), "cs", IMAGE)
    sl.unscale_(model)
    for refused in (sl.unscale_, sl.coefficients):
        with pytest.raises(sl.NotScaledError):
            refused(model)


def test_none_is_not_scaled_and_can_be_replaced():
    model = hand_written()
    sl.scale_skips_(model, "none", IMAGE)
    assert not sl.is_scaled(model)
    assert sl.coefficients(model) == [1.0, 1.0, 1.0]
    sl.scale_skips_(model, "cs", IMAGE)
    assert sl.is_scaled(model)


def test_unscaled_is_a_pause():
    model = hand_written()
    before = model(*IMAGE)
    sl.scale_skips_(model, "ls", IMAGE)
    scaled, optimised = model(*IMAGE), list(model.parameters())
    with sl.unscaled(model):
        assert torch.equal(model(*IMAGE), before)
        assert not any(key.startswith("skip_scaling") for key in model.state_dict())
    assert torch.equal(model(*IMAGE), scaled)
    assert all(a is b for a, b in zip(model.parameters(), optimised, strict=True))
    with pytest.raises(RuntimeError, match="inside"), sl.unscaled(model):
        raise RuntimeError("inside")
    assert torch.equal(model(*IMAGE), scaled)


def test_coefficients_of_a_batch():
    model = sl.scale_skips_(hand_written(), "ls", IMAGE)
    with pytest.raises(sl.NotScaledError, match="run the model first"):
        sl.coefficients(model)
    assert sl.coefficients(model, *IMAGE) == pytest.approx([0.999, 0.7, 0.49])
    tensors = sl.coefficients(model, *IMAGE, reduce=False)
    assert [tuple(t.shape) for t in tensors] == [(2, 4, 1, 1), (2, 8, 1, 1), (2, 16, 1, 1)]


def test_another_path_than_the_planned_one_raises():
    model = build(Family(zoo.EncoderDecoder, image(), 2))
    sl.scale_skips_(model, "uniform:0.5", IMAGE)
    assert isinstance(model, zoo.EncoderDecoder)
    block = model.decoder.blocks[0]
    with pytest.raises(SkipMismatchError, match=r"long skip 2.*without it.*example_inputs"):
        block(torch.randn(1, 12, 2, 2))
    with pytest.raises(SkipMismatchError, match="expected 8 channels on axis 1"):
        block(torch.randn(1, 12, 2, 2), skip=torch.randn(1, 9, 4, 4))
    rewritten = build(Family(zoo.Additive, image(), 3))
    sl.scale_skips_(rewritten, "uniform:0.5", IMAGE)
    rewritten.up.append(nn.Identity())  # pyright: ignore
    rewritten.blocks.append(nn.Identity())  # pyright: ignore
    rewritten.down.insert(0, nn.Conv2d(4, 4, 1))  # pyright: ignore
    with pytest.raises(SkipMismatchError):
        rewritten(*IMAGE)


def test_a_constant_that_groupnorm_cancels_warns_once():
    model = build(Family(zoo.GuidedDiffusion, image(), 4))
    inputs = (*IMAGE, torch.ones(2))
    with pytest.warns(CancelledScalingWarning, match=r"GroupNorm\(4\).*cancels.*shortcut") as caught:
        sl.scale_skips_(model, "cs", inputs)
    assert len(caught) == 1
    sl.unscale_(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sl.scale_skips_(model, "ls", inputs)
        sl.scale_skips_(hand_written(), "cs", IMAGE)


def test_a_plan_of_another_model_is_refused(tmp_path):
    plan = find_skips(zoo.HandWritten(), IMAGE)
    with pytest.raises(ScalingMismatchError, match="no 'd"):
        sl.scale_skips_(zoo.ZipLoop(), "cs", plan=plan)
    model = sl.scale_skips_(hand_written(), "ls", IMAGE)
    sl.save_scaling(model, tmp_path / "s.safetensors")
    other = zoo.ZipLoop()
    with pytest.raises(ScalingMismatchError, match="scales a HandWritten"):
        sl.load_scaling_(other, tmp_path / "s.safetensors")
    assert not sl.is_scaled(other)
    wider = sl.load_scaling_(zoo.HandWritten(8), tmp_path / "s.safetensors")
    with pytest.raises(SkipMismatchError, match=r"expected \d+ channels"):
        wider(*IMAGE)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ScalingMismatchError, match="not written by save_scaling"):
        sl.load_scaling_(hand_written(), tmp_path / "junk")
    with pytest.raises(CannotReadError, match="No such file"):
        sl.load_scaling_(hand_written(), tmp_path / "absent")


def test_a_rewritten_class_whose_source_changed_is_refused(monkeypatch):
    import scalelong.finding.source as source

    model = sl.scale_skips_(build(Family(zoo.Additive, image(), 3)), "cs", IMAGE)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    plan = plan_of(model)
    monkeypatch.setattr(source, "source_digest", lambda *_: "another")
    with pytest.raises(sl.ScaleLongError, match="not the one that was planned"):
        torch.load(buffer, weights_only=False)
    other = build(Family(zoo.Additive, image(), 3))
    with pytest.raises(sl.ScaleLongError, match="not the one that was planned"):
        sl.scale_skips_(other, "cs", plan=plan)
    assert type(other) is zoo.Additive


def test_what_cannot_be_reached_is_refused_and_left_alone():
    """A network without source: its additions are found, but there is nothing to rewrite."""
    names: dict[str, type[nn.Module]] = {"Additive": zoo.Additive, "F": nn.functional}  # pyright: ignore
    exec(
        "class Hidden(Additive):\n"
        "    def forward(self, x):\n"
        "        x = self.stem(x)\n"
        "        skips = []\n"
        "        for down in self.down:\n"
        "            skips.append(x)\n"
        "            x = F.silu(down(x))\n"
        "        for up, block in zip(self.up, self.blocks):\n"
        "            x = F.silu(block(up(x) + skips.pop()))\n"
        "        return self.head(x)\n",
        names,  # pyright: ignore
    )
    model = names["Hidden"]()
    before = model(*IMAGE)
    plan = find_skips(model, IMAGE)
    assert [skip.places.skip for skip in plan] == [None] * 3
    assert "impossible" in str(plan)
    with pytest.raises(UnreachableSkipError, match=r"long skip 2.*exclude"):
        sl.scale_skips_(model, "cs", IMAGE)
    assert not sl.is_scaled(model)
    assert torch.equal(model(*IMAGE), before)
