"""The proxy's routes for evaluations, with a scripted server and a real hook process."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.evaluation.messages import CHECK_PATH, ROW_PATH
from fakevllm.gate.loaded_versions import IDLE_S
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.transport.sibling_limit import Grant
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.protocol.errors import unavailable
from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ROLLING, TIMEOUT_S, ScriptedSwarm, until

HOOK = """
def on_compute_relative_reward(siblings, answers):
    return [siblings[0].task.metadata["answer"] in answer["content"] for answer in answers]
"""
CHAT = "/v1/chat/completions"
ROW: dict[str, Any] = {
    "eval_id": "e1",
    "task": {"task_id": "r1", "main_query": "2 plus 5?", "metadata": {"answer": "7"}},
    "num_samples": 2,
}


def answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "fake", "choices": [choice]}


@asynccontextmanager
async def open_client(
    folder: Path,
    hook: str | None = HOOK,
    swarm: ScriptedSwarm | None = None,
    **sections: dict[str, Any],
) -> AsyncGenerator[tuple[ScriptedSwarm, ProxyComponents, httpx.AsyncClient]]:
    flags: dict[str, dict[str, Any]] = {"proxy": {"run_dir": folder / "run"}, **sections}
    if hook is not None:
        (folder / "hooks").mkdir()
        (folder / "hooks" / "on_compute_relative_reward.py").write_text(hook)
        flags["hooks"] = {"path": folder / "hooks"}
    async with swarm or ScriptedSwarm() as swarm:
        swarm.answers[CHAT] = answer("It is 7.")
        async with open_proxy(load(None, flags | {"swarm": {"url": swarm.url}})) as proxy:
            await until(lambda: proxy.link.model is not None)
            transport = httpx.ASGITransport(create_app(proxy))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8000"
            ) as client:
                yield swarm, proxy, client


async def test_a_row_is_sampled_scored_recorded_and_not_sent_for_training(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"weight_version": 12})
        reply = (await client.post("/fakevllm/eval", json=ROW)).json()
        assert await proxy.ledger.flush()
        record = proxy.ledger.group(reply["group_id"])
        assert swarm.calls[CHAT] == 3
        assert swarm.calls["/end_group"] == 0
        assert SIBLING_HEADER not in swarm.headers[CHAT]
    sample = {"text": "It is 7.", "reward": 1.0, "failure": None}
    assert (reply["greedy"], reply["samples"]) == (sample, [sample, sample])
    assert (reply["first_version"], reply["last_version"], reply["reason"]) == (12, 12, None)
    assert record is not None
    assert (record.state, record.reason, record.kind) == ("served", "evaluation", "eval")
    assert (record.eval_id, record.eval_version, record.task_id) == ("e1", 12, "r1")
    assert (record.session_id, record.step, record.run_id) == (None, None, ROLLING.run_id)
    assert [sibling.reward for sibling in record.siblings] == [1.0, 1.0, 1.0]


class ListeningSwarm(ScriptedSwarm):
    """A server that records all chat requests."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[dict[str, Any]] = []

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == CHAT:
            self.chats.append(await request.json())
        return await super()._answer(request)


async def test_samples_are_taken_from_the_whole_distribution_as_trained_siblings_are(
    tmp_path: Path,
) -> None:
    swarm = ListeningSwarm()
    async with open_client(tmp_path, swarm=swarm) as (_, _, client):
        await client.post("/fakevllm/eval", json=ROW)
    messages = [{"role": "user", "content": "2 plus 5?"}]
    greedy, *samples = sorted(swarm.chats, key=lambda body: body["temperature"])
    assert greedy == {"model": "fake", "messages": messages, "temperature": 0.0}
    sibling = ADAPTERS["chat"].sibling_body({"model": "fake", "messages": messages}, 1, 1.0)
    assert samples == [sibling, sibling]
    assert sibling["top_p"] == sibling["repetition_penalty"] == 1.0


