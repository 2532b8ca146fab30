"""No app can tell: the same request to a real vLLM, and to it behind proxy and server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.checking import check
from tests.differential.corpus import KEY, Request, corpus
from tests.differential.engines import DIRECT, WAYS, Ways, ways
from tests.e2e.ledgers import rows

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

LEAST_FANNED_OUT = 100


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with ways(tmp_path_factory.mktemp("differential")) as started:
        yield started


@pytest.mark.parametrize("name", [name for name, each in corpus().items() if not each.thinks])
@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_answered_as_by_vllm_itself(asked: Ways, name: str, way: str) -> None:
    check(asked, name, way)


def test_with_four_siblings_most_were_sampled_four_times(asked: Ways) -> None:
    groups = rows(
        asked.proxies["N=4"],
        "select count(*) as n from siblings where text is not null group by group_id having n = 4",
    )
    assert len(groups) >= LEAST_FANNED_OUT


@pytest.mark.parametrize("way", WAYS)
def test_all_metrics_of_vllms_are_among_ours_and_none_is_there_twice(asked: Ways, way: str) -> None:
    request = Request("metrics", "GET", "/metrics", {"authorization": f"Bearer {KEY}"})
    direct, ours = (asked.ask(one, request, corpus()) for one in (DIRECT, way))
    one, other = (names_of(seen.body.decode()) for seen in (direct, ours))
    assert set(one) <= set(other)
    assert len(set(other)) == len(other)
    assert direct.header("content-type") == ours.header("content-type")


def names_of(metrics: str) -> list[str]:
    """Of the families, in Prometheus's text format."""
    return [line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE ")]
