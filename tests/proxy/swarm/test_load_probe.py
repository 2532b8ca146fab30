"""The engine's queue, as the proxy hears of it."""

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
    def __init__(self) -> None:
        self.now = 100.0
        self.is_wanted = True
        self.queue = LoadProbe(lambda: self.is_wanted, lambda: self.now)

    async def heard(self, swarm: ScriptedSwarm, *, is_serving: bool = True) -> int | None:
        async with aiohttp.ClientSession(swarm.url) as http:
            await self.queue.follow(http, is_serving=is_serving)
        return self.queue.num_waiting


async def test_what_waits_in_all_engines_is_one_queue_and_asked_for_now_and_then() -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = PAGE
        assert await rig.heard(swarm) == 7
        swarm.answers["/metrics"] = PAGE.replace("3.0", "1.0")
        assert await rig.heard(swarm) == 7
        rig.now += PROBE_EVERY_S
        assert await rig.heard(swarm) == 5
        assert swarm.calls["/metrics"] == 2


@pytest.mark.parametrize(("page", "first", "then"), [(PAGE, 7, 0), (404, None, None)])
async def test_a_queue_that_nobody_goes_by_is_asked_for_once_in_an_engines_life(
    page: str | int, first: int | None, then: int | None
) -> None:
    rig = Rig()
    rig.is_wanted = False
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = page
        for num_lives in (1, 2):
            assert await rig.heard(swarm, is_serving=False) is None
            rig.now += PROBE_EVERY_S
            assert await rig.heard(swarm) == first
            for _ in range(3):
                rig.now += PROBE_EVERY_S
                assert await rig.heard(swarm) == then
            assert swarm.calls["/metrics"] == num_lives
        swarm.answers["/metrics"] = PAGE
        rig.is_wanted = True
        assert await rig.heard(swarm) == 7, "at once"


@pytest.mark.parametrize(
    "page",
    [404, 500, "", "up 1", "vllm:num_requests_waiting", "vllm:num_requests_waiting{ 3"]
    + [f"vllm:num_requests_waiting {odd}" for odd in ("NaN", "+Inf", "many")],
)
async def test_an_engine_that_tells_nothing_that_can_be_read_has_no_known_queue(
    page: str | int,
) -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = page
        assert await rig.heard(swarm) is None


async def test_an_engine_that_does_not_answer_has_no_queue() -> None:
    rig = Rig()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/metrics"] = PAGE
        assert await rig.heard(swarm) == 7
        assert await rig.heard(swarm, is_serving=False) is None
    rig.now += PROBE_EVERY_S
    assert await rig.heard(swarm) is None, "the server has gone"


def test_nothing_else_is_taken_for_the_queue() -> None:
    assert (
        parse_queue_length("vllm:num_requests_waiting_by_reason 3\nnum_requests_waiting 4") is None
    )
