"""Importing the package is light, and its public names are real."""

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import scalelong

PACKAGE = Path(scalelong.__file__).parent

# Everything optional that is installed beside the package.
HEAVY = ["accelerate", "datasets", "diffusers", "matplotlib", "monai", "PIL", "rich", "safetensors"]
HEAVY += ["ray", "scipy", "submitit", "tensorboard", "transformers", "shtab", "yaml"]

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import scalelong
for name in dir(scalelong):
    getattr(scalelong, name)
print(json.dumps(sorted({module.partition(".")[0] for module in set(sys.modules) - before})))
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_needs_torch_alone():
    assert not set(json.loads(run(PROBE))) & set(HEAVY)


def stub_names() -> dict[str, str | None]:
    """Public names of the root and their homes, as a type checker reads them."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    return {alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_every_public_name_is_real():
    assert set(dir(scalelong)) == set(stub_names())
    for name, home in stub_names().items():
        if home is None:  # a package as a whole
            assert getattr(scalelong, name) is importlib.import_module(f"scalelong.{name}")
        else:
            assert getattr(scalelong, name) is getattr(importlib.import_module(f"scalelong.{home}"), name)
    namespace: dict[str, object] = {}
    exec("from scalelong import *", namespace)
    assert set(dir(scalelong)) <= set(namespace)


def test_a_name_that_is_not_public():
    with pytest.raises(AttributeError, match="module 'scalelong' has no attribute 'scale_skip'"):
        _ = scalelong.scale_skip  # pyright: ignore[reportAttributeAccessIssue]


def test_public_things_can_be_pickled():
    for thing in (scalelong.ConstantScaling(0.5), scalelong.UViT, scalelong.scale_skips_, scalelong.NotScaledError):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_a_public_name_is_written_once():
    """A door re-exports `Name as Name`, which type checkers take as public, and needs no `__all__` beside it."""
    for door in PACKAGE.glob("*/__init__.py"):
        tree = ast.parse(door.read_text())
        lists = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
        assert "__all__" not in lists, f"{door.parent.name} lists its names a second time"
