"""Apps see no unintended difference either if the model reasons before it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.corpus import corpus
from tests.differential.engines import EXTRA, SIBLINGS, Setups, start_all
from tests.differential.reasoning_model import FLAGS, create_reasoning_model
from tests.differential.request_check import check_request

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setups]:
    folder = tmp_path_factory.mktemp("reasoning")
    with start_all(folder, create_reasoning_model(folder / "model"), (*EXTRA, *FLAGS)) as started:
        yield started


@pytest.mark.parametrize(
    "name", [name for name, request in corpus().items() if request.is_reasoning]
)
@pytest.mark.parametrize("setup", SIBLINGS)
def test_reasoning_is_returned_as_by_vllm_itself(setups: Setups, name: str, setup: str) -> None:
    check_request(setups, name, setup)
