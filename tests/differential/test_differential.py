"""Apps see no unintended difference between a real vLLM and the same vLLM behind proxy and
server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fakevllm_adapters.formats.registry import ADAPTERS
from tests.differential.comparison import differences
from tests.differential.corpus import KEY, Request, corpus
from tests.differential.engines import DIRECT, MODEL, SIBLINGS, TIED, Setups, start_all
from tests.differential.raw_http import send
from tests.differential.request_check import check_request
from tests.e2e.ledgers import rows

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

MIN_FANNED_OUT = 100


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setups]:
    with start_all(tmp_path_factory.mktemp("differential")) as started:
        yield started


@pytest.mark.parametrize(
    "name", [name for name, request in corpus().items() if not request.is_reasoning]
)
@pytest.mark.parametrize("setup", SIBLINGS)
def test_a_request_is_answered_as_by_vllm_itself(setups: Setups, name: str, setup: str) -> None:
    check_request(setups, name, setup)


SEEDED_BODIES = {
    "chat": {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 8},
    "completions": {"prompt": "user: What is 3 plus 4?", "max_tokens": 8},
    "responses": {"input": "What is 3 plus 4?", "max_output_tokens": 8},
}
NUM_SEEDS, NUM_REPEATS = 4, 4


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("format", SEEDED_BODIES)
@pytest.mark.parametrize("setup", [DIRECT, TIED])
def test_a_request_with_a_seed_repeats_its_answer_at_temperature_1(
    setups: Setups, setup: str, format: str, streamed: bool
) -> None:
    for seed in range(NUM_SEEDS):
        sampling = {"model": MODEL, "temperature": 1.0, "seed": seed, "stream": streamed}
        body = json.dumps(SEEDED_BODIES[format] | sampling).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = Request("seeded", "POST", ADAPTERS[format].path, headers, body)
        first, *others = [send(setups.urls[setup], request) for _ in range(NUM_REPEATS)]
        assert first.status == 200
        for other in others:
            assert differences(first, other) == []


def test_ties_of_different_seeds_end_differently(setups: Setups) -> None:
    served = rows(setups.proxies[TIED], "select distinct served_index from groups")
    assert len(served) > 1


def test_with_four_siblings_many_requests_were_sampled_four_times(setups: Setups) -> None:
    groups = rows(
        setups.proxies["N=4"],
        "select count(*) as n from siblings where text is not null group by group_id having n = 4",
    )
    assert len(groups) >= MIN_FANNED_OUT


@pytest.mark.parametrize("setup", SIBLINGS)
def test_the_proxys_metrics_contain_each_metric_of_vllm_once(setups: Setups, setup: str) -> None:
    request = Request("metrics", "GET", "/metrics", {"authorization": f"Bearer {KEY}"})
    direct, ours = (setups.send(one, request, corpus()) for one in (DIRECT, setup))
    one, other = (family_names(response.body.decode()) for response in (direct, ours))
    assert set(one) <= set(other)
    assert len(set(other)) == len(other)
    assert direct.header("content-type") == ours.header("content-type")


def family_names(metrics: str) -> list[str]:
    """Return the names of the metric families in Prometheus's text format."""
    return [line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE ")]
