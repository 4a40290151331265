"""A plan in a notebook: a table in HTML, and a picture of the U."""

import json
import pickle

import pytest
import torch

import scalelong as sl


@pytest.fixture(scope="module")
def plan() -> sl.SkipPlan:
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=6, heads=2)
    return sl.plan_of(sl.scale_skips_(model, "cs"))


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_a_plan_is_a_table_in_notebooks(plan):
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan)
    assert "UViT: 3 long skips, outermost first" in html
    assert "<td style='text-align:left'>encoder.0</td>" in html


def test_names_are_escaped(plan):
    skips = [skip.replace(producer="<b>$x$</b>") for skip in plan]
    strange = sl.SkipPlan("<i>", tuple(skips))
    assert "<b>$" not in strange._repr_html_()
    assert "<i>" not in strange._repr_html_()
    pytest.importorskip("matplotlib")
    figure = strange.plot()
    figure.canvas.draw()  # a $ would be a formula
    assert "<b>$x$</b>" in texts(figure)


def test_the_picture_names_every_skip(plan):
    pytest.importorskip("matplotlib")
    shown = texts(plan.plot([1.0, 0.7, 0.49]))
    for skip in plan:
        assert skip.producer in shown
        assert skip.consumer in shown
    assert shown.count("1×5×16") == shown.count("cat") == 3
    assert [text for text in shown if "κ" in text] == ["κ = 1", "κ = 0.7", "κ = 0.49"]
    assert not any("κ" in text for text in texts(plan.plot()))


def test_a_box_serves_all_skips_of_one_module(plan):
    pytest.importorskip("matplotlib")
    shared = sl.SkipPlan(plan.model, tuple(skip.replace(consumer="up.0") for skip in plan))
    assert texts(shared.plot()).count("up.0") == 1


def test_coefficients_must_fit(plan):
    pytest.importorskip("matplotlib")
    with pytest.raises(sl.InvalidConfigError, match="one number for each of the 3 long skips, got 2"):
        plan.plot([1.0, 0.5])


def test_an_empty_plan_and_a_skip_that_cannot_be_scaled(plan):
    pytest.importorskip("matplotlib")
    assert "(nothing)" in sl.SkipPlan("Net", ())._repr_html_()
    sl.SkipPlan("Net", ()).plot().canvas.draw()
    stuck = sl.SkipPlan(plan.model, (plan[1].replace(attachment=None, obstacle="no way"),))
    assert "cat (cannot be scaled)" in texts(stuck.plot())


def test_coefficients_print_as_in_the_readme():
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=8, heads=2)
    found = sl.coefficients(sl.scale_skips_(model, "cs"))
    assert repr(found) == "[1.0, 0.7, 0.49, 0.343]"
    assert found == [0.7**i for i in range(4)]
    assert "<th style='text-align:left'>κ_i</th>" in getattr(found, "_repr_html_")()  # noqa: B009


def test_coefficients_stay_a_list_of_floats():
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=4, heads=2)
    found = sl.coefficients(sl.scale_skips_(model, "ls"), torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))
    assert isinstance(found, list)
    assert all(type(value) is float for value in found)
    assert json.loads(json.dumps(found)) == found == list(found)
    assert pickle.loads(pickle.dumps(found)) == found
    assert repr(found) == str([float(f"{value:.4g}") for value in found])
