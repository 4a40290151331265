"""Docstrings for the reference: what they say about each argument becomes a list.

`depth`: the long skip whose shell ...        -> - **depth**: the long skip whose shell ...
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"`?(\w+)`?(?:, `?(\w+)`?)*: \S")


class Docstrings(griffe.Extension):
    """What griffe asks for each thing that it has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and (obj.is_function or obj.is_class):
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Paragraphs whose first line looks like `name: ...` as lists, one item per such line."""
    return "\n\n".join(_listed(paragraph) for paragraph in text.split("\n\n"))


def _listed(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if not ARGUMENT.match(lines[0]) or lines[0].startswith(("Returns:", "Raises:", "Note:")):
        return paragraph
    items: list[str] = []
    for line in lines:
        if ARGUMENT.match(line):
            names, _, rest = line.partition(": ")
            items.append(f"- **{names.replace('`', '')}**: {rest}")
        else:
            items.append(f"    {line.strip()}")
    return "\n".join(items)
