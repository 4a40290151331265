"""The report in a real browser: no errors, and everything that can be operated works."""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from report.browser import Browser
from report.made_up import made_up_range, make_run
from scalelong.report import serving, write_report
from scalelong.stability import RULE


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("none", "cs:0.7", "ls"):
        for seed in (0, 1):
            make_run(folder / f"{method.replace(':', '-')}-seed{seed}", method, seed)
    return write_report([folder], folder / "report.html")


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser, page):
    shared_browser.errors.clear()
    shared_browser.requests.clear()
    shared_browser.open(page)
    yield shared_browser
    assert shared_browser.errors == []


LINES = "document.querySelectorAll('#held-out path.line').length"


def test_opens_without_errors_and_asks_for_nothing(browser, page):
    assert browser.run("document.title") == "ScaleLong report"
    assert browser.run(LINES) == 3
    assert {url for url in browser.requests if not url.startswith("data:")} == {page.as_uri()}


def test_method_toggles_hide_and_show(browser):
    browser.run("document.querySelector('[data-method=\"ls\"]').click()")
    assert browser.run(LINES) == 2
    assert browser.run("document.querySelector('[data-method=\"ls\"]').getAttribute('aria-pressed')") == "false"
    assert browser.run("document.querySelectorAll('#samples img').length") == 2
    assert browser.run("document.querySelectorAll('#maps svg').length") == 2
    for method in ("none", "cs:0.7"):
        browser.run(f"document.querySelector('[data-method=\"{method}\"]').click()")
    assert "Nothing to show" in browser.run("document.getElementById('held-out').textContent")
    browser.run("document.querySelector('[data-method=\"ls\"]').click()")
    assert browser.run(LINES) == 1


def test_the_sample_slider_changes_images(browser):
    image = "document.querySelector('#samples img')"
    last = browser.run(f"{image}.src")
    assert browser.run(f"{image}.dataset.step") == "100"
    browser.run("document.getElementById('sample-step').focus()")
    browser.key("ArrowLeft")
    assert browser.run(f"{image}.dataset.step") == "50"
    assert browser.run(f"{image}.src") != last
    assert browser.run("document.getElementById('sample-step-out').value") == "50"
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert browser.run(f"{image}.naturalWidth") == 16


def test_hover_and_arrow_keys_show_values(browser):
    browser.run("document.getElementById('held-out').scrollIntoView({block: 'center'})")
    box = browser.run("(({x, y, width, height}) => [x, y, width, height])"
                      "(document.querySelector('#held-out svg').getBoundingClientRect())")  # fmt: skip
    browser.hover(box[0] + box[2] * 0.6, box[1] + box[3] / 2)
    tip = "document.querySelector('#held-out .tip')"
    assert browser.run(f"{tip}.hidden") is False
    assert "cs:0.7" in browser.run(f"{tip}.textContent")
    browser.run("document.querySelector('#held-out svg').focus()")
    browser.key("End")
    assert browser.run(f"{tip}.querySelector('b').textContent") == "step 100"
    browser.key("ArrowLeft")
    assert browser.run(f"{tip}.querySelector('b').textContent") == "step 95"
    browser.key("Escape")
    assert browser.run(f"{tip}.hidden") is True


def test_the_skip_map_shows_every_coefficient(browser):
    texts = browser.run("[...document.querySelectorAll('#maps .tile')][1].textContent")
    assert "κ 0.49" in texts
    widths = browser.run(
        "[...document.querySelectorAll('#maps .tile')[0].querySelectorAll('.skip line')]"
        ".map(line => +line.getAttribute('stroke-width'))"
    )
    assert len(widths) == 4
    assert widths == sorted(widths)


def test_quantity_selector_and_linear_scale(browser):
    browser.run("document.getElementById('quantity').value = 'kappa/2'")
    browser.run("document.getElementById('quantity').dispatchEvent(new Event('change'))")
    assert "κ_i" in browser.run("document.querySelector('#explorer h3').textContent")
    browser.run("document.getElementById('log').click()")
    assert browser.run("document.querySelectorAll('#explorer path.line').length") == 3


def test_the_theme_follows_the_system_until_one_is_chosen(browser, page):
    theme = "document.documentElement.dataset.theme"
    # A page is told of the change with a frame: in the second one it has been.
    later = f"new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({theme}))))"
    browser.run("localStorage.clear()")
    browser.prefer("light")
    browser.open(page)
    for system in ("dark", "light"):
        browser.prefer(system)
        assert browser.run(later) == system
    browser.open(page)  # to have been shown in a theme is not to have chosen it
    browser.run("document.getElementById('theme').click()")
    for system in ("dark", "light"):
        browser.prefer(system)
        assert browser.run(later) == "dark"
    browser.open(page)
    assert browser.run(theme) == "dark"
    browser.run("localStorage.clear()")
    browser.prefer("")


