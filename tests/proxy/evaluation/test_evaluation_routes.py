"""The proxy's routes for evaluations, with a scripted server and a real hook process."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import ProxyComponents, open_proxy
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until

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
        assert "X-Fakevllm-Sibling" not in swarm.headers
    sample = {"text": "It is 7.", "reward": 1.0, "failure": None}
    assert (reply["greedy"], reply["samples"]) == (sample, [sample, sample])
    assert (reply["first_version"], reply["last_version"], reply["reason"]) == (12, 12, None)
    assert record is not None
    assert (record.state, record.reason, record.kind) == ("served", "evaluation", "eval")
    assert (record.eval_id, record.eval_version, record.task_id) == ("e1", 12, "r1")
    assert (record.session_id, record.step) == (None, None)
    assert [sibling.reward for sibling in record.siblings] == [1.0, 1.0, 1.0]


async def test_a_version_is_sampled_by_the_name_that_the_server_gives_it(tmp_path: Path) -> None:
    models = {"aliases": ["*"]}  # an alias must not replace the name
    async with open_client(tmp_path, models=models) as (swarm, proxy, client):
        swarm.answers["/load_policy"] = {"success": True, "model": "policy-3"}
        swarm.answers["/unload_policy"] = {"success": True}
        check = await client.post("/fakevllm/eval/check", json={"texts": [], "versions": [3]})
        assert check.json()["refusal"] is None
        reply = (await client.post("/fakevllm/eval", json=ROW | {"version": 3})).json()
        assert swarm.bodies["/load_policy"] == {"version": 3}
        assert swarm.bodies[CHAT]["model"] == "policy-3"
        assert await proxy.ledger.flush()
        record = proxy.ledger.group(reply["group_id"])
        assert (await client.post("/fakevllm/eval/end", json={"versions": [3]})).json() == {}
        assert swarm.bodies["/unload_policy"] == {"version": 3}
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
        ('{"question": "1 plus 1?"}', "1 rows of the dataset .* are held out by"),
        ('{"text": "1 plus 1?"}', "no text field 'question'"),
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
