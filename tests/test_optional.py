"""Optional packages and objects by name: what is missing is named, with what to do."""

import math
import sys
import types

import pytest

from scalelong.errors import EvaluationError, InvalidConfigError, MissingDependencyError
from scalelong.optional import load_object, needs


def test_an_absent_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image", raising=False)
    with pytest.raises(MissingDependencyError, match=r"decoding needs the package 'pillow'.*not installed.*\[train\]"):
        needs("PIL.Image", "train", "decoding")


def test_a_package_that_is_there_and_broken_says_why(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"'halfway', which cannot be imported \(No module named 'no_such"):
        needs("halfway", "train", "this")


def test_objects_by_name(monkeypatch):
    module = types.ModuleType("things")
    module.Outer = types.SimpleNamespace(inner=5)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "things", module)
    assert load_object("things:Outer.inner") == 5
    assert load_object("math:pi") == math.pi


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("math", "must look like package.module:name"),
        (":pi", "must look like package.module:name"),
        ("no_such_module:x", "model 'no_such_module:x' cannot be imported.*PYTHONPATH"),
        ("math:Nothing", "module 'math' has no attribute 'Nothing'"),
    ],
)
def test_what_is_wrong_with_a_name(spec, says):
    with pytest.raises(InvalidConfigError, match=says):
        load_object(spec, "model")
    with pytest.raises(EvaluationError):
        load_object(spec, "features", EvaluationError)
