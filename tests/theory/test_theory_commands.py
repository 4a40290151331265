"""`scalelong lab theory`."""

import re

from scalelong.cli import main


def test_theory_prints_every_check(capsys) -> None:
    assert main(["lab", "theory", "--seeds", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("Theorem 3.1", "Lemma 3.2", "Theorem 3.3", "Theorem 3.4", "true norm", "w_6/w_1"):
        assert words in printed


def test_too_few_seeds_are_one_clear_line(capsys) -> None:
    assert main(["lab", "theory", "--seeds", "1"]) == 1
    assert re.fullmatch(r"scalelong lab theory: .*--seeds must be at least 2.*\n", capsys.readouterr().err)
