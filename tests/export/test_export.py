"""Exported folders, loaded by plain diffusers in a process that cannot import scalelong; files; cards; the hub."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors import safe_open

from scalelong.attaching import unscale_
from scalelong.cli import main
from scalelong.config import DiffusionConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TextConfig, TrainConfig
from scalelong.errors import ExportError
from scalelong.evaluation import SCORES, STORED, Protocol, Score, Scores, store
from scalelong.export import export_run, model_card, push_to_hub
from scalelong.runs import save_png
from scalelong.runs.load import load_run
from scalelong.training import train

UNET = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 1,
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}
BASE = TrainConfig(
    data="digits",
    model="unet/cifar10",
    model_options=UNET,
    scaling="cs",
    steps=8,
    batch_size=8,
    images=ImagesConfig(size=8, channels=1),
    diffusion=DiffusionConfig(schedule="ddpm"),
    optimizer=OptimizerConfig(lr=1e-3, ema_rate=0.5),
    logging=LoggingConfig(trackers=(), samples_every=0),
)
UVIT = {"model": "uvit", "model_options": {"patch_size": 2, "dim": 32, "depth": 2, "heads": 2}}
FORMATS: tuple[Literal["diffusers", "safetensors"], ...] = ("diffusers", "safetensors")
BY_CLASS = DiffusionConfig(condition="class", prediction="v")

LOAD = """
import sys
sys.modules["scalelong"] = None  # importing it is an error
import numpy, torch
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained({folder!r}, trust_remote_code=True)
pipeline.set_progress_bar_config(disable=True)
generators = [torch.Generator().manual_seed(seed) for seed in range(8)]
images = pipeline(generator=generators, output_type="np", num_inference_steps=5, **{arguments}).images
numpy.save({out!r}, images)
print(type(pipeline).__name__)
"""


def in_a_fresh_process(folder: Path, **arguments: object) -> tuple[str, torch.Tensor]:
    """The class of the pipeline and its images, made by a process that cannot import scalelong."""
    out = str(folder.parent / "images.npy")
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(folder=str(folder), arguments=arguments, out=out)],
        env={
            "PYTHONPATH": ":".join(entry for entry in sys.path if entry.endswith("site-packages")),
            "OMP_NUM_THREADS": "1",
            "HF_MODULES_CACHE": str(folder.parent / "modules"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1], as_bytes(np.load(out))


def in_this_process(folder: Path, trust: bool, **arguments: object) -> tuple[str, torch.Tensor]:
    """The same, faster, for what does not depend on the process."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(folder, **({"trust_remote_code": True} if trust else {}))
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in range(8)]
    images = pipeline(generator=generators, output_type="np", num_inference_steps=5, **arguments).images
    return type(pipeline).__name__, as_bytes(images)


def as_bytes(images: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(images).permute(0, 3, 1, 2) * 255).round().to(torch.int64)


