"""The same image for the same seed, whatever is made beside it; prompts; guidance; folders; processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scalelong.cli import main
from scalelong.config import SAMPLERS
from scalelong.diffusion import ImageMaker, SampleSettings, Unconditional, guided, requests
from scalelong.diffusion.conditions import ConditionError
from scalelong.diffusion.sampling import to_bytes
from scalelong.errors import InvalidConfigError
from scalelong.models import Denoiser, unet
from scalelong.noise import NoiseProcess
from scalelong.runs import SampleFolder, load_run
from scalelong.runs.samples import read_png
from scalelong.training import TrainResult


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_every_sampler_gives_the_same_images_at_any_batch_size(class_run: Path, sampler: str) -> None:
    run = load_run(class_run)
    whole = run.sample(24, sampler=sampler, steps=6, guidance=2.0, batch_size=64)
    assert whole.shape == (24, 1, 8, 8)
    assert whole.dtype == torch.uint8
    assert len({image.numpy().tobytes() for image in whole}) == 24
    for batch_size in (1, 7):
        assert torch.equal(run.sample(9, sampler=sampler, steps=6, guidance=2.0, batch_size=batch_size), whole[:9])
    # Image 5 of seed 0 is image 0 of seed 5, if it shows the same class.
    assert torch.equal(run.sample(1, seed=5, prompts=["5"], sampler=sampler, steps=6, guidance=2.0)[0], whole[5])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_unets_too(layout: torch.memory_format) -> None:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 8}
    model = unet("cifar10", sample_size=8, **blocks, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    maker = ImageMaker(model, Denoiser(model), NoiseProcess("ddpm"), "epsilon", (3, 8, 8), Unconditional(), None)
    whole, few = (
        [maker.all(requests(n, 0), SampleSettings(sampler="ddpm", steps=4), batch_size=size) for size in sizes]
        for n, sizes in ((64, (64,)), (15, (1, 7)))
    )
    assert whole[0].float().std() > 10
    for images in few:
        assert torch.equal(images, whole[0][:15])


def test_averaged_weights_by_default(class_run: Path) -> None:
    default, raw = load_run(class_run), load_run(class_run, weights="raw")
    assert default.weights == "ema"
    assert not torch.equal(default.sample(4, steps=5), raw.sample(4, steps=5))


def test_prompts_by_name_or_number_and_bad_ones(class_run: Path) -> None:
    run = load_run(class_run)
    assert torch.equal(run.sample(2, prompts=["7"], steps=3)[1], run.sample(2, prompts=["3", "7"], steps=3)[1])
    with pytest.raises(ConditionError, match="no class 'eleven'"):
        run.sample(1, prompts=["eleven"], steps=3)
    for bad in ({"n": 0}, {"seed": -1}, {"steps": 0}, {"steps": 1001}, {"sampler": "euler?"}, {"guidance": -1.0}):
        with pytest.raises(InvalidConfigError):
            run.sample(**{"n": 1, **bad})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidConfigError, match="batch_size"):
        run.sample(1, batch_size=0)
    with pytest.raises(InvalidConfigError, match="not finite"):
        to_bytes(torch.full((1, 1, 2, 2), float("nan")))


def test_guidance_is_the_formula() -> None:
    def network(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        return x * (1 + y.view(-1, 1, 1, 1)) + t.view(-1, 1, 1, 1)

    x, t, y, null = torch.randn(3, 1, 2, 2), torch.rand(3), torch.tensor([1, 2, 3]), torch.tensor(9)
    told, untold = network(x, t, y), network(x, t, null.expand(3))
    for scale in (0.0, 0.5, 1.0, 4.0):
        torch.testing.assert_close(guided(network, y, null, scale)(x, t), untold + scale * (told - untold))
    assert torch.equal(guided(network, y, None, 1.0)(x, t), told)
    with pytest.raises(InvalidConfigError, match="condition_dropout 0"):
        guided(network, y, None, 2.0)


REFUSALS = [torch.OutOfMemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_batch_too_large_for_the_memory_is_halved(
    class_run: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    run, sizes = load_run(class_run), []
    make = ImageMaker._batch

    def with_little_memory(self: ImageMaker, part: list, *arguments: object) -> torch.Tensor:
        sizes.append(len(part))
        if len(part) > 3:
            raise refusal
        return make(self, part, *arguments)  # pyright: ignore[reportArgumentType]

    expected = run.sample(10, steps=3)
    monkeypatch.setattr(ImageMaker, "_batch", with_little_memory)
    assert torch.equal(run.sample(10, steps=3, batch_size=16), expected)
    assert sizes == [10, 8, 4, 2, 2, 2, 2, 2]


@pytest.fixture
def arguments(class_run: Path, tmp_path: Path) -> list[str]:
    return ["sample", str(class_run), "--steps", "4", "--guidance", "1.5", "--out", str(tmp_path / "out")]


def test_the_command_writes_files_a_grid_and_how_they_were_made(
    class_run: Path, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--n", "20"]) == 0
    assert "weights: EMA, step 12" in capsys.readouterr().err
    images = load_run(class_run).sample(20, steps=4, guidance=1.5)
    for seed in range(20):
        assert torch.equal(read_png(tmp_path / "out" / f"{seed:012d}.png"), images[seed])
    # Ten classes in columns, enlarged eight times, with gaps of two pixels, below their names.
    assert read_png(tmp_path / "out" / "grid.png").shape == (1, 14 + 2 * 66 + 2, 10 * 66 + 2)
    note = SampleFolder(tmp_path / "out").note()
    assert (note["weights"], note["sampler"], note["steps"], note["guidance"]) == ("ema", "dpm++", 4, 1.5)
    assert note["wishes"]["13"] == "3"


def test_it_continues_where_it_was_interrupted(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*arguments, "--n", "12"]) == 0
    files = {seed: tmp_path / "out" / f"{seed:012d}.png" for seed in range(12)}
    before = {seed: file.read_bytes() for seed, file in files.items()}
    files[3].unlink()
    files[11].unlink()
    made = []
    make = ImageMaker._batch
    monkeypatch.setattr(
        ImageMaker,
        "_batch",
        lambda self, part, *rest: (made.extend(request.seed for request in part), make(self, part, *rest))[1],
    )
    assert main([*arguments, "--n", "14"]) == 0
    assert made == [3, 11, 12, 13]
    assert {seed: file.read_bytes() for seed, file in files.items()} == before


def test_samples_made_in_another_way_are_not_mixed(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--n", "2"]) == 0
    assert main([*arguments, "--n", "2", "--sampler", "ddim"]) == 1
    assert "sampler: 'dpm++' -> 'ddim'" in capsys.readouterr().err
    assert main([*arguments, "--n", "2", "--class", "8"]) == 1
    assert "'8' is asked for" in capsys.readouterr().err
    # What the network cannot draw is said first, whatever the folder holds.
    assert main([*arguments, "--n", "2", "--prompt", "a horse"]) == 1
    said = capsys.readouterr().err
    assert "no class 'a horse'" in said
    assert "asked for" not in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    assert main([*arguments[:-1], str(tmp_path / "other")]) == 1
    assert "not empty" in capsys.readouterr().err


def test_two_processes_make_what_one_makes(class_run: Path, arguments: list[str], tmp_path: Path) -> None:
    """As torchrun starts them, without waiting for torchrun itself."""
    assert main([*arguments, "--n", "5"]) == 0
    together = tmp_path / "together"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "scalelong", *arguments[:-1], str(together), "-n", "5", "--batch-size", "1"]
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert sum(err.count("weights: EMA") for _, err in said) == 1
    assert (together / "grid.png").read_bytes() == (tmp_path / "out" / "grid.png").read_bytes()
    for seed in range(5):
        name = f"{seed:012d}.png"
        assert (together / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert json.loads((together / "samples.json").read_text()) == SampleFolder(tmp_path / "out").note()


def test_a_grid_is_a_picture_that_notebooks_show(class_run: Path, tmp_path: Path) -> None:
    run = load_run(class_run)
    picture = run.grid(5, columns=2, steps=2)
    images = run.sample(5, steps=2)
    assert picture.size == (2 * (64 + 2) + 2, 3 * (64 + 2) + 2)  # 8 pixels, enlarged eight times
    assert picture.getpixel((2, 2)) == int(images[0, 0, 0, 0])
    assert picture._repr_png_().startswith(b"\x89PNG")
    picture.save(tmp_path / "newest.png")
    shown = TrainResult(class_run, run.step, True, tmp_path / "newest.png")._repr_html_()
    assert "finished at step" in shown
    assert "data:image/png;base64,iVBOR" in shown


def test_precision_is_that_of_the_network_alone(class_run: Path) -> None:
    run = load_run(class_run)
    seen: list[tuple[torch.dtype, bool]] = []

    def look(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append((inputs[0].dtype, torch.is_autocast_enabled("cpu")))

    handle = run.model.register_forward_pre_hook(look)
    low = run.sample(8, steps=3, precision="bf16")
    handle.remove()
    assert seen == [(torch.float32, True)] * 3
    full = run.sample(8, steps=3)
    assert not torch.equal(low, full)
    assert (low.float() - full.float()).abs().mean() < 4  # of 255


def test_the_command_samples_in_bf16_and_never_mixes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--precision", "bf16"]) == 0
    note = json.loads((Path(arguments[arguments.index("--out") + 1]) / "samples.json").read_text())
    assert note["precision"] == "bf16"
    assert main(arguments) != 0
    assert "precision: 'bf16' -> 'no'" in capsys.readouterr().err
    with pytest.raises(InvalidConfigError, match="precision must be one of no, bf16, fp16, got 'int4'"):
        SampleSettings(precision="int4")
