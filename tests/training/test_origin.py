"""Runs that begin with weights that exist: what they computed is what step 0 computes."""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
import json
from dataclasses import replace

import pytest
import torch

from scalelong import UViT
from scalelong.cli import main
from scalelong.config import DiffusionConfig, ImagesConfig, load_config
from scalelong.errors import InvalidConfigError, UntrustedCodeError
from scalelong.models.calling import Denoiser
from scalelong.runs import load_run, read_origin
from scalelong.runs.model import DataShape, build_model, load_run_data
from scalelong.runs.origin import adopt_weights, load_start_
from scalelong.training import train
from tests.training.conftest import TINY as WITH_OPTIONS

TINY = replace(WITH_OPTIONS, model_options={})

CLASSES = replace(
    TINY,
    model_options={"patch_size": 2, "dim": 16, "depth": 4, "heads": 2},
    steps=4,
    scaling="cs:0.5",
    diffusion=DiffusionConfig(condition="class", prediction="v"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with classes and constant scaling."""
    folder = tmp_path_factory.mktemp("origin") / "source"
    train(CLASSES, folder, quiet=True)
    return folder


def begun(path, folder=None, **changes):
    """The network of a run that begins with these weights, and its configuration."""
    config = adopt_weights(replace(TINY, start_from=str(path), **changes), given=changes.keys())
    shape = load_run_data(config).shape
    model = build_model(config, shape)
    load_start_(model, config, shape)
    return model.eval(), config, shape


@torch.no_grad()
def outputs(model, size=8, channels=1, labels=True):
    x = torch.randn(5, channels, size, size, generator=torch.Generator().manual_seed(3))
    t = torch.tensor([1.0, 100.0, 400.0, 700.0, 990.0])
    return Denoiser(model)(x, t, torch.tensor([0, 3, 9, 10, 10]) if labels else None)


def same(first, second):
    return float((first - second).norm() / second.norm()) < 1e-5


@pytest.mark.parametrize("scaling", ["cs:0.5", "none", "cs:0.7", "uniform", "mp", "ls"])
def test_step_zero_computes_what_the_run_computed(source, scaling):
    model, config, _ = begun(source, scaling=scaling)
    assert config.diffusion == CLASSES.diffusion
    assert config.model_options == CLASSES.model_options
    assert config.scaling == scaling
    assert same(outputs(model), outputs(load_run(source).model))


def test_gates_that_look_at_the_data_are_refused(source):
    with pytest.raises(InvalidConfigError, match="`scaling` ls:start=paper would change"):
        begun(source, scaling="ls:start=paper")


def test_what_the_weights_decide_is_not_overruled(source):
    config = replace(TINY, start_from=str(source))
    for name, changed in {
        "prediction": replace(config, diffusion=DiffusionConfig(prediction="x0")),
        "condition": replace(config, diffusion=DiffusionConfig(condition="none")),
        "channels": replace(config, images=ImagesConfig(channels=3)),
    }.items():
        with pytest.raises(InvalidConfigError, match=f"`{name}` .* does not go with the weights"):
            adopt_weights(changed, given={name})
    with pytest.raises(InvalidConfigError, match="dim=32 does not go"):
        adopt_weights(replace(config, model_options={"dim": 32}), given={"model_options"})
    with pytest.raises(InvalidConfigError, match="is not there: give a run folder"):
        read_origin(source / "nowhere")


def test_other_sizes_resize_the_positions(source):
    model, config, _ = begun(source, scaling="none", images=ImagesConfig(size=16))
    assert (config.images.size, config.images.channels) == (8, 1)  # "images" is no flag: those of the weights
    config = adopt_weights(replace(TINY, start_from=str(source), images=ImagesConfig(size=16)), given={"size"})
    shape = load_run_data(config).shape
    model = build_model(config, shape)
    load_start_(model, config, shape)
    own = load_run(source).model.position_embedding
    with torch.no_grad():
        torch.testing.assert_close(model.position_embedding.weight, own((8, 8)))


def test_classes_go_by_name_and_new_ones_begin_as_none_in_particular(source, caplog):
    config = adopt_weights(replace(TINY, start_from=str(source)))
    rows = load_run(source).model.class_embedding.weight
    model = build_model(config, DataShape(1, 8, 8, ("7", "cat", "2")))
    caplog.set_level("INFO")
    load_start_(model, config, DataShape(1, 8, 8, ("7", "cat", "2")))
    assert torch.equal(model.class_embedding.weight, rows[[7, 10, 2, 10]])
    assert "1 of 3 classes are new" in caplog.text
    without = replace(config, diffusion=replace(config.diffusion, condition="none"))
    with pytest.raises(InvalidConfigError, match="trained with classes"):
        load_start_(build_model(without, DataShape(1, 8, 8)), without, DataShape(1, 8, 8))
    with pytest.raises(InvalidConfigError, match="1 channels, and digits has 3"):
        load_start_(model, config, DataShape(3, 8, 8, ("7",)))


def authors_weights(**arguments):
    """Weights under the authors' names, from a network of ours."""
    from scalelong.models.official import official_name

    plain = {"residual_scaling": "none", "scaling": "none", **arguments}
    model = UViT(image_size=8, patch_size=2, channels=1, dim=64, depth=4, heads=1, **plain).eval()
    theirs = {}
    for block, ours in (("in_blocks.0.", "encoder.0."), ("in_blocks.1.", "encoder.1."), ("mid_block.", "middle.")):
        theirs |= {block: ours}
    theirs |= {"out_blocks.0.": "decoder.0.", "out_blocks.1.": "decoder.1."}
    parts = ["norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.proj.weight", "attn.proj.bias", "norm2.weight"]
    parts += ["norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"]
    names = [block + part for block in theirs for part in parts]
    names += [f"out_blocks.{i}.skip_linear.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    names += ["pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight", "norm.bias"]
    names += ["decoder_pred.weight", "decoder_pred.bias", "final_layer.weight", "final_layer.bias"]
    names += ["label_emb.weight"] if model.classes else []
    state = model.state_dict()
    return model, {name: state[official_name(name, 2)].clone() for name in names}


@pytest.mark.parametrize(("classes", "scaling"), [(None, "none"), (None, "cs:0.6"), (11, "cs:0.6")])
def test_a_file_of_the_authors(tmp_path, classes, scaling):
    model, weights = authors_weights(classes=classes)
    torch.save(weights, tmp_path / "nnet_ema.pth")
    found, config, _ = begun(tmp_path / "nnet_ema.pth", scaling=scaling)
    assert config.diffusion.condition == ("class" if classes else "none")
    assert config.model_options["dim"] == 64
    assert same(outputs(found, labels=bool(classes)), outputs(model, labels=bool(classes)))


def test_a_file_that_would_run_code_is_not_opened(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harmed"), "w"))

    torch.save({"pos_embed": Harm()}, tmp_path / "nnet_ema.pth")
    with pytest.raises(InvalidConfigError, match="without running code"):
        read_origin(tmp_path / "nnet_ema.pth")
    assert not (tmp_path / "harmed").exists()
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(InvalidConfigError, match="no weights of the authors"):
        read_origin(tmp_path / "other.pth")


@pytest.mark.parametrize("scaling", ["none", "cs:kappa=0.7,behind_norms=true"])
def test_a_folder_of_diffusers(tmp_path, scaling):
    from diffusers.models.unets.unet_2d import UNet2DModel
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    torch.manual_seed(1)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    ).eval()
    unet.save_pretrained(tmp_path / "pipe" / "unet")
    DDPMScheduler(prediction_type="v_prediction").save_pretrained(tmp_path / "pipe" / "scheduler")
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    model, config, _ = begun(tmp_path / "pipe", scaling=scaling)
    assert (config.diffusion.schedule, config.diffusion.prediction) == ("ddpm", "v")
    assert same(outputs(model, labels=False), outputs(unet, labels=False))


def test_code_that_a_run_names_needs_trust(source, tmp_path):
    import shutil

    shutil.copytree(source, tmp_path / "run", symlinks=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("model: uvit", "model: os:system"))
    with pytest.raises(UntrustedCodeError, match="--trust"):
        read_origin(tmp_path / "run")


def test_the_command_starts_and_continues(source, tmp_path, capsys, final_state):
    out = tmp_path / "tuned"
    command = ["train", "digits", "--from", str(source), "--scaling", "none", "--out", str(out), "--quiet"]
    flags = ["--samples-every", "0", "--monitor-every", "0", "--trackers", "--save-every", "4"]
    assert main([*command, "--steps", "4", *flags]) == 0
    saved = load_config(out / "config.yaml")
    assert (saved.start_from, saved.scaling, saved.steps) == (str(source), "none", 4)
    assert saved.batch_size == CLASSES.batch_size
    first = load_run(out, weights="raw", step=0).model
    assert same(outputs(first), outputs(load_run(source).model))
    assert main([*command, "--steps", "6", *flags]) == 0
    assert final_state(out).step == 6


def test_a_run_with_adapters_of_earlier_versions_is_refused(source, tmp_path):
    config = (source / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(f"{config}lora: 0\n")
    assert load_config(tmp_path / "config.yaml") == load_config(source / "config.yaml")
    (tmp_path / "config.yaml").write_text(f"{config}lora: 4\n")
    with pytest.raises(InvalidConfigError, match=r"`lora` 4: .*peft"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sample_size": "x"}, "sample_size in its config.json must be a whole number above 0, got 'x'"),
        ({"num_class_embeds": -1}, "num_class_embeds in its config.json must be"),
        ({"in_channels": [3]}, "in_channels in its config.json must be"),
        ({"beta_start": "x"}, "a noise schedule or a prediction that is not one of ours"),
        ({"num_train_timesteps": 10**12}, "a noise schedule or a prediction that is not one of ours"),
        ({"prediction_type": ["epsilon"]}, "a noise schedule or a prediction that is not one of ours"),
    ],
)
def test_edited_configurations_of_diffusers_are_refused_by_name(tmp_path, change, said):
    known = {"_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1}
    scheduler = {"beta_start": 1e-4, "beta_end": 0.02, "num_train_timesteps": 1000}
    for name, values in {"unet/config": known, "scheduler/scheduler_config": scheduler, "model_index": {}}.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values | change))  # what a file does not know, it leaves out
    with pytest.raises(InvalidConfigError, match=said):
        read_origin(tmp_path)


def test_damaged_weights_are_refused_by_name(tmp_path):
    """And without torch's own advice, which is how to run what is in the file."""
    torch.save({"a": torch.zeros(20_000)}, tmp_path / "whole.pth")
    cut = (tmp_path / "whole.pth").read_bytes()[:40_000]  # torch seeks before the beginning of such a file
    for name, content in {"a.pth": b"hello", "b.safetensors": b"hello", "c.pth": b"", "d.pth": cut}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidConfigError, match=r"without running code: .* download it again") as raised:
            read_origin(tmp_path / name)
        assert "weights_only=False" not in str(raised.value)
    (tmp_path / "model").mkdir()
    known = {"_class_name": "UNet2DModel", "sample_size": 8, "in_channels": 1, "out_channels": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(known))
    (tmp_path / "model" / "diffusion_pytorch_model.safetensors").write_bytes(b"hello")
    with pytest.raises(InvalidConfigError, match=r"diffusers cannot load this UNet2DModel .*download it again"):
        read_origin(tmp_path / "model").network()
