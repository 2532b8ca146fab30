"""A request that is sent again is one request: over real sockets, before a real swarm server."""

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


async def was_told_again(folder: Path) -> None:
    """Until the ledger says so of the only group, or the first."""
    await until(lambda: groups(folder)[0][1:3] == (200, 1))
    assert num_kept(folder) == 0


async def are_open(stack: Stack, num: int, *, are_asked: bool = True) -> None:
    """Until so many requests wait for their answers; by default, with siblings under way."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with stack.http.get(stack.proxy + "/metrics") as told:
                lines = (await told.text()).splitlines()
            is_ready = not are_asked or "fakevllm_siblings_in_flight 0.0" not in lines
            if is_ready and f"fakevllm_requests_open {num}.0" in lines:
                return
            await asyncio.sleep(0.01)


async def cut(stack: Stack, body: bytes, num_open: int = 1, headers: dict[str, str] = JSON) -> None:
    """Asks, and hangs up once it waits beside those that are open, itself with them."""
    asking = asyncio.create_task(stack.send(stack.proxy + CHAT, body, headers))
    await are_open(stack, num_open)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def asked(stack: Stack, body: bytes, headers: dict[str, str] = JSON) -> Reply:
    got = await stack.send(stack.proxy + CHAT, body, headers)
    assert got.status == 200
    return got


async def test_who_hangs_up_and_asks_again_joins_the_group_that_runs(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await cut(stack, chat(LONG))
        got = await asked(stack, chat(LONG))
        await settled(tmp_path, 1)
        await was_told_again(tmp_path)
    assert got.json["choices"][0]["message"]["content"] == "a" * 40


async def test_who_asks_the_same_beside_another_has_a_group_of_its_own(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        both = await asyncio.gather(*(asked(stack, chat(LONG)) for _ in range(2)))
        await settled(tmp_path, 2)
    assert both[0].json["id"] != both[1].json["id"]


async def test_an_answer_that_was_read_is_not_told_again_unasked(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first, second = await asked(stack, chat()), await asked(stack, chat())
        third = await asked(stack, chat(), AGAIN)
        await settled(tmp_path, 2)
        await until(lambda: [row[2] for row in groups(tmp_path)] == [0, 1])
    assert first.json["id"] != second.json["id"]
    assert third.body == second.body


async def test_one_idempotency_key_is_one_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        named = [JSON | {"Idempotency-Key": name} for name in "xxy"]
        got = [await asked(stack, chat(), headers) for headers in named]
        await settled(tmp_path, 2)
    assert got[0].body == got[1].body != got[2].body


async def test_an_idempotency_key_with_another_body_is_a_400_that_says_so(tmp_path: Path) -> None:
    named = JSON | {"Idempotency-Key": "x"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first = await asked(stack, chat(), named)
        other = await stack.send(stack.proxy + CHAT, chat(LONG), named)
        again = await asked(stack, chat(), named)
        await asked(stack, chat(LONG), named | {"Authorization": "Bearer another"})
        await settled(tmp_path, 2)
    assert other.status == 400 and other.json["error"]["type"] == "BadRequestError"
    assert "`Idempotency-Key` was sent before with another body" in other.json["error"]["message"]
    assert again.body == first.body


async def test_an_idempotency_key_may_be_sent_again_after_an_error(tmp_path: Path) -> None:
    named = JSON | {"Idempotency-Key": "x"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        refused = await stack.send(stack.proxy + CHAT, chat(temperature=-1), named)
        await asked(stack, chat(), named)
    assert refused.status == 400


async def test_other_keys_and_other_sessions_ask_for_themselves(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await asked(stack, chat(), JSON | {"Authorization": "Bearer a"})
        await asked(stack, chat(), AGAIN | {"Authorization": "Bearer b"})
        await asked(stack, chat(), AGAIN | {"Authorization": "Bearer a", "x-session-id": "s"})
        await settled(tmp_path, 3)


@pytest.mark.parametrize("kind", ["best", "lead"])
async def test_a_stream_that_was_cut_is_resent_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    body = chat(LONG, stream=True)
    async with running(tmp_path, **sections(tmp_path, policy=kind)) as stack:
        async with stack.http.post(stack.proxy + CHAT, data=body, headers=JSON) as answer:
            await answer.content.readany()
            answer.close()
        got = await asked(stack, body)
        await settled(tmp_path, 1)
        await was_told_again(tmp_path)
    text = b"".join(got.body.split(b'"content":"')[2:])
    assert text.count(b"a") >= 40 and got.body.endswith(b"data: [DONE]\n\n")


async def test_an_undelivered_answer_is_resent_by_a_restarted_proxy(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await cut(stack, chat(LONG))
        (row,) = await settled(tmp_path)
        assert row[1:3] == (499, 0) and num_kept(tmp_path) == 1
    async with running(tmp_path, **sections(tmp_path)) as stack:
        got, other = await asked(stack, chat(LONG)), await asked(stack, chat(LONG))
        await settled(tmp_path, 2)
        await was_told_again(tmp_path)
    assert other.json["id"] != got.json["id"]


async def read_some(
    url: str, body: bytes, upto: bytes, when: Callable[[], bool] = lambda: True
) -> None:
    """Asks, reads as far as that, and closes with the rest unread."""
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
    """Also where that is before its group has ended."""
    body = chat(LARGE, max_tokens=2000)
    async with running(tmp_path, **sections(tmp_path, policy=kind)) as stack:
        for _ in range(2):
            await read_some(stack.proxy, body, b"200")
            await until(lambda: num_kept(tmp_path) == 1)
        got = await asked(stack, body)
        await settled(tmp_path, 1)
        await until(lambda: num_kept(tmp_path) == 0)
    assert got.json["choices"][0]["message"]["content"] == "a" * 1500


@pytest.mark.parametrize(("read_rate", "num_groups"), [(1e12, 2), (100, 1)])
async def test_who_resets_late_had_no_use_for_the_connection_unless_there_was_much_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_rate: float, num_groups: int
) -> None:
    monkeypatch.setattr(resend_cache, "RESET_WINDOW_S", 0.0)
    monkeypatch.setattr(resend_cache, "MIN_READ_RATE", read_rate)
    body = chat(LARGE, max_tokens=2000)
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await read_some(stack.proxy, body, b"200", lambda: bool(groups(tmp_path)))
        if num_groups == 1:
            await until(lambda: num_kept(tmp_path) == 1)
        await asked(stack, body)
        await settled(tmp_path, num_groups)
        await until(lambda: num_kept(tmp_path) == 0)


async def test_a_client_that_closes_a_stream_that_it_has_read_may_send_a_new_request(
    tmp_path: Path,
) -> None:
    """Some stop at the event that ends the answer, with the last one unread."""
    body = chat(stream=True)
    async with running(tmp_path, **sections(tmp_path, policy="lead")) as stack:
        end = b'"finish_reason":"stop"'
        await read_some(stack.proxy, body, end, lambda: bool(groups(tmp_path)))
        await asked(stack, body)
        await settled(tmp_path, 2)


async def test_an_answer_without_a_retry_expires(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0.3)) as stack:
        for number in range(3):
            await cut(stack, chat(f"{number} {LONG}"))
            await until(lambda: len(groups(tmp_path)) == number + 1)  # noqa: B023
            await asyncio.sleep(0.4)  # the window
    assert num_kept(tmp_path) == 1


async def test_who_leaves_while_a_hook_plans_is_seen_to_leave(tmp_path: Path) -> None:
    submit = (
        "import time\ndef on_user_submit_new_requests(request_id, task):\n    time.sleep(0.5)\n"
    )
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES, submit)
    async with running(tmp_path, hooks=hooks) as stack:
        asking = asyncio.create_task(stack.send(stack.proxy + CHAT, chat(), JSON))
        await are_open(stack, 1, are_asked=False)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asked(stack, chat())
        await settled(tmp_path, 1)
        await was_told_again(tmp_path)


@pytest.mark.parametrize(("has_answer", "kind"), [(True, "regenerates"), (False, "repeats")])
async def test_an_undelivered_answer_is_no_turn_of_the_session_until_it_is_resent(
    tmp_path: Path, has_answer: bool, kind: str
) -> None:
    named = JSON | {"x-session-id": "s"}
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await cut(stack, chat(LONG), headers=named)
        await settled(tmp_path, 1)
        if has_answer:
            await asked(stack, chat(LONG), named)
        await asked(stack, chat(LONG, max_tokens=99), named)  # another request, of the same history
        rows = await settled(tmp_path, 2)
    assert [row[4] for row in rows] == ["new", kind]


async def test_a_retry_of_a_refused_request_is_a_new_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        for headers in (JSON, AGAIN):
            got = await stack.send(stack.proxy + CHAT, chat(max_tokens=-1), headers)
            assert got.status == 400
        assert [row[2] for row in await settled(tmp_path, 2)] == [0, 0]


async def test_a_retry_of_a_cancelled_group_is_a_new_request(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        await cut(stack, chat(LONG))
        await asked(stack, chat(LONG))
        rows = await settled(tmp_path, 2)
    assert [row[1] for row in rows] == [499, 200] and rows[0][0] == "failed"


async def test_an_answer_may_be_cut_again_and_again(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        await cut(stack, chat(LONG))
        for _ in range(2):  # who asked first is open until there is an answer
            await cut(stack, chat(LONG), num_open=2)
            await are_open(stack, 1)
        await asked(stack, chat(LONG))
        await settled(tmp_path, 1)
        await was_told_again(tmp_path)


async def test_a_resend_that_waits_with_the_first_attempt_gets_the_same_answer(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, **sections(tmp_path)) as stack:
        first = asyncio.create_task(asked(stack, chat(LONG)))
        await are_open(stack, 1)
        second = await asked(stack, chat(LONG), AGAIN)
        assert (await first).body == second.body
        await settled(tmp_path, 1)


async def test_a_window_of_nothing_knows_no_retries(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0)) as stack:
        await asked(stack, chat())
        await asked(stack, chat(), AGAIN)
        await settled(tmp_path, 2)


async def test_a_window_of_nothing_joins_no_group_that_runs(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, resend_window_s=0)) as stack:
        first = asyncio.create_task(asked(stack, chat(LONG)))
        await are_open(stack, 1)
        second = await asked(stack, chat(LONG), AGAIN)
        assert (await first).json["id"] != second.json["id"]
        await settled(tmp_path, 2)


async def test_who_waits_for_a_group_that_is_cancelled_asks_anew(tmp_path: Path) -> None:
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        first = asyncio.create_task(asked(stack, chat(LONG)))
        await are_open(stack, 1)
        second = asyncio.create_task(asked(stack, chat(LONG), AGAIN))
        await are_open(stack, 2)
        first.cancel()
        assert (await second).json["choices"][0]["message"]["content"] == "a" * 40
        rows = await settled(tmp_path, 2)
    assert [row[0] for row in rows] == ["failed", rows[1][0]]


async def test_a_resend_that_waits_for_a_cancelled_group_gets_an_error_if_its_stream_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream was opened to keep it waiting: it cannot become another request any more."""
    monkeypatch.setattr(app_response, "GRACE_S", 0.01)
    monkeypatch.setattr(app_response, "KEEP_ALIVE_EVERY_S", 0.01)
    body = chat(LONG, stream=True)
    async with running(tmp_path, **sections(tmp_path, on_disconnect="cancel")) as stack:
        first = asyncio.create_task(asked(stack, body))
        await are_open(stack, 1)
        async with stack.http.post(stack.proxy + CHAT, data=body, headers=AGAIN) as second:
            await second.content.readany()
            first.cancel()
            told = await second.content.read()
    assert b"Try again" in told and b"error" in told
