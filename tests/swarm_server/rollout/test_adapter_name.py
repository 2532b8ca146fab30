"""The name of the adapter that holds the served weights, in requests and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.rollout.adapter_name import AdapterName

NAME = AdapterName("model", "policy-17")


@pytest.mark.parametrize("body", [{"model": "model"}, {"model": ""}, {"model": None}, {}])
def test_a_request_for_the_model_is_sent_to_the_adapter(body: dict[str, object]) -> None:
    assert NAME.request(body | {"n": 1}) == {"model": "policy-17", "n": 1}
    raw = NAME.raw_request(orjson.dumps(body))
    assert raw is not None and orjson.loads(raw) == {"model": "policy-17"}


def test_a_request_for_other_weights_is_not_changed() -> None:
    assert NAME.request({"model": "policy-3"}) is None
    assert NAME.raw_request(b'{"model": "policy-3"}') is None
    assert NAME.raw_request(b"nonsense") is None


def test_the_last_of_several_names_counts_as_it_does_in_vllm() -> None:
    raw = NAME.raw_request(b'{"model": "policy-3", "model": "model"}')
    assert raw is not None and orjson.loads(raw) == {"model": "policy-17"}


def test_integers_beyond_64_bits_reach_the_engine() -> None:
    raw = NAME.raw_request(b'{"model": "model", "seed": 99999999999999999999999}')
    assert raw is not None and b"99999999999999999999999" in raw


@given(
    st.lists(st.sampled_from(['"model":"policy-17"', "policy-17", '"model":', '"mo', "x"])),
    st.lists(st.integers(1, 12), min_size=1),
)
async def test_an_answer_shows_the_models_name_however_it_is_cut(
    texts: list[str], sizes: list[int]
) -> None:
    event = {"id": "1", "model": "policy-17", "text": "".join(texts), "tokens": texts}
    whole = b"data: " + orjson.dumps(event) + b"\n\ndata: [DONE]\n\n"

    async def chunks() -> AsyncIterator[bytes]:
        begin = number = 0
        while begin < len(whole):
            size = sizes[number % len(sizes)]
            yield whole[begin : begin + size]
            begin, number = begin + size, number + 1

    shown = b"".join([chunk async for chunk in NAME.answer(chunks())])
    assert shown == b"data: " + orjson.dumps(event | {"model": "model"}) + b"\n\ndata: [DONE]\n\n"
