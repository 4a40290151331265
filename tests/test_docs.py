"""The Python examples of the documentation run, in order, as one session each, and show what is printed.

What a comment beside `print(...)`, or beside a line that is an expression, shows as a list or a number (`# [1.0, 0.7]`)
is compared with what is printed; "..." stands for the rest of it.
"""

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

from scalelong.scaling import METHODS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ("methods", "mup", "theory", "stability", "compare", "range", "caching", "tuning")
PAGES = ["README.md", *(f"docs/{name}.md" for name in DOCS)]


SHOWN = re.compile(r"  # (\[?-?\d[^a-zA-Zκ]*)$")


def run(block: str, page: str, namespace: dict[str, object]) -> None:
    lines = block.splitlines()
    for node in ast.parse(block).body:
        code = compile(ast.Module([node], []), page, "exec")
        shown = SHOWN.search(lines[(node.end_lineno or 1) - 1])
        if not isinstance(node, ast.Expr) or shown is None:
            exec(code, namespace)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = eval(compile(ast.Expression(node.value), page, "eval"), namespace)
        # As an interactive session would show it.
        said = printed.getvalue().strip() if value is None else repr(value)
        expected = re.escape(shown[1].strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(expected, said), (
            f"{page} shows {shown[1]!r} beside {ast.unparse(node)!r}, which is {said!r}"
        )


def test_what_is_shown_is_compared():
    run("x = [1.0, 0.7]\nx  # [1.0, ...]\nprint(x[0])  # 1.0\nprint(x)  # a list", "page", {})
    for wrong in ("print(0.7)  # 0.5", "[1.0, 0.7]  # [1.0, 0.5]"):
        with pytest.raises(AssertionError, match="page shows"):
            run(wrong, "page", {})


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    before = dict(METHODS)
    # Classes defined in the examples need a module to belong to.
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in blocks:
            run(block, page, namespace)
    finally:
        METHODS.clear()
        METHODS.update(before)
