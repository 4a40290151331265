"""A cache of its own for the tests of evaluation, shared by them so that statistics are computed once."""

from collections.abc import Iterator

import pytest

from scalelong.data import ImageData, load_data


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def digits() -> ImageData:
    return load_data("digits")
