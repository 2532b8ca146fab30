"""Contract tests of the rollout engines: chat completions, capture and weights.

The engines are those of conftest.py. `contract.rollouts.ABILITIES` lists the deliberate
differences between engines.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from contract.rollouts import (
    CHAT,
    CONSTRAINED,
    MASKING_FIELDS,
    MAX_ATTEMPTS,
    TOOL,
    CapturedAnswer,
    Json,
    Rig,
    SentAnswer,
    chunks_of,
    deltas_of,
    logprobs_of,
    shape_of,
    text_of,
    user,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")

ENGINES = [
    "fake",
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
    pytest.param("vllm_lora", marks=[pytest.mark.real, pytest.mark.timeout(300)]),
]
GREEDY: Json = {"temperature": 0}
TOKENS: Json = {"return_token_ids": True, "logprobs": True}


async def test_an_engine_is_healthy_and_lists_its_model(rig: Rig) -> None:
    assert await rig.rollout.health() and await rig.client.is_healthy()
    async with rig.http.get("/v1/models") as answer:
        card, *others = (await answer.json())["data"]
    assert [other["id"] for other in others] == [
        adapter for adapter in [rig.endpoint.gate.adapter] if adapter is not None
    ]
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
async def test_every_variant_of_a_conversation_is_answered(rig: Rig, shape: str) -> None:
    answer = await rig.send({"messages": CONVERSATIONS[shape]})
    assert answer.status == 200, answer.json
    (choice,) = answer.json["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer.json["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "with tools"])
@pytest.mark.parametrize("shape", CONVERSATIONS)
async def test_the_prompt_is_rendered_by_the_chat_template(
    rig: Rig, shape: str, tools: list[Json]
) -> None:
    wanted = rig.rendered(CONVERSATIONS[shape], tools)
    answer = await rig.send(TOKENS | {"messages": CONVERSATIONS[shape], "tools": tools})
    assert wanted is None or answer.json["prompt_token_ids"] == wanted, wanted


async def test_content_in_parts_has_the_same_prompt_as_a_string(rig: Rig) -> None:
    fields = [
        (await rig.send(TOKENS | {"messages": CONVERSATIONS[shape]})).json["prompt_token_ids"]
        for shape in ("user", "parts")
    ]
    assert fields[0] == fields[1]


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
async def test_an_invalid_request_is_refused_in_vllms_format(
    rig: Rig, body: Json, status: int, kind: str
) -> None:
    answer = await rig.send(body)
    assert answer.status == status
    error = answer.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (kind, status)
    captured = await rig.capture(body)
    assert (captured.status, captured.call) == (status, None)
    assert orjson.loads(captured.body) == answer.json, "capture must not change a refusal"


MEDIA: list[Json] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
]


@pytest.mark.parametrize("part", MEDIA, ids=lambda part: part["type"])
async def test_a_model_that_reads_only_text_refuses_images_and_audio(rig: Rig, part: Json) -> None:
    question: Json = {"type": "text", "text": "What is this?"}
    answer = await rig.send({"messages": [{"role": "user", "content": [question, part]}]})
    assert answer.status == 400
    assert "is not a multimodal model" in answer.json["error"]["message"]


async def test_a_body_that_is_not_json_is_refused_in_vllms_format(rig: Rig) -> None:
    headers = {"Content-Type": "application/json"}
    async with rig.http.post(CHAT, data=b'{"messages": [', headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("field", CONSTRAINED)
async def test_a_constraint_is_followed_or_refused_by_name(rig: Rig, field: str) -> None:
    answer = await rig.send(CONSTRAINED[field])
    if field in rig.abilities.refuses:
        assert answer.status == 400 and field in answer.json["error"]["message"]
    else:
        assert answer.status == 200, answer.json
        (choice,) = answer.json["choices"]
        if (
            choice["finish_reason"] != "length"
        ):  # vLLM allows endless white space, which this model samples
            _check_constraint(CONSTRAINED[field], choice["message"])
        captured = await rig.capture(CONSTRAINED[field])
        reason = captured.record.untrainable
        if rig.endpoint.reports_allowed and field in MASKING_FIELDS:
            assert reason is None and captured.record.allowed is not None
        else:
            assert field == "prompt_logprobs" or (reason or "").startswith("sampling_not_trainable")


async def test_a_stream_has_the_content_of_a_plain_answer_in_vllms_chunks(rig: Rig) -> None:
    fields = GREEDY | {"stream_options": {"include_usage": True}}
    chunks = await rig.stream(fields)
    whole = (await rig.send(GREEDY)).json
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    *content_chunks, last = chunks
    assert last["choices"] == [] and all("usage" not in chunk for chunk in content_chunks)
    usage = whole["usage"]
    assert last["usage"] == {key: value for key, value in usage.items() if value is not None}
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in content_chunks]
    assert finishes[-1] == whole["choices"][0]["finish_reason"] and not any(finishes[:-1])
    assert len({chunk["id"] for chunk in chunks}) == len({c["created"] for c in chunks}) == 1


async def test_a_stream_without_usage_has_none(rig: Rig) -> None:
    chunks = await rig.stream(GREEDY)
    assert chunks[-1]["choices"][0]["finish_reason"] and not any("usage" in c for c in chunks)


async def test_a_seed_makes_answers_reproducible(rig: Rig) -> None:
    first, again = [(await rig.send({"seed": 5})).json["choices"][0]["message"] for _ in range(2)]
    assert first == again


async def test_each_token_has_an_id_and_a_logprob(rig: Rig) -> None:
    body = (await rig.send(TOKENS)).json
    (choice,) = body["choices"]
    count = body["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == len(logprobs_of(choice)) == count > 0
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert all(-100 < entry["logprob"] <= 1e-4 for entry in logprobs_of(choice))


async def test_a_stream_has_the_ids_and_logprobs_of_a_plain_answer(rig: Rig) -> None:
    choices = [c for chunk in await rig.stream(GREEDY | TOKENS) for c in chunk["choices"]]
    ids = [id for choice in choices for id in choice.get("token_ids") or ()]
    content = [entry for choice in choices if choice["logprobs"] for entry in logprobs_of(choice)]
    (whole,) = (await rig.send(GREEDY | TOKENS)).json["choices"]
    assert ids == whole["token_ids"]
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [entry["logprob"] for entry in logprobs_of(whole)], abs=1e-3
    )


async def test_logprobs_are_of_the_distribution_that_was_sampled(rig: Rig) -> None:
    """The gap between two tokens' logprobs at temperature 2 is half of the gap at temperature 1."""
    logprobs: dict[float, dict[str, float]] = {1.0: {}, 2.0: {}}
    for temperature, seed in itertools.product(logprobs, range(12)):
        fields = {
            "temperature": temperature,
            "seed": seed,
            "top_logprobs": rig.abilities.top_logprobs,
        }
        answer = await rig.send(TOKENS | fields | {"max_tokens": 1})
        first = logprobs_of(answer.json["choices"][0])[0]
        for entry in [first, *first["top_logprobs"]]:
            logprobs[temperature][entry["token"]] = entry["logprob"]
    one, two = logprobs.values()
    shared = sorted(one.keys() & two.keys(), key=lambda token: one[token])
    gap = one[shared[-1]] - one[shared[0]]
    assert len(shared) >= 2 and gap > 0.05
    assert two[shared[-1]] - two[shared[0]] == pytest.approx(gap / 2, rel=0.1)


