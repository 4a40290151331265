"""What the report says, without a browser."""

import json
import re

import pytest

from report.made_up import make_run
from scalelong.cli import main
from scalelong.report import NoRunsError, collect, write_report
from scalelong.runs.recipes import recipe


@pytest.fixture
def comparison(tmp_path):
    for method in ("none", "cs:0.7", "ls"):
        for seed in (0, 1):
            make_run(tmp_path / f"{method.replace(':', '-')}-seed{seed}", method, seed)
    return tmp_path


def embedded(page: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_everything_is_inside_and_nothing_outside(comparison):
    page = write_report([comparison], comparison / "report.html").read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*"(?!data:|#)', page)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    data = embedded(page)
    assert data["methods"] == ["none", "cs:0.7", "ls"]
    assert len(data["runs"]) == 6
    assert [sample["step"] for sample in data["runs"][0]["samples"]] == [50, 100]


def test_text_of_a_run_cannot_end_the_script(comparison):
    page = write_report([comparison], comparison / "report.html").read_text()
    assert embedded(page)["runs"][0]["environment"]["note"] == "</script><b>&"
    assert "</script><b>" not in page


def test_the_table_has_the_known_answers(comparison):
    (table,) = collect([comparison])["tables"]
    rows = {row["method"]: row for row in table["rows"]}
    # exp(-1.25 s / 50) reaches none's last loss after 80 of 100 steps, for both seeds.
    assert rows["cs:0.7"]["steps to none's loss"].startswith("× 0.80")
    assert rows["ls"]["steps to none's loss"] == "not reached by 2 of 2 seeds"
    assert rows["none"]["held-out loss, step 100"].startswith("0.1403 (0.1353 to 0.1453)")


def test_the_frechet_distance_has_a_column_where_it_was_measured(comparison):
    assert "Fréchet distance" not in collect([comparison])["tables"][0]["rows"][0]
    for seed in (0, 1):
        with open(comparison / f"ls-seed{seed}" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 100, "frechet": 12.0 + seed}) + "\n")
    rows = {row["method"]: row for row in collect([comparison])["tables"][0]["rows"]}
    assert rows["ls"]["Fréchet distance"] == "12.50 (12.00 to 13.00)"
    assert rows["none"]["Fréchet distance"] == "-"


def test_a_single_run_and_runs_that_differ_in_more_than_the_method(tmp_path):
    one = make_run(tmp_path / "a", "none")
    assert collect([one])["methods"] == ["none"]
    other = make_run(tmp_path / "b", "none", batch_size=7)
    size = recipe("digits-tiny").batch_size
    assert collect([one, other])["methods"] == [f"none, batch_size {size}", "none, batch_size 7"]


def test_a_diverged_run_says_so(tmp_path):
    run = make_run(tmp_path / "a", "none")
    (run / "diverged.json").write_text(json.dumps({"message": "the loss of step 7 is not finite"}))
    data = collect([run])
    assert "step 7" in data["runs"][0]["diverged"]
    assert data["tables"][0]["rows"][0]["diverged"] == "seed 0"


def test_not_a_number_does_not_break_the_page(tmp_path):
    run = make_run(tmp_path / "a", "none")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "loss": NaN}\n{"step": 102, "lo')
    data = embedded(write_report([run], tmp_path / "r.html").read_text())
    assert data["runs"][0]["curves"]["loss"][1][-1] is None


def test_folders_without_runs_are_named(tmp_path, capsys):
    with pytest.raises(NoRunsError, match="no folder"):
        collect([tmp_path / "missing"])
    with pytest.raises(NoRunsError, match="holds none"):
        collect([tmp_path])
    assert main(["report", str(tmp_path)]) == 1
    assert "NoRunsError" in capsys.readouterr().err


def test_the_command_prints_the_path(comparison, capsys):
    assert main(["report", str(comparison)]) == 0
    assert str(comparison / "report.html") in capsys.readouterr().out
