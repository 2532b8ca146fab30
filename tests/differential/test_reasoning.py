"""No app can tell, of a model that thinks before it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.checking import check
from tests.differential.corpus import corpus
from tests.differential.engines import EXTRA, WAYS, Ways, ways
from tests.differential.thinking import FLAGS, thinking_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    folder = tmp_path_factory.mktemp("reasoning")
    with ways(folder, thinking_model(folder / "model"), (*EXTRA, *FLAGS)) as started:
        yield started


@pytest.mark.parametrize("name", [name for name, each in corpus().items() if each.thinks])
@pytest.mark.parametrize("way", WAYS)
def test_reasoning_is_told_as_by_vllm_itself(asked: Ways, name: str, way: str) -> None:
    check(asked, name, way)
