"""Pages that nobody writes by hand: reference, commands, examples, notebooks, changelog."""

import base64
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from .names import PACKAGES, ROOT, package_names, root_names

EXAMPLES = ROOT / "examples"
NOTEBOOKS = ROOT / "docs" / "notebooks"


# Reference


def reference_pages() -> dict[str, str]:
    """One page per package. The names of the root come first: these are the ones that stay."""
    return {
        "reference/index.md": _reference_index(),
        **{f"reference/{package}.md": _reference_page(package) for package in PACKAGES},
    }


def _reference_page(package: str) -> str:
    # Functions come before the classes that they take and return.
    first = sorted((name.path for name in root_names() if name.package == package), key=_is_class)
    then = sorted((name.path for name in package_names(package)), key=_is_class)
    lines = [f"# {PACKAGES[package]}", ""]
    if first:
        lines += ["Names of `import scalelong as sl`.", "", *(f"::: {path}\n" for path in first)]
    if then:
        lines += [f"## In `scalelong.{package}`", ""] if first else [f"Names of `scalelong.{package}`.", ""]
        lines += [f"::: {path}\n" for path in then]
    return "\n".join(lines)


def _is_class(path: str) -> bool:
    return path.rpartition(".")[2][0].isupper()


def _reference_index() -> str:
    lines = [
        "# Reference",
        "",
        "Every public name. Those of `import scalelong as sl` stay as they are within a major version; the others are "
        "[supported with a notice before they change](../stable.md). The [commands](commands.md) have their own page.",
        "",
    ]
    for package, title in PACKAGES.items():
        first = sorted((name for name in root_names() if name.package == package), key=lambda n: _is_class(n.path))
        rest = sorted(package_names(package), key=lambda n: _is_class(n.path))
        lines += [f"## [{title}]({package}.md)", ""]
        if first:
            lines += [" · ".join(f"[`{name.name}`][{name.path}]" for name in first), ""]
        if rest:
            listed = " · ".join(f"[`{name.name}`][{name.path}]" for name in rest)
            lines += [f"in `scalelong.{package}`: {listed}", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """What `scalelong COMMAND --help` prints, for every command. None of them imports torch for that."""
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["COLUMNS"] = "100"
    from scalelong.cli import COMMANDS, LAB

    lines = ["# Commands", "", "What `scalelong COMMAND --help` prints, for this version.", ""]
    for command, purpose in {**COMMANDS, **{f"lab {name}": purpose for name, purpose in LAB.items()}}.items():
        lines += [f"## {command}", "", f"{purpose[0].upper()}{purpose[1:]}.", "", "```text", _help(command), "```", ""]
    return "\n".join(lines)


def _help(command: str) -> str:
    from scalelong.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help-all" if command == "train" else "--help"])
    if f"scalelong {command}" not in printed.getvalue():
        raise RuntimeError(f"`scalelong {command} --help` printed no help: {printed.getvalue()[:300]!r}")
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).rstrip()


# Files of the repository that are no pages


def example_pages() -> dict[str, str]:
    """Each example as a page: its docstring as text, then its code."""
    pages = {}
    for path in sorted(EXAMPLES.rglob("*.py")):
        inside = path.relative_to(EXAMPLES).with_suffix(".md").as_posix()
        pages[f"examples/{inside}"] = f"# {path.name}\n\n```python\n{path.read_text().rstrip()}\n```\n"
    return pages


def repository_pages() -> dict[str, str]:
    """Changelog and contributing guide, and the notices of the embedded data."""
    outside = {
        "changelog.md": ROOT / "CHANGELOG.md",
        "contributing.md": ROOT / "CONTRIBUTING.md",
        **{f"data-{name}.md": ROOT / f"src/scalelong/data/{name}.md" for name in ("digits", "garments", "portraits")},
    }
    return {uri: path.read_text() for uri, path in outside.items()}


MOVED = {
    r"\.\./examples/([\w/]+)\.py": r"examples/\1.md",
    r"\.\./src/scalelong/data/(digits|garments|portraits)\.md": r"data-\1.md",
    r"(?:\.\./)+CHANGELOG\.md": "changelog.md",
    r"(?:\.\./)+CONTRIBUTING\.md": "contributing.md",
    r"notebooks/(\w+)\.ipynb": r"notebooks/\1.md",
}
"""Links that are right in the repository, and where they lead on the site."""


def with_site_links(text: str, uri: str) -> str:
    """A page with links that are right on the site."""
    up = "../" * uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        for pattern, to in MOVED.items():
            if found := re.fullmatch(rf"(?:\.\./)*?{pattern}", target):
                return f"]({up}{found.expand(to)}{anchor})"
        return match[0]

    return re.sub(r"\]\(([^)\s#]+)(#[^)\s]*)?\)", moved, text)


# Notebooks


def notebook_pages() -> dict[str, str | bytes]:
    """Each notebook as a page with its stored outputs, and its pictures as files beside it."""
    pages: dict[str, str | bytes] = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        pages |= _notebook(path)
    return pages


def _notebook(path: Path) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    lines: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            if source.startswith("# "):
                lines += [f"[Download this notebook]({path.name}){{ .md-button download }}", ""]
        elif cell["cell_type"] == "code":
            lines += ["```python", source, "```", ""]
            for output in cell["outputs"]:
                text, picture = _shown(output)
                if picture:
                    name = f"{path.stem}-{len(files) + 1}.png"
                    files[f"notebooks/{name}"] = picture
                    text = f"![{_title(source)}]({name})"
                lines += [text, ""]
    return {f"notebooks/{path.stem}.md": "\n".join(lines), **files}


def _shown(output: dict[str, Any]) -> tuple[str, bytes]:
    """An output as Markdown, or as a picture."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```", b""
    data = output["data"]
    if "image/png" in data:
        return "", base64.b64decode("".join(data["image/png"]))
    if "text/html" in data:
        return f'<div class="notebook-output">{"".join(data["text/html"])}</div>', b""
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```", b""


def _title(source: str) -> str:
    """The last comment of a cell says what its picture shows."""
    comments = re.findall(r"^# (.*)$", source, re.MULTILINE)
    return comments[-1] if comments else "what the cell draws"


# Names in texts lead to the reference


def with_linked_names(text: str) -> str:
    """`find_skips`, `sl.find_skips` and `sl.find_skips(...)` in a text become links to the reference."""
    known = {name.name: name.path for name in root_names()}
    parts = re.split(r"(^```.*?^```[^\n]*$|^(?: {4}|\t|#|\|)[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else _link_names(part, known) for index, part in enumerate(parts))


def _link_names(text: str, known: dict[str, str]) -> str:
    def linked(match: re.Match[str]) -> str:
        path = known.get(match[1])
        return f"[{match[0]}][{path}]" if path else match[0]

    # Not inside the text of a link.
    return re.sub(r"(?<![\[`])`(?:sl\.|scalelong\.)?(\w+)(?:\([^`\n]*\))?`(?![`\]])", linked, text)
