"""What the report says, without a browser."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from report.made_up import made_up_range, make_run
from scalelong.cli import main
from scalelong.config import recipe
from scalelong.errors import ScaleLongError
from scalelong.report import RunFolderError, collect, write_report, write_timelapse


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
    assert data["runs"][0]["environment"]["note"] == "</script><b>&"
    assert "</script><b>" not in page  # a text of a run cannot end the script
    assert data["methods"] == ["none", "cs:0.7", "ls"]
    assert len(data["runs"]) == 6
    assert [sample["step"] for sample in data["runs"][0]["samples"]] == [50, 100]


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
    one = make_run(tmp_path / "a", "none", kappas=False)
    data = collect([one])
    assert data["methods"] == ["none"]
    (row,) = data["tables"][0]["rows"]
    assert "-" not in row.values()
    assert not any(name.startswith("steps to") for name in row)
    assert data["verdict"][0]["text"][0].startswith("Your run did not collapse and ends with")
    (one / "diverged.json").write_text(json.dumps({"message": "the loss of step 7 is not finite"}))
    data = collect([one])
    assert "step 7" in data["runs"][0]["diverged"]
    assert data["tables"][0]["rows"][0]["diverged"] == "seed 0"
    other = make_run(tmp_path / "b", "none", batch_size=7)
    size = recipe("digits-tiny").batch_size
    assert collect([one, other])["methods"] == [f"none, batch_size {size}", "none, batch_size 7"]


def test_the_verdict_comes_first_and_is_computed(comparison):
    (found,) = collect([comparison])["verdict"]
    assert found["text"][0] == "All 6 runs survived: none diverged and none collapsed."
    assert found["text"][1].startswith("cs:0.7 ends 3")
    page = write_report([comparison], comparison / "report.html").read_text()
    assert page.index('id="verdict"') < page.index('id="results"')


def test_scores_and_alarms_are_shown(tmp_path):
    run = make_run(tmp_path / "a", "none")
    score = {"value": 12.5, "low": 12.0, "high": 13.0}
    scores = {
        "protocol": {"images": 500, "sampler": "ddim", "sampler_steps": 10, "features": "classifier"},
        "frechet": score,
        "precision": score,
        "recall": score,
        "subject": {"step": 100},
        "agreement": None,
    }
    (run / "scores.jsonl").write_text(f'{json.dumps(scores)}\nnot json\n{{"foreign": 1}}\n')
    (run / "alarms.jsonl").write_text('{"step": 90, "kind": "spike", "message": "m"}\n{"foreign": 1}\n')
    rollback = {"bad_step": 95, "to_step": 80, "factor": 0.5, "rate": 0.002, "cause": "not finite"}
    (run / "rollbacks.json").write_text(json.dumps([rollback, {"foreign": 1}]))
    data = collect([run])
    assert [(row["Fréchet distance"], row["sampler"]) for row in data["scores"]] == [
        ("12.5 [12, 13]", "ddim, 10 steps")
    ]
    assert [(alarm["step"], alarm["kind"]) for alarm in data["alarms"]] == [(80, "rollback"), (90, "spike")]
    assert "with the rate 0.001 instead of 0.002" in data["alarms"][0]["message"]


def test_samples_over_time_are_one_file(tmp_path):
    from PIL import Image

    run = make_run(tmp_path / "a", "none")
    path = write_timelapse(run)
    assert path is not None
    assert path == run / "samples.gif"
    with Image.open(path) as image:
        assert (getattr(image, "n_frames", 1), image.size) == (2, (512, 512))
    (run / "samples" / "step-00000050.png").unlink()
    assert write_timelapse(run) is None


def test_a_link_in_place_of_the_report_is_not_followed(tmp_path, capsys):
    run, mine = make_run(tmp_path / "a", "none"), tmp_path / "mine"
    mine.write_text("precious")
    for name in ("report.html", "samples.gif"):
        (run / name).symlink_to(mine)
    assert main(["report", str(run)]) == 0
    assert mine.read_text() == "precious"
    assert (run / "samples.gif").read_bytes()[:3] == b"GIF"


@pytest.mark.parametrize(
    "name", ["samples/step-00000050.png", "samples", "environment.json", "data.json", "config.yaml", "metrics.jsonl"]
)
def test_links_in_a_run_folder_are_not_followed(tmp_path, name):
    """A stranger's run folder could otherwise publish any file of this user."""
    run, secret = make_run(tmp_path / "run", "none"), tmp_path / "secret"
    if (run / name).is_dir():
        (run / name).rename(secret)
    else:
        (run / name).unlink()
        secret.write_text('{"step": 1, "key": "PRIVATE"}')
    (run / name).symlink_to(secret)
    with pytest.raises(ScaleLongError, match="symbolic link"):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_only_pictures_are_embedded(tmp_path, caplog):
    run = make_run(tmp_path / "run", "none")
    (run / "samples" / "step-00000050.png").write_text("PRIVATE")
    (entry,) = collect([run])["runs"]
    assert [sample["step"] for sample in entry["samples"]] == [100]
    assert "leaves it out" in caplog.text
    # The pictures of a range are named in its file, which is a stranger's as well.
    (tmp_path / "key.png").write_bytes((run / "samples" / "step-00000100.png").read_bytes())
    found = replace(made_up_range({"none": {0.008: 1}}, 1), samples=({"file": "../key.png"},))
    (run / "range.json").write_text(found.to_json())
    with pytest.raises(ScaleLongError, match=r"does not stay below"):
        collect([run])


