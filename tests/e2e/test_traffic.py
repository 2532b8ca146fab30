"""Tests of admission and outages with real processes, which are killed and restarted."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm_adapters.protocol.outage_reasons import REASON_HEADER, OutageReason
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, free_port, wait_until

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TITLE: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "You are a title generator. You output ONLY a title."},
        {"role": "user", "content": "Generate a title for this conversation:\n"},
        {"role": "user", "content": "hi"},
    ],
}
UP_S = 40.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A fake server that tests share if they do not damage it."""
    with Processes(tmp_path_factory.mktemp("shared")) as started:
        server = started.server("--backend", "fake")
        started.proxy(server)  # its job starts the engine
        yield server


def send(proxy: Process, body: dict[str, Any] = HI, **headers: str) -> httpx.Response:
    return httpx.post(f"{proxy.url}{CHAT}", json=body, headers=headers, timeout=UP_S)


def answered(proxy: Process, body: dict[str, Any] = HI, **headers: str) -> str:
    answer = send(proxy, body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def command(proxy: Process, *words: str) -> str:
    """Run a `fakevllm` command for that proxy, and return its output."""
    done = PRELOADED_PYTHON.run(["-m", "fakevllm", *words, "--url", proxy.url], proxy.folder)
    done.check_returncode()
    return done.stdout


def config(processes: Processes, text: str) -> tuple[str, str]:
    file = processes.folder / "fakevllm.toml"
    file.write_text(text)
    return "--config", str(file)


def ends(proxy: Process, count: int) -> list[tuple[str, str | None]]:
    return [(group["state"], group["reason"]) for group in wait_for_groups(proxy, count)]


# --- admission


def test_a_paused_proxy_uses_one_sibling_also_after_a_restart_until_it_is_resumed(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "3")
    assert "none is fanned out" in command(proxy, "pause")
    assert "paused" in command(proxy, "status")
    answered(proxy)
    wait_for_groups(proxy, 1)
    proxy.kill()
    proxy.start()
    proxy.wait_until_healthy()
    answered(proxy)
    stats = httpx.get(f"{proxy.url}/fakevllm/stats").json()
    assert stats["paused"] is True
    assert "fakevllm_paused 1.0" in httpx.get(f"{proxy.url}/metrics").text
    assert "are fanned out" in command(proxy, "resume")
    answered(proxy)
    groups = wait_for_groups(proxy, 3)
    assert [(group["num_siblings"], group["reason"]) for group in groups[:2]] == [(1, "paused")] * 2
    assert groups[2]["num_siblings"] == 3 and groups[2]["reason"] != "paused"
    assert httpx.get(f"{proxy.url}/fakevllm/stats").json()["untrained"]["paused"] == 2
    assert "2 paused" in command(proxy, "status")


def test_pause_and_resume_demand_a_key_if_the_proxy_has_keys(
    processes: Processes, server: Process
) -> None:
    keys = processes.folder / "of-apps"
    keys.write_text("sk-one\n")
    proxy = processes.proxy(server, "--key-file", str(keys))
    for path in ("/fakevllm/pause", "/fakevllm/resume"):
        assert httpx.post(f"{proxy.url}{path}").status_code == 401
        cross_origin = {"Origin": "https://evil.example", "Authorization": "Bearer sk-one"}
        assert httpx.post(f"{proxy.url}{path}", headers=cross_origin).status_code == 403
    assert not (proxy.folder / "paused").exists()
    assert "paused" in command(proxy, "pause", "--key", "sk-one")


def test_a_side_call_gets_one_sibling_while_the_main_call_trains(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "3")
    session = {"x-session-id": "ses_1"}
    with ThreadPoolExecutor() as threads:  # as opencode sends them
        for request in [threads.submit(answered, proxy, body, **session) for body in (TITLE, HI)]:
            request.result()
    side, main = sorted(wait_for_groups(proxy, 2), key=lambda group: group["num_siblings"])
    assert (side["state"], side["reason"]) == ("served", "side_call: marker")
    assert (side["num_siblings"], main["num_siblings"]) == (1, 3)


def test_requests_that_admission_leaves_out_have_a_reason(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    policy = """
    [models]
    aliases = ["fake-small", "one"]
    [policy]
    side_models = ["*-small"]
    n = {one = 1}
    skip = [{name = "tests", header = "X-Env: test"}]
    """
    arguments = ("--hooks", str(yes_hooks), "--n", "3")
    proxy = processes.proxy(server, *arguments, *config(processes, policy))
    answered(proxy, HI | {"model": "fake-small"})
    answered(proxy, HI, **{"x-env": "test"})
    answered(proxy, HI | {"model": "one"})
    assert ends(proxy, 3) == [
        ("served", "side_call: model"),
        ("served", "skip_rule: tests"),
        ("served", "one_sibling"),
    ]
    sampled = processes.proxy(
        server, *arguments, *config(processes, "[policy]\nsample_fraction = 0"), folder="none"
    )
    answered(sampled)
    assert ends(sampled, 1) == [("served", "not_sampled")]


def test_in_shadow_mode_the_app_gets_the_leads_answer_and_all_siblings_are_scored(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    shadow = config(processes, "[policy]\nshadow = true\n")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "4", *shadow)
    texts = [answered(proxy) for _ in range(8)]
    groups = wait_for_groups(proxy, 8, states="pooled trained dropped lost")
    assert [group["served_index"] for group in groups] == [0] * 8
    served = rows(
        proxy,
        "select text from siblings join groups using (group_id) where served order by received_at",
    )
    assert [row["text"] for row in served] == texts
    (scored,) = rows(proxy, "select count(*) from siblings where reward is not null")
    assert scored[0] == 32


# --- outages


def test_a_server_without_a_running_engine_sends_the_reason_for_which_proxies_hold_requests(
    processes: Processes,
) -> None:
    answer = send(processes.server("--backend", "fake"))
    assert answer.status_code == 503
    assert answer.headers[REASON_HEADER] == OutageReason.ENGINE_NOT_READY


@pytest.mark.parametrize("num_siblings", ["1", "3"])
def test_a_request_before_the_servers_start_is_held_and_then_answered(
    processes: Processes, yes_hooks: Path, num_siblings: str
) -> None:
    port = free_port()
    arguments = ("--hooks", str(yes_hooks), "--n", num_siblings, "--alias", "gpt")
    proxy = processes.proxy(
        f"http://127.0.0.1:{port}",
        *arguments,
        *config(processes, "[upstream]\nhold_s = 60"),
        wait=False,
    )
    wait_until(lambda: "listening" in proxy.log, UP_S)
    with ThreadPoolExecutor() as threads:
        body = HI | {"model": "gpt"}  # the served model is not known yet
        requests = [threads.submit(answered, proxy, body | {"stream": False}) for _ in range(3)]
        processes.server("--backend", "fake", port=port)
        texts = [request.result() for request in requests]
    assert all(text in ("yes.", "no.") for text in texts)
    for group in wait_for_groups(proxy, 3):
        assert group["status"] == 200 and group["num_siblings"] == int(num_siblings)


@pytest.mark.parametrize("num_siblings", ["1", "2"])
def test_a_held_stream_without_an_answer_ends_with_an_error_status(
    processes: Processes, yes_hooks: Path, num_siblings: str
) -> None:
    held = config(
        processes, "[upstream]\nhold_s = 2.5"
    )  # longer than the delay before the first keep-alive
    arguments = ("--hooks", str(yes_hooks), "--n", num_siblings, *held)
    proxy = processes.proxy(f"http://127.0.0.1:{free_port()}", *arguments, wait=False)
    wait_until(lambda: "listening" in proxy.log, UP_S)
    answer = send(proxy, HI | {"stream": True})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    assert ends(proxy, 1) == [("failed", "upstream_unreachable")]


@pytest.mark.parametrize("num_siblings", ["1", "2"])
def test_the_fallback_answers_while_the_server_is_down_and_training_continues_afterwards(
    processes: Processes, server: Process, yes_hooks: Path, num_siblings: str
) -> None:
    own = processes.server("--backend", "fake", folder="own")
    text = "[upstream]\nhold_s = 0.3\n[job]\nbatch_size = 2\nlr = 0.1\n"
    arguments = ("--hooks", str(yes_hooks), "--n", num_siblings, *config(processes, text))
    proxy = processes.proxy(own, *arguments, "--fallback", f"{server.url}/v1")
    answered(proxy)
    wait_for_groups(proxy, 1)
    own.kill()
    for stream in (False, True):
        answer = send(proxy, HI | {"stream": stream})
        assert answer.status_code == 200 and (
            "yes." in answer.text or "no." in answer.text or '"content":"' in answer.text
        )
    fallen = ends(proxy, 3)[1:]
    assert fallen == [("served", "fallback: server_unreachable")] * 2
    own.start()
    own.wait_until_healthy()
    proxy.wait_until_healthy()
    for _ in range(4):
        answered(proxy)
    later = [(group["state"], group["reason"]) for group in wait_for_groups(proxy, 7)][3:]
    assert not any((reason or "").startswith("fallback") for _, reason in later)
    if num_siblings == "2":
        wait_for_groups(proxy, 1, states="trained")


@contextlib.contextmanager
def frozen(process: Process) -> Generator[None]:
    """Suspend a process, so that it keeps its connections but sends nothing."""
    process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.signal(signal.SIGCONT)


@pytest.mark.parametrize("num_siblings", ["1", "2"])
def test_apps_get_the_same_error_for_a_frozen_server_as_for_a_dead_one(
    processes: Processes, yes_hooks: Path, num_siblings: str
) -> None:
    own = processes.server("--backend", "fake", folder="own")
    held = config(processes, "[upstream]\nhold_s = 0.5")
    proxy = processes.proxy(own, "--hooks", str(yes_hooks), "--n", num_siblings, *held)
    answered(proxy)
    wait_for_groups(proxy, 1)
    both = [HI | {"stream": stream} for stream in (False, True)]
    with frozen(own), ThreadPoolExecutor() as threads:
        whole, streamed = threads.map(
            send, [proxy] * 2, both
        )  # before the proxy's link detects the outage
        assert whole.status_code == 503 and whole.headers["retry-after"] == "2"
        assert '"code":503' in streamed.text
        for later in threads.map(send, [proxy] * 2, both):
            assert later.status_code == 503 and later.headers["retry-after"] == "2"
        assert ends(proxy, 5)[1:] == [("failed", "upstream_unreachable")] * 4
    proxy.wait_until_healthy()
    answered(proxy)


def test_a_request_that_kills_the_engine_is_not_retried_for_the_whole_hold_time(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    own = processes.server("--backend", "fake", folder="own")
    arguments = ("--hooks", str(yes_hooks), "--n", "2", *config(processes, "[upstream]\nhold_s=60"))
    proxy = processes.proxy(own, *arguments)
    crash = HI | {"messages": [{"role": "user", "content": "[[crash]]"}]}
    assert send(proxy, crash).status_code == 503
    num_starts = own.log.count("starting it again")
    assert num_starts <= 4, "two siblings, each sent twice by the server"
    answered(proxy)


# --- a full disk


@contextlib.contextmanager
def full_disk(process: Process) -> Generator[None]:
    """Let a process fail to write to any file, including its log."""
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_with_a_full_disk_apps_get_answers_and_the_ledgers_error_is_reported(
    processes: Processes, server: Process, yes_hooks: Path
) -> None:
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    answered(proxy)
    wait_for_groups(proxy, 1)

    def stats() -> dict[str, Any]:
        return httpx.get(f"{proxy.url}/fakevllm/stats", timeout=UP_S).json()

    with full_disk(proxy):
        for _ in range(5):
            assert answered(proxy) in ("yes.", "no.")
        wait_until(lambda: stats()["ledger_dropped"] >= 5, UP_S, lambda: json.dumps(stats()))
        assert "full" in stats()["ledger_error"] or "disk" in stats()["ledger_error"]
        assert "cannot be written" in command(proxy, "status")
    answered(proxy)
    wait_until(lambda: stats()["ledger_error"] is None, UP_S)
    assert len(wait_for_groups(proxy, 2)) >= 2, "the ledger is written again"
