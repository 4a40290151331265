"""`scalelong lab theory`, and the range of κ in `scalelong diagnose`."""

import re

from scalelong.cli import main


def test_theory_prints_every_check(capsys) -> None:
    assert main(["lab", "theory", "--seeds", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("Theorem 3.1", "Lemma 3.2", "Theorem 3.3", "Theorem 3.4", "true norm", "w_6/w_1"):
        assert words in printed


def test_diagnose_prints_the_range_of_kappa(capsys) -> None:
    assert main(["diagnose", "--recipe", "digits-tiny", "--kappa-range"]) == 0
    assert re.search(r"κ from 0\.\d+ to 0\.\d+ for 3 long skips \(Section 4\.1\)", capsys.readouterr().out)


def test_too_few_seeds_are_one_clear_line(capsys) -> None:
    assert main(["lab", "theory", "--seeds", "1"]) == 1
    assert re.fullmatch(r"scalelong lab theory: .*--seeds must be at least 2.*\n", capsys.readouterr().err)