def assert_same_images(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Scaling in another place rounds differently: a value may fall on the other side of a half."""
    difference = (theirs - ours.to(torch.int64)).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02
    assert ours.float().std() > 10


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where diffusers copies the code of a folder before it runs it."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def unet_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "unet"
    train(BASE, folder)
    return folder


def test_an_unconditional_unet_needs_nothing_of_ours(unet_run: Path, tmp_path: Path) -> None:
    """GroupNorm comes before any weights that could take κ, so a class of twenty lines carries it."""
    assert main(["export", str(unet_run), "--out", str(tmp_path / "model")]) == 0
    kind, images = in_a_fresh_process(tmp_path / "model", batch_size=8)
    assert kind == "DDPMPipeline"
    run = load_run(unet_run)
    assert_same_images(images, run.sample(8, sampler="ddpm", steps=5))
    # κ matters: without it the images are others.
    unscale_(run.model)
    assert (images - run.sample(8, sampler="ddpm", steps=5).to(torch.int64)).abs().max() > 2


@pytest.mark.parametrize("scaling", ["none", "cs:kappa=0.5,behind_norms=true"])
def test_what_is_in_the_weights_needs_standard_classes_alone(scaling: str, tmp_path: Path) -> None:
    train(replace(BASE, scaling=scaling, steps=2), tmp_path / "run")
    export_run(load_run(tmp_path / "run"), tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.py"))
    kind, images = in_this_process(tmp_path / "model", trust=False, batch_size=8)
    assert kind == "DDPMPipeline"
    assert_same_images(images, load_run(tmp_path / "run").sample(8, sampler="ddpm", steps=5))


@pytest.mark.parametrize("scaling", ["cs:0.5", "mp"])
def test_every_constant_method_is_carried_and_the_run_is_left_alone(scaling: str, tmp_path: Path) -> None:
    train(replace(BASE, scaling=scaling, steps=2), tmp_path / "run")
    run = load_run(tmp_path / "run")
    x, t = torch.randn(8, 1, 8, 8), torch.full((8,), 300.0)
    with torch.no_grad():
        before = run.network(x, t)
        export_run(run, tmp_path / "model")
        assert torch.equal(run.network(x, t), before)
    factors = json.loads((tmp_path / "model" / "unet" / "config.json").read_text())["factors"]
    assert len(factors) == 4
    assert len({skip for _, _, skip in factors}) == (4 if scaling.startswith("cs") else len({s for _, _, s in factors}))


def test_a_class_conditional_unet_brings_a_pipeline_without_scalelong(tmp_path: Path) -> None:
    train(replace(BASE, diffusion=replace(BY_CLASS, schedule="cosine")), tmp_path / "run")
    run = load_run(tmp_path / "run")
    export_run(run, tmp_path / "model")
    kind, images = in_this_process(
        tmp_path / "model", trust=True, class_labels=["3", 4, "5", 6, "3", 4, "5", 6], guidance_scale=2.0
    )
    assert kind == "ExportedPipeline"
    assert_same_images(images, run.sample(8, prompts=["3", "4", "5", "6"], steps=5, guidance=2.0))
    # From the hub, diffusers takes every list for a component: a module and a class.
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    lists = {name for name, entry in index.items() if isinstance(entry, list)}
    assert lists == {"_class_name", "unet", "scheduler", "vae"}


def test_uvit_brings_its_class(tmp_path: Path) -> None:
    train(replace(BASE, **UVIT, scaling="ls", diffusion=BY_CLASS), tmp_path / "run")
    run = load_run(tmp_path / "run")
    export_run(run, tmp_path / "model")
    kind, images = in_this_process(tmp_path / "model", trust=True, class_labels=[7] * 8, guidance_scale=1.5)
    assert kind == "ExportedPipeline"
    assert_same_images(images, run.sample(8, prompts=["7"], steps=5, guidance=1.5))


def test_what_standard_classes_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(replace(BASE, scaling="ls", steps=1), tmp_path / "learned")
    assert main(["export", str(tmp_path / "learned")]) == 1
    assert "depend on the data" in capsys.readouterr().err
    assert not (tmp_path / "learned" / "export-diffusers").exists()
    assert main(["export", str(tmp_path / "learned"), "--format", "safetensors"]) == 0


TEXTS = replace(
    BASE,
    data="shapes",
    images=ImagesConfig(size=8),
    diffusion=DiffusionConfig(condition="text", prediction="v"),
    text=TextConfig(text_length=8, text_dim=16),
    steps=3,
)
PROMPTS = ["a red circle at the top left", "a blue square at the bottom right"] * 4


def test_words_draw_the_same_images_as_in_the_run(tmp_path: Path) -> None:
    train(replace(TEXTS, **UVIT), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    kind, images = in_this_process(tmp_path / "model", trust=True, prompt=PROMPTS, guidance_scale=2.0)
    assert kind == "ExportedPipeline"
    assert_same_images(images, run.sample(8, prompts=PROMPTS, steps=5, guidance=2.0))
    _, same = in_this_process(tmp_path / "model", trust=True, prompt=PROMPTS[0], batch_size=8)
    assert_same_images(same, run.sample(8, prompts=PROMPTS[:1], steps=5))
    turns = run.sample(8, prompts=PROMPTS, steps=5).to(torch.int64)
    assert (same[1::2] - turns[1::2]).abs().max() > 2, "the prompt matters"
    with pytest.raises(ValueError, match="'zebra'"):
        in_this_process(tmp_path / "model", trust=True, prompt=["a zebra"] * 8)
    with pytest.raises(ValueError, match="prompt must be given"):
        in_this_process(tmp_path / "model", trust=True)
    card = (tmp_path / "model" / "README.md").read_text()
    assert 'prompt="a ' in card


def test_a_text_encoder_goes_with_the_model(tmp_path: Path) -> None:
    """CLIP and its tokenizer lie in the folder, which needs nothing of ours."""
    encoder = tiny_clip(tmp_path / "clip", length=8, dim=16)
    options = {
        **UNET,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    config = replace(
        TEXTS,
        model="unet/mscoco256",
        model_options=options,
        text=TextConfig(text_encoder=str(encoder), text_length=8, text_dim=16),
    )
    train(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    expected = run.sample(8, prompts=PROMPTS, steps=5, guidance=3.0)
    export_run(run, tmp_path / "model")
    encoder.rename(tmp_path / "gone")
    kind, images = in_this_process(tmp_path / "model", trust=True, prompt=PROMPTS, guidance_scale=3.0)
    assert kind == "ExportedPipeline"
    assert_same_images(images, expected)


def tiny_clip(folder: Path, length: int, dim: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", *dict.fromkeys(" ".join(PROMPTS).split())]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=dim,
            intermediate_size=dim,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=length,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


def test_nothing_is_overwritten(unet_run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("precious")
    run = load_run(unet_run)
    with pytest.raises(ExportError, match="exists already"):
        export_run(run, tmp_path / "taken")
    export_run(run, tmp_path / "weights.safetensors", "safetensors")
    with pytest.raises(ExportError, match="exists already"):
        export_run(run, tmp_path / "weights.safetensors", "safetensors")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(("weights", "said"), [("ema", "EMA"), ("raw", "not averaged")])
def test_a_file_says_what_it_holds(weights: str, said: str, unet_run: Path, tmp_path: Path) -> None:
    run = load_run(unet_run, weights=weights)  # pyright: ignore[reportArgumentType]
    path = export_run(run, tmp_path / weights, "safetensors")
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["scalelong"])
        assert set(file.keys()) == set(run.model.state_dict())
    assert said in about["weights"]
    assert about["step"] == 8
    assert about["scaling"]["method"] if "method" in about["scaling"] else about["scaling"]
    assert about["config"]["data"] == "digits"
    assert len(about["coefficients"]) >= 2
    again = export_run(run, tmp_path / "again", "safetensors")
    assert again.read_bytes() == path.read_bytes()


def test_the_card_tells_data_method_kappa_and_scores(unet_run: Path, tmp_path: Path) -> None:
    protocol = Protocol(
        features="classifier",
        features_sha256="f" * 64,
        data="digits",
        data_sha256="d" * 64,
        reference_images=1797,
        images=500,
        sampler="ddim",
        sampler_steps=25,
        guidance=1.0,
        weights="ema",
    )
    score = dict.fromkeys(SCORES, Score(12.5, 11.0, 14.0))
    store(unet_run / STORED, Scores(protocol, score, {"run": "x", "step": 8}))
    store(unet_run / STORED, Scores(replace(protocol, images=77), score, {"run": "x", "step": 5}))
    export_run(load_run(unet_run), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    for part in (
        "digits",
        "EMA",
        "step 8",
        "κ",
        "12.5 [11, 14]",
        "near-copies",
        "500 images, ddim 25 steps",
        "f" * 12,
        "d" * 12,
    ):
        assert part in card
    assert "77 images" not in card
    (unet_run / STORED).unlink()


def test_names_of_others_are_text_in_the_card(tmp_path: Path) -> None:
    train(replace(BASE, steps=1, diffusion=replace(BY_CLASS, schedule="ddpm")), tmp_path / "run")
    about = json.loads((tmp_path / "run" / "data.json").read_text())
    about["name"] = "x | y\n# Title <script>alert(1) [link](x) ![i](j)"
    about["classes"][0] = '"]); import os\n```\n<b>'
    (tmp_path / "run" / "data.json").write_text(json.dumps(about))
    card = model_card(load_run(tmp_path / "run"), "diffusers")
    assert "\n# Title" not in card
    assert "\\<script\\>" in card
    assert "\\[link\\]" in card
    assert "x \\| y" in card
    assert card.count("```") == 2, "the block of code is not left"
    block = card.split("```")[1].partition("python\n")[2]
    assert "import os" not in [line.strip() for line in block.splitlines()]
    compile(block, "card", "exec")


def test_a_card_shows_samples_and_no_place_of_this_machine(tmp_path: Path) -> None:
    train(replace(BASE, steps=1), tmp_path / "run")
    about = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps(about | {"name": "/home/me/photos"}))
    for step in (1, 9):
        save_png(tmp_path / "run" / "samples" / f"step-{step:08d}.png", torch.full((3, 4, 4), step, dtype=torch.uint8))
    for form in FORMATS:
        folder = tmp_path / form
        export_run(load_run(tmp_path / "run"), folder, form)
        card = (folder / "README.md").read_text()
        assert " on photos\n" in card
        assert not any(b"/home/me" in file.read_bytes() for file in folder.rglob("*") if file.is_file())
        assert "![samples](samples.png)" in card
        assert "| scaling | cs (kappa=0.7, " in card, "in words, not as Python"
        shown = folder / "samples.png"
        assert shown.read_bytes() == (tmp_path / "run" / "samples" / "step-00000001.png").read_bytes()


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    class Hub:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
            calls.append((name, private))

        def upload_folder(self, repo_id: str, folder_path: str) -> str:
            calls.append((repo_id, folder_path))
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert push_to_hub(tmp_path, "me/model") == "https://hub/commit"
    assert calls == [("me/model", True), ("me/model", str(tmp_path))]

    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Hub, "create_repo", offline)
    with pytest.raises(ExportError, match="no route to host"):
        push_to_hub(tmp_path, "me/model")


# Kills, and several exports to one place


class Killed(BaseException):
    """As good as SIGKILL for what is on the disk."""


def test_a_killed_export_can_be_repeated(tmp_path, monkeypatch, unet_run):
    run = load_run(unet_run)

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("scalelong.export.exporter.model_card", killed)
        for form in FORMATS:
            with pytest.raises(Killed):
                export_run(run, tmp_path / form, form)
            assert not (tmp_path / form).exists()
    path = export_run(run, tmp_path / "safetensors", "safetensors")
    assert sorted(file.name for file in path.parent.iterdir()) == ["README.md", "model.safetensors"]
    assert (export_run(run, tmp_path / "diffusers") / "model_index.json").exists()


@pytest.mark.parametrize("name", ["folder", "file.safetensors"])
def test_of_several_exports_to_one_place_one_succeeds(tmp_path, name, unet_run):
    run, outcomes, start = load_run(unet_run), [], threading.Barrier(4)

    def export():
        start.wait()
        try:
            outcomes.append(str(export_run(run, tmp_path / name, "safetensors")))
        except ExportError as error:
            outcomes.append(f"refused: {error}")

    threads = [threading.Thread(target=export) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcome.startswith("refused") for outcome in outcomes) == 3
    assert not list(tmp_path.glob(".*"))
    with safe_open(tmp_path / name / "model.safetensors" if name == "folder" else tmp_path / name, "pt") as file:
        assert set(file.keys()) == set(run.model.state_dict())
