"""A detector of the guard fires in a real run: releases are held, training goes back, or training
is paused, and a receiver gets the signed alert. The fake engine samples."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.release_stack import history, proxy_flags, stats, write_held_out
from tests.proxy.guard.alert_receiver import AlertReceiver

pytestmark = pytest.mark.slow

SECRET = "s3cret"
REFUSAL = "[[say I am sorry, but I cannot help with that.]]"
GUARDED = """
[guard]
refusals = "{action}"
baseline_steps = 3
window_steps = 3
{release}
[alerts]
url = "{url}"
"""
GATED = """
[release]
mode = "gated"
canary_share = 0.9
eval_dataset = "{rows}"
evaluate_every = 1000
"""


class App:
    """An app whose sessions have numbers."""

    def __init__(self, proxy: Process) -> None:
        self._proxy = proxy
        self._number = 0

    def ask(self, text: str = "") -> None:
        self._number += 1
        messages = [{"role": "user", "content": f"Question {self._number}? {text}"}]
        body = {"model": "fake", "messages": messages}
        reply = httpx.post(f"{self._proxy.url}/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text


def trained_steps(proxy: Process) -> int:
    engine: dict[str, Any] = stats(proxy)["engine"] or {}
    return int(engine.get("global_step") or 1) - 1


def ask_as_usual(proxy: Process, app: App) -> None:
    """Let the engine answer as usual until the first steps are trained."""

    def trained() -> bool:
        app.ask()
        return trained_steps(proxy) >= 4

    wait_until(trained, 60.0, "four steps with usual answers")


def ask_until_alarm(proxy: Process, app: App) -> dict[str, Any]:
    """Let the engine answer some steps as usual, and refuse from then on. Return the alarm."""

    def alarm() -> bool:
        app.ask(REFUSAL)
        return bool(stats(proxy)["guard"]["alarms"])

    ask_as_usual(proxy, app)
    wait_until(alarm, 60.0, "an alarm")
    (shown,) = stats(proxy)["guard"]["alarms"]
    return shown


def wait_for_action(proxy: Process, app: App) -> None:
    """Wait until the action of the alarm is carried out. A decision may wait for a step."""

    def done() -> bool:
        app.ask(REFUSAL)
        return not any(alarm["is_pending"] for alarm in stats(proxy)["guard"]["alarms"])

    wait_until(done, 60.0, "the action")


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEVLLM_ALERTS_SECRET", SECRET)


def test_releases_are_held_while_the_receiver_hangs_and_the_alert_comes_through_at_last(
    processes: Processes, tmp_path: Path, secret: None
) -> None:
    server = processes.server("--backend", "fake")
    with AlertReceiver(500, hangs=True) as receiver:
        release = GATED.format(rows=write_held_out(tmp_path))
        sections = GUARDED.format(action="hold", release=release, url=receiver.url)
        proxy = processes.proxy(server, *proxy_flags(tmp_path, sections))
        app = App(proxy)
        shown = ask_until_alarm(proxy, app)
        assert (shown["detector"], shown["action"]) == ("refusals", "hold")
        wait_until(lambda: receiver.alerts != [], 20.0, "the first attempt")
        app.ask()  # the receiver has not answered yet, and the app is answered all the same
        wait_for_action(proxy, app)
        assert len(receiver.alerts) == 1
        (record,) = history(server)
        assert (record["decision"], record["decided_by"]) == ("hold", "guard")
        assert record["evidence"]["detector"] == "refusals"
        wait_until(lambda: stats(proxy)["release"]["is_held"], 20.0, "the hold")
        metrics = httpx.get(f"{proxy.url}/metrics", timeout=30).text
        assert 'fakevllm_guard_alarms{detector="refusals"} 1.0' in metrics
        assert 'fakevllm_guard_alarms{detector="tool_errors"} 0.0' in metrics
        assert 'fakevllm_alerts{outcome="sent"} 0.0' in metrics

        receiver.release()  # it answers 500, and accepts the second attempt

        def is_sent() -> bool:
            page = httpx.get(f"{proxy.url}/metrics", timeout=30).text
            return 'fakevllm_alerts{outcome="sent"} 1.0' in page

        wait_until(is_sent, 60.0, "the alert")
        first, second = receiver.bodies
        assert first == second
        digest = hmac.new(SECRET.encode(), second, hashlib.sha256).hexdigest()
        assert receiver.headers[1]["X-Fakevllm-Signature"] == f"sha256={digest}"
        alert = receiver.alerts[1]
        assert (alert["id"], alert["step"]) == (record["id"], shown["step"])
        assert "sorry" not in second.decode()  # no text of an answer
        assert "Question" not in second.decode()
        assert "secret-path" not in proxy.log


def test_the_action_rollback_returns_training_to_the_released_version(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    with AlertReceiver() as receiver:
        release = GATED.format(rows=write_held_out(tmp_path))
        sections = GUARDED.format(action="rollback", release=release, url=receiver.url)
        proxy = processes.proxy(server, *proxy_flags(tmp_path, sections))
        app = App(proxy)

        def returned() -> bool:
            app.ask(REFUSAL)
            return history(server) != []

        ask_as_usual(proxy, app)
        wait_until(returned, 60.0, "the return")
        record = history(server)[0]
        assert (record["decision"], record["decided_by"]) == ("rejected", "guard")
        assert record["evidence"]["restored"] == 0
        wait_until(lambda: not stats(proxy)["guard"]["alarms"], 20.0, "the end of the alarm")
        wait_until(lambda: receiver.alerts != [], 20.0, "the alert")
        assert receiver.alerts[0]["id"] == record["id"]
        assert "X-Fakevllm-Signature" not in receiver.headers[0]


def test_without_releases_the_action_hold_pauses_training_and_apps_are_answered(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    with AlertReceiver() as receiver:
        sections = GUARDED.format(action="hold", release="", url=receiver.url)
        proxy = processes.proxy(server, *proxy_flags(tmp_path, sections))
        app = App(proxy)
        ask_until_alarm(proxy, app)
        wait_until(lambda: stats(proxy)["paused"], 20.0, "the pause")
        app.ask()
        assert history(server) == []
        assert "training is paused until `fakevllm resume`, because of refusals" in proxy.log
