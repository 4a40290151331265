"""The examples of README and docs run, and show what is printed; their commands have flags that exist.

The Python blocks of a page run in order, as one session, in an empty folder. What a comment beside `print(...)`, or
beside a line that is an expression, shows as a list or a number (`# [1.0, 0.7]`) is compared with what is printed;
"..." stands for the rest of it. A block that does not run says why, in a comment right above it:

    <!-- not run: takes an hour -->

A text block below a comment `<!-- printed -->` is what the block above it prints.

Every `scalelong ...` command of every block is parsed by the command's own parser, so that a flag which is gone fails.
Those of README and the tutorials run, in order, on a few small images; flags that make them short are added (SHORT).
Targets of make, extras, modules and scripts that pages name are there.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from scalelong.cli import COMMANDS, LAB, find_command, main
from scalelong.experiments import demo
from scalelong.scaling import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
]
PYTHON = ("python", "py", "pycon")
REASON = r"(?:<!-- not run: (?P<reason>[^\n]*?) -->\n+)?"
FENCE = re.compile(rf"^{REASON}```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)

PRINTED = re.compile(r"```\n+<!-- printed -->\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)

RUN_ELSEWHERE = {"docs/data.md": "tests/data/test_data_access.py", "docs/export.md": "tests/export/test_model.py"}
"""Pages whose examples need what another test has at hand."""
EXCERPTS = "docs/integrations/"
"""The pages in this folder show parts of examples/integrations, which tests/integrations runs whole."""


def python_blocks(page: str) -> list[str]:
    """The blocks that run. The others have a reason."""
    found = FENCE.finditer(text_of(page))
    return [block["code"] for block in found if block["language"] in PYTHON and not block["reason"]]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


WITH_PYTHON = [
    page for page in PAGES if python_blocks(page) and page not in RUN_ELSEWHERE and not page.startswith(EXCERPTS)
]

SHOWN = re.compile(r"  # ([\[(]?-?\d[^a-zA-Zκ]*)$")


def run(block: str, page: str, namespace: dict[str, object]) -> None:
    lines = block.splitlines()
    for node in ast.parse(block).body:
        code = compile(ast.Module([node], []), page, "exec")
        shown = SHOWN.search(lines[(node.end_lineno or 1) - 1])
        if not isinstance(node, ast.Expr) or shown is None:
            exec(code, namespace)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = eval(compile(ast.Expression(node.value), page, "eval"), namespace)
        # As an interactive session would show it.
        said = printed.getvalue().strip() if value is None else repr(value)
        expected = re.escape(shown[1].strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(expected, said), (
            f"{page} shows {shown[1]!r} beside {ast.unparse(node)!r}, which is {said!r}"
        )


def test_what_is_shown_is_compared():
    run("x = [1.0, 0.7]\nx  # [1.0, ...]\nprint(x[0])  # 1.0\nprint(x)  # a list", "page", {})
    for wrong in ("print(0.7)  # 0.5", "[1.0, 0.7]  # [1.0, 0.5]"):
        with pytest.raises(AssertionError, match="page shows"):
            run(wrong, "page", {})


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `runs/digits` of the pages stands for, in a minute less."""
    from scalelong.training import LoggingConfig, TrainConfig, train

    small = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 4}
    quiet = LoggingConfig(samples_every=0, monitor_every=0, trackers=())
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(TrainConfig(data="digits", steps=1, batch_size=4, model_options=small, logging=quiet), folder)
    return folder


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_examples_run(page, tmp_path, monkeypatch, request):
    missing = [
        name for name in re.findall(r"<!-- needs: (\w+) -->", text_of(page)) if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if "runs/digits" in "".join(python_blocks(page)):
        shutil.copytree(request.getfixturevalue("digits_run"), tmp_path / "runs" / "digits", symlinks=True)
    monkeypatch.chdir(tmp_path)
    before = dict(METHODS)
    # Classes defined in the examples need a module to belong to.
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        with warnings.catch_warnings():  # an example may change the filters
            for block in python_blocks(page):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    run(block, page, namespace)
                shown = PRINTED.match(text_of(page), text_of(page).index(block) + len(block))
                assert shown is None or shown[1].strip() == printed.getvalue().strip()
    finally:
        METHODS.clear()
        METHODS.update(before)
        torch.set_grad_enabled(True)


def test_no_page_is_forgotten():
    """Blocks that run elsewhere are run there, and a reason for not running is a sentence."""
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()
    if any(page.startswith(EXCERPTS) for page in PAGES):
        assert (ROOT / "tests" / "integrations" / "test_examples.py").is_file()
    for page in PAGES:
        for found in FENCE.finditer(text_of(page)):
            assert found["reason"] is None or len(found["reason"]) > 10, f"{page}: {found['reason']!r} is no reason"
    assert len(WITH_PYTHON) > 10


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_code_has_the_disease_that_it_cures(page):
    """A new `sl.UViT` survives by itself: the example has the start of the published network, as the demo has."""
    start = ast.literal_eval(re.findall(r"start = (\{.*\})", python_blocks(page)[0])[0])
    authors = {"init_std": round(0.02 * (512 / 64) ** 0.5, 4), "final_start": "authors", "residual_scaling": "none"}
    assert start == authors
    assert demo.demo_config().model_options["init_std"] == round(0.02 * (512 / demo.WIDTH) ** 0.5, 4)


# Commands


def commands_in(text: str) -> list[str]:
    """The command lines of a page: in fences and in indented blocks, with `$ ` or without, continued by a backslash.

    Those of a block that has a reason not to run are left out: a wrong turn, as it was typed."""
    found = [block for block in FENCE.finditer(text) if block["language"] not in PYTHON]
    blocks = [block["code"] for block in found if not block["reason"]]
    blocks += re.findall(r"(?:^ {4}.*\n)+", FENCE.sub("", text), re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"scalelong [a-z]+( |$)", line) and is_whole(line)]