async def test_a_row_with_messages_is_sampled_by_the_request_of_an_agent(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": "2 plus 5?"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    fields = {"messages": messages, "tools": [tool], "tool_choice": "auto", "answer": "7"}
    row = ROW | {"task": ROW["task"] | {"metadata": fields}}
    async with open_client(tmp_path, swarm=ListeningSwarm()) as (swarm, proxy, client):
        assert isinstance(swarm, ListeningSwarm)
        reply = (await client.post("/fakevllm/eval", json=row)).json()
        record = proxy.ledger.group(reply["group_id"]) if await proxy.ledger.flush() else None
    assert [chat["messages"] for chat in swarm.chats] == [messages] * 3
    assert all(chat["tools"] == [tool] and "answer" not in chat for chat in swarm.chats)
    assert reply["greedy"]["reward"] == 1.0
    assert record is not None and record.question == "2 plus 5?"


async def test_a_version_is_sampled_by_the_name_that_the_server_gives_it(tmp_path: Path) -> None:
    models = {"aliases": ["*"]}  # an alias must not replace the name
    async with open_client(tmp_path, models=models) as (swarm, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        swarm.answers["/unload_policy"] = {"success": True}
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert check.json()["refusal"] is None
        reply = (await client.post("/fakevllm/eval", json=ROW | {"version": 3})).json()
        assert swarm.bodies["/load_policy"] == {"version": 3, "pinned": False}
        assert swarm.bodies[CHAT]["model"] == "policy-3"
        assert await proxy.ledger.flush()
        record = proxy.ledger.group(reply["group_id"])
        assert (await client.post("/fakevllm/eval/end", json={"versions": [3]})).json() == {}
        assert swarm.bodies["/unload_policy"] == {"version": 3, "pinned": False}
    assert (reply["first_version"], reply["last_version"]) == (3, 3)
    assert record is not None and record.eval_version == 3


class RestartedSwarm(ScriptedSwarm):
    """A server whose engine loses its policies after the version was loaded."""

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        is_lost = request.path == CHAT and self.calls["/load_policy"] < 2
        return web.json_response({"error": {}}, status=404) if is_lost else response


async def test_a_version_that_the_engine_has_lost_is_loaded_again(tmp_path: Path) -> None:
    async with open_client(tmp_path, swarm=RestartedSwarm()) as (swarm, _, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        reply = (await client.post("/fakevllm/eval", json=ROW | {"version": 3})).json()
    assert reply["reason"] is None
    assert [sample["reward"] for sample in (reply["greedy"], *reply["samples"])] == [1.0] * 3


async def test_a_version_that_cannot_be_sampled_is_refused_with_the_servers_words(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (swarm, _, client):
        swarm.answers["/load_policy"] = {"success": False, "failure_reason": "No such version."}
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert check.json()["refusal"] == "No such version."
        refused = await client.post("/fakevllm/eval", json=ROW | {"version": 3})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "No such version."
        swarm.answers["/load_policy"] = 404
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert "update fakevllm-server" in check.json()["refusal"]
        assert swarm.calls[CHAT] == 0


async def test_a_version_for_which_there_is_no_room_now_may_be_sampled_later(
    tmp_path: Path,
) -> None:
    refusal = {"success": False, "failure_reason": "All of them are in use.", "is_temporary": True}
    async with open_client(tmp_path) as (swarm, _, client):
        swarm.answers["/load_policy"] = refusal
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert check.json()["refusal"] == "All of them are in use."
        refused = await client.post("/fakevllm/eval", json=ROW | {"version": 3})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "All of them are in use."


async def test_a_proxy_whose_key_is_not_an_admins_says_that_it_cannot_load_versions(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (swarm, _, client):
        swarm.answers["/load_policy"] = 403
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert "an admin's key with --swarm-key" in check.json()["refusal"]


async def test_a_served_version_without_a_checkpoint_must_stay_served(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, _, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "fake"}
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"weight_version": 3})
        row = ROW | {"version": 3}
        assert (await client.post("/fakevllm/eval", json=row)).json()["first_version"] == 3
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"weight_version": 4})
        refused = await client.post("/fakevllm/eval", json=row)
        assert refused.status_code == 400
        assert "Version 3 is not served any more" in refused.json()["error"]["message"]


class SteppingSwarm(ScriptedSwarm):
    """A server that publishes version 4 while version 3 is sampled for the first time."""

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == CHAT and self.calls[CHAT] == 0:
            self.answers["/get_engine_status"] = ROLLING.model_copy(update={"weight_version": 4})
            self.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        return await super()._answer(request)


async def test_a_row_is_sampled_again_by_the_checkpoint_if_a_step_was_published_meanwhile(
    tmp_path: Path,
) -> None:
    swarm = SteppingSwarm()
    async with open_client(tmp_path, swarm=swarm) as (_, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "fake"}
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"weight_version": 3})
        reply = (await client.post("/fakevllm/eval", json=ROW | {"version": 3})).json()
        assert await proxy.ledger.flush()
        record = proxy.ledger.group(reply["group_id"])
        assert swarm.bodies[CHAT]["model"] == "policy-3"
        assert (swarm.calls[CHAT], swarm.calls["/load_policy"]) == (6, 2)
    assert record is not None and record.eval_version == 3


