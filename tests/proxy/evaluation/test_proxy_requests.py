"""Requests of `fakevllm eval` to a proxy that is not always there."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from fakevllm.errors import ConfigError
from fakevllm.evaluation.messages import CHECK_PATH, ROW_PATH, RowReply, RowRequest, Sample
from fakevllm.evaluation.proxy_requests import ProxyRequests
from fakevllm.runtime.admin_client import fetch_json, no_proxy
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.scripted_swarm import ScriptedSwarm

ROW = RowRequest(eval_id="e", task=Task(task_id="r", main_query="hi"), num_samples=1)
SAMPLE = Sample(text="hi", reward=1.0, failure=None)
REPLY = RowReply(
    group_id="g", first_version=1, last_version=1, greedy=SAMPLE, samples=[SAMPLE], reason=None
)


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


class RestartingProxy(ScriptedSwarm):
    """A proxy that is unavailable for its first two requests."""

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        return error(503, "not ready") if self.calls[request.path] < 3 else response


async def test_a_row_is_sent_again_while_the_proxy_is_unavailable() -> None:
    async with RestartingProxy() as server:
        server.answers[ROW_PATH] = REPLY
        async with ProxyRequests(f"{server.url}/v1", None) as proxy:
            assert await proxy.evaluate(ROW) == REPLY
        assert server.calls[ROW_PATH] == 3
        assert server.bodies[ROW_PATH] == ROW.model_dump(mode="json")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (error(400, "no hooks"), "refused a row: no hooks"),
        (error(401, "no key"), "pass one of its keys with --key"),
        (404, "does not know evaluations: update the proxy"),
        (error(503, "not ready"), "cannot sample: not ready"),
        ("<html>", "as no fakevllm proxy does"),
    ],
)
async def test_a_refused_row_ends_the_evaluation_with_one_line(answer: Any, message: str) -> None:
    async with ScriptedSwarm() as server:
        server.answers[ROW_PATH] = answer
        async with ProxyRequests(server.url, "sk-1", retry_for_s=0) as proxy:
            with pytest.raises(ConfigError, match=message):
                await proxy.evaluate(ROW)
        assert server.headers[ROW_PATH]["Authorization"] == "Bearer sk-1"


async def test_a_proxy_that_is_not_there_has_the_message_of_the_other_commands() -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(ConfigError) as of_status:
        fetch_json(url, "/fakevllm/stats", None)
    async with ProxyRequests(url, None) as proxy:
        with pytest.raises(ConfigError) as of_eval:
            await proxy.check(["hi"], [])
    refused = os.strerror(errno.ECONNREFUSED)
    assert f"No fakevllm proxy answers at {url} ({refused}): start it" in str(of_status.value)
    assert str(of_eval.value) == str(of_status.value)


def test_an_unknown_host_is_reported_in_the_words_of_the_resolver() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    error = aiohttp.ClientConnectorDNSError(cast("Any", None), unknown)
    for one in (error, unknown):
        assert "(Name or service not known): start it" in no_proxy("http://nowhere", one)


async def test_the_check_sends_the_texts() -> None:
    async with ScriptedSwarm() as server:
        server.answers[CHECK_PATH] = {"has_hooks": True, "trained": [1]}
        async with ProxyRequests(server.url, None) as proxy:
            assert (await proxy.check(["a", "b"], [0, 3])).trained == [1]
        assert server.bodies[CHECK_PATH] == {"texts": ["a", "b"], "versions": [0, 3]}