def test_a_folder_with_a_range_needs_no_runs(tmp_path):
    made = made_up_range({"none": {0.008: 1, 0.012: 0}, "cs": {0.008: 7, 0.012: 5}}, title="deep")
    (tmp_path / "range.json").write_text(made.to_json())
    data = collect([tmp_path])
    assert data["verdict"] == [{"title": "deep", "text": [made.verdict]}]
    (found,) = data["ranges"]
    assert [[cell["survived"] for cell in row] for row in found["cells"]] == [[1, 0], [7, 5]]
    assert [(cell["best"], cell["last"]) for cell in found["cells"][0]] == [(0.1, 0.1), (0.1, None)]  # medians
    assert found["rows"][1]["half of the runs survive"] == made.half_rates[1].text
    write_report([tmp_path], tmp_path / "report.html")
    (tmp_path / "range.json").write_text('{"methods": 3}')
    with pytest.raises(RunFolderError, match="scalelong range"):
        collect([tmp_path])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_long_run_is_reported_in_little_time_and_memory(tmp_path):
    """A tenth of a million lines, in a process of its own: without torch, and without holding all lines."""
    run = make_run(tmp_path / "a", "none")
    line = '{"step": %d, "epoch": 0.1, "loss": 0.5, "gradient_norm": 1.0, "seconds_per_step": 0.01, "lr": 0.001}\n'
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(line % step for step in range(101, 100_101))
    script = (
        "import sys\n"
        "from scalelong.cli import main\n"
        f"code = main(['report', {str(run)!r}])\n"
        # Not by getrusage: a new process inherits the peak of the one that started it.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(code, 'torch' in sys.modules, int(peak.split()[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    code, torch_loaded, megabytes = done.stdout.splitlines()[-1].split()
    assert (code, torch_loaded) == ("0", "False")
    assert int(megabytes) < 200


def test_not_a_number_does_not_break_the_page(tmp_path):
    run = make_run(tmp_path / "a", "none")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "loss": NaN}\n{"step": 102, "lo')
    data = embedded(write_report([run], tmp_path / "r.html").read_text())
    assert data["runs"][0]["curves"]["loss"][1][-1] is None


def test_folders_without_runs_are_named(tmp_path, capsys):
    with pytest.raises(RunFolderError, match="no folder"):
        collect([tmp_path / "missing"])
    with pytest.raises(RunFolderError, match="holds none"):
        collect([tmp_path])
    assert main(["report", str(tmp_path)]) == 1
    assert "RunFolderError" in capsys.readouterr().err
    make_run(tmp_path / "a", "none")
    with pytest.raises(RunFolderError, match="which is a folder"):
        write_report([tmp_path / "a"], tmp_path)
    assert main(["report", str(tmp_path / "a")]) == 0
    assert str(tmp_path / "a" / "report.html") in capsys.readouterr().out
