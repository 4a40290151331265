"""What others depend on: the wheel, its extras, and one version and one address in all files."""

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import scalelong
from scalelong.optional import DISTRIBUTIONS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

NOTICES = ("LICENSE", *(f"src/scalelong/data/{name}.md" for name in ("digits", "garments", "portraits")))

PLACEHOLDER = "https://scalelong.example/"


# Extras


def distributions(extra: str) -> set[str]:
    """The names of all that `scalelong[EXTRA]` asks for, normalised."""
    found = set()
    for requirement in EXTRAS[extra]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        if name[0] == "scalelong":
            inner = re.search(r"\[(.*)\]", requirement)
            assert inner is not None
            found |= {package for part in inner[1].split(",") for package in distributions(part.strip())}
        else:
            found.add(normal(name[0]))
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def calls_of_needs() -> list[tuple[str, str, str | None]]:
    """(place, distribution, extra) of every `needs("module", "extra", ...)` in the package."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "needs":
                module, extra = node.args[:2]
                if isinstance(module, ast.Constant) and isinstance(extra, ast.Constant):
                    package = str(module.value).partition(".")[0]
                    place = f"{path.name}:{node.lineno}"
                    named = normal(DISTRIBUTIONS.get(package, package))
                    found.append((place, named, None if extra.value is None else str(extra.value)))
    return found


def test_whoever_lacks_a_package_is_told_an_extra_that_has_it():
    calls = calls_of_needs()
    assert len(calls) > 30
    for place, package, extra in calls:
        if extra is None:
            having = [name for name in EXTRAS if package in distributions(name)]
            assert not having, f"{place}: {package} is in the extra {having}, and the message should say so"
        else:
            assert extra in EXTRAS, f"{place}: there is no extra {extra!r}"
            assert package in distributions(extra), f"{place}: scalelong[{extra}] does not bring {package}"


def test_all_is_all_that_users_need():
    # eval brings torchvision, which must be of torch's build; a cluster has one of the last two
    users = set(EXTRAS) - {"all", "dev", "docs", "eval", "slurm", "ray"}
    assert distributions("all") == set().union(*map(distributions, users))


def test_what_make_installs_is_pinned():
    pins = {normal(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = distributions("dev") | {normal(re.split(r"[><=]", name)[0]) for name in PROJECT["dependencies"]}
    assert wanted <= pins


# One version, one address


def test_one_version_in_all_files():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == scalelong.__version__
    # The data that comes along has licences of its own.
    assert PROJECT["license"] == f"{citation['license']} AND CC-BY-4.0 AND MIT"


def test_one_description_in_all_files():
    from scalelong.cli import usage

    named = {name: (ROOT / name).read_text() for name in ("README.md", "docs/index.md", "mkdocs.yml")}
    for name, text in {**named, "--help": usage(), "scalelong": scalelong.__doc__ or ""}.items():
        assert PROJECT["description"] in text, name


def test_actions_are_named_by_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (\S+)", path.read_text()):
            assert re.search("@[0-9a-f]{40}$", used), used


def test_requirements_with_hashes():
    from website.hashes import requirements

    archive = {"archive_info": {"hashes": {"sha256": "00ff"}}}
    packages = [("torch", archive), ("scalelong", {"dir_info": {}}), ("Pillow", archive)]
    report = [{"metadata": {"name": name, "version": "1"}, "download_info": info} for name, info in packages]
    assert requirements({"install": report}) == ["Pillow==1 --hash=sha256:00ff", "torch==1 --hash=sha256:00ff"]


def test_one_address_in_all_files():
    """A placeholder until the project has an address: RELEASING.md lists the files in which it is replaced."""
    releasing = (ROOT / "RELEASING.md").read_text()
    tracked = ["pyproject.toml", "mkdocs.yml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"]
    for name in tracked:
        assert PLACEHOLDER in (ROOT / name).read_text(), name
        assert f"`{name}`" in releasing, name
    for address in PROJECT["urls"].values():
        assert address.startswith(PLACEHOLDER)


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if name.startswith("scalelong/")}
    info = f"scalelong-{scalelong.__version__}.dist-info/"
    assert {name for name in names - inside if not name.startswith(info)} == set()
    # Every file of the source, data, stubs and the pages of the report too.
    source = ROOT / "src" / "scalelong"
    files = {path.relative_to(source.parent).as_posix() for path in source.rglob("*") if path.is_file()}
    assert inside == {name for name in files if "__pycache__" not in name}
    assert {"scalelong/py.typed", "scalelong/__init__.pyi", "scalelong/data/digits.npz"} <= inside
    assert {f"{info}licenses/{name}" for name in NOTICES} <= set(names)
    assert wheel.stat().st_size < 20e6


def test_the_metadata_of_the_wheel(wheel):
    found = metadata(wheel)
    assert found["Version"] == scalelong.__version__
    assert found["License-Expression"] == PROJECT["license"]
    assert found["Requires-Python"] == ">=3.11"
    assert set(found.get_all("Provides-Extra", [])) == set(EXTRAS)
    needed = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[><=]", line)[0] for line in needed} == {"torch", "safetensors", "filelock"}
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith("# scalelong")  # pyright: ignore[reportAttributeAccessIssue]


CORE = """
import sys
sys.path[:] = {path}
import scalelong as sl
assert sl.__file__.startswith({wheel!r}), sl.__file__
for name in dir(sl):
    getattr(sl, name)
