"""Tests of feedback about answers: in the group's reward, or as a late sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

Json = dict[str, Any]
KEY = {"Authorization": "Bearer sk-one"}


def start_stack(
    processes: Processes,
    folder: Path,
    *more: str,
    window_s: float = 0,
    hook: str = "",
    pools: int = 1,
) -> tuple[Process, Process]:
    """Start a server, and a proxy with two siblings."""
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    if hook:
        (hooks / "on_feedback.py").write_text(hook)
    file = folder / "fakevllm.toml"
    file.write_text(
        f"[job]\nbatch_size = {pools}\nlr = 0.1\nmax_staleness = 1000\n"
        f"[feedback]\nwindow_s = {window_s}\nnum_for_baseline = 2\n"
    )
    server = processes.server("--backend", "fake")
    flags = ["--config", str(file), "--hooks", str(hooks), "--n", "2", *more]
    return server, processes.proxy(server, *flags)


def chat(proxy: Process, *texts: str, **more: Any) -> Json:
    """Send a conversation whose `texts` alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"model": "fake", "messages": messages} | more
    reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, headers=KEY, timeout=20)
    assert reply.status_code == 200, reply.text
    return reply.json() if not more.get("stream") else {"id": reply.text.split('"id":"')[1]}


def send_feedback(proxy: Process, key: str = "sk-one", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{proxy.url}/v1/feedback", json=body, headers=headers, timeout=20)


def feedback_rows(proxy: Process) -> list[Any]:
    return rows(proxy, "select * from feedback order by received_at")


def wait_for_states(proxy: Process, *states: str) -> None:
    def states_now() -> list[str]:
        return [row["state"] for row in feedback_rows(proxy)]

    wait_until(lambda: states_now() == [*states], 20, lambda: f"{states}, and not {states_now()}")


def test_late_feedback_is_trained_once_minus_its_baseline_also_after_a_restart(
    processes: Processes, tmp_path: Path
) -> None:
    _, proxy = start_stack(processes, tmp_path)
    one, other = chat(proxy, "first"), chat(proxy, "second")
    wait_for_groups(proxy, 2, states="pooled trained dropped")
    first = send_feedback(proxy, id=one["id"], thumbs="up")
    assert (first.status_code, first.json()["is_repeated"]) == (200, False)
    wait_for_states(proxy, "waiting")  # a single value has no baseline
    proxy.kill()
    proxy.start()
    proxy.wait_until_healthy()
    again = send_feedback(proxy, id=one["id"], thumbs="up").json()
    assert again["is_repeated"] and again["feedback_id"] == first.json()["feedback_id"]
    assert send_feedback(proxy, id=other["id"], thumbs="down", feedback_id="mine").is_success
    wait_for_states(proxy, "trained", "trained")
    values = [(row["value"], row["baseline"], row["amount"]) for row in feedback_rows(proxy)]
    assert values == [(1.0, -1.0, 2.0), (-1.0, 1.0, -2.0)]
    send_feedback(proxy, id=other["id"], thumbs="down", feedback_id="mine").raise_for_status()
    send_feedback(proxy, id=other["id"], comment="and why").raise_for_status()
    wait_for_states(proxy, "trained", "trained", "kept")
    stats = httpx.get(f"{proxy.url}/fakevllm/stats").json()
    assert stats["feedback"] == {"kept": 1, "trained": 2}
    shown = httpx.get(f"{proxy.url}/fakevllm/groups/{first.json()['group_id']}").json()
    expected = {"kind": "feedback", "state": "trained", "reason": None, "value": 1.0}
    expected |= {"edit_state": None, "edit_reason": None}
    assert shown["feedback"] == [expected]
    counted = 'fakevllm_feedback_total{kind="feedback"} 2.0'  # counted by this process
    assert counted in httpx.get(f"{proxy.url}/metrics").text


def test_feedback_within_the_window_changes_the_reward_its_group_is_sent_with(
    processes: Processes, tmp_path: Path
) -> None:
    _, proxy = start_stack(processes, tmp_path, window_s=600)
    held = [chat(proxy, f"[[say {word}]]") for word in ("one", "two", "three")]
    groups = wait_for_groups(proxy, 3, states="scored")
    reply = send_feedback(proxy, id=held[0]["id"], thumbs="up")
    assert reply.json()["group_id"] == groups[0]["group_id"]
    wait_for_states(proxy, "joined")
    assert wait_for_groups(proxy, 1, states="pooled trained")[0]["state"] != "scored"
    # Equal answers tie, so only the feedback makes a signal.
    trained = "select * from siblings where group_id = ? and trained"
    wait_until(lambda: len(rows(proxy, trained, groups[0]["group_id"])) == 2, 20, "the training")

    chat(proxy, "[[say two]]", held[1]["choices"][0]["message"]["content"], "[[say next]]")
    wait_for_groups(proxy, 2, states="pooled trained")
    groups = wait_for_groups(proxy, 4, states="scored pooled trained")
    assert [row["state"] for row in groups][2:] == ["scored", "scored"]
    proxy.stop()
    proxy.start()
    proxy.wait_until_healthy()
    wait_for_groups(proxy, 4, states="pooled trained")
    assert len(feedback_rows(proxy)) == 1


SLOW = "[[slow 0.05]] [[say a long answer that takes its time]]"


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_feedback_is_accepted_during_an_answer_and_after_it_was_stopped(
    processes: Processes, tmp_path: Path, path: str, is_stopped: bool
) -> None:
    _, proxy = start_stack(processes, tmp_path, "--serve-policy", "lead", window_s=600)
    messages = [{"role": "user", "content": SLOW}]
    body = {"model": "fake", "messages": messages, "stream": True, "max_tokens": 200}
    url = f"{proxy.url}/v1/{path}"
    with httpx.stream("POST", url, json=body, headers=KEY, timeout=20) as reply:
        pieces = reply.iter_text()
        read = ""
        while '"id":"' not in read or '"text' not in read.replace('"content":"', '"text'):
            read += next(pieces)
        name = read.partition('"id":"')[2].partition('"')[0]
        assert send_feedback(proxy, id=name, thumbs="down").status_code == 200
        if not is_stopped:
            list(pieces)
    wait_for_states(proxy, "joined")
    (group,) = wait_for_groups(proxy, 1, states="pooled trained dropped")
    assert [row["group_id"] for row in feedback_rows(proxy)] == [group["group_id"]]


def test_without_siblings_feedback_is_accepted_during_an_answer_but_not_after_it_was_stopped(
    processes: Processes, tmp_path: Path
) -> None:
    """The ledger has no answer for a stopped request."""
    proxy = processes.proxy(processes.server("--backend", "fake"))
    body = {"model": "fake", "messages": [{"role": "user", "content": SLOW}], "stream": True}
    url = f"{proxy.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=KEY, timeout=20) as reply:
        chunks, text = reply.iter_text(), ""
        while (match := re.search(r'"id":"([^"]+)"', text)) is None:  # keep-alives may come first
            text += next(chunks)
        name = match[1]
        assert send_feedback(proxy, id=name, thumbs="down", edited="No.").status_code == 200
    (group,) = wait_for_groups(proxy, 1)
    wait_for_states(proxy, "waiting")
    assert group["state"] == "failed" and feedback_rows(proxy)[0]["edited"] == "No."
    assert send_feedback(proxy, id=name, thumbs="up").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"id": "chatcmpl-none", "thumbs": "up"}, 404, "send the id of the response"),
        ({"thumbs": "up"}, 400, "Field required"),
        ({"id": "x"}, 400, "at least one of score"),
        ({"id": "x", "score": 3}, 400, "less than or equal to 1"),
        ({"id": "x", "thumbs": "sideways"}, 400, "'up' or 'down'"),
        ({"id": "x", "score": True}, 400, "valid number"),
        ({"id": "x", "edited": ""}, 400, "at least 1 character"),
    ],
)
def test_invalid_feedback_is_refused_with_an_error_in_vllms_format(
    stack: Any, body: Json, status: int, words: str
) -> None:
    reply = send_feedback(stack.three, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, status)
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_only_the_app_that_got_an_answer_may_send_feedback_about_it(stack: Any) -> None:
    answer = chat(stack.three, "[[say mine]]")
    assert (
        send_feedback(stack.three, key="sk-other", id=answer["id"], thumbs="down").status_code
        == 404
    )
    accepted = send_feedback(stack.three, id=answer["id"], thumbs="down", feedback_id="a")
    assert accepted.is_success
    assert send_feedback(
        stack.three, id=accepted.json()["group_id"], thumbs="down", feedback_id="b"
    ).is_success
    reply = send_feedback(stack.three, id=answer["id"], thumbs="up", feedback_id="a")
    assert reply.status_code == 400 and "choose another id" in reply.json()["error"]["message"]