def is_whole(command: str) -> bool:
    """Not `scalelong diagnose ...`, which stands for any."""
    return not re.search(r"(?<![\w.,])\.\.\.(?![\w.])", command.partition("  #")[0])


def mentioned_in(text: str) -> list[str]:
    """`scalelong lab tune RUN --steps` within a sentence. Only its flags are looked at."""
    return re.findall(r"`(scalelong [a-z]+ [^`\n]+)`", FENCE.sub("", text))


def split(command: str) -> tuple[str, list[str]]:
    """The name and the arguments; what the shell does with the output is its own."""
    name, *arguments = shlex.split(command, comments=True)[1:]
    if name == "lab" and arguments:
        name = f"lab {arguments.pop(0)}"
    ends = [index for index, argument in enumerate(arguments) if argument in ("|", ">", "&&", "&")]
    ends += [index + 1 for index, argument in enumerate(arguments) if argument.endswith(";")]
    return name, [argument.removesuffix(";") for argument in arguments[: min(ends, default=None)]]


def parser_of(name: str) -> argparse.ArgumentParser:
    if name not in {*COMMANDS, *(f"lab {study}" for study in LAB)}:
        raise ValueError(f"there is no command {name!r}")
    return find_command(name).parser()


def require_flags(command: str) -> None:
    """Raises ValueError for a command or a flag that does not exist."""
    name, arguments = split(command)
    known = {*parser_of(name)._option_string_actions, "--debug"}
    given = {argument.partition("=")[0] for argument in arguments if re.match(r"--[a-z]", argument)}
    if given - known:
        raise ValueError(f"{command}: there is no {', '.join(sorted(given - known))}")


def require_arguments(command: str) -> None:
    """Raises ValueError for arguments that the command refuses."""
    name, arguments = split(command)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parser_of(name).parse_args(["1" if argument == "N" else argument for argument in arguments])
        except SystemExit as end:
            if end.code not in (0, None):
                raise ValueError(f"{command}: {said.getvalue().strip().splitlines()[-1]}") from end


@pytest.mark.parametrize("page", [page for page in PAGES if "scalelong " in text_of(page)])
def test_commands_have_arguments_that_exist(page):
    text, wrong = text_of(page), []
    for command in [*commands_in(text), *mentioned_in(text)]:
        try:
            require_flags(command)
            if command in commands_in(text):
                require_arguments(command)
        except ValueError as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)


