"""All requests that the intake accepts, each with the preparation that it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm_server.samples import call
from swarm_server.training.intake_server import CLIENT, IntakeServer

from fakevllm_adapters.protocol.swarm import (
    SiblingRef,
)

Request = Callable[[], Awaitable[object]]
Prepare = Callable[[IntakeServer], Awaitable[Request]]
"""Prepares a server for a request, and returns the function that sends the request."""


async def claims(server: IntakeServer) -> Request:
    return server.claim


async def ends_an_episode(server: IntakeServer) -> Request:
    uuid = (await server.play()).uuid
    return lambda: server.end(uuid)


async def ends_an_eval_episode(server: IntakeServer) -> Request:
    uuid = (await server.play(kind="eval")).uuid
    return lambda: server.end(uuid)


async def aborts_an_episode(server: IntakeServer) -> Request:
    uuid = (await server.play()).uuid
    return lambda: server.process.intake.abort_episode(uuid, CLIENT)


async def ends_a_group(server: IntakeServer) -> Request:
    await server.capture("g")
    return lambda: server.end_group("g")


async def aborts_a_group(server: IntakeServer) -> Request:
    await server.capture("g")
    return lambda: server.process.intake.abort_group("g")


async def adds_a_sample(server: IntakeServer) -> Request:
    return lambda: server.add_sample("s")


async def adds_a_demonstration(server: IntakeServer) -> Request:
    return lambda: server.add_demonstration("edit:g/f")


async def ends_a_call_of_a_sibling(server: IntakeServer) -> Request:
    return lambda: server.process.intake.add_call(SiblingRef("g", 0), call())


async def ends_a_call_of_an_episode(server: IntakeServer) -> Request:
    episode = await server.claim()
    return lambda: server.process.intake.add_episode_call(episode, call())


ENDS = [ends_an_episode, ends_an_eval_episode, ends_a_group, adds_a_sample, adds_a_demonstration]
ABORTS = [aborts_an_episode, aborts_a_group]
CALLS = [ends_a_call_of_a_sibling, ends_a_call_of_an_episode]
