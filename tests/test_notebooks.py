"""The notebooks run, and still show what the site shows of them."""

import nbformat
import pytest

from website.notebooks import NOTEBOOKS, execute, kinds


@pytest.mark.parametrize("name", ["diagnose_and_range", "find_and_scale", "theory", "train_and_sample"])
def test_the_notebook_runs(name, tmp_path):
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert kinds(execute(NOTEBOOKS / f"{name}.ipynb", tmp_path)) == kinds(stored)


def test_all_notebooks_are_run():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {
        "diagnose_and_range",
        "find_and_scale",
        "theory",
        "train_and_sample",
    }