async def test_a_served_version_is_not_judged_while_the_server_does_not_report_its_version(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "fake"}
        swarm.answers["/get_engine_status"] = 503
        refused = await client.post("/fakevllm/eval", json=ROW | {"version": 3})
        assert refused.status_code == 503, refused.text
        assert await proxy.ledger.flush()
        assert proxy.ledger.untrained() == {}


async def test_a_row_without_answers_is_a_failed_row_and_not_an_error(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        swarm.answers[CHAT] = {"error": {"message": "too long", "code": 400}}
        swarm.statuses[CHAT] = 400
        reply = (await client.post("/fakevllm/eval", json=ROW)).json()
        assert await proxy.ledger.flush()
        record = proxy.ledger.group(reply["group_id"])
    assert reply["reason"].startswith("upstream_400: ") and "too long" in reply["reason"]
    assert [sample["reward"] for sample in reply["samples"]] == [None, None]
    assert "too long" in reply["greedy"]["failure"]
    assert record is not None and (record.state, record.status) == ("failed", 400)


class FailingSwarm(ScriptedSwarm):
    """A server whose engine fails while it has the second call."""

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path == CHAT and self.calls[CHAT] == 2:
            headers = {REASON_HEADER: OutageReason.ENGINE_FAILED}
            return web.json_response(unavailable("It died.").body, status=503, headers=headers)
        return response


async def test_a_row_is_refused_and_not_recorded_if_the_engine_fails_for_one_sample(
    tmp_path: Path,
) -> None:
    async with open_client(tmp_path, swarm=FailingSwarm()) as (_, proxy, client):
        failed = await client.post("/fakevllm/eval", json=ROW)
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, "It died.")
        repeated = (await client.post("/fakevllm/eval", json=ROW)).json()
        assert await proxy.ledger.flush()
    assert [sample["reward"] for sample in repeated["samples"]] == [1.0, 1.0]
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM groups").fetchall() == [(1,)]


