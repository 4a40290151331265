import pytest

from scalelong.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_version(capsys):
    import scalelong

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"scalelong {scalelong.__version__}\n"


def test_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0
    assert f"scalelong {command}" in capsys.readouterr().out


def test_models_lists_sizes(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "cifar10-s2" in printed
    assert "260M" in printed
