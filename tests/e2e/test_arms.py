"""A share of the sessions stays at version 0, as a user sets it up in front of the fake engine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.release_stack import proxy_flags, stats, wait_for_arms
from tests.e2e.test_known_prompt import check_agreement

pytestmark = pytest.mark.slow

BASELINE = """
[serve.routes.completions]
policy = "lead"

[release]
baseline_share = 0.5
baseline_version = {version}
"""
NUM_SESSIONS = 24
MEANS = """
    SELECT g.arm, AVG(s.reward) FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.received_at > ? AND g.arm_propensity = 0.5 GROUP BY g.arm
"""


def baseline_flags(folder: Path, *, version: int = 0) -> list[str]:
    return proxy_flags(folder, BASELINE.format(version=version))


def ask(proxy: Process, messages: list[dict[str, str]]) -> dict[str, str]:
    """Send a chat request and return the answer's message."""
    body = {"model": "fake", "messages": messages}
    reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "fake"
    assert not [name for name in reply.headers if "arm" in name.split("-")]
    return reply.json()["choices"][0]["message"]


def arms_by_session(proxy: Process) -> dict[str, set[str]]:
    arms: dict[str, set[str]] = {}
    for row in rows(proxy, "SELECT session_id, arm FROM groups"):
        arms.setdefault(row["session_id"], set()).add(row["arm"])
    return arms


def ended(proxy: Process, num: int) -> list[Any]:
    return wait_for_groups(proxy, num, states="served pooled trained dropped failed lost")


def test_sessions_of_the_baseline_are_answered_by_version_0_and_never_trained(
    processes: Processes, tmp_path: Path
) -> None:
    flags = baseline_flags(tmp_path)
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags)
    wait_for_arms(proxy)
    talks = [[{"role": "user", "content": f"Question {n}?"}] for n in range(NUM_SESSIONS)]
    for talk in talks:
        talk.append(ask(proxy, talk))
    groups = ended(proxy, NUM_SESSIONS)
    baseline = [group for group in groups if group["arm"] == "baseline"]
    training = [group for group in groups if group["arm"] == "training"]
    assert len(baseline) + len(training) == NUM_SESSIONS and min(len(baseline), len(training)) > 3
    assert {group["arm_propensity"] for group in groups} == {0.5}
    assert {(one["state"], one["reason"]) for one in baseline} == {("served", "other_arm")}
    assert {one["num_siblings"] for one in groups} == {4}
    assert "trained" in {one["state"] for one in training}
    assert {one["served_by"] for one in baseline} == {"best"}
    assert_never_captured(proxy)

    assert proxy.kill() == -signal.SIGKILL
    proxy = processes.proxy(server, *flags, folder="proxy")
    wait_for_arms(proxy)
    arms_before = arms_by_session(proxy)
    for talk in talks:
        ask(proxy, [*talk, {"role": "user", "content": "And now?"}])
    ended(proxy, 2 * NUM_SESSIONS)
    assert arms_by_session(proxy) == arms_before
    assert len(arms_before) == NUM_SESSIONS
    restarted_at = max(group["received_at"] for group in groups)
    means = {arm: mean for arm, mean in rows(proxy, MEANS, restarted_at)}
    assert means["baseline"] < means["training"]
    assert_never_captured(proxy)

    arms = stats(proxy)["arms"]
    assert (arms["open_sessions"], arms["reward_outside"]) == (NUM_SESSIONS, None)
    assert "fakevllm_arm_sessions" in httpx.get(f"{proxy.url}/metrics").text

    streamed_model_names(proxy)
    assert_never_captured(proxy)
    restarted_engine_is_given_version_0_again(processes, server, proxy)


def assert_never_captured(proxy: Process) -> None:
    query = "SELECT COUNT(*) FROM calls JOIN groups USING (group_id) WHERE arm = 'baseline'"
    assert rows(proxy, query)[0][0] == 0
    query = "SELECT DISTINCT state FROM groups WHERE arm = 'baseline'"
    assert [row[0] for row in rows(proxy, query)] == ["served"]
    query = "SELECT COUNT(*) FROM groups WHERE arm = 'baseline' AND trained_step IS NOT NULL"
    assert rows(proxy, query)[0][0] == 0


def streamed_model_names(proxy: Process) -> None:
    """Stream leads of both arms, and check that the app sees the name that it sent."""
    num_before = len(rows(proxy, "SELECT 1 FROM groups"))
    for number in range(8):
        body = {"model": "fake", "prompt": f"Text {number}:", "stream": True}
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=30) as reply:
            assert reply.status_code == 200
            events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert {orjson.loads(event)["model"] for event in events} == {"fake"}
    groups = ended(proxy, num_before + 8)[num_before:]
    assert {group["arm"] for group in groups} == {"training", "baseline"}