def test_feedback_names_answers_of_every_format_by_their_own_ids(stack: Any) -> None:
    url, text = stack.three.url, "[[say hello]]"
    chat = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    bodies: list[tuple[str, Json]] = [
        ("chat/completions", chat),
        ("messages", chat),
        ("completions", {"model": "fake", "prompt": text}),
        ("responses", {"model": "fake", "input": text}),
    ]
    for path, body in bodies:
        for own in ({}, {"X-Request-Id": f"mine-{path.replace('/', '-')}"}):
            reply = httpx.post(f"{url}/v1/{path}", json=body, headers=KEY | own).json()
            assert send_feedback(stack.three, id=reply["id"], score=0.5).is_success, (
                path,
                reply["id"],
            )
        streamed = httpx.post(f"{url}/v1/{path}", json=body | {"stream": True}, headers=KEY).text
        name = streamed.partition('"id":"')[2].partition('"')[0]
        assert send_feedback(stack.three, id=name, score=-0.5).is_success, (path, name)


ON_FEEDBACK = """
def on_feedback(feedback):
    return {"feedback": None, "next_message": 0.25, "regenerate": -0.5}[feedback.kind]
"""


def test_a_hook_turns_later_messages_into_values_and_may_ignore_feedback(
    processes: Processes, tmp_path: Path
) -> None:
    _, proxy = start_stack(processes, tmp_path, window_s=600, hook=ON_FEEDBACK)
    first = chat(proxy, "[[say one]]")
    answer = first["choices"][0]["message"]["content"]
    second = chat(proxy, "[[say one]]", answer, "[[say two]]")
    chat(proxy, "[[say one]]", answer, "[[say two]]")  # the same again: a regeneration
    assert send_feedback(proxy, id=second["id"], thumbs="up").is_success
    wait_until(lambda: len(feedback_rows(proxy)) == 3, 20, "three feedback rows")
    wait_for_states(proxy, "joined", "joined", "kept")
    values = [(row["kind"], row["group_id"], row["amount"]) for row in feedback_rows(proxy)]
    groups = [row["group_id"] for row in wait_for_groups(proxy, 3, states="scored pooled trained")]
    assert values == [
        ("next_message", groups[0], 0.25),
        ("regenerate", groups[1], -0.5),
        ("feedback", groups[1], None),
    ]
