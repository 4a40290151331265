"""The notebooks run, and still show what the site shows of them. In this process: a kernel takes seconds to start."""

import ast
from typing import Any

import nbformat
import pytest

from website.notebooks import NOTEBOOKS, code, kinds


def run(source: str, names: dict[str, Any]) -> Any:
    """The value of the last expression of a cell, if it ends with one."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        return exec(compile(tree, "cell", "exec"), names)
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stored = nbformat.read(path, as_version=4)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell, shown in zip(code(stored), kinds(stored), strict=True):
        value = run(cell.source, names)
        printed = "".join(capsys.readouterr())
        assert (bool(printed), value is not None) == ("text" in shown, bool(shown - {"text"})), cell.source