SHORT = {
    "train": "--steps 1 --batch-size 2 --samples 2 --sampler-steps 1 --held-out 4 --ema-lengths 5% 10%",
    "sample": "-n 2 --steps 1",
    "eval": "-n 20 --steps 1 --features random",
    "lab tune": "-n 16 --steps 1 --features random",
    "compare": "--steps 1 --seeds 1 --jobs 1 --out runs/compare-digits-tiny",
    "range": "--steps 2 --seeds 1 --jobs 1 --methods none --rates 1e-3 --set model_options.depth=4",
}
"""Flags after those of the page: of two with the same name the last one counts."""

MY_UNET = """
import torch
from diffusers import UNet2DModel

def model():
    return UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
                       down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)

def example_inputs():
    return {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([1, 500])}
"""


@pytest.mark.parametrize("page", [page for page in PAGES if page == "README.md" or page.startswith("docs/tutorials/")])
def test_commands_of_readme_and_tutorials_run(page, tmp_path, monkeypatch, digits_run):
    from scalelong.runs import save_png
    from scalelong.training import sizing

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sizing, "step_seconds", lambda *_, **__: 100.0)  # nothing is timed: the smallest is taken
    for folder in ("my_images", "my_photos"):
        (tmp_path / folder).mkdir()
        for number, picture in enumerate(torch.randint(0, 255, (24, 3, 8, 8), dtype=torch.uint8)):
            save_png(tmp_path / folder / f"{number}.png", picture)
    (tmp_path / "my_unet.py").write_text(MY_UNET)
    if page == "README.md":
        shutil.copytree(digits_run, tmp_path / "runs" / "my-run", symlinks=True)
    # Commands within sentences come last: they are about what the others have made.
    for command in [*commands_in(text_of(page)), *mentioned_in(text_of(page))]:
        name, arguments = split(command)
        assert main([*name.split(), *arguments, *SHORT.get(name, "").split()]) == 0, command


def test_targets_extras_modules_and_scripts_of_pages_are_there():
    targets = set(re.findall(r"^(\w+):", text_of("Makefile"), re.MULTILINE))
    extras = set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])
    wrong = []
    for page in PAGES:
        text = text_of(page)
        blocks = "".join(re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE))
        inline = " ".join(re.findall(r"`([^`\n]+)`", text))
        wrong += [f"{page}: make {name}" for name in re.findall(r"(?m)^ *make (\w+)", blocks) if name not in targets]
        wrong += [f"{page}: make {name}" for name in re.findall(r"`make (\w+)`", text) if name not in targets]
        for found in re.findall(r"(?:scalelong|'\.)\[([a-z,]+)\]", blocks + inline):
            wrong += [f"{page}: [{name}]" for name in found.split(",") if name not in extras]
        modules = re.findall(r"python -m ((?:research|benchmarks|website)[\w.]*)", blocks + inline)
        if not page.startswith("docs/evidence/"):  # finished studies name the commit that has their code
            paths = {module: ROOT / module.replace(".", "/") for module in modules}
            gone = [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())]
            wrong += [f"{page}: {module}" for module in gone]
        scripts = re.findall(r"python (\w[\w/]*\.py)", blocks + inline)
        wrong += [f"{page}: {script}" for script in scripts if "/" in script and not (ROOT / script).exists()]
    assert not wrong, "\n".join(wrong)


def test_an_argument_that_does_not_exist_is_noticed():
    require_flags("scalelong sample runs/x --seed 3 | head --lines 3  # a comment --sede")
    for wrong in ("scalelong smaple runs/x", "scalelong sample runs/x --sede 3", "scalelong train --lrr 3"):
        with pytest.raises(ValueError, match="there is no"):
            require_flags(wrong)
    with pytest.raises(ValueError, match="whole number"):
        require_arguments("scalelong demo --seed x")
    page = "```\n$ scalelong find a.py \\\n  --json\n```\n\n    scalelong lab theory\n    scalelong diagnose ...\n"
    assert commands_in(page) == ["scalelong find a.py    --json", "scalelong lab theory"]
    assert commands_in("<!-- not run: a wrong turn -->\n```text\n$ scalelong train --bugdet 4m\n```\n") == []
    assert mentioned_in("see `scalelong lab tune RUN --steps`") == ["scalelong lab tune RUN --steps"]
