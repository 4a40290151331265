"""Plans and coefficients in a notebook: tables in HTML."""

import json
import pickle

import pytest
import torch

import scalelong as sl


@pytest.fixture(scope="module")
def plan() -> sl.SkipPlan:
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=6, heads=2)
    return sl.plan_of(sl.scale_skips_(model, "cs"))


def test_a_plan_is_a_table_in_notebooks(plan):
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan)
    assert "UViT: 3 long skips, outermost first" in html
    assert "<td style='text-align:left'>encoder.0</td>" in html
    strange = sl.SkipPlan("<i>", tuple(skip.replace(producer="<b>x</b>") for skip in plan))
    assert "<b>x" not in strange._repr_html_()
    assert "<i>" not in strange._repr_html_()


def test_coefficients_print_as_in_the_readme():
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=8, heads=2)
    found = sl.coefficients(sl.scale_skips_(model, "cs"))
    assert repr(found) == "[1.0, 0.7, 0.49, 0.343]"
    assert found == [0.7**i for i in range(4)]


def test_coefficients_stay_a_list_of_floats():
    model = sl.UViT(image_size=8, patch_size=4, dim=16, depth=4, heads=2)
    found = sl.coefficients(sl.scale_skips_(model, "ls"), torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))
    assert isinstance(found, list)
    assert all(type(value) is float for value in found)
    assert json.loads(json.dumps(found)) == found == list(found)
    assert pickle.loads(pickle.dumps(found)) == found
    assert repr(found) == str([float(f"{value:.4g}") for value in found])
