"""A resent request is one request. The tests use real sockets and a real swarm server."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from fakevllm.groups import resend_cache
from fakevllm.transport import app_response
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.fuzz.in_process_stack import TIMEOUT_S, Reply, Stack, running
from tests.proxy.scripted_swarm import until

JSON = {"Content-Type": "application/json"}
AGAIN = JSON | {"x-stainless-retry-count": "1"}
CHAT = "/v1/chat/completions"
ROW = "SELECT state, status, num_resent, served_index, kind, group_id FROM groups"


def chat(text: str = "yes or no?", **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return orjson.dumps({"model": "fake", "messages": messages, **more})


LONG = "[[slow 0.01]] [[say " + "a" * 40 + "]]"
LARGE = "[[say " + "a" * 1500 + "]]"


def sections(folder: Path, **serve: Any) -> dict[str, Any]:
    return {"hooks": write_hooks(folder / "hooks", PREFER_YES), "serve": serve}


def groups(folder: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "proxy" / "ledger.sqlite")) as ledger:
        return ledger.execute(f"{ROW} ORDER BY received_at").fetchall()


def num_kept(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "proxy" / "ledger.sqlite")) as ledger:
        return ledger.execute("SELECT COUNT(*) FROM kept_answers").fetchone()[0]


async def settled(folder: Path, num: int = 1) -> list[tuple[Any, ...]]:
    await until(lambda: len(groups(folder)) == num)
    await until(lambda: all(row[0] != "scored" for row in groups(folder)))
    return groups(folder)


async def was_resent(folder: Path) -> None:
    """Wait until the ledger records that the answer of the first group was resent once."""
    await until(lambda: groups(folder)[0][1:3] == (200, 1))
    assert num_kept(folder) == 0


async def until_open(stack: Stack, num: int, *, has_siblings: bool = True) -> None:
    """Wait until `num` requests are open. With `has_siblings`, also wait until at least one sibling
    runs."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with stack.http.get(stack.proxy + "/metrics") as reply:
                lines = (await reply.text()).splitlines()
            is_ready = not has_siblings or "fakevllm_siblings_in_flight 0.0" not in lines
            if is_ready and f"fakevllm_requests_open {num}.0" in lines:
                return
            await asyncio.sleep(0.01)


async def send_and_disconnect(
    stack: Stack, body: bytes, num_open: int = 1, headers: dict[str, str] = JSON
) -> None:
    """Send a request, and disconnect once `num_open` requests are open, including this one."""
    request = asyncio.create_task(stack.send(stack.proxy + CHAT, body, headers))
    await until_open(stack, num_open)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def send(stack: Stack, body: bytes, headers: dict[str, str] = JSON) -> Reply:
    reply = await stack.send(stack.proxy + CHAT, body, headers)
    assert reply.status == 200
    return reply


