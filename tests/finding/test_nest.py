"""Which are the long skips: networks that are easily read wrongly, found alike in every run."""

import pytest
import torch
from finding_networks import EXPECTED, Levels
from torch import Tensor

from scalelong.errors import AmbiguousSkipsError, NoLongSkipsError, UnreachableSkipError
from scalelong.finding import find_skips


def found(name: str) -> int | str:
    cls, _ = EXPECTED[name]
    torch.manual_seed(0)
    model = cls().eval()
    try:
        return len(find_skips(model, cls.inputs()))  # pyright: ignore
    except NoLongSkipsError:
        return "none"
    except (AmbiguousSkipsError, UnreachableSkipError):
        return "refused"


@pytest.mark.parametrize("name", EXPECTED)
def test_count(name):
    assert found(name) == EXPECTED[name][1]


@pytest.mark.parametrize("name", ["NoisyAutoencoder", "InPlaceHalves", "NormBeforeTheInnermost"])
def test_the_same_answer_in_every_run(name):
    """Memory that is free is used again: what lies there now is not what lay there before."""
    assert {found(name) for _ in range(20)} == {EXPECTED[name][1]}


def test_the_refusal_names_operation_and_place():
    cls, _ = EXPECTED["ChosenLevel"]
    with pytest.raises(UnreachableSkipError, match=r"where at finding_networks\.py:\d+.*exclude='finding_networks"):
        find_skips(cls(), cls.inputs())  # pyright: ignore


def test_all_candidates_of_two_us_are_shown():
    cls, _ = EXPECTED["TwoUs"]
    with pytest.raises(AmbiguousSkipsError) as caught:
        find_skips(cls(), cls.inputs())  # pyright: ignore
    assert caught.value.plan is not None
    assert sorted(skip.consumer for skip in caught.value.plan) == sorted(
        f"{half}.dec.{n}" for half in ("first", "second") for n in range(3)
    )


class Tagged(Tensor):
    """A subclass that rewraps every result, as those of other libraries do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(cls) if isinstance(result, Tensor) and not isinstance(result, cls) else result


def test_subclasses_of_tensors_are_followed():
    image = torch.randn(2, 5, 16, 16)
    model = Levels()
    plan = find_skips(model, image)
    assert find_skips(model, image.as_subclass(Tagged)) == plan
    monai = pytest.importorskip("monai.data")
    assert find_skips(model, monai.MetaTensor(image)) == plan


def test_inference_tensors_and_other_modes():
    from torch.utils.flop_counter import FlopCounterMode

    model, image = Levels(), torch.randn(2, 5, 16, 16)
    plan = find_skips(model, image)
    with torch.inference_mode():
        assert find_skips(model, image.clone()) == plan
    with FlopCounterMode(display=False), torch.autocast("cpu", torch.bfloat16):
        assert [skip.producer for skip in find_skips(model, image)] == [skip.producer for skip in plan]
