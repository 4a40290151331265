"""`scalelong lab bench`: names of cases, the harness, and one case from end to end."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.cases import BENCHMARKS
from benchmarks.catalogue import chosen
from benchmarks.harness import OfficialCheckoutError, Race, Settings, Spread, fill_page, measure, read_results
from benchmarks.quality import Contender, compared
from benchmarks.theirs import checkout, definitions
from scalelong.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_names_choose_benchmarks_and_cases():
    assert chosen(["step/unet", "step/small", "step/unet"]) == ["step/unet", "step/small"]
    assert chosen(["sampling"]) == ["sampling/digits", "sampling/fashion"]
    assert {name.partition("/")[0] for name in chosen([])} == set(BENCHMARKS)


def test_the_places_of_the_page_are_cases():
    places = re.findall(r"<!-- bench: ([\w/-]+) -->", (DOCS / "performance.md").read_text(encoding="utf-8"))
    assert places
    assert set(places) <= set(chosen([]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["setp"], "unknown benchmark 'setp'; known: step"),
        (["step/big"], "no case 'big'; it has small"),
        (["step", "--threads", "0"], "must be at least 1"),
        (["step", "--official", "nowhere"], "OfficialCheckoutError: nowhere is not a checkout of the authors' code"),
        (["--table", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message, capsys):
    assert main(["lab", "bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_contenders_take_turns_in_alternating_order():
    calls: list[str] = []
    race = Race("A race", {name: lambda name=name: lambda: calls.append(name) for name in ("one", "two")}, images=4)
    threads = torch.get_num_threads()
    found = measure(race, 9, Settings(threads=threads, quick=True, rounds=3))
    assert calls[4:] == ["one", "two", "two", "one", "one", "two"]
    assert [row[0] for row in found["rows"]] == ["one", "two"]
    assert len(found["seconds"]["two"]) == 3
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.5, 2.5)


def test_a_step_from_end_to_end(tmp_path, capsys):
    file, page = tmp_path / "bench.json", tmp_path / "page.md"
    assert main(["lab", "bench", "step/small", "--quick", "--threads", "1", "--out", str(file)]) == 0
    assert "was not measured: give a checkout" in capsys.readouterr().out
    found = read_results(file)["step/small"]
    assert len(found["seconds"]["ours"]) == 2
    page.write_text("<!-- bench: step/small -->\nold\n<!-- end -->\n")
    assert main(["lab", "bench", "--table", str(file), "--fill", str(page)]) == 0
    assert "| ours |" in page.read_text()
    assert "old" not in page.read_text()
    assert fill_page(page, {}) == []


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    (tmp_path / "sde.py").touch()
    with pytest.raises(OfficialCheckoutError, match=r"has no libs/uvit.py, libs/timm.py, utils.py. Clone"):
        checkout(tmp_path)


def test_definitions_are_taken_without_the_imports_of_others(tmp_path):
    file = tmp_path / "utils.py"
    file.write_text(
        "import math\nfrom a_package_that_is_not_there import save\n"
        "def root(x):\n    return math.sqrt(x)\ndef other():\n    save()\n"
    )
    assert definitions(file, ("root",)).root(9) == 3
    with pytest.raises(OfficialCheckoutError, match="needs the package 'a_package_that_is_not_there'"):
        definitions(file, ("other",))


def test_finding_is_shown_by_the_number_of_operations(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["lab", "bench", "attach", "--quick", "--threads", "1", "--rounds", "1", "--out", str(file)]) == 0
    found = read_results(file)
    shallow, deep = (int(row[2].replace(",", "")) for row in found["attach/finding"]["rows"])
    assert shallow < deep
    assert [row[0] for row in found["attach/scaling"]["rows"]] == ["cs:behind_norms=true", "ls"]


def test_time_to_quality_of_a_unet_against_diffusers_script(capsys):
    assert main(["lab", "bench", "quality/unet", "--quick", "--threads", "1", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "| diffusers' script, rate" in said
    assert "1 seed, median" in said
    assert "processor time" in said


def test_time_to_quality_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["lab", "bench", "quality/width-128", "--quick", "--threads", "1", "--out", str(file)]) == 0
    assert "no --official was given" in capsys.readouterr().out
    found = read_results(file)["quality/width-128"]
    authors = found["rows"][0]
    assert authors[0].startswith("authors, rate")
    assert found["rows"][-1][0] == "+ fused blocks: our defaults"
    assert authors[4].startswith("1.00 [1.00")  # it reaches its own final loss with its last step
    curves = found["seconds"]
    assert all([point[0] for point in curve] == [2, 4, 6] for seeds in curves.values() for curve in seeds)
    assert curves["+ fused blocks: our defaults"][0] != curves["+ fused blocks: our defaults"][1]


def contender(name: str, losses: list[float], theirs: bool = False) -> Contender:
    curve = [(10 * (i + 1), 1.0 * (i + 1), loss) for i, loss in enumerate(losses)]
    return Contender(name, 1e-3, theirs, curve=curve)


def test_steps_until_the_authors_loss():
    run = [contender("b", [3, 1.5], True), contender("c", [1.4, 1]), contender("d", [2, 2])]
    rows = compared([run, run])
    assert [row[0] for row in rows] == ["b", "c", "d"]
    assert rows[1][2].startswith("10 [")
    assert rows[1][4].startswith("2.00 [")
    assert rows[2][2] == "reached by 0 of 2 seeds"