async def test_a_resend_after_a_disconnect_joins_the_running_group(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await send_and_disconnect(stack, chat(LONG))
        reply = await send(stack, chat(LONG))
        await settled(tmp_path, 1)
        await was_resent(tmp_path)
    assert reply.json["choices"][0]["message"]["content"] == "a" * 40


async def test_equal_concurrent_requests_have_separate_groups(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        both = await asyncio.gather(*(send(stack, chat(LONG)) for _ in range(2)))
        await settled(tmp_path, 2)
    assert both[0].json["id"] != both[1].json["id"]


async def test_a_read_answer_is_resent_only_to_a_marked_retry(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first, second = await send(stack, chat()), await send(stack, chat())
        third = await send(stack, chat(), AGAIN)
        await settled(tmp_path, 2)
        await until(lambda: [row[2] for row in groups(tmp_path)] == [0, 1])
    assert first.json["id"] != second.json["id"]
    assert third.body == second.body


async def test_requests_with_one_idempotency_key_are_one_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        named = [JSON | {"Idempotency-Key": name} for name in "xxy"]
        reply = [await send(stack, chat(), headers) for headers in named]
        await settled(tmp_path, 2)
    assert reply[0].body == reply[1].body != reply[2].body


async def test_an_idempotency_key_with_another_body_is_a_400_that_says_so(tmp_path: Path) -> None:
    named = JSON | {"Idempotency-Key": "x"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first = await send(stack, chat(), named)
        other = await stack.send(stack.proxy + CHAT, chat(LONG), named)
        again = await send(stack, chat(), named)
        await send(stack, chat(LONG), named | {"Authorization": "Bearer another"})
        await settled(tmp_path, 2)
    assert other.status == 400 and other.json["error"]["type"] == "BadRequestError"
    assert "`Idempotency-Key` was sent before with another body" in other.json["error"]["message"]
    assert again.body == first.body


async def test_an_idempotency_key_may_be_sent_again_after_an_error(tmp_path: Path) -> None:
    named = JSON | {"Idempotency-Key": "x"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        refused = await stack.send(stack.proxy + CHAT, chat(temperature=-1), named)
        await send(stack, chat(), named)
    assert refused.status == 400


async def test_retries_with_another_key_or_session_are_new_requests(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await send(stack, chat(), JSON | {"Authorization": "Bearer a"})
        await send(stack, chat(), AGAIN | {"Authorization": "Bearer b"})
        await send(stack, chat(), AGAIN | {"Authorization": "Bearer a", "x-session-id": "s"})
        await settled(tmp_path, 3)


@pytest.mark.parametrize("kind", ["best", "lead"])
async def test_an_interrupted_stream_is_resent_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    body = chat(LONG, stream=True)
    async with running(tmp_path, **sections(tmp_path, policy=kind)) as stack:
        async with stack.http.post(stack.proxy + CHAT, data=body, headers=JSON) as answer:
            await answer.content.readany()
            answer.close()
        reply = await send(stack, body)
        await settled(tmp_path, 1)
        await was_resent(tmp_path)
    text = b"".join(reply.body.split(b'"content":"')[2:])
    assert text.count(b"a") >= 40 and reply.body.endswith(b"data: [DONE]\n\n")


async def test_an_undelivered_answer_is_resent_by_a_restarted_proxy(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await send_and_disconnect(stack, chat(LONG))
        (row,) = await settled(tmp_path)
        assert row[1:3] == (499, 0) and num_kept(tmp_path) == 1
    async with running(tmp_path, **sections(tmp_path)) as stack:
        reply, other = await send(stack, chat(LONG)), await send(stack, chat(LONG))
        await settled(tmp_path, 2)
        await was_resent(tmp_path)
    assert other.json["id"] != reply.json["id"]


async def read_some(
    url: str, body: bytes, upto: bytes, when: Callable[[], bool] = lambda: True
) -> None:
    """Send a request, read until the given bytes, and close the connection with the rest unread."""
    where, loop = urlsplit(url), asyncio.get_running_loop()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    with closing(socket.socket()) as client:
        client.setblocking(False)
        await loop.sock_connect(client, (where.hostname, where.port))
        sent = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
        await loop.sock_sendall(client, sent)
        read = b""
        while not read.endswith(upto):
            read += await loop.sock_recv(client, 1)
        await until(when)


@pytest.mark.parametrize("kind", ["best", "lead"])
async def test_a_client_that_closes_with_unread_data_gets_the_answer_again(
    tmp_path: Path, kind: str
) -> None:
    """This holds also if the client closes before its group has ended."""
    body = chat(LARGE, max_tokens=2000)
    async with running(tmp_path, **sections(tmp_path, policy=kind)) as stack:
        for _ in range(2):
            await read_some(stack.proxy, body, b"200")
            await until(lambda: num_kept(tmp_path) == 1)
        reply = await send(stack, body)
        await settled(tmp_path, 1)
        await until(lambda: num_kept(tmp_path) == 0)
    assert reply.json["choices"][0]["message"]["content"] == "a" * 1500


@pytest.mark.parametrize(("read_rate", "num_groups"), [(1e12, 2), (100, 1)])
async def test_a_late_reset_counts_as_a_lost_answer_only_if_much_was_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_rate: float, num_groups: int
) -> None:
    monkeypatch.setattr(resend_cache, "RESET_WINDOW_S", 0.0)
    monkeypatch.setattr(resend_cache, "MIN_READ_RATE", read_rate)
    body = chat(LARGE, max_tokens=2000)
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await read_some(stack.proxy, body, b"200", lambda: bool(groups(tmp_path)))
        if num_groups == 1:
            await until(lambda: num_kept(tmp_path) == 1)
        await send(stack, body)
        await settled(tmp_path, num_groups)
        await until(lambda: num_kept(tmp_path) == 0)


async def test_a_client_that_closes_a_stream_that_it_has_read_may_send_a_new_request(
    tmp_path: Path,
) -> None:
    """Some clients stop reading at the event that ends the answer, before the last event."""
    body = chat(stream=True)
    async with running(tmp_path, **sections(tmp_path, policy="lead")) as stack:
        end = b'"finish_reason":"stop"'
        await read_some(stack.proxy, body, end, lambda: bool(groups(tmp_path)))
        await send(stack, body)
        await settled(tmp_path, 2)


async def test_an_answer_without_a_retry_expires(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0.3)) as stack:
        for number in range(3):
            await send_and_disconnect(stack, chat(f"{number} {LONG}"))
            await until(lambda: len(groups(tmp_path)) == number + 1)  # noqa: B023
            await asyncio.sleep(0.4)  # the window
    assert num_kept(tmp_path) == 1


async def test_a_disconnect_is_noticed_while_a_hook_plans(tmp_path: Path) -> None:
    submit = (
        "import time\ndef on_user_submit_new_requests(request_id, task):\n    time.sleep(0.5)\n"
    )
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES, submit)
    async with running(tmp_path, hooks=hooks) as stack:
        request = asyncio.create_task(stack.send(stack.proxy + CHAT, chat(), JSON))
        await until_open(stack, 1, has_siblings=False)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await send(stack, chat())
        await settled(tmp_path, 1)
        await was_resent(tmp_path)


@pytest.mark.parametrize(("has_answer", "kind"), [(True, "regenerates"), (False, "repeats")])
async def test_an_undelivered_answer_becomes_a_turn_only_when_it_is_resent(
    tmp_path: Path, has_answer: bool, kind: str
) -> None:
    named = JSON | {"x-session-id": "s"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await send_and_disconnect(stack, chat(LONG), headers=named)
        await settled(tmp_path, 1)
        if has_answer:
            await send(stack, chat(LONG), named)
        await send(stack, chat(LONG, max_tokens=99), named)  # another request with the same history
        rows = await settled(tmp_path, 2)
    assert [row[4] for row in rows] == ["new", kind]


async def test_a_retry_of_a_refused_request_is_a_new_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        for headers in (JSON, AGAIN):
            reply = await stack.send(stack.proxy + CHAT, chat(max_tokens=-1), headers)
            assert reply.status == 400
        assert [row[2] for row in await settled(tmp_path, 2)] == [0, 0]


async def test_a_retry_of_a_cancelled_group_is_a_new_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        await send_and_disconnect(stack, chat(LONG))
        await send(stack, chat(LONG))
        rows = await settled(tmp_path, 2)
    assert [row[1] for row in rows] == [499, 200] and rows[0][0] == "failed"


async def test_an_answer_can_be_interrupted_repeatedly(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await send_and_disconnect(stack, chat(LONG))
        for _ in range(2):  # the first request stays open until there is an answer
            await send_and_disconnect(stack, chat(LONG), num_open=2)
            await until_open(stack, 1)
        await send(stack, chat(LONG))
        await settled(tmp_path, 1)
        await was_resent(tmp_path)


async def test_a_resend_that_waits_with_the_first_attempt_gets_the_same_answer(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first = asyncio.create_task(send(stack, chat(LONG)))
        await until_open(stack, 1)
        second = await send(stack, chat(LONG), AGAIN)
        assert (await first).body == second.body
        await settled(tmp_path, 1)


async def test_a_resend_window_of_zero_disables_resends(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0)) as stack:
        await send(stack, chat())
        await send(stack, chat(), AGAIN)
        await settled(tmp_path, 2)


async def test_a_resend_window_of_zero_disables_joining_a_running_group(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0)) as stack:
        first = asyncio.create_task(send(stack, chat(LONG)))
        await until_open(stack, 1)
        second = await send(stack, chat(LONG), AGAIN)
        assert (await first).json["id"] != second.json["id"]
        await settled(tmp_path, 2)


async def test_a_resend_that_waits_for_a_cancelled_group_starts_a_new_request(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        first = asyncio.create_task(send(stack, chat(LONG)))
        await until_open(stack, 1)
        second = asyncio.create_task(send(stack, chat(LONG), AGAIN))
        await until_open(stack, 2)
        first.cancel()
        assert (await second).json["choices"][0]["message"]["content"] == "a" * 40
        rows = await settled(tmp_path, 2)
    assert [row[0] for row in rows] == ["failed", rows[1][0]]


async def test_a_resend_that_waits_for_a_cancelled_group_gets_an_error_if_its_stream_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resend's stream has begun with keep-alives, so that it cannot become a new request."""
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.01)
    body = chat(LONG, stream=True)
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        first = asyncio.create_task(send(stack, body))
        await until_open(stack, 1)
        async with stack.http.post(stack.proxy + CHAT, data=body, headers=AGAIN) as second:
            await second.content.readany()
            first.cancel()
            reply = await second.content.read()
    assert b"Try again" in reply and b"error" in reply
