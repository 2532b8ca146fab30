"""All that is handed in, and what must have happened before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm_server.samples import call
from swarm_server.training.intakes import CLIENT, Lives

from fakevllm_adapters.protocol.swarm import (
    SiblingRef,
)

Ask = Callable[[], Awaitable[object]]
Prepare = Callable[[Lives], Awaitable[Ask]]
"""What must have happened before, and then what is asked."""


async def claims(lives: Lives) -> Ask:
    return lives.claimed


async def ends_an_episode(lives: Lives) -> Ask:
    uuid = (await lives.played()).uuid
    return lambda: lives.end(uuid)


async def ends_an_eval_episode(lives: Lives) -> Ask:
    uuid = (await lives.played(kind="eval")).uuid
    return lambda: lives.end(uuid)


async def aborts_an_episode(lives: Lives) -> Ask:
    uuid = (await lives.played()).uuid
    return lambda: lives.now.intake.abort_episode(uuid, CLIENT)


async def ends_a_group(lives: Lives) -> Ask:
    await lives.captured("g")
    return lambda: lives.end_group("g")


async def aborts_a_group(lives: Lives) -> Ask:
    await lives.captured("g")
    return lambda: lives.now.intake.abort_group("g")


async def adds_a_sample(lives: Lives) -> Ask:
    return lambda: lives.add_sample("s")


async def ends_a_call_of_a_sibling(lives: Lives) -> Ask:
    return lambda: lives.now.intake.add_call(SiblingRef("g", 0), call())


async def ends_a_call_of_an_episode(lives: Lives) -> Ask:
    episode = await lives.claimed()
    return lambda: lives.now.intake.add_episode_call(episode, call())


ENDS = [ends_an_episode, ends_an_eval_episode, ends_a_group, adds_a_sample]
ABORTS = [aborts_an_episode, aborts_a_group]
CALLS = [ends_a_call_of_a_sibling, ends_a_call_of_an_episode]
