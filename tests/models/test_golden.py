"""Our U-ViT against the authors': outputs and every gradient, under each of their methods."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import scalelong as sl
from scalelong.models.official import official_name

FILES = ["none", "inv_sqrt2", "cs", "ls_shared", "ls_per_skip", "class_cs", "text_none"]


def load(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("start", ["paper", "cs"])
def test_outputs_and_gradients_agree(golden, name, start):
    metadata, tensors = load(golden / f"uvit_{name}.safetensors")
    scaling = method(metadata, start)
    model = sl.UViT.from_official(part(tensors, "weight."), scaling=scaling, **arguments(metadata))
    output = model(**part(tensors, "input."))
    assert relative(output, tensors["output"]) < 1e-5
    output.square().mean().backward()
    gradients = part(tensors, "grad.")
    parameters = dict(model.named_parameters())
    offsets = {"skip_scaling.offsets"} & set(parameters)
    assert len(gradients) == len(parameters) - len(offsets)
    for their_name, gradient in gradients.items():
        ours = parameters[official_name(their_name, model.depth // 2)].grad
        assert ours is not None
        assert relative(ours, gradient) < 1e-5, their_name


def test_a_file_on_disk_loads_without_executing_code(golden, tmp_path):
    metadata, tensors = load(golden / "uvit_none.safetensors")
    torch.save(part(tensors, "weight."), tmp_path / "nnet.pth")
    model = sl.UViT.from_official(tmp_path / "nnet.pth", scaling="none", **arguments(metadata))
    assert relative(model(**part(tensors, "input.")), tensors["output"]) < 1e-5

    class Dangerous:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"weight": Dangerous()}, tmp_path / "bad.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        sl.UViT.from_official(tmp_path / "bad.pth", **arguments(metadata))


def test_gates_start_afresh_on_a_file_without_them(golden):
    metadata, tensors = load(golden / "uvit_none.safetensors")
    model = sl.UViT.from_official(part(tensors, "weight."), scaling="ls", **arguments(metadata))
    model(**part(tensors, "input."))
    assert sl.coefficients(model) == pytest.approx([0.999, 0.7])


@pytest.mark.parametrize(
    ("name", "scaling", "changes", "says"),
    [
        ("ls_shared", "cs", {}, r"learned gates .*LearnableScaling\(shared=True\)"),
        ("ls_per_skip", "ls", {}, r"LearnableScaling\(shared=False\)"),
        ("none", "none", {"depth": 6}, "missing"),
        ("none", "none", {"patch_size": 4}, r"to_patches.bias: \(12,\) in the file, \(48,\) expected"),
    ],
)
def test_what_does_not_fit_is_refused(golden, name, scaling, changes, says):
    metadata, tensors = load(golden / f"uvit_{name}.safetensors")
    with pytest.raises(sl.ScalingMismatchError, match=says):
        sl.UViT.from_official(part(tensors, "weight."), scaling=scaling, **{**arguments(metadata), **changes})


def test_unknown_arguments_are_named():
    with pytest.raises(sl.InvalidConfigError, match="does not take scalelong"):
        sl.UViT.from_official({}, scalelong=2)