async def test_a_stop_string_cuts_the_text_and_not_the_ids(rig: Rig) -> None:
    question, stop, before = rig.abilities.stop
    fields = GREEDY | TOKENS | {"messages": user(question), "stop": [stop]}
    body = (await rig.send(fields)).json
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    text = choice["message"]["content"]
    assert stop not in text and (not before or text == before)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in logprobs_of(choice)).rstrip().startswith(text)
    sampled = await rig.capture({"messages": user(question), "stop": [stop], "temperature": 0.01})
    assert sampled.record.untrainable is None
    streamed = await rig.stream(fields)
    assert text_of(streamed) == text


async def test_an_answer_cut_off_by_max_tokens_has_finish_reason_length_and_is_trainable(
    rig: Rig,
) -> None:
    captured = await rig.capture({"max_tokens": 2})
    assert captured.record.finish_reason == "length"
    assert len(captured.record.response_ids) == 2 and captured.record.untrainable is None


async def test_two_choices_of_one_call_have_their_own_index(rig: Rig) -> None:
    body = (await rig.send(TOKENS | {"n": 2})).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in body["choices"]
    )
    chunks = await rig.stream({"n": 2})
    for index in range(2):
        assert deltas_of(chunks, index)[0]["role"] == "assistant"
    captured = await rig.capture({"n": 2})
    assert captured.record.untrainable == "sampling_not_trainable: n"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fields",
    [{}, TOKENS, {"max_tokens": 2}, {"stop": ["7", "s"]}, {"temperature": 0.5}],
    ids=["plain", "tokens", "cut off", "stop", "temperature"],
)
async def test_a_choice_of_a_shared_call_equals_a_call_with_its_own_seed(
    rig: Rig, fields: Json, streamed: bool
) -> None:
    body = fields | {"stream": streamed, "seed": 11}
    for stream in (False, True):  # the forms of the answers are then known
        await rig.capture({"stream": stream, "max_tokens": 1})
    choices = await rig.capture_siblings(body, 3)
    for index, choice in enumerate(choices):
        single = await rig.capture(body | {"seed": 11 + index})
        assert choice.record.response_ids == single.record.response_ids
        assert choice.record.prompt_ids == single.record.prompt_ids
        assert (choice.record.untrainable, choice.record.finish_reason) == (
            single.record.untrainable,
            single.record.finish_reason,
        )
        assert choice.record.logprobs == pytest.approx(single.record.logprobs, abs=1e-5)
        if streamed:
            own, other = chunks_of(choice.body), chunks_of(single.body)
            assert text_of(own) == text_of(other)
            assert _chunk_shapes(own)[-1] == _chunk_shapes(other)[-1]
        else:
            own, other = orjson.loads(choice.body), orjson.loads(single.body)
            assert shape_of(own) == shape_of(other) and own["usage"] == other["usage"]
            assert own["choices"][0]["message"] == other["choices"][0]["message"]


