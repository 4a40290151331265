"""The Python examples of the documentation run, in order, as one session each."""

import re
from pathlib import Path

import pytest

from scalelong.scaling import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/methods.md", "docs/theory.md", "docs/stability.md", "docs/compare.md", "docs/range.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    before = dict(METHODS)
    # Classes defined in the examples need a module to belong to.
    namespace = {"__name__": "__main__"}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
    finally:
        METHODS.clear()
        METHODS.update(before)
