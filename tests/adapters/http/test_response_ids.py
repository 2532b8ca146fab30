"""The ids of responses in requests, and in the bytes that are sent to a client."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import orjson
import pytest

from fakevllm_adapters.http import response_ids
from fakevllm_adapters.http.response_ids import chooses_response_id, watch_response_id

EVENT = b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"}}\n\n'


async def ids_in(*chunks: bytes, status: int = 200) -> list[str]:
    """Return the ids that were reported for an answer, each before its last byte was sent."""
    ids: list[str] = []
    sent = b""

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        assert ids or b'resp_1"' not in sent or status != 200

    watched = watch_response_id(send, ids.append)
    await watched({"type": "http.response.start", "status": status})
    for chunk in chunks:
        await watched({"type": "http.response.body", "body": chunk, "more_body": True})
    assert sent == b"".join(chunks)
    return ids


async def test_an_id_that_is_split_over_chunks_is_reported_before_the_client_has_the_id() -> None:
    for middle in range(len(EVENT)):
        assert await ids_in(EVENT[:middle], EVENT[middle:], EVENT) == ["resp_1"]
    assert await ids_in(*(EVENT[at : at + 1] for at in range(len(EVENT)))) == ["resp_1"]


async def test_the_id_of_an_error_is_not_reported() -> None:
    assert await ids_in(EVENT, status=400) == []


async def test_only_the_beginning_of_an_answer_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[int] = []

    def find_string(raw: bytes, paths: object) -> None:
        scanned.append(len(raw))

    monkeypatch.setattr(response_ids, "find_string", find_string)
    send = watch_response_id(_ignore, lambda _: None)
    await send({"type": "http.response.start", "status": 200})
    for size in (10, 2**20, 10):
        await send({"type": "http.response.body", "body": b"x" * size})
    assert scanned == [10, response_ids.MAX_SCANNED_BYTES]


@pytest.mark.parametrize("body", [{"request_id": "r"}, {"request_id": None}, {"request_id": 1}])
def test_a_request_with_a_request_id_chooses_the_id_of_its_response(body: dict[str, Any]) -> None:
    raw = orjson.dumps(body)
    assert chooses_response_id(raw, body) and chooses_response_id(raw, None)
    assert chooses_response_id(b'{"request_id": "r", "top_p": NaN}', None)
    assert not chooses_response_id(b'{"top_p": NaN}', None)
    assert not chooses_response_id(b"{}", {})


async def _ignore(message: MutableMapping[str, Any]) -> None:
    pass