class BusySwarm(ScriptedSwarm):
    """A server that samples one call until `is_free` is set, and refuses all others until then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path != CHAT or self.is_free.is_set():
            return response
        if self.calls[CHAT] > 1:
            return web.Response(status=429)
        await self.is_free.wait()
        return response


async def test_refused_samples_try_again_while_apps_get_all_their_siblings(tmp_path: Path) -> None:
    swarm = BusySwarm()
    async with open_client(tmp_path, swarm=swarm) as (_, proxy, client):
        row = asyncio.create_task(client.post("/fakevllm/eval", json=ROW))
        await until(lambda: swarm.calls[CHAT] > 3)
        assert proxy.retry_handler.sibling_limit.acquire(2) == Grant(2)
        swarm.is_free.set()
        samples = (await row).json()["samples"]
    assert [sample["reward"] for sample in samples] == [1.0, 1.0]


async def test_a_hook_that_fails_gives_a_reason_and_keeps_the_answers(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, _, client):
        task = {"task_id": "r2", "main_query": "2 plus 5?"}
        reply = (await client.post("/fakevllm/eval", json=ROW | {"task": task})).json()
    assert reply["reason"].startswith("hook_raised") and "answer" in reply["reason"]
    assert reply["greedy"] == {"text": "It is 7.", "reward": None, "failure": None}


async def test_evaluated_rows_are_in_no_session_and_no_learning_curve(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, proxy, client):
        await client.post("/fakevllm/eval", json=ROW)
        assert await proxy.ledger.flush()
        stats = (await client.get("/fakevllm/stats")).json()
        assert proxy.ledger.sessions.latest(5) == []
    assert stats["curve"] == [] and stats["untrained"] == {"evaluation": 1}


async def test_the_check_names_rows_whose_question_or_task_was_trained(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, proxy, client):
        tasks = {"tasks": [{"task_id": "t1", "main_query": "Third"}]}
        await client.post("/fakevllm/tasks", json=tasks)
        proxy.ledger.record(replace(group("g1", state="trained"), question=" first "))
        proxy.ledger.record(replace(group("g2", state="served"), question="second"))
        proxy.ledger.record(group("g3", state="pooled", task_id="t1"))
        assert await proxy.ledger.flush()
        texts = {"texts": ["zeroth", "first", "second", "third"]}
        reply = (await client.post("/fakevllm/eval/check", json=texts)).json()
    assert reply == {"has_hooks": True, "trained": [1, 3], "refusal": None}


async def test_no_version_is_loaded_for_rows_that_were_trained(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        proxy.ledger.record(replace(group("g1", state="trained"), question="first"))
        assert await proxy.ledger.flush()
        body = {"texts": ["first"], "versions": [3]}
        check = (await client.post("/fakevllm/eval/check", json=body)).json()
        assert swarm.calls["/load_policy"] == 0
    assert check == {"has_hooks": True, "trained": [0], "refusal": None}


@pytest.mark.parametrize("question", ["what is 2 plus 5?\n", "What is  2\tPLUS 5?"])
async def test_the_check_finds_a_trained_question_with_other_case_and_white_space(
    tmp_path: Path, question: str
) -> None:
    async with open_client(tmp_path) as (_, proxy, client):
        proxy.ledger.record(replace(group("g1", state="trained"), question=question))
        assert await proxy.ledger.flush()
        texts = {"texts": ["What is 2 plus 5?"]}
        reply = (await client.post("/fakevllm/eval/check", json=texts)).json()
    assert reply["trained"] == [0]


@pytest.mark.parametrize(
    ("state", "trained"), [("pooled", [0]), ("trained", [0]), ("dropped", []), ("kept", [])]
)
async def test_the_check_finds_a_question_whose_answer_was_trained_by_late_feedback(
    tmp_path: Path, state: str, trained: list[int]
) -> None:
    async with open_client(tmp_path) as (_, proxy, client):
        proxy.ledger.record(replace(group("g1", state="dropped"), question="first"))
        late = FeedbackRecord(group_id="g1", feedback_id="f1", received_at=1.0, state=state)
        proxy.ledger.feedback.record(late)
        assert await proxy.ledger.flush()
        reply = (await client.post("/fakevllm/eval/check", json={"texts": ["First"]})).json()
    assert reply["trained"] == trained


async def test_a_proxy_without_hooks_says_so(tmp_path: Path) -> None:
    async with open_client(tmp_path, hook=None) as (swarm, _, client):
        check = (await client.post("/fakevllm/eval/check", json={"texts": []})).json()
        refused = await client.post("/fakevllm/eval", json=ROW)
        assert swarm.calls[CHAT] == 0
    assert check == {"has_hooks": False, "trained": [], "refusal": None}
    assert refused.status_code == 400 and "--hooks" in refused.json()["error"]["message"]


class SlowSwarm(ScriptedSwarm):
    """A server that does not answer requests for `path` until `is_free` is set."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.is_free = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path == self.path:
            await self.is_free.wait()
        return response


