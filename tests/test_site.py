"""The documentation site: built strictly, without a network; every public name is in its reference."""

import importlib
import os
import re
import subprocess
import sys
import time
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest

import scalelong
from website import names, pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.rglob("*.md"))


# The reference


def test_every_public_name_of_the_root_is_in_the_reference():
    listed = set(re.findall(r"^::: (\S+)", "\n".join(pages.reference_pages().values()), re.MULTILINE))
    for name in dir(scalelong):
        if isinstance(getattr(scalelong, name), types.ModuleType):
            assert name in names.PACKAGES, f"the package {name} has no page"
        elif not name.startswith("_"):
            assert f"scalelong.{name}" in listed, name
    assert len(listed) == len(names.public_names())


def test_every_package_has_a_page_or_serves_the_others():
    packages = {path.parent.name for path in names.SOURCE.glob("*/__init__.py")}
    assert packages | {"errors"} <= set(names.PACKAGES) | names.INSIDE
    assert all(title and len(title) < 60 for title in names.PACKAGES.values())


def test_the_names_of_the_reference_are_real():
    """They are read from the source, so that the site needs no torch; here they are compared with what is imported."""
    for name in names.public_names():
        home, _, attribute = name.path.rpartition(".")
        assert hasattr(importlib.import_module(home), attribute), name.path


def test_every_public_name_says_what_it_is():
    silent = []
    for name in names.root_names():
        thing = getattr(scalelong, name.name)
        if not (thing.__doc__ or "").strip():
            silent.append(name.path)
    assert not silent


# Names and commands in texts

NAME = re.compile(r"\b(?:sl|scalelong)\.([A-Za-z_][\w.]*)")
FILES = ("example", "json", "jsonl", "md", "yaml")


@pytest.mark.parametrize("page", [ROOT / "README.md", *WRITTEN], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_in_texts_are_real(page):
    text = page.read_text()
    wrong = []
    for found in NAME.finditer(text):
        if found[1] in FILES or text[found.start() - 1] in "/-":
            continue
        if not exists(found[1].rstrip(".")):
            wrong.append(found[0])
    assert not wrong


def exists(dotted: str) -> bool:
    """Whether "find_skips" or "training.sizing.choose" is there."""
    thing, path = scalelong, "scalelong"
    for part in dotted.split("."):
        path += f".{part}"
        if hasattr(thing, part):
            thing = getattr(thing, part)
            continue
        try:
            thing = importlib.import_module(path)
        except ImportError:
            # Fields of dataclasses and attributes of instances are not on the class.
            return isinstance(thing, type) and part in annotations(thing)
    return True


def annotations(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}


# Pages made of files of the repository


def test_links_that_are_right_in_the_repository_lead_to_pages_of_the_site():
    page = "[a](../examples/train_own_unet.py) [b](../src/scalelong/data/digits.md#x) [c](theory.md)"
    moved = "[a](examples/train_own_unet.md) [b](data-digits.md#x) [c](theory.md)"
    assert pages.with_site_links(page, "training.md") == moved
    assert pages.with_site_links("[n](../notebooks/find.ipynb)", "tutorials/first.md") == "[n](../notebooks/find.md)"


def test_names_become_links_outside_of_code_headings_and_tables():
    text = "# `find_skips`\n\nSee `sl.find_skips(model)` and [`find_skips`](x.md), not `find_skip`.\n"
    text += "\n```\n`find_skips`\n```\n\n| `find_skips` |\n"
    linked = pages.with_linked_names(text)
    assert linked == text.replace("`sl.find_skips(model)`", "[`sl.find_skips(model)`][scalelong.find_skips]")


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet: it drops warnings before --strict counts them, such as those about anchors that do not exist.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    said = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser loads with a page: scripts, styles, pictures, fonts. Links are not."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video") and values.get("src"):
            self.addresses.append(values["src"] or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "preload", "preconnect", "icon"):
            self.addresses.append(values.get("href") or "")


def test_the_site_is_built_and_loads_nothing_from_elsewhere(site):
    made = sorted(site.rglob("*.html"))
    assert len(made) > 50
    for page in made:
        loaded = Loaded()
        loaded.feed(page.read_text())
        for address in loaded.addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.relative_to(site)} loads {address}"
            if not address.startswith("data:") and page.name != "404.html":
                there = (page.parent / address.partition("?")[0]).resolve()
                assert there.is_file(), f"{page.relative_to(site)} loads {address}, which is not there"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style


def test_the_search_works_from_the_disk_and_knows_flags(site, tmp_path):
    from report.browser import Browser

    browser = Browser(tmp_path)
    try:
        browser.open(site / "index.html")
        for words in ("heic", "--budget"):
            browser.run(
                "(() => { const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
                f"field.value = {words!r}; field.dispatchEvent(new Event('input', {{bubbles: true}}));"
                "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})) })()"
            )
            until = time.monotonic() + 60
            found = 0
            while not found and time.monotonic() < until:
                time.sleep(0.1)
                found = browser.run("document.querySelectorAll('.md-search-result__item').length")
            assert found, words
        assert browser.errors == []
    finally:
        browser.close()


def test_the_site_has_every_name_every_command_and_every_page(site):
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for name in names.public_names():
        assert f'id="{name.path}"' in reference, name.path
    from scalelong.cli import COMMANDS

    commands = (site / "reference" / "commands.html").read_text()
    assert all(f'id="{command}"' in commands for command in COMMANDS)
    for page in WRITTEN:
        uri = page.relative_to(DOCS).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert (site / uri).is_file(), uri


def test_every_picture_of_the_gallery_is_there_with_its_command():
    text = (DOCS / "gallery.md").read_text()
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        (picture,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", section)
        assert (DOCS / picture).is_file(), picture
        assert re.search(
            r"^    (scalelong|python -m research\.\w+|git (show|checkout))|^```python", section, re.MULTILINE
        ), title
        module = re.search(r"python -m (research\.\w+)", section)
        assert module is None or (ROOT / f"{module[1].replace('.', '/')}.py").is_file(), module


def test_docstrings_say_each_argument_in_a_line_of_a_list():
    from website.docstrings import with_lists

    text = "What it does.\n\n`depth`: the skip\nthat runs.\na, b: two more.\n\nIn words: not a list"
    assert with_lists(text) == (
        "What it does.\n\n- **depth**: the skip\n    that runs.\n- **a, b**: two more.\n\nIn words: not a list"
    )
