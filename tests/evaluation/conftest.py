"""A cache of its own for the tests of evaluation, shared by them so that a classifier is trained once."""

from collections.abc import Iterator

import pytest

from scalelong.data import ImageData, load_data
from scalelong.evaluation import train_classifier
from scalelong.evaluation.features import Classifier


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return load_data("digits")


@pytest.fixture(scope="session")
def classifier(shared_cache: None, digits: ImageData) -> Classifier:
    return train_classifier(digits)
