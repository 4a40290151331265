"""Tables, the file of results, and the page that is filled from it."""

import json

import pytest

from benchmarks import record
from benchmarks.cases.sampling import Distances
from benchmarks.record import (
    Result,
    Spread,
    Table,
    busy_warning,
    describe_machine,
    entry,
    fill_page,
    machine_line,
    show,
)
from benchmarks.settings import BenchmarkError, cores


def table():
    rows = [["none", Spread(0.5, 0.4, 0.6), None], ["cs", 0.0000015, Spread(0.012, -0.001, 0.02)]]
    return Table("A title", {"": "text", "time": "seconds", "over none": "percent"}, rows, ["A note."])


def measured(quick=False):
    return entry(Result([table()], {"seconds": {"a": [1.0]}}), describe_machine(2), (0.1, 1.5), 12.3, quick)


def test_a_table_is_markdown_with_quartiles():
    text = table().markdown()
    assert "500 ms [400 ms, 600 ms]" in text
    assert "+1.20 % [-0.10 %, +2.00 %]" in text
    assert "1.5 µs" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1  # aligned
    assert len({line.count("|") for line in lines}) == 1
    assert text.endswith("A note.")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "times", "–"),
        ("yes", "text", "yes"),
        (1.2345, "times", "1.234"),
        (-0.15, "seconds", "-150 ms"),
        (2.5e9, "bytes", "2,500 MB"),
        (12345.0, "rate", "12,345"),
        (0.254, "share", "25.4 %"),
        (3.2e12, "gflops", "3,200.0"),
    ],
)
def test_numbers_are_written_by_kind(value, kind, text):
    assert show(value, kind) == text


def test_a_table_survives_the_file(tmp_path):
    file = tmp_path / "deep" / "bench.json"
    record.store(file, "step/small", measured())
    read = record.read(file)["step/small"]
    assert Table.from_dict(read["tables"][0]) == table()
    assert read["rounds"] == {"seconds": {"a": [1.0]}}
    assert {"cpu", "threads", "torch"} <= set(read["machine"])


def test_cases_are_added_and_replaced(tmp_path):
    file = tmp_path / "bench.json"
    record.store(file, "step/small", measured())
    record.store(file, "step/unet", measured())
    record.store(file, "step/small", measured(quick=True))
    assert list(record.read(file)) == ["step/small", "step/unet"]
    assert record.read(file)["step/small"]["quick"]
    assert not list(tmp_path.glob(".*"))  # nothing is left of the writing


@pytest.mark.parametrize("content", ["", "no json", "[]", '{"format": 99, "cases": {}}', '{"format": 1}'])
def test_a_file_of_another_kind_is_refused_and_stays(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(BenchmarkError, match=r"other\.json"):
        record.store(file, "step/small", measured())
    assert file.read_text() == content


def test_the_footnote_says_on_what_it_was_measured():
    text = record.markdown("step/small", measured(quick=True))
    assert "2 thread(s)" in text
    assert "load average 0.10 before and 1.50 after" in text
    assert "13 s" in text
    assert "mean little" in text


def test_a_page_is_filled_at_its_places_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench: x/one -->\nold\n<!-- end -->\nb\n<!-- bench: x/two -->\nkept\n<!-- end -->\nc\n")
    assert fill_page(page, {"x/one": "new\nlines", "x/three": "nowhere"}) == ["x/one"]
    expected = "a\n<!-- bench: x/one -->\nnew\nlines\n<!-- end -->\nb\n<!-- bench: x/two -->\nkept\n<!-- end -->\nc\n"
    assert page.read_text() == expected
    assert fill_page(page, {"x/one": "new\nlines"}) == ["x/one"]  # again: the same page
    assert page.read_text() == expected
    with pytest.raises(BenchmarkError, match=r"none\.md"):
        fill_page(tmp_path / "none.md", {})


def test_the_machine_is_described():
    machine = describe_machine(2)
    assert json.loads(json.dumps(machine)) == machine
    assert "2 thread(s)" in machine_line(machine)


def test_a_busy_machine_is_noticed():
    assert busy_warning(None) is None
    assert busy_warning(0.0) is None
    assert "busy" in (busy_warning(float(cores())) or "")


def test_intervals_of_distances_are_those_of_a_jackknife():
    """Of a mean the jackknife is the standard error: of 1, 2, 3 it is 1/√3, times Student's 4.303."""
    values, others = [1.0, 2.0, 3.0], [101.0, 52.0, 13.0]

    def found(numbers):
        return Distances(sum(numbers) / 3, [(sum(numbers) - number) / 2 for number in numbers])

    score = found(values).score()
    assert (score.median, score.high - score.median) == pytest.approx((2.0, 4.303 / 3**0.5))
    same = found([a + b for a, b in zip(values, others, strict=True)]).beyond(found(others))
    assert (same.median, same.median - same.low) == pytest.approx((2.0, 4.303 / 3**0.5))
