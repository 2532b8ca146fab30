"""The web chat with the proxy: its HTTP API, its groups in the ledger, and its reward hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.webchat.hooks import on_compute_relative_reward as hook
from examples.webchat.mock_user_request import play
from tests.e2e.ledgers import rows
from tests.e2e.processes import free_port, wait_until
from tests.e2e.stack import Stack, running_stack
from tests.examples.webchat_app import ROOT, running_webchat

SLOW = "[[slow 0.2]][[say one two three four five six seven eight nine ten]]"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def http(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        running_webchat(stack.three.url, tmp_path_factory.mktemp("webchat")) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def new_chat(http: httpx.Client) -> int:
    return http.post("/api/chats").json()["id"]


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in lines if line)


def ask(http: httpx.Client, path: str, text: str | None = None) -> list[dict[str, Any]]:
    """Return the events of an answer."""
    body = None if text is None else {"text": text}
    with http.stream("POST", f"/api/chats/{path}", json=body) as stream:
        assert stream.status_code == 200
        return list(events_of(stream.iter_lines()))


def visible(http: httpx.Client, chat: int) -> list[tuple[str, str]]:
    """Return role and text of the chat's visible messages."""
    messages = http.get(f"/api/chats/{chat}").json()["messages"]
    return [(message["role"], message["text"]) for message in messages]


def test_an_answer_is_streamed_and_stored(http: httpx.Client) -> None:
    chat = new_chat(http)
    *pieces, done = ask(http, f"{chat}/messages", "[[say Hello, wörld.]]")
    assert "".join(piece["text"] for piece in pieces) == "Hello, wörld."
    assert done["message"]["response_id"].startswith("chatcmpl-")
    assert visible(http, chat) == [
        ("user", "[[say Hello, wörld.]]"),
        ("assistant", "Hello, wörld."),
    ]


def test_the_model_gets_the_whole_history(http: httpx.Client, stack: Stack) -> None:
    chat = new_chat(http)
    for word in ("first", "second"):
        ask(http, f"{chat}/messages", f"[[say {word} of history]]")
    question = "[[say second of history]]"
    query = "select * from groups order by received_at"

    def requests() -> list[Any]:
        groups = [group for group in rows(stack.three, query) if group["question"] == question]
        return [json.loads(group["request_json"]) for group in groups]

    wait_until(lambda: bool(requests()), 20, "the group")
    (body,) = requests()
    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("user", "[[say first of history]]"),
        ("assistant", "first of history"),
        ("user", question),
    ]


def test_a_regenerated_answer_replaces_the_last_one(http: httpx.Client) -> None:
    chat = new_chat(http)
    first = ask(http, f"{chat}/messages", "[[say again]]")[-1]["message"]
    second = ask(http, f"{chat}/regenerate")[-1]["message"]
    assert second["id"] != first["id"] and second["response_id"] != first["response_id"]
    assert visible(http, chat) == [("user", "[[say again]]"), ("assistant", "again")]


def test_a_stopped_answer_is_stored_and_the_chat_continues(stack: Stack, tmp_path: Path) -> None:
    with running_webchat(stack.server.url, tmp_path) as url, httpx.Client(base_url=url) as http:
        chat = new_chat(http)
        with http.stream("POST", f"/api/chats/{chat}/messages", json={"text": SLOW}) as stream:
            events = events_of(stream.iter_lines())
            first = next(events)
            busy = httpx.post(f"{url}/api/chats/{chat}/regenerate")
            httpx.post(f"{url}/api/chats/{chat}/stop")
            *_, done = events
        assert busy.status_code == 409
        kept = done["message"]["text"]
        assert kept.startswith(first["text"]) and "ten" not in kept
        assert visible(http, chat)[-1] == ("assistant", kept)
        assert ask(http, f"{chat}/messages", "[[say on]]")[-1]["message"]["text"] == "on"


def test_an_answer_ends_when_the_page_disconnects_and_its_text_is_stored(
    stack: Stack, tmp_path: Path
) -> None:
    with running_webchat(stack.server.url, tmp_path) as url, httpx.Client(base_url=url) as http:
        chat = new_chat(http)
        with http.stream("POST", f"/api/chats/{chat}/messages", json={"text": SLOW}) as stream:
            first = next(events_of(stream.iter_lines()))
        wait_until(lambda: visible(http, chat)[-1][0] == "assistant", 20, "the kept answer")
        kept = visible(http, chat)[-1][1]
        assert kept.startswith(first["text"]) and "ten" not in kept


def test_chats_are_listed_by_their_first_question_and_can_be_deleted(http: httpx.Client) -> None:
    chat = new_chat(http)
    ask(http, f"{chat}/messages", "[[say x]] " + "long " * 30)
    titles = {one["id"]: one["title"] for one in http.get("/api/chats").json()}
    assert titles[chat].startswith("[[say x]] long") and len(titles[chat]) == 60
    http.delete(f"/api/chats/{chat}").raise_for_status()
    assert http.get(f"/api/chats/{chat}").status_code == 404
    assert http.post(f"/api/chats/{chat}/messages", json={"text": "x"}).status_code == 404