async def test_tools_may_be_offered(rig: Rig) -> None:
    prompt = '[[say <tool_call>{"name": "add", "arguments": {"left": 1}}</tool_call>]]'
    fields: Json = {"messages": user(prompt), "tools": [TOOL], "max_tokens": 100}
    fields |= {"tool_choice": "auto"}
    answer = await rig.send(fields)
    assert answer.status == 200, answer.json
    captured = await rig.capture(fields | {"stream": True})
    assert captured.record.untrainable is None
    if rig.name == "fake":  # the only engine whose prompt can make it call a tool
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert orjson.loads(call["function"]["arguments"]) == {"left": 1}
        assert captured.record.finish_reason == "tool_calls"


async def test_a_client_that_disconnects_frees_the_engine(rig: Rig) -> None:
    fields: Json = {"messages": user(rig.abilities.endless), "ignore_eos": True, "max_tokens": 400}
    answers = [SentAnswer() for _ in range(8)]
    calls = [
        asyncio.create_task(rig.capture(fields | {"stream": True}, answer)) for answer in answers
    ]
    async with asyncio.timeout(60):
        for answer in answers:
            await answer.begun.wait()
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    # On a busy machine, the engine may have completed some of them.
    assert any(isinstance(end, asyncio.CancelledError) for end in ends), ends
    assert all(isinstance(end, asyncio.CancelledError | CapturedAnswer) for end in ends), ends
    assert rig.endpoint.gate.num_running == 0
    async with asyncio.timeout(30):
        assert (await rig.capture({})).record.untrainable is None
    assert await rig.rollout.health()


async def test_eight_simultaneous_calls_are_each_complete(rig: Rig) -> None:
    fields = [{"seed": seed, "stream": bool(seed % 2)} for seed in range(8)]
    alone = [(await rig.capture(body)).record.response_ids for body in fields]
    together = await asyncio.gather(*(rig.capture(body) for body in fields))
    assert all(captured.record.untrainable is None for captured in together)
    if not rig.is_vllm:  # vLLM's floating-point sums depend on the other calls in the batch
        assert [captured.record.response_ids for captured in together] == alone


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
async def test_capture_does_not_change_a_stream(rig: Rig, usage: Json) -> None:
    fields = GREEDY | usage
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        plain = await rig.stream(fields)
        captured_chunks = chunks_of((await rig.capture(fields | {"stream": True})).body)
        assert text_of(captured_chunks) == text_of(plain)
        if _chunk_shapes(captured_chunks) == _chunk_shapes(plain):
            return
        assert attempts_left and rig.is_vllm, (
            _chunk_shapes(captured_chunks),
            _chunk_shapes(plain),
        )


