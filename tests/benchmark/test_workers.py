"""Contenders in processes of their own."""

from pathlib import Path

import pytest

from benchmarks.contender import Contender, Worker, race
from benchmarks.settings import BenchmarkError, Settings

HERE = str(Path(__file__).parent)
SETTINGS = Settings(threads=1, quick=True)


def contender(name, function, *, optional=False, environment=None, **arguments):
    return Contender(name, f"fakes:{function}", arguments, environment or {}, imports=(), optional=optional)


@pytest.fixture(autouse=True)
def fakes_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)


def test_time_and_memory_of_each_are_its_own_and_an_optional_one_may_be_missing():
    found = race(
        [
            contender("slow", "Sleeper", seconds=0.06),
            contender("large", "Sleeper", megabytes=80),
            contender("bad", "refusing", optional=True),
        ],
        SETTINGS,
        2,
    )
    assert list(found.seconds) == ["slow", "large"]
    assert all(seconds >= 0.06 for seconds in found.seconds["slow"])
    assert found.memory["large"] - found.memory["slow"] > 70e6
    assert found.memory["slow"] < 20e6  # what was imported does not count
    assert found.missing == {"bad": "bad: this contender does not want to"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("refusing", "bad: this contender does not want to"),
        ("failing_step", "bad: ZeroDivisionError: in the step"),
        ("dying", r"ended with code 3(.|\n)*last words"),
    ],
)
def test_a_contender_that_fails_says_why(function, message):
    with pytest.raises(BenchmarkError, match=message):
        race([contender("bad", function)], SETTINGS, 1)


def test_a_worker_answers_and_is_killed_if_it_does_not_end(monkeypatch):
    monkeypatch.setattr("benchmarks.contender.END_SECONDS", 0.2)
    worker = Worker(contender("sleepy", "Sleeper", seconds=60, environment={"WISH": "yes"}), threads=3)
    worker.wait_until_built()
    assert worker.ask("answer") == {"threads": "3", "wish": "yes"}
    worker.begin(1)
    worker.close()
    assert worker._process.returncode < 0


def test_a_worker_ends_with_its_input():
    worker = Worker(contender("quick", "Sleeper"), threads=1)
    worker.wait_until_built()
    worker.close()
    assert worker._process.returncode == 0