async def post_and_leave(proxy: ProxyComponents, swarm: SlowSwarm, path: str, body: Any) -> None:
    """Send a request to the proxy, and disconnect when the server has its part of the request."""
    parts = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if parts:
            return parts.pop()
        await until(lambda: swarm.calls[swarm.path] > 0)
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None:
        pass

    headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await create_app(proxy)(scope, receive, send)
    finally:
        swarm.is_free.set()


async def test_no_further_version_is_loaded_after_the_command_has_disconnected(
    tmp_path: Path,
) -> None:
    swarm = SlowSwarm("/load_policy")
    async with open_client(tmp_path, swarm=swarm) as (_, proxy, _):
        await post_and_leave(proxy, swarm, CHECK_PATH, {"texts": [], "versions": [3, 4]})
        assert swarm.calls["/load_policy"] == 1
        assert swarm.bodies["/load_policy"]["version"] == 3


async def test_a_row_whose_command_has_disconnected_ends_and_is_not_recorded(
    tmp_path: Path,
) -> None:
    swarm = SlowSwarm(CHAT)
    async with open_client(tmp_path, swarm=swarm) as (_, proxy, _):
        await post_and_leave(proxy, swarm, ROW_PATH, ROW)
        assert proxy.retry_handler.slots.num_open == 0
        assert await proxy.ledger.flush()
        assert proxy.ledger.untrained() == {}


async def test_versions_of_an_evaluation_that_was_killed_are_unloaded(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        await client.post(CHECK_PATH, json={"texts": [], "versions": [3]})
        assert proxy.evaluator is not None
        await proxy.evaluator.unload_idle(time.monotonic())
        assert swarm.calls["/unload_policy"] == 0
        await proxy.evaluator.unload_idle(time.monotonic() + IDLE_S)
        assert swarm.bodies["/unload_policy"] == {"version": 3, "pinned": False}


async def test_a_program_that_is_no_server_does_not_end_the_unloading(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        swarm.answers["/unload_policy"] = "<html>"
        await client.post(CHECK_PATH, json={"texts": [], "versions": [3, 4]})
        assert proxy.evaluator is not None
        await proxy.evaluator.unload_idle(time.monotonic() + IDLE_S)
        assert swarm.calls["/unload_policy"] == 2


async def test_an_invalid_request_is_refused(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (swarm, _, client):
        for change in ({"num_samples": 0}, {"num_samples": 65}, {"eval_id": ""}, {"task": 1}):
            refused = await client.post("/fakevllm/eval", json=ROW | change)
            assert refused.status_code == 400, change
        assert swarm.calls[CHAT] == 0


async def test_an_app_that_quotes_a_held_out_row_is_served_and_not_trained(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "What is 2 plus 5?"}\n')
    release = {"eval_dataset": held_out}
    async with open_client(tmp_path, release=release) as (_, proxy, client):
        opening = "Please tell me: what is 2  plus 5? Thanks."
        later = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": opening},
        ]
        for messages in ([{"role": "user", "content": opening}], later):
            body = {"model": "fake", "messages": messages}
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert await proxy.ledger.flush()
        assert proxy.ledger.untrained() == {"held_out": 2}


async def test_a_request_with_the_key_of_a_held_out_row_is_not_trained(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "What is 2 plus 5?"}\n')
    async with open_client(tmp_path, release={"eval_dataset": held_out}) as (_, proxy, client):
        tasks = {"tasks": [{"task_id": "t1", "main_query": "What is 2 plus 5?"}]}
        (key,) = (await client.post("/fakevllm/tasks", json=tasks)).json()["keys"]
        body = {"model": "fake", "messages": [{"role": "user", "content": "Add the numbers."}]}
        headers = {"Authorization": f"Bearer {key}"}
        assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
        assert await proxy.ledger.flush()
        assert proxy.ledger.untrained() == {"held_out": 1}


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ("\n", "has no rows"),
        ('{"question": "1 plus 1?"}', "1 row of the dataset .* is held out by"),
        ('{"text": "1 plus 1?"}', "no text field 'question'"),
        (
            '{"question": "3 plus 4?", "messages": []}',
            "has `messages` that are empty",
        ),
        (
            '{"question": "3 plus 4?", "messages": [{"role": "assistant", "content": "7"}]}',
            "end with an answer",
        ),
    ],
)
async def test_held_out_rows_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, held_out: str, message: str
) -> None:
    (tmp_path / "held_out.jsonl").write_text(held_out)
    (tmp_path / "dataset.jsonl").write_text('{"question": "What is 1 plus 1?"}\n')
    release = {"eval_dataset": tmp_path / "held_out.jsonl"}
    with pytest.raises(ConfigError, match=message):
        async with open_client(
            tmp_path, release=release, dataset={"file": tmp_path / "dataset.jsonl"}
        ):
            pass


