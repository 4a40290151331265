"""`scalelong bench`: names, bad arguments, the authors' code, and a tiny run from end to end."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import catalogue, record
from benchmarks.cases.growth import exponent, uvit_at
from benchmarks.catalogue import BENCHMARKS, cases_of, chosen
from benchmarks.contenders.theirs import definitions
from benchmarks.profile import REST, count_flops, group_of, shares_of
from benchmarks.record import Result, Table
from benchmarks.settings import OfficialCheckoutError, Settings, checkout
from scalelong.cli import main
from scalelong.errors import InvalidConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_names_choose_benchmarks_and_cases():
    assert chosen(["step/unet", "step/small", "step/unet"]) == ["step/unet", "step/small"]
    assert chosen(["growth"]) == [f"growth/{case}" for case in cases_of("growth")]
    assert {name.partition("/")[0] for name in chosen([])} == set(BENCHMARKS)


def test_the_page_has_a_place_for_every_case():
    places = re.findall(r"<!-- bench: ([\w/-]+) -->", (DOCS / "performance.md").read_text(encoding="utf-8"))
    assert places == chosen([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["setp"], "unknown benchmark 'setp'; known: step"),
        (["step/big"], "no case 'big'; it has small"),
        (["trainer/start", "--threads", "0"], "--threads must be at least 1"),
        (["trainer/start", "--rounds", "0"], "--rounds must be at least 1"),
        (["sampling", "--target", "-1"], "--target must be above 0"),
        (["step", "--official", "nowhere"], "OfficialCheckoutError: nowhere is not a checkout of the authors' code"),
        (["--table", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_fill_needs_a_table():
    with pytest.raises(SystemExit):
        main(["bench", "--fill", "page.md"])


def test_results_are_kept_case_by_case(tmp_path, monkeypatch, capsys):
    """The second case fails; the first is in the file by then."""

    def works(settings: Settings) -> Result:
        return Result([Table("It works", {"": "text", "threads": "count"}, [["a", settings.threads]])])

    def fails(_: Settings) -> Result:
        raise InvalidConfigError("cannot be measured")

    monkeypatch.setattr(catalogue, "cases_of", lambda benchmark: {"works": works, "fails": fails})
    file = tmp_path / "bench.json"
    assert main(["bench", "step", "--threads", "7", "--out", str(file)]) == 1
    assert list(record.read(file)) == ["step/works"]
    assert "cannot be measured" in capsys.readouterr().err
    assert main(["bench", "step", "--table", str(file)]) == 0
    assert "**It works**" in capsys.readouterr().out


def test_a_file_that_cannot_be_added_to_is_noticed_before_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("benchmarks.catalogue.measure", lambda *_: pytest.fail("it measured"))
    assert main(["bench", "trainer/start", "--out", str(tmp_path / "notes.txt")]) == 1
    assert "not a file of `scalelong bench --out`" in capsys.readouterr().err


def test_a_step_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["bench", "step/small", "--quick", "--threads", "1", "--rounds", "2", "--out", str(file)]) == 0
    assert "was not measured: give a checkout" in capsys.readouterr().out
    found = record.read(file)["step/small"]
    assert len(found["rounds"]["seconds"]["ours"]) == 2
    assert found["rounds"]["memory"]["ours"] > 0
    assert found["machine"]["threads"] == 1


def test_a_roofline_from_end_to_end(tmp_path):
    file = tmp_path / "bench.json"
    assert main(["bench", "roofline/small", "--quick", "--threads", "1", "--out", str(file)]) == 0
    found = record.read(file)["roofline/small"]["rounds"]
    assert sum(found["profile"].values()) == pytest.approx(1.0)
    assert {"matrix products", "attention", "optimiser", "moving average"} <= set(found["profile"])
    assert found["flops"]["training step"] > 1e6


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    (tmp_path / "sde.py").touch()
    with pytest.raises(OfficialCheckoutError, match=r"has no libs/uvit.py, libs/timm.py, utils.py. Clone"):
        checkout(tmp_path)


def test_definitions_are_taken_without_the_imports_of_others(tmp_path):
    file = tmp_path / "utils.py"
    file.write_text(
        "import math\nfrom a_package_that_is_not_there import save\n"
        "def root(x):\n    return math.sqrt(x)\ndef other():\n    save()\n"
    )
    assert definitions(file, ("root",)).root(9) == 3
    with pytest.raises(OfficialCheckoutError, match="needs the package 'a_package_that_is_not_there'"):
        definitions(file, ("other",))
    with pytest.raises(OfficialCheckoutError, match="has no absent"):
        definitions(file, ("root", "absent"))


def test_flops_of_attention_are_those_of_its_products():
    q = torch.randn(2, 3, 5, 4, requires_grad=True)

    def step():
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    # Two products forward and four backward, each 2 B H L² D.
    assert count_flops(step) == 6 * 2 * 2 * 3 * 5 * 5 * 4


def test_flops_of_a_product():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert count_flops(lambda: a @ b) == 2 * 3 * 4 * 5


class Event:
    def __init__(self, name, parent=None, thread=1, microseconds=0.0):
        self.name, self.cpu_parent, self.thread = name, parent, thread
        self.self_cpu_time_total = microseconds
        self.time_range = SimpleNamespace(elapsed_us=lambda: microseconds)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::gelu_backward", "GELU"),
        ("aten::native_layer_norm", "norms"),
        ("aten::copy_", "copies"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::add_", "additions and products"),
        ("AddmmBackward0", REST),
    ],
)
def test_operations_belong_to_groups(name, group):
    assert group_of(Event(name)) == group
    assert group_of(Event(name, Event("x", Event("Optimizer.step#AdamW.step")))) == "optimiser"


def test_a_profile_is_of_all_cores():
    step = Event("bench::step", microseconds=100.0)
    split = Event("bench::split", step, microseconds=5.0)
    events = [
        step,
        split,
        Event("aten::mm", split, microseconds=40.0),
        Event("aten::mm", thread=2, microseconds=30.0),
        Event("aten::gelu", thread=2, microseconds=10.0),
        Event("Optimizer.step#AdamW.step", step, microseconds=20.0),  # both cores share it
    ]
    assert shares_of(events, cores=2) == pytest.approx(
        {"matrix products": 0.35, "GELU": 0.05, "optimiser": 0.2, REST: 0.4}
    )


def test_a_profile_sees_what_the_other_core_does():
    from benchmarks.contenders.ours import training_step
    from benchmarks.settings import TINY

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(training_step(**TINY.ours()).profile())
    finally:
        torch.set_num_threads(before)
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in found)
    assert all(share >= 0 for shares in found for share in shares.values())
    assert {"matrix products", "attention", "optimiser", "moving average", "data and noise"} <= set(found[1])


def test_an_exponent_is_found_again():
    sizes = [4, 8, 12, 24]
    assert exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)


def test_one_size_is_changed_at_a_time():
    assert uvit_at("tokens", 12).tokens == 145
    assert uvit_at("width", 192).heads == 6
    assert uvit_at("batch", 64).depth == uvit_at("depth", 8).depth == 8


def test_flops_of_a_step_do_not_depend_on_the_number_of_cores():
    from benchmarks.contenders.ours import training_step
    from benchmarks.settings import TINY

    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(training_step(**TINY.ours()).flops())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] > 0
