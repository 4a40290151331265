"""The study of the probe: its statistics against tables of Student's t, and its page against its raw lines."""

from pathlib import Path

import pytest

from research import probe
from research.probe import Gap, holm

EVIDENCE = Path(__file__).resolve().parents[2] / probe.FOLDER
PATTERN = (-1.5, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.5)


def with_t(t: float) -> Gap:
    """Eight numbers whose t is this."""
    spread = (sum(x * x for x in PATTERN) / 7) ** 0.5 / 8**0.5
    return Gap(tuple(x + t * spread for x in PATTERN))


@pytest.mark.parametrize(("t", "p"), [(2.365, 0.05), (3.499, 0.01), (5.408, 0.001), (0.711, 0.5)])
def test_p_is_that_of_the_tables_for_seven_degrees_of_freedom(t, p):
    assert with_t(t).p() == pytest.approx(p, rel=0.01)
    assert with_t(-t).p() == pytest.approx(p, rel=0.01)


def test_intervals_and_p_agree():
    assert with_t(2.37).holds() == "above"
    assert with_t(-2.37).holds() == "below"
    assert with_t(2.36).holds() == "no difference"
    assert "one seed" in Gap((0.3,)).text()


def test_holm_stops_at_the_first_that_does_not_hold():
    strong, weak = with_t(6.0), with_t(2.5)
    assert holm({"a": strong, "b": weak}) == ["a", "b"]
    assert holm({"a": strong, "b": weak, "c": weak}) == ["a"]
    assert holm({"b": weak, "c": with_t(0.1)}) == []


def test_without_cifar10_its_studies_are_left_out(tmp_path, capsys):
    for place in (None, tmp_path / "nowhere"):
        probe.run("cifar10", tmp_path, place)
    assert capsys.readouterr().out.count("left out") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", [probe.digits_part, probe.conditioning_part, probe.scaling_part, probe.cifar_part])
def test_the_page_is_made_of_the_raw_lines(part):
    made = part(EVIDENCE)
    assert made in (EVIDENCE / "results.md").read_text(encoding="utf-8")
