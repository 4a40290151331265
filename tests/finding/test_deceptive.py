"""Networks that are easily read wrongly: scaled as their own code scales them, or refused by name."""

import pytest
import torch

import deceptive
import scalelong as sl

CASES = [(cls, ran) for cls in deceptive.NETWORKS for ran in ([False, True] if cls.remembers else [False])]


@pytest.mark.parametrize(("cls", "ran"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_scaled_as_the_network_scales_itself(cls, ran):
    inputs = cls.inputs()
    model, reference = deceptive.build(cls), deceptive.build(cls)
    for one in (model, reference) if ran else ():
        one(*inputs)
    try:
        sl.scale_skips_(model, "cs:0.7", inputs)
    except sl.ScaleLongError:
        if cls.must:
            raise
        return
    reference.ks = [0.7**i for i in range(cls.N)]
    assert len(sl.coefficients(model)) == cls.N
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(model(*inputs), reference(*inputs), atol=1e-5)


def test_the_innermost_skip_around_nothing_can_be_left_out():
    model, inputs = deceptive.build(deceptive.AroundNothing), deceptive.AroundNothing.inputs()
    assert [skip.producer for skip in sl.find_skips(model, inputs)][-1:] == ["blocks.2"]
    plan = sl.find_skips(model, inputs, innermost="leave out")
    assert len(plan) == 2
    assert [(merge.kind, merge.count) for merge in plan.left_out] == [("cat", 1)]


def test_the_plan_says_what_it_leaves_out(tmp_path):
    plan = sl.find_skips(deceptive.build(deceptive.EmbeddingConcatenated), deceptive.EmbeddingConcatenated.inputs())
    merge = max(plan.left_out, key=lambda merge: merge.count)
    assert (merge.kind, merge.count) == ("cat", 6)
    assert merge.location in str(plan)
    plan.save(tmp_path / "plan.json")
    assert sl.SkipPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")
def test_controlnet_xs_is_scaled_in_the_decoder_of_its_base_network():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNetControlNetXSModel(
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(4, 8),
        cross_attention_dim=8,
        num_attention_heads=2,
        norm_num_groups=4,
        ctrl_block_out_channels=(2, 4),
        ctrl_conditioning_embedding_out_channels=(2, 2),
        ctrl_max_norm_num_groups=2,
        ctrl_num_attention_heads=2,
    ).eval()
    inputs = {
        "sample": torch.randn(1, 4, 16, 16),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 4, 8),
        "controlnet_cond": torch.randn(1, 3, 32, 32),
    }
    # The reference: every residual block of the decoder gets its skip in the last channels, innermost first.
    widths = {"up_blocks.0": (8, 8, 4), "up_blocks.1": (4, 4, 4)}
    blocks = [(block, n) for block in ("up_blocks.0", "up_blocks.1") for n in range(3)]
    handles = []
    for i, (block, n) in zip(range(6, 0, -1), blocks, strict=True):

        def scale(module, args, k=0.7 ** (i - 1), width=widths[block][n]):
            x = args[0]
            return torch.cat([x[:, :-width], k * x[:, -width:]], 1), *args[1:]

        handles.append(model.get_submodule(f"{block}.resnets.{n}").register_forward_pre_hook(scale))
    with torch.no_grad():
        wanted = model(**inputs).sample
        for handle in handles:
            handle.remove()
        sl.scale_skips_(model, "cs:0.7", inputs)
        assert torch.allclose(model(**inputs).sample, wanted, atol=1e-5)
