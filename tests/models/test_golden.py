"""Our U-ViT against the authors': outputs and every gradient, under each of their methods.

Small files (tests/golden) are part of the repository. The full ones, with every entry of every gradient and two more
networks, are checked where they are.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import scalelong as sl
from scalelong.errors import CannotReadError
from scalelong.models import cpu, fuse_
from scalelong.models.official import official_name
from tests.golden.make import read, signature

SMALL = Path(__file__).resolve().parents[1] / "golden"
METHODS = {"none": "constant", "inv_sqrt2": "constant", "cs": "constant"}
METHODS |= {"ls_shared": "ls_shared", "ls_per_skip": "ls_per_skip"}
"""The authors' five methods, and the small file that each is in."""
FULL = [*METHODS, "class_cs", "text_none"]


@pytest.fixture(autouse=True)
def fused_at_any_size(monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 0)


def load(name: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Arguments, and weights, inputs, output and signatures of the gradients, of one of the five methods."""
    about, tensors = read(SMALL / f"{METHODS[name]}.safetensors")
    shared = {key: value for key, value in tensors.items() if key.startswith(("weight.", "input."))}
    return json.loads(about["methods"])[name], shared | part(tensors, f"{name}.")


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def method(metadata: dict[str, str], start: str = "paper") -> sl.Scaling:
    """The authors' methods 0 to 4."""
    return [
        sl.NoScaling(),
        sl.UniformScaling(),
        sl.ConstantScaling(float(metadata["kappa"])),
        sl.LearnableScaling(start=start),
        sl.LearnableScaling(shared=False, start=start),
    ][int(metadata["scalelong"])]


def arguments(metadata: dict[str, str]) -> dict[str, Any]:
    return {name: json.loads(value.lower()) for name, value in metadata.items() if name not in ("scalelong", "kappa")}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach() - theirs).norm() / theirs.norm().clamp_min(1e-12))


def run(
    metadata: dict[str, str], tensors: dict[str, torch.Tensor], start: str, fuses: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of our U-ViT with the authors' weights, and its gradients under the authors' names."""
    scaling = method(metadata, start)
    model = sl.UViT.from_official(part(tensors, "weight."), scaling=scaling, **arguments(metadata))
    if fuses:
        fuse_(model)
    output = model(**part(tensors, "input."))
    output.square().mean().backward()
    parameters = dict(model.named_parameters())
    theirs = part(tensors, "grad.")
    offsets = {"skip_scaling.offsets"} & set(parameters)
    assert len(theirs) == len(parameters) - len(offsets)
    gradients = {name: parameters[official_name(name, model.depth // 2)].grad for name in theirs}
    return output, {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("start", ["paper", "cs"])
@pytest.mark.parametrize("fuses", [False, True])
def test_outputs_and_gradients_agree(name, start, fuses):
    metadata, tensors = load(name)
    output, gradients = run(metadata, tensors, start, fuses)
    assert relative(output, tensors["output"]) < 1e-5
    for their_name, theirs in part(tensors, "grad.").items():
        ours = signature(their_name, gradients[their_name])
        # The norm, then four sums with fixed signs: each is as far off as the gradient is, give or take.
        assert float((ours - theirs).abs().max()) < 3e-5 * float(theirs[0]) + 1e-12, their_name


def test_a_signature_sees_one_wrong_entry():
    _, tensors = load("cs")
    name, theirs = next(iter(part(tensors, "grad.").items()))
    gradient = run(*load("cs"), "paper")[1][name].clone()
    gradient.flatten()[0] += 1e-3 * gradient.norm()
    assert float((signature(name, gradient) - theirs).abs().max()) > 3e-4 * float(theirs[0])


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("start", ["paper", "cs"])
@pytest.mark.parametrize("fuses", [False, True])
def test_every_entry_of_the_full_files_agrees(golden, name, start, fuses):
    metadata, tensors = read(golden / f"uvit_{name}.safetensors")
    output, gradients = run(metadata, tensors, start, fuses)
    assert relative(output, tensors["output"]) < 1e-5
    for their_name, theirs in part(tensors, "grad.").items():
        assert relative(gradients[their_name], theirs) < 1e-5, their_name


def test_a_file_on_disk_loads_without_executing_code(tmp_path):
    metadata, tensors = load("none")
    torch.save(part(tensors, "weight."), tmp_path / "nnet.pth")
    model = sl.UViT.from_official(tmp_path / "nnet.pth", scaling="none", **arguments(metadata))
    assert relative(model(**part(tensors, "input.")), tensors["output"]) < 1e-5

    class Dangerous:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"weight": Dangerous()}, tmp_path / "bad.pth")
    with pytest.raises(CannotReadError, match="weights only"):
        sl.UViT.from_official(tmp_path / "bad.pth", **arguments(metadata))
    for content in ([1, 2], {"weight": "text"}, None):
        torch.save(content, tmp_path / "bad.pth")
        with pytest.raises(CannotReadError, match="tensors by name"):
            sl.UViT.from_official(tmp_path / "bad.pth", **arguments(metadata))
    (tmp_path / "bad.pth").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(CannotReadError, match="download it again"):
        sl.UViT.from_official(tmp_path / "bad.pth", **arguments(metadata))


def test_gates_start_afresh_on_a_file_without_them():
    metadata, tensors = load("none")
    model = sl.UViT.from_official(part(tensors, "weight."), scaling="ls", **arguments(metadata))
    model(**part(tensors, "input."))
    assert sl.coefficients(model) == pytest.approx([0.999, 0.7])


@pytest.mark.parametrize(
    ("name", "scaling", "changes", "says"),
    [
        ("ls_shared", "cs", {}, r"learned gates .*LearnableScaling\(shared=True, start=.paper.\)"),
        ("ls_per_skip", "ls", {}, r"LearnableScaling\(shared=False, start=.paper.\)"),
        # Eq. 9's gates have no bounds: read as bounded gates they would mean something else.
        ("ls_shared", "ls", {}, r"LearnableScaling\(shared=True, start=.paper.\)"),
        ("none", "none", {"depth": 6}, "missing"),
        ("none", "none", {"patch_size": 4}, r"to_patches.bias: \(12,\) in the file, \(48,\) expected"),
    ],
)
def test_what_does_not_fit_is_refused(name, scaling, changes, says):
    metadata, tensors = load(name)
    with pytest.raises(sl.ScalingMismatchError, match=says):
        sl.UViT.from_official(part(tensors, "weight."), scaling=scaling, **{**arguments(metadata), **changes})


def test_unknown_arguments_are_named():
    with pytest.raises(sl.InvalidConfigError, match="does not take scalelong"):
        sl.UViT.from_official({}, scalelong=2)