model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=4, heads=2)
print(sl.start_skips_(model, "cs"))
sl.scale_skips_(model, "cs:0.7")
print(sl.coefficients(model))
try:
    from scalelong.optional import needs
    needs("matplotlib.figure", "report", "drawing")
except sl.MissingDependencyError as error:
    print(error)
"""


def test_the_wheel_works_with_torch_alone(wheel, tmp_path):
    """Unpacked, beside links to torch and what torch needs, and to nothing else of this environment."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
    packages, alone = Path(sysconfig.get_path("purelib")), tmp_path / "alone"
    alone.mkdir()
    import filelock
    import safetensors
    import torch

    homes = {Path(module.__file__ or "").parents[1] for module in (torch, safetensors, filelock)} | {packages}
    wanted = ("torch", "torchgen", "functorch", "safetensors", "filelock", "typing_extensions.py", "sympy", "mpmath")
    for name in (*wanted, "networkx", "jinja2", "markupsafe", "fsspec"):
        home = next(home for home in homes if (home / name).exists())
        (alone / name).symlink_to(home / name)
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    path = [str(tmp_path / "wheel"), str(alone), *standard]
    code = CORE.format(path=path, wheel=str(tmp_path / "wheel"))
    run = [sys.executable, "-I", "-S", "-W", "ignore", "-c", code]
    said = subprocess.run(run, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "[1.0, 0.7]" in said.stdout
    assert "'matplotlib', which is not installed. Install it with: pip install 'scalelong[report]'" in said.stdout


@pytest.mark.slow
def test_the_wheel_installs_in_an_empty_environment(wheel, tmp_path):
    """`pytest -m slow tests/test_packaging.py`: needs a registry. torch is pinned, so that no other build is pulled."""
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    install = [str(python), "-m", "pip", "install", "--quiet", *constraints, str(wheel)]
    subprocess.run(install, check=True)
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    )
    there = {normal(line.partition("==")[0]) for line in listed.stdout.splitlines()}
    assert not there & (distributions("all") - {"torch"})
    code = CORE.format(path="sys.path", wheel=str(tmp_path / "empty"))
    said = subprocess.run([str(python), "-I", "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "[1.0, 0.7]" in said.stdout
    scalelong_command = tmp_path / "empty" / "bin" / "scalelong"
    for arguments in (["--version"], ["--help"], ["train", "--help"], ["lab", "coords", "--help"]):
        subprocess.run([str(scalelong_command), *arguments], check=True, capture_output=True)
    # With `train`, from the wheel: a run of the digits.
    subprocess.run([*install[:-1], f"{wheel}[train]"], check=True)
    small = ["--recipe", "digits-tiny", "--steps", "2", "--samples-every", "0", "--out", str(tmp_path / "run")]
    said = subprocess.run([str(scalelong_command), "train", *small], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