@pytest.mark.parametrize("fields", [{}, TOKENS, {"logprobs": True}, {"include_reasoning": False}])
async def test_capture_does_not_change_an_answer(rig: Rig, fields: Json) -> None:
    plain = await rig.send(GREEDY | fields)
    captured = await rig.capture(GREEDY | fields)
    assert shape_of(orjson.loads(captured.body)) == shape_of(plain.json)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_captured_call_is_complete_and_has_the_version_that_sampled_it(
    rig: Rig, streams: bool
) -> None:
    fields: Json = {"seed": 3, "stream": streams}
    results: list[Json] = []
    for version, folder in [(7, rig.folders[1]), (8, rig.folders[0])]:
        await rig.rollout.load_weights(folder, version)
        record = (await rig.capture(fields)).record
        spans = [(span.version, span.start, span.end) for span in record.versions]
        assert spans == [(version, 0, len(record.response_ids))]
        assert record.untrainable is None and record.temperature == 1.0
        assert record.logprobs is not None and len(record.logprobs) == len(record.response_ids)
        results.append({"ids": record.response_ids, "logprob": record.logprobs[0]})
    before, after = results
    assert before["ids"] != after["ids"] or not math.isclose(before["logprob"], after["logprob"])


async def test_an_answer_has_versions_if_the_engine_reports_them(rig: Rig) -> None:
    await rig.rollout.load_weights(rig.folders[0], 13)
    (choice,) = (await rig.send({"return_weight_versions": True})).json["choices"]
    versions = [span["version"] for span in choice.get("weight_versions") or ()]
    assert versions == ([13] if rig.abilities.reports_versions else [])


async def test_weights_that_are_loaded_again_give_the_same_answer(rig: Rig) -> None:
    async def greedy() -> Any:
        choice = (await rig.send(GREEDY | TOKENS)).json["choices"][0]
        return choice["token_ids"], [entry["logprob"] for entry in logprobs_of(choice)]

    await rig.rollout.load_weights(rig.folders[0], 9)
    ids, logprobs = await greedy()
    await rig.rollout.load_weights(rig.folders[1], 10)
    assert (await greedy())[1] != logprobs
    await rig.rollout.load_weights(rig.folders[0], 11)
    again = await greedy()
    assert again[0] == ids and again[1] == pytest.approx(logprobs, abs=1e-3)


async def test_the_known_prompt_tells_which_weights_an_engine_has(rig: Rig) -> None:
    await rig.rollout.load_weights(rig.folders[0], 14)
    first = await rig.rollout.probe()
    if rig.name == "vllm_lora":
        assert first is None, "beside other requests, vLLM would die of this one"
        return
    assert first is not None and len(first.log_probs) == len(first.ids) - 1 > 0
    assert first.num_layers > 0
    # vLLM's floating-point sums depend on the other requests of a batch.
    expected = pytest.approx(list(first.log_probs), abs=1e-4 if rig.is_vllm else 0)
    for folder, version, is_first in ((rig.folders[1], 15, False), (rig.folders[0], 16, True)):
        await rig.rollout.load_weights(folder, version)
        reply = await rig.rollout.probe()
        assert reply is not None and (list(reply.log_probs) == expected) is is_first


async def test_no_call_is_refused_while_weights_change(rig: Rig) -> None:
    calls = [asyncio.create_task(rig.capture({"seed": seed})) for seed in range(4)]
    await rig.rollout.load_weights(rig.folders[0], 12)
    calls += [asyncio.create_task(rig.capture({"seed": seed})) for seed in range(4)]
    records = [(await call).record for call in calls]
    assert all(record.untrainable is None for record in records)
    assert all(record.version == 12 for record in records[4:])


def _check_constraint(fields: Json, message: Json) -> None:
    if "response_format" in fields:
        assert orjson.loads(message["content"]) == {"n": 7}
    if "structured_outputs" in fields:
        assert message["content"] in fields["structured_outputs"]["choice"]
    if "tool_choice" in fields:
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert names and set(names) == {fields["tools"][0]["function"]["name"]}


def _chunk_shapes(chunks: list[Json]) -> list[Any]:
    """Return the shapes of the chunks in order, without repetitions.

    The number of tokens in a chunk depends on chance, because vLLM joins tokens that its reader has
    not read yet. For the same reason the last token may be in a chunk with text or in a chunk of
    its own. `_split_finish` splits such chunks, so that both cases are equal.
    """
    return [shape for shape, _ in itertools.groupby(map(shape_of, _split_finish(chunks)))]


def _split_finish(chunks: list[Json]) -> Iterator[Json]:
    for chunk in chunks:
        choices: list[Json] = chunk["choices"]
        if choices and choices[0]["finish_reason"] and choices[0]["delta"]:
            rest = {key: value for key, value in choices[0].items() if key != "stop_reason"}
            yield chunk | {"choices": [rest | {"finish_reason": None}]}
            choices = [choices[0] | {"delta": {}}]
        yield chunk | {"choices": choices}