def test_every_control_has_a_name_and_can_be_reached(browser):
    unnamed = browser.run(
        "[...document.querySelectorAll('button, input, select, svg[role=img], img')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.alt || e.labels?.length))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    assert browser.run("[...document.querySelectorAll('[tabindex]')].every(e => e.tabIndex === 0)")


def test_words_are_explained_on_focus_and_tap_and_in_a_list(browser):
    tip = "document.getElementById('explanation')"
    word = "[...document.querySelectorAll('#tables .term')].find(e => e.textContent === 'ms/step')"
    assert browser.run(f"{tip}.hidden") is True
    browser.run(f"{word}.focus()")
    assert browser.run(f"{tip}.hidden") is False
    assert "Milliseconds" in browser.run(f"{tip}.textContent")
    browser.key("Escape")
    assert browser.run(f"{tip}.hidden") is True
    browser.run(f"{word}.click()")
    assert browser.run(f"{tip}.hidden") is False
    glossary = browser.run("document.getElementById('glossary').textContent")
    assert all(name in glossary for name in ("ms/step", "wi", "κi"))


def test_losses_can_be_shown_as_difference_to_none(browser):
    box = "document.querySelector('#held-out input[type=checkbox]')"
    assert browser.run(f"{box}.checked") is False  # these curves are far apart
    browser.run(f"{box}.click()")
    assert "difference to none, %" in browser.run("document.querySelector('#held-out .y-label').textContent")
    assert browser.run(LINES) == 3
    browser.run(f"{box}.click()")
    assert browser.run("document.querySelector('#held-out .y-label').textContent") == "mean squared error in ε"


def test_on_a_phone_charts_fill_the_card_and_tables_say_that_they_scroll(browser, page):
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    share = browser.run(
        "document.querySelector('#held-out svg').getBoundingClientRect().width"
        " / document.querySelector('#held-out').getBoundingClientRect().width"
    )
    assert share > 0.9
    hint = "getComputedStyle(document.querySelector('#tables .sideways')).display"
    assert browser.run(hint) == "block"


def test_a_range_is_drawn(shared_browser, tmp_path):
    made = made_up_range({"none": {0.008: 1}}, rule=RULE)
    (tmp_path / "range.json").write_text(made.to_json())
    shared_browser.errors.clear()
    shared_browser.open(write_report([tmp_path], tmp_path / "report.html"))
    assert shared_browser.run("document.querySelector('.verdict .first').textContent") == made.verdict
    assert shared_browser.run("document.querySelectorAll('.grid .alive').length") == 1
    assert shared_browser.run("document.querySelectorAll('.grid .lost').length") == 7
    assert shared_browser.run("document.getElementById('results').hidden") is True
    words = shared_browser.run("[...document.querySelectorAll('#glossary dt')].map(word => word.textContent)")
    assert {"collapsed", "left first", "none"} <= set(words) < {*words, "merge_norm"}
    # The losses stand there at once, also where printing leaves no time for a frame.
    shared_browser.run("dispatchEvent(new Event('beforeprint'))")
    assert shared_browser.run("document.querySelectorAll('.range-losses path[opacity]').length") == 8
    shared_browser.run("dispatchEvent(new Event('afterprint'))")
    assert shared_browser.errors == []


def test_skips_that_nothing_scales_are_folded_and_a_live_page_follows_the_run(shared_browser, tmp_path):
    run = make_run(tmp_path / "a", "none")
    shared_browser.errors.clear()
    with serving(tmp_path) as address:
        shared_browser.open(address)
        lead = "document.getElementById('lead').textContent"
        until(lambda: "100 steps" in shared_browser.run(lead))
        assert shared_browser.run("document.getElementById('skips-fold').open") is False
        assert "every method" not in shared_browser.run("document.querySelector('main').innerText"), "there is one"
        top = "document.getElementById('{}').getBoundingClientRect().top"
        assert shared_browser.run(f"{top.format('samples')} < {top.format('results')}")
        shared_browser.run("document.querySelector('#skips-fold summary').click()")
        until(lambda: shared_browser.run("document.querySelector('#maps svg').clientWidth") > 100)
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 200, "loss": 0.4}\n')
        until(lambda: "200 steps" in shared_browser.run(lead))
        shared_browser.open("about:blank#")
    assert shared_browser.errors == []


def until(holds: Callable[[], bool]) -> None:
    """A page that is loaded at this moment cannot answer."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(AssertionError, TypeError):
            if holds():
                return
        time.sleep(0.1)
    pytest.fail("the page did not come to show it")
