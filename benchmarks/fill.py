"""Tables into a Markdown page, between `<!-- bench: CASE -->` and `<!-- end -->`."""

import re
from collections.abc import Mapping
from pathlib import Path

from scalelong.files import write_text

from .errors import BenchmarkError

PLACE = re.compile(r"(<!-- bench: (?P<case>[\w/-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill_page(page: Path, tables: Mapping[str, str]) -> list[str]:
    """Replace what stands at the places of these cases; other places stay as they are. Returns the cases filled."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"the page {page} cannot be read: {error}") from error
    filled: list[str] = []

    def replace(match: re.Match[str]) -> str:
        case = match["case"]
        if case not in tables:
            return match[0]
        filled.append(case)
        return f"{match[1]}{tables[case]}\n"

    write_text(page, PLACE.sub(replace, text))
    return filled
