"""Tests of warnings about mistakes that newcomers make."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import START_TIMEOUT_S, Processes, free_port, wait_until
from tests.e2e.test_commands import assert_mistake, run
from tests.e2e.test_traffic import HI, answered, command


def test_a_base_url_without_v1_is_warned_about_once_per_path(processes: Processes) -> None:
    proxy = processes.proxy(processes.server("--backend", "fake"))
    for path in ("/chat/completions", "/chat/completions", "/v1/v1/chat/completions", "/else"):
        assert httpx.post(f"{proxy.url}{path}", json=HI).status_code == 404
    answered(proxy)
    warned = [line for line in proxy.log.splitlines() if "is not a path of this proxy" in line]
    assert [line.partition(" is not a path")[0].split()[-1] for line in warned] == [
        "/chat/completions",
        "/v1/v1/chat/completions",
    ]
    assert "http://HOST:PORT/v1" in warned[0]


def test_the_status_of_a_proxy_without_hooks_says_that_nothing_is_fanned_out(
    processes: Processes,
) -> None:
    proxy = processes.proxy(processes.server("--backend", "fake"))
    answered(proxy)
    wait_for_groups(proxy, 1)
    status = " ".join(command(proxy, "status").split())
    assert "off: without hooks" in status and "requests are fanned out" not in status


def test_a_replay_warns_before_it_starts_that_nothing_will_be_trained(
    processes: Processes, yes_hooks: Path
) -> None:
    proxy = processes.proxy(processes.server("--backend", "fake"), "--hooks", str(yes_hooks))
    dataset = processes.folder / "rows.jsonl"
    dataset.write_text('{"question": "one"}\n')
    replay = ["-m", "fakevllm", "replay", "--dataset", str(dataset)]
    replay += ["--url", f"{proxy.url}/v1", "--fresh"]
    output = run(processes.folder, *replay).stderr
    assert "trains nothing" not in output
    command(proxy, "pause")
    output = run(processes.folder, *replay).stderr
    assert "rows will not be trained: paused" in output and "fakevllm resume" in output


def test_a_hook_override_that_the_engine_refuses_is_logged_once(processes: Processes) -> None:
    changes = """
def on_user_submit_new_requests(request_id, task):
    return [{}, {"temperature": 1.1}, {"temperature": -7}]
"""
    hooks = write_hooks(processes.folder / "changing", PREFER_YES, changes)
    proxy = processes.proxy(processes.server("--backend", "fake"), "--hooks", str(hooks))
    for _ in range(3):
        answered(proxy)
    groups = wait_for_groups(proxy, 3)
    assert all(group["served_index"] in (0, 1) for group in groups)
    [warning] = [line for line in proxy.log.splitlines() if "hook_override: " in line]
    assert "the engine refuses sibling 2: " in warning and "temperature" in warning
    assert "the group continues without that sibling" in warning


def test_calls_that_bypass_the_proxy_are_logged_once(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server)
    answered(proxy)
    assert "past the proxy" not in server.log
    answered(server)
    answered(server)
    assert server.log.count("A model call that bypassed the proxy") == 1


def test_a_hook_that_is_mended_while_the_proxy_runs_is_reported_until_the_restart(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks))
    assert "changed on disk" not in command(proxy, "status")
    write_hooks(yes_hooks, PREFER_YES.replace('"yes"', '"no"'))
    for _ in range(2):
        status = " ".join(command(proxy, "status").split())
        assert "The hook files changed on disk" in status
    assert proxy.log.count("The hook files changed on disk") == 1
    proxy.stop()
    proxy.start()
    proxy.wait_until_healthy()
    assert "changed on disk" not in command(proxy, "status")


def test_the_first_request_of_a_web_chat_waits_for_a_server_that_starts_later(
    processes: Processes, yes_hooks: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    proxy = processes.proxy(url, "--hooks", str(yes_hooks), wait=False)
    wait_until(lambda: status_of(f"{proxy.url}/health") == 503, START_TIMEOUT_S, "the proxy")
    with ThreadPoolExecutor() as threads:
        waiting = [
            threads.submit(httpx.get, f"{proxy.url}{path}", timeout=60)
            for path in ("/v1/models", "/version")
        ]
        assert status_of(f"{proxy.url}/metrics") == 200
        assert not any(request.done() for request in waiting)
        processes.server("--backend", "fake", port=port)
        assert [request.result().status_code for request in waiting] == [200, 200]
        assert waiting[0].result().json()["data"][0]["id"] == "fake"


def status_of(url: str) -> int | None:
    """Return the HTTP status, or None while nobody listens."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.ConnectError:
        return None


WITHOUT_TORCH = "import sys\nsys.modules['torch'] = sys.modules['vllm'] = None\n"
"""A `sitecustomize.py` with which Python behaves as if torch and vLLM were not installed."""


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torch and vLLM from the processes that the test starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "demo"), "embedded engine needs torch, not installed"),
        (("--backend", "vllm"), "vllm engine needs vllm, not installed"),
        (("--backend", "vllm", "--rollout-url", "http://127.0.0.1:9"), "embedded engine needs"),
    ],
)
def test_a_server_whose_engine_needs_a_missing_package_does_not_start(
    flags: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    arguments = ("start", *flags, "--port", "0", "--run-dir", "run")
    done = run(tmp_path, "-m", "fakevllm_server", *arguments)
    assert_mistake(done, reason)
    assert "pip install -e '.[" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_torch")
async def test_an_embedded_engine_without_torch_is_refused_with_the_reason(tmp_path: Path) -> None:
    engine = ChildEngine(EngineSpec("embedded", tmp_path, str(DEMO_MODEL_DIR), "demo"))
    with pytest.raises(BackendRefused, match=r"cannot import a package \(.*torch.*pip install"):
        await engine.launch()
    await engine.close()
