"""The system clock is set forward and back while a real proxy and a real server work."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adversary.system_clock import SystemClock, find_library
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.swarm_wire import Wire

LIBRARY = find_library()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed"),
    pytest.mark.parametrize("jump_s", [-3600, 86_400]),
]

WINDOW_S = 4.0
"""Seconds for which a scored group waits for feedback."""
IDLE_LIMIT_S = 3.0
"""Seconds after which an episode without a sign of life expires."""
LATE_S = 90.0
"""Seconds by which an expected event may be late on a busy machine."""
CONFIG = f"""
[job]
batch_size = 1
lr = 0.1
[feedback]
window_s = {WINDOW_S}
"""
KEY, OTHER_KEY = "sk-one", "sk-two"
SLOW = "[[slow 0.2]] [[say one two three four five six seven eight nine ten]]"


@dataclass(frozen=True, slots=True)
class Stack:
    """A server and a proxy whose clock can be set, and the proxy's key file."""

    server: Process
    proxy: Process
    clock: SystemClock
    keys: Path

    def chat(self, *texts: str, key: str = KEY, **more: Any) -> httpx.Response:
        """Send a conversation whose `texts` alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        headers = {"Authorization": f"Bearer {key}"} | more.pop("headers", {})
        return httpx.post(
            f"{self.proxy.url}/v1/chat/completions",
            json={"model": "fake", "messages": messages} | more,
            headers=headers,
            timeout=more.pop("timeout", 60),
        )

    @property
    def num_open(self) -> float:
        """Number of requests that the proxy is answering."""
        headers = {"Authorization": f"Bearer {KEY}"}
        metrics = httpx.get(f"{self.proxy.url}/metrics", headers=headers, timeout=60).text
        name = "fakevllm_requests_open "
        return next(
            float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)
        )

    def group(self, answer_id: str) -> dict[str, Any]:
        """Return the row of the group with this answer, or {} if there is none yet."""
        found = rows(self.proxy, "SELECT * FROM groups WHERE answer_id = ?", answer_id)
        return dict(found[0]) if found else {}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("clock")
    clock = SystemClock(folder)
    keys, config = folder / "keys", folder / "fakevllm.toml"
    keys.write_text(f"{KEY}\n")
    config.write_text(CONFIG)
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with pytest.MonkeyPatch.context() as environment, Processes(folder) as started:
        assert LIBRARY is not None
        clock.use(environment, LIBRARY)
        server = started.server("--backend", "fake")
        flags = ("--config", str(config), "--key-file", str(keys), "--n", "2")
        proxy = started.proxy(server, "--hooks", str(hooks), *flags)
        yield Stack(server, proxy, clock, keys)


def test_requests_under_way_and_later_ones_get_whole_answers(stack: Stack, jump_s: int) -> None:
    with ThreadPoolExecutor() as threads:
        under_way = [
            threads.submit(stack.chat, f"{SLOW} {number}", stream=number % 2 == 0)
            for number in range(8)
        ]
        time.sleep(0.5)  # the answers take two seconds
        stack.clock.jump(jump_s)
        later = [threads.submit(stack.chat, f"later {number}") for number in range(4)]
        replies = [future.result() for future in under_way + later]
    assert [reply.status_code for reply in replies] == [200] * 12
    assert all(
        "[DONE]" in reply.text or '"finish_reason":"stop"' in reply.text for reply in replies
    )
    assert not any('"error"' in reply.text for reply in replies)
    assert httpx.get(f"{stack.proxy.url}/health").status_code == 200


def test_a_group_waits_for_feedback_as_long_as_before_and_is_then_trained(
    stack: Stack, jump_s: int
) -> None:
    answered_at = time.monotonic()
    answer_id = stack.chat("yes or no?").json()["id"]
    stack.clock.jump(jump_s)
    while time.monotonic() < answered_at + WINDOW_S - 1:
        assert stack.group(answer_id).get("state") in (None, "scored")
        time.sleep(0.2)
    wait_until(
        lambda: stack.group(answer_id).get("state") in ("trained", "dropped"),
        LATE_S,
        lambda: f"the group to be trained: {stack.group(answer_id)}",
    )


def test_a_retry_joins_the_group_of_a_request_that_was_cut_off(stack: Stack, jump_s: int) -> None:
    text = f"{SLOW} cut {jump_s}"
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    url, headers = f"{stack.proxy.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    with httpx.Client() as http:
        request = http.build_request("POST", url, json=body, headers=headers)
    head = [f"{name}: {value}" for name, value in request.headers.items()]
    raw = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *head, "", ""]).encode()
    with socket.create_connection(("127.0.0.1", stack.proxy.port)) as app:
        app.sendall(raw + request.content)
        wait_until(lambda: stack.num_open == 1, LATE_S, "the request to be open")
    stack.clock.jump(jump_s)
    assert stack.chat(text, headers={"x-stainless-retry-count": "1"}).status_code == 200
    query = "SELECT COUNT(*) AS num FROM groups WHERE question = ?"
    wait_until(lambda: rows(stack.proxy, query, text)[0]["num"] > 0, LATE_S, "the group")
    assert rows(stack.proxy, query, text)[0]["num"] == 1


def test_a_repeated_idempotency_key_gets_the_same_answer(stack: Stack, jump_s: int) -> None:
    headers = {"Idempotency-Key": f"key {jump_s}"}
    first = stack.chat("yes or no?", headers=headers).json()
    wait_until(lambda: bool(stack.group(first["id"])), LATE_S, "the group")
    stack.clock.jump(jump_s)
    assert stack.chat("yes or no?", headers=headers).json()["id"] == first["id"]


def test_the_next_message_continues_the_session_and_the_same_one_regenerates(
    stack: Stack, jump_s: int
) -> None:
    first = stack.chat(f"first {jump_s}").json()
    stack.clock.jump(jump_s)
    answer = first["choices"][0]["message"]["content"]
    texts = (f"first {jump_s}", answer, "and then?")
    second = stack.chat(*texts).json()
    stack.clock.jump(jump_s)
    again = stack.chat(*texts).json()
    wait_until(lambda: bool(stack.group(again["id"])), LATE_S, "the groups")
    groups = [stack.group(answer["id"]) for answer in (second, again)]
    assert [(group["kind"], group["turn"]) for group in groups] == [
        ("continues", 2),
        ("regenerates", 2),
    ]
    assert groups[0]["parent_id"] == stack.group(first["id"])["group_id"]
    stack.clock.jump(-jump_s)


def claim(wire: Wire, idle_limit_s: float) -> str:
    """Claim an episode, if necessary after the training step that is under way."""
    body = wire.claim_body(discard_episode_timeout=idle_limit_s)
    replies: list[dict[str, Any]] = []

    def is_claimed() -> bool:
        replies.append(wire.post("/claim_episode", body))
        return replies[-1]["success"]

    wait_until(is_claimed, LATE_S, lambda: f"a claim: {replies[-1]}")
    return replies[-1]["episode_uuid"]


def test_a_claim_expires_neither_earlier_nor_later(stack: Stack, jump_s: int) -> None:
    with Wire(stack.server.url) as wire:
        long_claim = claim(wire, 240.0)
        short_claim = claim(wire, IDLE_LIMIT_S)
        stack.clock.jump(jump_s)
        assert wire.can_continue(short_claim)
        wait_until(lambda: not wire.can_continue(short_claim), IDLE_LIMIT_S + LATE_S, "expiry")
        assert wire.can_continue(long_claim)
        assert wire.abort(long_claim) == {"success": True}


def test_an_added_key_is_accepted_and_a_removed_key_refused(stack: Stack, jump_s: int) -> None:
    stack.clock.jump(jump_s)
    assert stack.chat("hi", key=OTHER_KEY).status_code == 401
    stack.keys.write_text(f"{KEY}\n{OTHER_KEY}\n")
    wait_until(lambda: stack.chat("hi", key=OTHER_KEY).status_code == 200, LATE_S, "the new key")
    stack.clock.jump(-jump_s)
    stack.keys.write_text(f"{KEY}\n")
    wait_until(lambda: stack.chat("hi", key=OTHER_KEY).status_code == 401, LATE_S, "the end")


def test_restarted_processes_continue_the_run_and_its_sessions(stack: Stack, jump_s: int) -> None:
    first = stack.chat(f"before {jump_s}").json()
    wait_until(lambda: bool(stack.group(first["id"])), LATE_S, "the first group")
    for process in (stack.proxy, stack.server):
        process.kill()
    stack.clock.jump(jump_s)
    stack.server.start()
    stack.proxy.start()
    stack.proxy.wait_until_healthy()
    wait_until(
        lambda: stack.group(first["id"])["state"] in ("trained", "dropped"),
        WINDOW_S + LATE_S,
        lambda: f"the group to be trained: {stack.group(first['id'])}",
    )
    answer = first["choices"][0]["message"]["content"]
    second = stack.chat(f"before {jump_s}", answer, "and then?").json()
    wait_until(lambda: bool(stack.group(second["id"])), LATE_S, "the second group")
    assert stack.group(second["id"])["parent_id"] == stack.group(first["id"])["group_id"]
