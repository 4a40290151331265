"""What a scaled model does in other people's hands: EMA, wrappers, hooks, warnings, mismatches."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import scalelong as sl
import zoo
from families import Family, build, call, case, image
from scalelong.attaching import plan_of, scaling_of
from scalelong.errors import (
    CancelledScalingWarning,
    CannotReadError,
    ScalingMismatchError,
    SkipMismatchError,
    UnreachableSkipError,
    UnsupportedModelError,
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


def test_other_hooks_stay():
    model = hand_written()
    seen = []
    model.d1.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))  # pyright: ignore
    sl.scale_skips_(model, "cs", IMAGE)
    sl.unscale_(model)
    seen.clear()
    model(*IMAGE)
    assert len(seen) == 1


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
    for other, says in ((zoo.ZipLoop(), "scales a HandWritten"), (zoo.HandWritten(8), r"e1\S* is \[4, 3, 3, 3\]")):
        with pytest.raises(ScalingMismatchError, match=says):
            sl.load_scaling_(other, tmp_path / "s.safetensors")
        assert not sl.is_scaled(other)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ScalingMismatchError, match="not written by save_scaling"):
        sl.load_scaling_(hand_written(), tmp_path / "junk")
    with pytest.raises(CannotReadError, match="No such file"):
        sl.load_scaling_(hand_written(), tmp_path / "absent")


def test_wrappers_are_seen_through():
    model = hand_written()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    sl.scale_skips_(averaged, "cs", IMAGE)
    assert sl.is_scaled(averaged.module)
    parallel = nn.DataParallel(hand_written())
    with pytest.raises(UnsupportedModelError, match="first, then wrap"):
        sl.scale_skips_(parallel, "ls", IMAGE)


def test_diffusers_ema_follows_the_gates():
    training_utils = pytest.importorskip("diffusers.training_utils")
    model = sl.scale_skips_(hand_written(), "ls", IMAGE)
    ema = training_utils.EMAModel(model.parameters(), decay=0.0, use_ema_warmup=False)
    with torch.no_grad():
        for parameter in scaling_of(model).parameters():
            parameter.normal_()
    for _ in range(3):
        ema.step(model.parameters())
    other = sl.scale_skips_(hand_written(), "ls", plan=plan_of(model))
    ema.copy_to(other.parameters())
    torch.testing.assert_close(other(*IMAGE), model(*IMAGE))


def test_half_precision_keeps_the_gate_in_fp32():
    model = sl.scale_skips_(hand_written(), "ls", IMAGE).to(torch.bfloat16)
    assert {p.dtype for p in scaling_of(model).parameters()} == {torch.float32}
    assert model(IMAGE[0].to(torch.bfloat16)).dtype == torch.bfloat16


def test_inference_mode_does_not_spoil_training():
    model = sl.scale_skips_(hand_written(), "cs", IMAGE)
    with torch.inference_mode():
        model(*IMAGE)
    model(*IMAGE).sum().backward()


@pytest.mark.parametrize("method", ["ls", "ls:start=paper", "ls:module=ie", "ls:module=scalar", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gated_concatenation_is_the_same_with_and_without_gradients(method, dtype):
    """Without gradients it is one multiplication, with gates for some channels and ones for the others."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 16, 16), torch.tensor([3.0, 700.0]))
    model = sl.scale_skips_(zoo.GuidedDiffusion().eval(), method, inputs)
    with torch.no_grad():
        for parameter in scaling_of(model).parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        trained = model(*inputs)
        with torch.inference_mode():
            torch.testing.assert_close(model(*inputs), trained.detach(), rtol=0, atol=0)


def test_fake_tensors_do_not_spoil_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = sl.scale_skips_(hand_written(), "cs", IMAGE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(IMAGE[0]))
    assert torch.isfinite(model(*IMAGE)).all()


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


def test_folded_weights_run_in_a_new_host():
    c = case("hand-written")
    model = c.scaled("cs")
    with torch.no_grad():
        expected = call(model, c.inputs)
        assert sl.fold_(model).folded == (1, 2, 3)
        plain = zoo.HandWritten().eval()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(plain(*c.inputs), expected, rtol=1e-6, atol=1e-6)


def test_magnitude_preserving_folds_both_operands():
    c = case("hand-written")
    model = c.scaled("mp:0.3")
    with torch.no_grad():
        expected = call(model, c.inputs)
        assert not sl.fold_(model).kept
        torch.testing.assert_close(call(model, c.inputs), expected)


def test_a_cut_skip_cannot_be_compensated():
    model = sl.scale_skips_(hand_written(), sl.CustomScaling((1, 0, 1)), IMAGE)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sl.InvalidConfigError, match="long skip 2"):
        sl.fold_(model, inverse=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


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
