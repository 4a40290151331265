"""The live report: what it gives out, to whom, and that the page follows the run."""

import json
import urllib.error
import urllib.request

import pytest

from report.made_up import make_run
from scalelong.errors import InvalidConfigError, RunFolderError
from scalelong.report import serving


def get(address: str, **headers: str) -> tuple[str, dict[str, str]]:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
        return answer.read().decode(), dict(answer.headers)


def test_the_page_and_a_mark_of_its_state_are_all_there_is(tmp_path):
    run = make_run(tmp_path / "a", "none")
    with serving(tmp_path) as address:
        assert address.startswith("http://127.0.0.1:")
        page, headers = get(address)
        assert "Your run did not collapse" in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        before, _ = get(f"{address}state")
        assert f'"live": "{before}"' in page
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 101, "loss": 0.4}) + "\n")
        assert get(f"{address}state")[0] != before
        for path in ("a/config.yaml", "../a/config.yaml", "metrics.jsonl"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(f"{address}{path}")


def test_other_names_for_this_machine_are_refused(tmp_path):
    """A stranger's page may point a name of its own at 127.0.0.1."""
    with serving(tmp_path) as address, pytest.raises(urllib.error.HTTPError, match="403"):
        get(address, Host="evil.example:80")


def test_a_folder_whose_run_has_not_begun(tmp_path):
    with serving(tmp_path) as address:
        assert "No run has begun" in get(address)[0]
    with pytest.raises(RunFolderError, match="no folder"), serving(tmp_path / "missing"):
        pass


def test_a_port_that_is_taken_is_refused_by_name(tmp_path):
    with serving(tmp_path) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(InvalidConfigError, match="`port`"), serving(tmp_path, port):
            pass
