"""An episode's model calls by the swarm protocol, on the wire. Written from the protocol alone, of
which the table of deliberate differences wins: samplings are honoured, streams are real.
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


def test_a_stock_client_puts_its_own_host_before_the_path(wire: Wire, claimed: Json) -> None:
    own = re.sub(r"^https?://[^/]+", wire.url, claimed["openai_base_url"])
    answer = json_of(wire.ask(claimed | {"openai_base_url": own}, "[[say yes]]"))
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] > 0 and answer["usage"]["completion_tokens"] > 0


def test_the_key_alone_names_the_episode(wire: Wire, claimed: Json) -> None:
    by_key = claimed | {"openai_base_url": f"{wire.url}/v1"}
    json_of(wire.ask(by_key))
    told = wire.pool()["running_episode_details"][claimed["episode_uuid"]]
    assert told["llm_call_count"] == "1"


def test_no_system_prompt_is_put_before_the_agents(wire: Wire, claimed: Json) -> None:
    system = {"role": "system", "content": "x"}
    without = json_of(wire.ask(claimed, messages=[USER]))["usage"]["prompt_tokens"]
    with_one = json_of(wire.ask(claimed, messages=[system, USER]))["usage"]["prompt_tokens"]
    assert without < with_one
    assert wire.post("/replay_latest_llm_call")["input"]["messages"] == [system, USER]


def test_a_cut_answer_says_so(wire: Wire, claimed: Json) -> None:
    cut = json_of(wire.ask(claimed, messages=[USER], max_tokens=1))
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 1


def test_a_stream_is_real_and_ends_as_clients_know_it(wire: Wire, claimed: Json) -> None:
    usage = {"include_usage": True}
    answer = wire.ask(claimed, messages=[USER], stream=True, stream_options=usage)
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
        answer = json_of(wire.ask(claimed, f"[[say {number}]]"))
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as calls:
        assert list(calls.map(say, range(4))) == ["0", "1", "2", "3"]


def test_responses_are_spoken(wire: Wire, claimed: Json) -> None:
    body = {"model": "m", "input": "[[say yes]]", "instructions": "be kind"}
    answer = json_of(wire.call(claimed, "responses", body))
    (item,) = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == "yes"
    assert answer["status"] == "completed"


def test_messages_are_spoken_with_either_header(wire: Wire, claimed: Json) -> None:
    said = {"role": "user", "content": "[[say yes]]"}
    body: Json = {"model": "m", "max_tokens": 50, "system": "be kind", "messages": [said]}
    by_bearer = json_of(wire.call(claimed, "messages", body))
    url = f"{claimed['openai_base_url']}/messages"
    key = {"x-api-key": claimed["openai_api_key"]}
    by_key = json_of(wire.http.post(url, json=body, headers=key))
    for answer in (by_bearer, by_key):
        assert answer["content"] == [{"type": "text", "text": "yes"}]
        assert answer["stop_reason"] == "end_turn"


def test_models_and_completions_are_served_too(wire: Wire, claimed: Json) -> None:
    bearer = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
    models = json_of(wire.http.get(f"{claimed['openai_base_url']}/models", headers=bearer))
    assert len(models["data"]) == 1
    text = json_of(wire.call(claimed, "completions", {"model": "m", "prompt": "[[say yes]]"}))
    assert text["object"] == "text_completion"


def test_a_key_is_good_while_its_claim_is(wire: Wire) -> None:
    claimed = wire.claim()
    json_of(wire.ask(claimed))
    wire.end(claimed["episode_uuid"], "key")
    by_key = claimed | {"openai_base_url": f"{wire.url}/v1"}
    for late in (claimed, by_key):
        assert wire.ask(late).status_code == 404


def test_a_call_without_a_key_is_answered_and_in_no_episode(wire: Wire, claimed: Json) -> None:
    body = {"model": "fake", "messages": [USER]}
    json_of(wire.http.post("/v1/chat/completions", json=body))  # the public server: 401
    told = wire.pool()["running_episode_details"][claimed["episode_uuid"]]
    assert told["llm_call_count"] == "0"


def test_another_episodes_key_opens_nothing(wire: Wire, claimed: Json) -> None:
    other = wire.claim()
    foreign = wire.ask(claimed | {"openai_api_key": other["openai_api_key"]})
    wire.abort(other["episode_uuid"])
    assert foreign.status_code == 404


def test_the_latest_call_can_be_looked_at(wire: Wire, claimed: Json) -> None:
    answer = json_of(wire.ask(claimed, "[[say seen]]"))
    latest = wire.post("/replay_latest_llm_call")
    assert latest["input"]["messages"][0]["content"] == "[[say seen]]"
    said = latest["output"]["choices"][0]["message"]["content"]
    assert said == answer["choices"][0]["message"]["content"] == "seen"