async def test_short_held_out_rows_are_reported_in_one_line_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"question": "hi"}\n{"question": "yes"}\n{"question": "What is 2 plus 5?"}\n')
    async with open_client(tmp_path, release={"eval_dataset": file}):
        pass
    (line,) = [record.message for record in caplog.records if "held-out" in record.message]
    assert line.startswith("2 rows of the held-out dataset") and "'hi'" in line


async def test_the_ledger_answers_which_versions_were_evaluated(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, proxy, client):
        await client.post("/fakevllm/eval", json=ROW)
        assert await proxy.ledger.flush()
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as db:
        query = """
            SELECT eval_id, eval_version, AVG(reward) FROM groups JOIN siblings USING (group_id)
            WHERE kind = 'eval' AND "index" > 0 GROUP BY 1, 2
        """
        assert db.execute(query).fetchall() == [("e1", 0, 1.0)]


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_app_that_names_a_policy_gets_the_404_of_an_unknown_model(
    tmp_path: Path, path: str
) -> None:
    async with open_client(tmp_path) as (swarm, _, client):
        reply = await client.post(path, json=BODIES[path] | {"model": "policy-15"})
        assert reply.status_code == 404
        assert "The model `policy-15` does not exist." in reply.json()["error"]["message"]
        assert swarm.calls[CHAT] == swarm.calls[path] == 0


async def test_an_alias_and_the_served_model_may_have_the_name_of_a_policy(tmp_path: Path) -> None:
    swarm = ScriptedSwarm()
    swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"model": "policy-7"})
    models = {"aliases": ["policy-15"]}
    async with open_client(tmp_path, swarm=swarm, models=models) as (_, _, client):
        for name in ("policy-7", "policy-15"):
            reply = await client.post(CHAT, json=BODIES[CHAT] | {"model": name})
            assert reply.status_code == 200
            assert swarm.bodies[CHAT]["model"] == "policy-7"


async def test_the_models_that_apps_see_contain_no_policy(tmp_path: Path) -> None:
    cards = [{"id": name} for name in ("fake", "policy-15", "lora")]
    async with open_client(tmp_path) as (swarm, _, client):
        swarm.answers["/v1/models"] = {"object": "list", "data": cards}
        listing = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listing["data"]] == ["fake", "lora"]
        assert (await client.get("/v1/models/policy-15")).status_code == 404
        assert (await client.get("/v1/models/lora")).status_code == 200
