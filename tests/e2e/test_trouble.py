"""Tests of faults behind the proxy: the app's answer and the ledger's row."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.run_log_reader import read_log_entries, surviving_steps
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, free_port, wait_until

HI: Any = [{"role": "user", "content": "hi"}]
ENDLESS: Any = [{"role": "user", "content": "[[say abcdefghij]] [[slow 2]]"}]
SLOW: Any = [{"role": "user", "content": "[[say abcdefghij]] [[slow 0.3]]"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A fake server that tests share if they do not damage it."""
    with Processes(tmp_path_factory.mktemp("shared")) as started:
        server = started.server("--backend", "fake")
        started.proxy(server)  # its job starts the engine
        yield server


def client(proxy: Process, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-app", **settings)


def ask(proxy: Process, messages: Any = HI) -> str:
    with client(proxy, max_retries=0) as app:
        answer = app.chat.completions.create(model="fake", messages=messages)
    return answer.choices[0].message.content or ""


def post(
    url: str, body: object, timeout_s: float = 10, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("raise ValueError('bad')", "hook_raised: ValueError: bad"),
        ("return [float('nan')] * 3", "hook_nan"),
        ("return [1.0]", "hook_length: got 1, want 3"),
        ("return 'great'", "hook_type"),
        ("import os; os._exit(3)", "hook_crashed"),
        ("import time; time.sleep(60)", "hook_timeout"),
        ("return [None] * 3", "fewer_than_two_rewards"),
    ],
)
def test_with_a_failing_hook_the_app_gets_an_answer_and_the_group_is_dropped(
    processes: Processes, server: Process, reward: str, reason: str
) -> None:
    source = f"def on_compute_relative_reward(results, answers):\n    {reward}\n"
    hooks = write_hooks(processes.folder / "hooks", source)
    config = processes.folder / "fakevllm.toml"
    config.write_text(f'[hooks]\npath = "{hooks}"\ntimeout_s = 1.0\n')
    proxy = processes.proxy(server, "--config", str(config), "--n", "3")
    assert ask(proxy) in ("yes.", "no.")
    (group,) = wait_for_groups(proxy, 1)
    assert group["state"] == "dropped" and group["reason"].startswith(reason)
    assert group["served_index"] == 0 and group["best_index"] is None


def test_without_a_server_the_app_gets_503_with_retry_after(processes: Processes) -> None:
    config = processes.folder / "fakevllm.toml"
    config.write_text("[upstream]\nhold_s = 0.5\n")
    unused_url = f"http://127.0.0.1:{free_port()}"
    proxy = processes.proxy(unused_url, "--config", str(config), wait=False)
    url = f"{proxy.url}/v1/chat/completions"
    wait_until(lambda: "listening" in proxy.log, 60)
    status, body, headers = post(url, {"model": "fake", "messages": HI})
    assert status == 503 and headers["retry-after"] == "2"
    assert body["error"]["type"] == "Service Unavailable"
    (group,) = wait_for_groups(proxy, 1)
    assert (group["state"], group["reason"]) == ("failed", "upstream_unreachable")


