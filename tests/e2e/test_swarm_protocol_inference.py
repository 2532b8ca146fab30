"""Conformance tests of an episode's model calls, written from the swarm protocol's description.

Where docs/differences.md lists a deliberate difference, the tests expect the difference: sampling
parameters are applied, and streams are real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.swarm_wire import Json, Wire, with_stock_job

USER: Json = {"role": "user", "content": "[[say one two three four]]"}


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with with_stock_job(tmp_path_factory.mktemp("inference"), "--keep-latest-call") as wire:
        yield wire


@pytest.fixture
def claimed(wire: Wire) -> Iterator[Json]:
    claimed = wire.claim()
    yield claimed
    wire.abort(claimed["episode_uuid"])


def json_of(answer: httpx.Response) -> Json:
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_client_may_replace_the_host_of_the_base_url(wire: Wire, claimed: Json) -> None:
    own = re.sub(r"^https?://[^/]+", wire.url, claimed["openai_base_url"])
    answer = json_of(wire.chat(claimed | {"openai_base_url": own}, "[[say yes]]"))
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] > 0 and answer["usage"]["completion_tokens"] > 0


def test_the_key_alone_identifies_the_episode(wire: Wire, claimed: Json) -> None:
    by_key = claimed | {"openai_base_url": f"{wire.url}/v1"}
    json_of(wire.chat(by_key))
    details = wire.pool()["running_episode_details"][claimed["episode_uuid"]]
    assert details["llm_call_count"] == "1"


def test_no_system_prompt_is_added_to_the_agents_messages(wire: Wire, claimed: Json) -> None:
    system = {"role": "system", "content": "x"}
    without = json_of(wire.chat(claimed, messages=[USER]))["usage"]["prompt_tokens"]
    with_one = json_of(wire.chat(claimed, messages=[system, USER]))["usage"]["prompt_tokens"]
    assert without < with_one
    assert wire.post("/replay_latest_llm_call")["input"]["messages"] == [system, USER]


def test_an_answer_cut_off_by_max_tokens_has_the_finish_reason_length(
    wire: Wire, claimed: Json
) -> None:
    cut = json_of(wire.chat(claimed, messages=[USER], max_tokens=1))
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 1


def test_a_stream_has_several_chunks_and_ends_with_usage_and_done(
    wire: Wire, claimed: Json
) -> None:
    usage = {"include_usage": True}
    answer = wire.chat(claimed, messages=[USER], stream=True, stream_options=usage)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    texts = [text for text in deltas if text]
    assert len(texts) > 1 and "".join(texts) == "one two three four"
    assert chunks[-1]["usage"]["completion_tokens"] > 1


def test_calls_of_one_episode_may_run_at_once(wire: Wire, claimed: Json) -> None:
    def say(number: int) -> str:
        answer = json_of(wire.chat(claimed, f"[[say {number}]]"))
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as calls:
        assert list(calls.map(say, range(4))) == ["0", "1", "2", "3"]


def test_the_responses_api_is_served(wire: Wire, claimed: Json) -> None:
    body = {"model": "m", "input": "[[say yes]]", "instructions": "be kind"}
    answer = json_of(wire.call(claimed, "responses", body))
    (item,) = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == "yes"
    assert answer["status"] == "completed"


def test_the_messages_api_is_served_with_either_key_header(wire: Wire, claimed: Json) -> None:
    message = {"role": "user", "content": "[[say yes]]"}
    body: Json = {"model": "m", "max_tokens": 50, "system": "be kind", "messages": [message]}
    by_bearer = json_of(wire.call(claimed, "messages", body))
    url = f"{claimed['openai_base_url']}/messages"
    key = {"x-api-key": claimed["openai_api_key"]}
    by_key = json_of(wire.http.post(url, json=body, headers=key))
    for answer in (by_bearer, by_key):
        assert answer["content"] == [{"type": "text", "text": "yes"}]
        assert answer["stop_reason"] == "end_turn"


def test_models_and_completions_are_served(wire: Wire, claimed: Json) -> None:
    bearer = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
    models = json_of(wire.http.get(f"{claimed['openai_base_url']}/models", headers=bearer))
    assert len(models["data"]) == 1
    text = json_of(wire.call(claimed, "completions", {"model": "m", "prompt": "[[say yes]]"}))
    assert text["object"] == "text_completion"


def test_the_key_of_an_ended_claim_is_refused(wire: Wire) -> None:
    claimed = wire.claim()
    json_of(wire.chat(claimed))
    wire.end(claimed["episode_uuid"], "key")
    by_key = claimed | {"openai_base_url": f"{wire.url}/v1"}
    for late in (claimed, by_key):
        assert wire.chat(late).status_code == 404


def test_a_call_without_a_key_is_answered_but_belongs_to_no_episode(
    wire: Wire, claimed: Json
) -> None:
    body = {"model": "fake", "messages": [USER]}
    json_of(wire.http.post("/v1/chat/completions", json=body))  # the public server: 401
    details = wire.pool()["running_episode_details"][claimed["episode_uuid"]]
    assert details["llm_call_count"] == "0"


def test_the_key_of_another_episode_is_refused(wire: Wire, claimed: Json) -> None:
    other = wire.claim()
    foreign = wire.chat(claimed | {"openai_api_key": other["openai_api_key"]})
    wire.abort(other["episode_uuid"])
    assert foreign.status_code == 404


def test_the_latest_call_can_be_inspected(wire: Wire, claimed: Json) -> None:
    answer = json_of(wire.chat(claimed, "[[say seen]]"))
    latest = wire.post("/replay_latest_llm_call")
    assert latest["input"]["messages"][0]["content"] == "[[say seen]]"
    content = latest["output"]["choices"][0]["message"]["content"]
    assert content == answer["choices"][0]["message"]["content"] == "seen"
