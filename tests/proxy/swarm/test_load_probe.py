"""Probing of the engine's queue length."""

from __future__ import annotations

import aiohttp
import pytest

from fakevllm.swarm.load_probe import PROBE_EVERY_S, LoadProbe, parse_queue_length
from tests.proxy.scripted_swarm import ScriptedSwarm

PAGE = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:num_requests_running{engine="0",model_name="m"} 5.0
"""


class Rig:
    """A load probe with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_wanted = True
        self.load_probe = LoadProbe(lambda: self.is_wanted, lambda: self.now)

    async def probe(self, swarm: ScriptedSwarm, *, is_serving: bool = True) -> int | None:
        async with aiohttp.ClientSession(swarm.url) as http:
            await self.load_probe.follow(http, is_serving=is_serving)
        return self.load_probe.num_waiting


async def test_the_queues_of_all_engines_are_added_and_probed_at_intervals() -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = PAGE
        assert await rig.probe(swarm) == 7
        swarm.answers["/metrics"] = PAGE.replace("3.0", "1.0")
        assert await rig.probe(swarm) == 7
        rig.now += PROBE_EVERY_S
        assert await rig.probe(swarm) == 5
        assert swarm.calls["/metrics"] == 2


@pytest.mark.parametrize(("page", "first", "later"), [(PAGE, 7, 0), (404, None, None)])
async def test_an_unwanted_queue_length_is_probed_once_per_start_of_the_engine(
    page: str | int, first: int | None, later: int | None
) -> None:
    rig = Rig()
    rig.is_wanted = False
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = page
        for num_starts in (1, 2):
            assert await rig.probe(swarm, is_serving=False) is None
            rig.now += PROBE_EVERY_S
            assert await rig.probe(swarm) == first
            for _ in range(3):
                rig.now += PROBE_EVERY_S
                assert await rig.probe(swarm) == later
            assert swarm.calls["/metrics"] == num_starts
        swarm.answers["/metrics"] = PAGE
        rig.is_wanted = True
        assert await rig.probe(swarm) == 7, "at once"


@pytest.mark.parametrize(
    "page",
    [404, 500, "", "up 1", "vllm:num_requests_waiting", "vllm:num_requests_waiting{ 3"]
    + [f"vllm:num_requests_waiting {odd}" for odd in ("NaN", "+Inf", "many")],
)
async def test_the_queue_length_is_unknown_if_the_metrics_cannot_be_parsed(
    page: str | int,
) -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = page
        assert await rig.probe(swarm) is None


async def test_an_engine_that_does_not_answer_has_no_known_queue() -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = PAGE
        assert await rig.probe(swarm) == 7
        assert await rig.probe(swarm, is_serving=False) is None
    rig.now += PROBE_EVERY_S
    assert await rig.probe(swarm) is None, "the server has stopped"


def test_other_metrics_are_not_mistaken_for_the_queue_length() -> None:
    assert (
        parse_queue_length("vllm:num_requests_waiting_by_reason 3\nnum_requests_waiting 4") is None
    )