def restarted_engine_is_given_version_0_again(
    processes: Processes, server: Process, proxy: Process
) -> None:
    """Kill the server with its engine, which forgets its policies."""
    server.kill()
    processes.server("--backend", "fake", port=int(server.url.rpartition(":")[2]))
    query = "SELECT COUNT(*) FROM groups WHERE reason = 'other_arm'"
    (num_before,) = rows(proxy, query)[0]
    number = 0

    def answered_by_version_0() -> bool:
        nonlocal number
        number += 1
        ask(proxy, [{"role": "user", "content": f"After the restart {number}?"}])
        return rows(proxy, query)[0][0] > num_before

    wait_until(answered_by_version_0, 60.0, "an answer of version 0")


def test_apps_are_answered_if_the_version_of_the_baseline_cannot_be_sampled(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *baseline_flags(tmp_path, version=999))
    for number in range(12):
        ask(proxy, [{"role": "user", "content": f"Question {number}?"}])
    groups = ended(proxy, 12)
    unavailable = [group for group in groups if (group["reason"] or "").startswith("arm_un")]
    assert {(one["state"], one["arm"]) for one in unavailable} == {("served", "training")}
    assert {one["arm_propensity"] for one in unavailable} == {None}
    assert {one["num_siblings"] for one in unavailable} == {4}
    assert all(one["served_by"] == "best" for one in unavailable)
    assert {one["arm"] for one in groups} == {"training"}
    warnings = [line for line in proxy.log.splitlines() if "cannot be sampled" in line]
    assert len(warnings) == 1
    assert "Version 999 does not exist" in warnings[0]
    assert "Set release.baseline_version" in warnings[0]


EMBEDDED_CONFIG = """
[job]
batch_size = 2
lr = 1e-3
num_repeat = 4

[release]
baseline_share = 0.5
"""
PREFER_LONG = """
def on_compute_relative_reward(siblings, answers):
    return [min(1.0, len(answer["content"] or "") / 100) for answer in answers]
"""


def test_the_embedded_engine_answers_the_baseline_with_version_0_after_training(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "fakevllm.toml").write_text(EMBEDDED_CONFIG)
    hooks = write_hooks(tmp_path / "hooks", PREFER_LONG)
    server = processes.server("--backend", "embedded", "--model", "demo")
    flags = ("--config", str(tmp_path / "fakevllm.toml"), "--hooks", str(hooks))
    proxy = processes.proxy(server, *flags)

    wait_until(lambda: not stats(proxy)["arms"]["trouble"], 120.0, "version 0")
    before = greedy_log_probs(proxy, "before")
    number = 0

    def is_trained() -> bool:
        nonlocal number
        number += 1
        body = {"messages": [{"role": "user", "content": f"What is {number} plus 3?"}]}
        body |= {"model": "demo", "max_tokens": 24}
        reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200 and reply.json()["model"] == "demo"
        return rows(proxy, "SELECT COUNT(DISTINCT trained_step) FROM groups")[0][0] >= 3

    wait_until(is_trained, 120.0, "three steps")
    check_agreement(server)
    after = [greedy_log_probs(proxy, f"after {n}") for n in range(12)]
    query = "SELECT arm, state, reason FROM groups WHERE question = 'Say it.' ORDER BY received_at"
    wait_until(lambda: len(rows(proxy, query)) == 13, 20.0, "the greedy requests")
    _, *answered = [tuple(row) for row in rows(proxy, query)]
    assert set(answered) == {
        ("baseline", "served", "greedy_request"),
        ("training", "served", "greedy_request"),
    }
    for (arm, _, _), log_probs in zip(answered, after, strict=True):
        is_version_0 = log_probs == pytest.approx(before, abs=1e-4)
        assert is_version_0 == (arm == "baseline")
    assert_never_captured(proxy)
    query = "SELECT COUNT(*) FROM groups WHERE arm = 'baseline' AND reason = 'other_arm'"
    assert rows(proxy, query)[0][0] > 0


def greedy_log_probs(proxy: Process, key: str) -> list[float]:
    """Return log-probabilities of a greedy answer. Each key is an app of its own, so the request
    opens a session."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Say it."}]}
    body |= {"temperature": 0, "logprobs": True, "max_tokens": 4}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{proxy.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return [token["logprob"] for token in reply.json()["choices"][0]["logprobs"]["content"]]
