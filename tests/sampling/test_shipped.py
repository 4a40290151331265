"""Trained networks that come with the package: small, documented, and usable by every command at once."""

import json

import pytest
import torch

import scalelong as sl
from research.shipped import pack
from scalelong.cli import main
from scalelong.config import load_config
from scalelong.data import load_data
from scalelong.errors import CheckpointError, InvalidConfigError, RunFolderError
from scalelong.runs import NETWORKS, load_run, packed_folder, unpack
from scalelong.training import train


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_all_are_there_small_and_documented():
    files = [file for name in NETWORKS for file in packed_folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 2_000_000
    for name in NETWORKS:
        load_config(packed_folder(name) / "config.yaml")  # for research.shipped
        card = (packed_folder(name) / "README.md").read_text()
        for part in (
            f"python -m research.shipped {name}",
            "licence",
            "held-out real images",
            "noise",
        ):
            assert part in card, (name, part)


@pytest.mark.parametrize("name", NETWORKS)
def test_they_draw_what_they_are_told(name):
    """Every class twice; a sample should be nearest to the mean picture of its own class."""
    run = sl.load_trained(name)
    data = load_data(run.config.data)
    batch = data.fetch(range(len(data)))
    assert batch.labels is not None
    means = torch.stack([batch.images[batch.labels == label].float().mean(0) for label in range(10)])
    prompts = list(data.classes or ())
    if run.config.diffusion.condition == "text":
        captions = data.annotations.captions or []
        prompts = [captions[int((batch.labels == label).nonzero()[0])] for label in range(10)]
    images = run.sample(20, prompts=prompts, steps=8, guidance=2).float()
    found = torch.cdist(images.flatten(1), means.flatten(1)).argmin(1)
    assert float((found == torch.arange(20) % 10).float().mean()) >= 0.7


def test_on_the_command_line(capsys, tmp_path):
    assert main(["sample", "--model", "digits-class", "7", "-n", "2", "--steps", "2", "--quiet"]) == 0
    folder = tmp_path / capsys.readouterr().out.strip()
    note = json.loads((folder / "samples.json").read_text())
    assert note["wishes"] == {"0": "7", "1": "7"}
    assert folder.is_relative_to(tmp_path / "runs" / "digits-class")
    # It is a run folder like any other, with prompts behind it.
    assert main(["sample", "runs/digits-class", "3", "4", "-n", "2", "--steps", "2", "--quiet", "--out", "drawn"]) == 0
    assert json.loads((tmp_path / "drawn" / "samples.json").read_text())["wishes"] == {"0": "3", "1": "4"}
    assert main(["export", "--model", "digits-class", "--format", "safetensors"]) == 0
    assert list((tmp_path / "runs" / "digits-class" / "export-safetensors").glob("*.safetensors"))
    capsys.readouterr()
    assert main(["models", "--trained", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(NETWORKS)


def test_clear_errors(tmp_path):
    with pytest.raises(InvalidConfigError, match="digits-class, digits-text"):
        sl.load_trained("digits")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(RunFolderError, match="something else"):
        unpack("digits-class", tmp_path / "other")
    folder = unpack("digits-class", tmp_path / "run")
    assert unpack("digits-class", folder) == folder
    with pytest.raises(CheckpointError, match="--from"):
        train(load_config(folder / "config.yaml"), folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        pack(tmp_path / "other", tmp_path / "packed")


def test_packing_and_unpacking_keep_the_weights(tmp_path, monkeypatch):
    name = next(iter(NETWORKS))
    first = load_run(unpack(name, tmp_path / "run"))
    again = pack(tmp_path / "run", tmp_path / "packed" / name)
    monkeypatch.setattr("scalelong.runs.load.packed_folder", lambda _: again)
    second = load_run(unpack(name, tmp_path / "again"))
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