def test_thumbs_are_stored_whether_or_not_the_model_server_accepts_feedback(
    http: httpx.Client,
) -> None:
    chat = new_chat(http)
    message = ask(http, f"{chat}/messages", "[[say x]]")[-1]["message"]
    for thumbs in (1, -1, 0):
        path = f"/api/messages/{message['id']}/thumbs"
        assert http.post(path, json={"thumbs": thumbs}).json()["thumbs"] == thumbs
    assert http.post("/api/messages/0/thumbs", json={"thumbs": 1}).status_code == 404
    assert http.post(path, json={"thumbs": 2}).status_code == 422


def test_thumbs_reach_the_proxy_and_the_last_one_counts(http: httpx.Client, stack: Stack) -> None:
    chat = new_chat(http)
    message = ask(http, f"{chat}/messages", "[[say thumbed]]")[-1]["message"]
    query = "select f.* from feedback as f join groups using (group_id) where answer_id = ?"
    sent = "select * from groups where answer_id = ? and state not in ('scored')"
    wait_until(
        lambda: bool(rows(stack.three, sent, message["response_id"])), 20, "the group to be sent"
    )
    states: list[tuple[str | None, str]] = []
    for thumbs, state in ((1, "waiting"), (-1, "waiting"), (0, "kept")):
        http.post(f"/api/messages/{message['id']}/thumbs", json={"thumbs": thumbs})
        states.append(({1: "up", -1: "down", 0: None}[thumbs], state))

        def feedback() -> list[tuple[str | None, str]]:
            ordered = f"{query} order by f.received_at"
            events = rows(stack.three, ordered, message["response_id"])
            return [(event["thumbs"], event["state"]) for event in events]

        def has_arrived(expected: tuple[str | None, str] = states[-1]) -> bool:
            return bool(feedback()) and feedback()[-1] == expected

        wait_until(has_arrived, 20, lambda: f"{states[-1]} in {feedback()}")
    assert [state for _, state in feedback()] == ["kept", "kept", "kept"]


def test_an_unreachable_model_causes_an_error_event_and_the_question_stays(tmp_path: Path) -> None:
    with running_webchat("http://127.0.0.1:9", tmp_path) as url, httpx.Client(base_url=url) as http:
        chat = new_chat(http)
        (only,) = ask(http, f"{chat}/messages", "hello")
        assert only == {
            "type": "error",
            "text": "The model cannot be reached. Try again in a moment.",
        }
        assert visible(http, chat) == [("user", "hello")]


def test_a_page_of_another_site_cannot_read_the_chats(http: httpx.Client) -> None:
    assert http.get("/api/chats", headers={"Host": "elsewhere.example"}).status_code == 400


async def test_mock_users_ask_and_regenerate(http: httpx.Client) -> None:
    ended: list[int] = []
    results = await play(str(http.base_url), 6, 3, 0, lambda: ended.append(threading.get_ident()))
    assert len(ended) == 6 and results.answers >= 6 and results.failed == 0
    assert results.regenerated > 0  # the fake model cannot add


async def test_mock_users_report_only_the_first_failed_answer_and_continue(tmp_path: Path) -> None:
    reports: list[str] = []
    with running_webchat("http://127.0.0.1:9", tmp_path) as url:
        results = await play(url, 4, 4, 0, lambda: None, reports.append)
    assert results.failed >= 4 and results.answers == 0
    message = "The model cannot be reached. Try again in a moment."
    assert reports == [f"The first answer that failed: {message}"]


def test_mock_users_exit_with_1_if_no_answer_came(tmp_path: Path) -> None:
    with running_webchat("http://127.0.0.1:9", tmp_path) as url:
        users = [sys.executable, "-m", "examples.webchat.mock_user_request", "--app", url]
        played = subprocess.run([*users, "--chats", "1"], cwd=ROOT, capture_output=True, timeout=60)
    assert played.returncode == 1


@pytest.mark.parametrize("missing", ["OPENAI_BASE_URL", "OPENAI_API_KEY"])
def test_an_app_without_the_models_url_or_key_prints_one_line(tmp_path: Path, missing: str) -> None:
    variables = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "any"}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment |= {name: value for name, value in variables.items() if name != missing}
    command = [sys.executable, "-m", "examples.webchat.app", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--file", str(tmp_path / "webchat.sqlite")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Set {missing}: ") and variables["OPENAI_BASE_URL"][:7] in line
    assert (done.returncode, done.stdout) == (2, "")


def test_the_hook_rewards_the_right_sum_and_brevity_a_little() -> None:
    answers: list[dict[str, Any]] = [
        {"content": "It is 7.", "finish_reason": "stop"},
        {"content": "The answer is 7.", "finish_reason": "stop"},
        {"content": "It is 8.", "finish_reason": "stop"},
        {"content": "It is 7", "finish_reason": "length"},
        {"content": None, "finish_reason": "stop"},
    ]
    scores = hook.on_compute_relative_reward([], answers, "What is 3 plus 4?")
    assert scores == [1.0, 0.98, 0.0, 0.0, 0.0]
    assert hook.on_compute_relative_reward([], answers, "Who are you?") == [None] * 5
