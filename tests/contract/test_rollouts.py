"""What every rollout engine owes the server and its apps, asked over HTTP.

One engine a module; where engines differ by design, `contract.rollouts.ABILITIES` says so.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from contract.rollouts import (
    CHAT,
    CONSTRAINED,
    CUTS,
    TOOL,
    TRIES,
    Json,
    Rig,
    chunks_of,
    deltas_of,
    logprobs_of,
    shape_of,
    started,
    text_of,
    user,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = [
    "fake",
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
]
GREEDY: Json = {"temperature": 0}
TOKENS: Json = {"return_token_ids": True, "logprobs": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Rig]:
    rig = await started(request.param, tmp_path_factory.mktemp(request.param))
    yield rig
    await rig.close()


async def test_it_is_well_and_lists_its_model(rig: Rig) -> None:
    assert await rig.rollout.health() and await rig.client.is_healthy()
    async with rig.http.get("/v1/models") as answer:
        (card,) = (await answer.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("contract", rig.endpoint.max_model_len)
    assert (card["object"], card["owned_by"], card["parent"]) == ("model", "vllm", None)


CONVERSATIONS: dict[str, list[Json]] = {
    "user": user("hi"),
    "system": [{"role": "system", "content": "Be brief."}, *user("hi")],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "turns": [*user("hi"), {"role": "assistant", "content": "Hello."}, *user("again")],
    "tools": [
        *user("add"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"left": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "2"},
    ],
}


@pytest.mark.parametrize("shape", CONVERSATIONS)
async def test_a_conversation_of_every_shape_is_answered(rig: Rig, shape: str) -> None:
    answer = await rig.ask({"messages": CONVERSATIONS[shape]})
    assert answer.status == 200, answer.json
    (choice,) = answer.json["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer.json["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "with tools"])
@pytest.mark.parametrize("shape", CONVERSATIONS)
async def test_the_prompt_is_the_chat_templates(rig: Rig, shape: str, tools: list[Json]) -> None:
    wanted = rig.rendered(CONVERSATIONS[shape], tools)
    answer = await rig.ask(TOKENS | {"messages": CONVERSATIONS[shape], "tools": tools})
    assert wanted is None or answer.json["prompt_token_ids"] == wanted, wanted


async def test_content_in_parts_is_the_same_prompt_as_a_string(rig: Rig) -> None:
    asked = [
        (await rig.ask(TOKENS | {"messages": CONVERSATIONS[shape]})).json["prompt_token_ids"]
        for shape in ("user", "parts")
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": None}, 400, "Bad Request"),
        ({"model": "nobody"}, 404, "NotFoundError"),
        ({"max_tokens": 10**7}, 400, "BadRequestError"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError"),
        ({"top_logprobs": 2}, 400, "BadRequestError"),
        ({"temperature": -1}, 400, "BadRequestError"),
        ({"tools": []}, 400, "BadRequestError"),
    ],
)
async def test_what_cannot_be_answered_is_refused_in_vllms_shape(
    rig: Rig, body: Json, status: int, kind: str
) -> None:
    answer = await rig.ask(body)
    assert answer.status == status
    error = answer.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (kind, status)
    captured = await rig.captured(body)
    assert (captured.status, captured.call) == (status, None)
    assert orjson.loads(captured.shown) == answer.json, "capture must not change what is refused"


async def test_a_body_that_is_no_json_is_refused_in_vllms_shape(rig: Rig) -> None:
    headers = {"Content-Type": "application/json"}
    async with rig.http.post(CHAT, data=b'{"messages": [', headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("field", CONSTRAINED)
async def test_a_constraint_is_kept_or_refused_by_name(rig: Rig, field: str) -> None:
    answer = await rig.ask(CONSTRAINED[field])
    if field in rig.can.refuses:
        assert answer.status == 400 and field in answer.json["error"]["message"]
    else:
        assert answer.status == 200, answer.json
        (choice,) = answer.json["choices"]
        if choice["finish_reason"] != "length":  # vLLM bounds no blanks, and this model fills them
            _keeps(CONSTRAINED[field], choice["message"])
        captured = await rig.captured(CONSTRAINED[field])
        reason = captured.record.untrainable
        if rig.endpoint.reports_allowed and field in CUTS:
            assert reason is None and captured.record.allowed is not None
        else:
            assert field == "prompt_logprobs" or (reason or "").startswith("sampling_not_trainable")


async def test_a_stream_says_the_same_as_the_whole_answer_in_vllms_grammar(rig: Rig) -> None:
    asked = GREEDY | {"stream_options": {"include_usage": True}}
    chunks = await rig.stream(asked)
    whole = (await rig.ask(GREEDY)).json
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    *spoken, last = chunks
    assert last["choices"] == [] and all("usage" not in chunk for chunk in spoken)
    usage = whole["usage"]
    assert last["usage"] == {key: value for key, value in usage.items() if value is not None}
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in spoken]
    assert finishes[-1] == whole["choices"][0]["finish_reason"] and not any(finishes[:-1])
    assert len({chunk["id"] for chunk in chunks}) == len({c["created"] for c in chunks}) == 1


async def test_a_stream_without_usage_has_none(rig: Rig) -> None:
    chunks = await rig.stream(GREEDY)
    assert chunks[-1]["choices"][0]["finish_reason"] and not any("usage" in c for c in chunks)


async def test_a_seed_gives_the_same_answer_again(rig: Rig) -> None:
    first, again = [(await rig.ask({"seed": 5})).json["choices"][0]["message"] for _ in range(2)]
    assert first == again


async def test_each_token_has_an_id_and_a_logprob(rig: Rig) -> None:
    body = (await rig.ask(TOKENS)).json
    (choice,) = body["choices"]
    count = body["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == len(logprobs_of(choice)) == count > 0
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert all(-100 < entry["logprob"] <= 1e-4 for entry in logprobs_of(choice))


async def test_a_streams_ids_and_logprobs_are_those_of_the_whole_answer(rig: Rig) -> None:
    choices = [c for chunk in await rig.stream(GREEDY | TOKENS) for c in chunk["choices"]]
    ids = [id for choice in choices for id in choice.get("token_ids") or ()]
    content = [entry for choice in choices if choice["logprobs"] for entry in logprobs_of(choice)]
    (whole,) = (await rig.ask(GREEDY | TOKENS)).json["choices"]
    assert ids == whole["token_ids"]
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [entry["logprob"] for entry in logprobs_of(whole)], abs=1e-3
    )


async def test_logprobs_are_of_the_distribution_that_was_sampled(rig: Rig) -> None:
    """At temperature 2 the gaps between any two tokens are half of those at 1."""
    told: dict[float, dict[str, float]] = {1.0: {}, 2.0: {}}
    for temperature, seed in itertools.product(told, range(12)):
        asked = {"temperature": temperature, "seed": seed, "top_logprobs": rig.can.top_logprobs}
        answer = await rig.ask(TOKENS | asked | {"max_tokens": 1})
        first = logprobs_of(answer.json["choices"][0])[0]
        for entry in [first, *first["top_logprobs"]]:
            told[temperature][entry["token"]] = entry["logprob"]
    one, two = told.values()
    shared = sorted(one.keys() & two.keys(), key=lambda token: one[token])
    gap = one[shared[-1]] - one[shared[0]]
    assert len(shared) >= 2 and gap > 0.05
    assert two[shared[-1]] - two[shared[0]] == pytest.approx(gap / 2, rel=0.1)


async def test_a_stop_string_cuts_the_text_and_not_the_ids(rig: Rig) -> None:
    question, stop, before = rig.can.stop
    asked = GREEDY | TOKENS | {"messages": user(question), "stop": [stop]}
    body = (await rig.ask(asked)).json
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    text = choice["message"]["content"]
    assert stop not in text and (not before or text == before)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in logprobs_of(choice)).rstrip().startswith(text)
    sampled = await rig.captured({"messages": user(question), "stop": [stop], "temperature": 0.01})
    assert sampled.record.untrainable is None
    streamed = await rig.stream(asked)
    assert text_of(streamed) == text


async def test_an_answer_cut_by_its_length_says_so_and_trains(rig: Rig) -> None:
    captured = await rig.captured({"max_tokens": 2})
    assert captured.record.finish_reason == "length"
    assert len(captured.record.response_ids) == 2 and captured.record.untrainable is None


async def test_two_choices_of_one_call_have_their_own_index(rig: Rig) -> None:
    body = (await rig.ask(TOKENS | {"n": 2})).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in body["choices"]
    )
    chunks = await rig.stream({"n": 2})
    for index in range(2):
        assert deltas_of(chunks, index)[0]["role"] == "assistant"
    captured = await rig.captured({"n": 2})
    assert captured.record.untrainable == "sampling_not_trainable: n"


async def test_tools_may_be_offered(rig: Rig) -> None:
    said = '[[say <tool_call>{"name": "add", "arguments": {"left": 1}}</tool_call>]]'
    asked: Json = {"messages": user(said), "tools": [TOOL], "max_tokens": 100}
    asked |= {"tool_choice": "auto"}
    answer = await rig.ask(asked)
    assert answer.status == 200, answer.json
    captured = await rig.captured(asked | {"stream": True})
    assert captured.record.untrainable is None
    if rig.name == "fake":  # the only one that can be told to call
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert orjson.loads(call["function"]["arguments"]) == {"left": 1}
        assert captured.record.finish_reason == "tool_calls"


async def test_a_client_that_leaves_frees_the_engine(rig: Rig) -> None:
    asked: Json = {"messages": user(rig.can.endless), "ignore_eos": True, "max_tokens": 400}
    calls = [asyncio.create_task(rig.captured(asked)) for _ in range(8)]
    while rig.endpoint.gate.num_running < len(calls):
        await asyncio.sleep(0)
    async with rig.http.post(CHAT, json=rig.body(asked | {"stream": True})) as answer:
        assert await answer.content.readany()  # the others are under way too
    for call in calls:
        call.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError)
        for end in await asyncio.gather(*calls, return_exceptions=True)
    )
    assert rig.endpoint.gate.num_running == 0
    async with asyncio.timeout(10):
        assert (await rig.captured({})).record.untrainable is None
    assert await rig.rollout.health()


async def test_eight_calls_at_once_are_each_whole(rig: Rig) -> None:
    asked = [{"seed": seed, "stream": bool(seed % 2)} for seed in range(8)]
    alone = [(await rig.captured(body)).record.response_ids for body in asked]
    together = await asyncio.gather(*(rig.captured(body) for body in asked))
    assert all(captured.record.untrainable is None for captured in together)
    if rig.name != "vllm":  # whose sums depend on what else is in the batch
        assert [captured.record.response_ids for captured in together] == alone


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
async def test_capture_leaves_no_trace_in_a_stream(rig: Rig, usage: Json) -> None:
    asked = GREEDY | usage
    for tries_left in reversed(range(TRIES)):
        plain = await rig.stream(asked)
        shown = chunks_of((await rig.captured(asked | {"stream": True})).shown)
        assert text_of(shown) == text_of(plain)
        if _grammar(shown) == _grammar(plain):
            return
        assert tries_left and rig.name == "vllm", (_grammar(shown), _grammar(plain))


@pytest.mark.parametrize("asked", [{}, TOKENS, {"logprobs": True}, {"include_reasoning": False}])
async def test_capture_leaves_no_trace_in_an_answer(rig: Rig, asked: Json) -> None:
    plain = await rig.ask(GREEDY | asked)
    shown = await rig.captured(GREEDY | asked)
    assert shape_of(orjson.loads(shown.shown)) == shape_of(plain.json)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_captured_call_is_whole_and_bears_the_version_that_sampled_it(
    rig: Rig, streams: bool
) -> None:
    asked: Json = {"seed": 3, "stream": streams}
    seen: list[Json] = []
    for version, folder in [(7, rig.folders[1]), (8, rig.folders[0])]:
        await rig.rollout.load_weights(folder, version)
        record = (await rig.captured(asked)).record
        spans = [(span.version, span.start, span.end) for span in record.versions]
        assert spans == [(version, 0, len(record.response_ids))]
        assert record.untrainable is None and record.temperature == 1.0
        assert record.logprobs is not None and len(record.logprobs) == len(record.response_ids)
        seen.append({"ids": record.response_ids, "logprob": record.logprobs[0]})
    before, after = seen
    assert before["ids"] != after["ids"] or not math.isclose(before["logprob"], after["logprob"])


async def test_versions_are_told_where_the_engine_knows_them(rig: Rig) -> None:
    await rig.rollout.load_weights(rig.folders[0], 13)
    (choice,) = (await rig.ask({"return_weight_versions": True})).json["choices"]
    versions = [span["version"] for span in choice.get("weight_versions") or ()]
    assert versions == ([13] if rig.can.tells_spans else [])


async def test_weights_given_back_are_the_same_as_before(rig: Rig) -> None:
    async def greedy() -> Any:
        choice = (await rig.ask(GREEDY | TOKENS)).json["choices"][0]
        return choice["token_ids"], [entry["logprob"] for entry in logprobs_of(choice)]

    await rig.rollout.load_weights(rig.folders[0], 9)
    ids, logprobs = await greedy()
    await rig.rollout.load_weights(rig.folders[1], 10)
    assert (await greedy())[1] != logprobs
    await rig.rollout.load_weights(rig.folders[0], 11)
    again = await greedy()
    assert again[0] == ids and again[1] == pytest.approx(logprobs, abs=1e-3)


async def test_no_call_is_refused_while_weights_change(rig: Rig) -> None:
    calls = [asyncio.create_task(rig.captured({"seed": seed})) for seed in range(4)]
    await rig.rollout.load_weights(rig.folders[0], 12)
    calls += [asyncio.create_task(rig.captured({"seed": seed})) for seed in range(4)]
    records = [(await call).record for call in calls]
    assert all(record.untrainable is None for record in records)
    assert all(record.version == 12 for record in records[4:])


def _keeps(asked: Json, message: Json) -> None:
    if "response_format" in asked:
        assert orjson.loads(message["content"]) == {"n": 7}
    if "structured_outputs" in asked:
        assert message["content"] in asked["structured_outputs"]["choice"]
    if "tool_choice" in asked:
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert names and set(names) == {asked["tools"][0]["function"]["name"]}


def _grammar(chunks: list[Json]) -> list[Any]:
    """Shapes in their order, repeats once: how many tokens a chunk holds is chance.

    Chance too is whether the token that ends the answer comes with the text before it or by
    itself (vLLM joins what its reader has not taken yet), so the two are told apart here.
    """
    return [shape for shape, _ in itertools.groupby(map(shape_of, _parted(chunks)))]


def _parted(chunks: list[Json]) -> Iterator[Json]:
    for chunk in chunks:
        choices: list[Json] = chunk["choices"]
        if choices and choices[0]["finish_reason"] and choices[0]["delta"]:
            rest = {key: value for key, value in choices[0].items() if key != "stop_reason"}
            yield chunk | {"choices": [rest | {"finish_reason": None}]}
            choices = [choices[0] | {"delta": {}}]
        yield chunk | {"choices": choices}
