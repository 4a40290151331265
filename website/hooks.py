"""Where MkDocs asks: files that are made at build time, the navigation, links and names in pages."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path

from website import pages  # noqa: E402
from website.names import PACKAGES  # noqa: E402


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sections that list what is there: integrations, notebooks, examples, evidence, reference."""
    made: dict[str, list[Any]] = {
        "Integrations": _written("integrations"),
        "Notebooks": [f"notebooks/{path.stem}.md" for path in sorted(pages.NOTEBOOKS.glob("*.ipynb"))],
        "Examples": sorted(pages.example_pages()),
        "Evidence": _evidence(but=repr(config.nav)),
        "Reference": [
            "reference/index.md",
            {"Commands": "reference/commands.md"},
            *({title.partition(":")[0]: f"reference/{package}.md"} for package, title in PACKAGES.items()),
        ],
    }
    nav: list[Any] = _filled({"": config.nav}, made)[""]
    guides = next(entry["How to"] for entry in nav if "How to" in entry)
    guides += [uri for uri in _all_written() if repr(uri) not in repr(nav)]  # a new page is not forgotten
    config.nav = nav
    return config


def _filled(entry: Any, made: dict[str, list[Any]]) -> Any:
    """An entry of the navigation in which "..." stands for what the section has."""
    if not isinstance(entry, dict):
        return entry
    (title, value), *_ = entry.items()
    if value == "...":
        return {title: made[title]}
    if isinstance(value, list):
        inner = [_filled(part, made) for part in value]
        return {title: [part for part in inner if not isinstance(part, dict) or next(iter(part.values()))]}
    return entry


def _written(folder: str) -> list[str]:
    found = sorted((ROOT / "docs" / folder).glob("*.md"), key=lambda path: (path.stem not in ("index", "README"), path))
    return [f"{folder}/{path.name}" for path in found]


def _all_written() -> list[str]:
    return sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def _evidence(but: str) -> list[Any]:
    """One entry for each study, apart from those whose pages mkdocs.yml names itself."""
    folders = sorted({path.parent for path in (ROOT / "docs/evidence").glob("*/*.md")})
    folders = [folder for folder in folders if f"'evidence/{folder.name}/" not in but]
    entries: list[Any] = ["evidence/README.md"]
    for folder in folders:
        inside = _written(f"evidence/{folder.name}")
        entries.append({folder.name: inside[0] if len(inside) == 1 else inside})
    return entries


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made: dict[str, str | bytes] = {
        **pages.reference_pages(),
        "reference/commands.md": pages.commands_page(),
        **pages.example_pages(),
        **pages.repository_pages(),
        **pages.notebook_pages(),
    }
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    markdown = pages.with_site_links(markdown, uri)
    return markdown if uri.startswith("reference/") else pages.with_linked_names(markdown)