def test_the_group_of_a_client_that_disconnects_is_finished_with_status_499(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    with pytest.raises(openai.APITimeoutError), client(proxy, max_retries=0, timeout=0.5) as app:
        app.chat.completions.create(model="fake", messages=SLOW)
    (group,) = wait_for_groups(proxy, 1)
    assert (group["state"], group["status"]) == ("pooled", 499)


def test_a_slow_stream_has_keep_alives_and_ends_with_the_answer(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    body = {"model": "fake", "messages": SLOW, "stream": True}
    request = urllib.request.Request(
        f"{proxy.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        raw = answer.read()
    assert raw.startswith(b": keep-alive\n\n")
    assert raw.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"stop"' in raw


def test_an_engine_that_dies_is_restarted_and_the_run_continues(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    ask(proxy)
    with pytest.raises(openai.InternalServerError) as error:
        ask(proxy, [{"role": "user", "content": "[[crash]]"}])
    assert error.value.status_code == 503
    proxy.wait_until_healthy()
    wait_until(lambda: "starting it again" in server.log, 60)
    with client(proxy, max_retries=5) as app:
        answer = app.chat.completions.create(model="fake", messages=HI)
    assert answer.choices[0].finish_reason == "stop"


def test_every_group_is_trained_once_although_server_and_proxy_are_killed(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    config = processes.folder / "fakevllm.toml"
    job = "num_repeat = 2\nbatch_size = 2\nlr = 0.1\nsave_freq = 4\n"
    config.write_text(
        f"[job]\n{job}max_staleness = 100\n"
    )  # groups that wait for a full batch are not stale
    arguments = ("--config", str(config), "--hooks", str(yes_hooks))
    proxy = processes.proxy(server, *arguments)

    def send_requests(times: int) -> None:
        with client(proxy, max_retries=10) as app:
            for _ in range(times):
                app.chat.completions.create(model="fake", messages=HI)

    send_requests(12)
    server.kill()
    server.start()
    server.wait_until_healthy()
    proxy.wait_until_healthy()
    send_requests(6)
    proxy.kill()
    # Requests that the proxy answered in its last moments are not in the ledger yet. A busy machine
    # loses several of them.
    recorded = len(rows(proxy, "select * from groups"))
    assert recorded >= 12, "a request that was answered before the server's death is missing"
    proxy.start()
    proxy.wait_until_healthy()
    send_requests(6)
    expected = recorded + 6
    # A batch has two groups, so one group may be left over.
    wait_for_groups(proxy, expected - expected % 2, states="trained")
    assert_consistent(server, proxy)


def assert_consistent(server: Process, proxy: Process) -> None:
    """Check that no group was trained twice in the surviving steps, and that the ledger agrees."""
    assert any(entry["kind"] == "restored" for entry in read_log_entries(server.folder))
    groups = [
        group
        for entry in surviving_steps(read_log_entries(server.folder))
        for group in entry["groups"]
    ]
    trained = {group["group_id"]: group["siblings"] for group in groups}
    assert len(groups) == len(trained), "a group was trained twice"

    def agreed() -> bool:
        recorded = rows(proxy, "select group_id from groups where state = 'trained'")
        return {row["group_id"] for row in recorded} == set(trained)

    wait_until(agreed, 60, "the ledger to agree with the server's log")
    marked = rows(proxy, 'select group_id, "index" from siblings where trained = 1')
    assert {(row[0], row[1]) for row in marked} == {
        (group_id, index) for group_id, siblings in trained.items() for index in siblings
    }
    assert rows(proxy, "select * from groups where state = 'lost'") == []


def test_ctrl_c_stops_server_engine_and_proxy_and_leaves_a_checkpoint(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    config = processes.folder / "fakevllm.toml"
    config.write_text("[job]\nnum_repeat = 2\nbatch_size = 1\nlr = 0.1\n")
    proxy = processes.proxy(server, "--config", str(config), "--hooks", str(yes_hooks))
    for _ in range(3):
        ask(proxy)
    wait_for_groups(proxy, 3, states="trained")
    for process in (proxy, server):
        process.signal(signal.SIGINT)
        wait_until(lambda process=process: process.returncode is not None, 60, process.name)
        assert "Traceback" not in process.log
    assert list((server.folder / "checkpoints").glob("step-*"))
    assert not list(server.folder.glob("engine-*.sock"))


@pytest.mark.parametrize("num_siblings", ["1", "2"])
def test_a_stop_answers_the_waiting_apps_with_503_and_writes_their_rows(
    processes: Processes, server: Process, yes_hooks: Path, num_siblings: str
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", num_siblings)
    url = f"{proxy.url}/v1/chat/completions"
    body = {"model": "fake", "messages": ENDLESS}
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with ThreadPoolExecutor() as threads:
        whole = threads.submit(post, url, body, timeout_s=30)
        with urllib.request.urlopen(request, timeout=30) as stream:
            first = stream.read(1)  # the other request has been sent by now
            proxy.signal(signal.SIGTERM)
            streamed = first + stream.read()
        status, error, headers = whole.result()
    assert status == 503 and "The proxy is stopping" in error["error"]["message"]
    assert headers["retry-after"] == "2"
    assert b"The proxy is stopping" in streamed and streamed.endswith(b"data: [DONE]\n\n")
    wait_until(lambda: proxy.returncode is not None, 60, proxy.name)
    assert "Traceback" not in proxy.log
    ends = [(group["state"], group["reason"]) for group in wait_for_groups(proxy, 2)]
    assert ends == [("failed", "proxy_stopped")] * 2


def test_a_page_on_another_site_cannot_reach_either_process(
    processes: Processes, server: Process
) -> None:
    proxy = processes.proxy(server)
    for url in (f"{proxy.url}/v1/chat/completions", f"{server.url}/stop_engine"):
        assert post(url, {}, Origin="https://evil.example")[0] == 403
        assert post(url, {}, Host="evil.example")[0] == 403


def test_a_second_proxy_attaches_and_reports_a_differing_job(
    processes: Processes, server: Process
) -> None:
    job = processes.folder / "other.toml"
    job.write_text("[job]\nlr = 0.7\n")
    proxy = processes.proxy(server, "--n", "7", "--config", str(job))
    wait_until(lambda: "running with another job" in proxy.log, 60, lambda: proxy.log)
    (warning,) = [line for line in proxy.log.splitlines() if "running with another job" in line]
    assert "lr = " in warning and "num_repeat" not in warning


def test_a_task_key_gives_the_hook_the_reference_answer(
    processes: Processes, server: Process
) -> None:
    reward = (
        "def on_compute_relative_reward(results, answers, question):\n"
        "    want = results[0].task.metadata['want']\n"
        "    return [float(answer['content'] == want) for answer in answers]\n"
    )
    hooks = write_hooks(processes.folder / "hooks", reward)
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "6")
    tasks = {"tasks": [{"task_id": "t1", "main_query": "hi", "metadata": {"want": "no."}}]}
    _, keys, _ = post(f"{proxy.url}/fakevllm/tasks", tasks)
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=keys["keys"][0]) as app:
        answer = app.chat.completions.create(model="fake", messages=HI)
    assert answer.choices[0].message.content == "no."
    (group,) = wait_for_groups(proxy, 1)
    assert group["task_id"] == "t1"


def test_the_app_gets_the_answer_that_the_hook_prefers(
    processes: Processes, server: Process
) -> None:
    hooks = write_hooks(processes.folder / "hooks", PREFER_YES)
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "12")
    assert ask(proxy) == "yes."
