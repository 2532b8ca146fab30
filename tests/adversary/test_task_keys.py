"""Attacks with task keys, and on the tasks of other clients, on a real proxy with a key file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm_adapters.protocol.keys import fingerprint
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = pytest.mark.slow

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
SLOW: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "[[say one two three]] [[slow 0.5]]"}],
    "stream": True,
}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def start_proxy(processes: Processes, config: str) -> Process:
    """Start a proxy that has the keys of KEYS and these lines of configuration."""
    (processes.folder / "keys").write_text("".join(f"{key}\n" for key in KEYS.values()))
    file = processes.folder / "fakevllm.toml"
    file.write_text(config)
    hooks = write_hooks(processes.folder / "hooks", PREFER_YES)
    flags = ("--config", str(file), "--key-file", str(processes.folder / "keys"))
    server = processes.server("--backend", "fake")
    return processes.proxy(server, "--hooks", str(hooks), "--n", "2", *flags)


def post(proxy: Process, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
    bearer = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{proxy.url}{path}", json=body, headers=bearer, timeout=30)


def register(proxy: Process, key: str, task_id: str, **metadata: str) -> httpx.Response:
    task = {"task_id": task_id, "main_query": "hi", "metadata": metadata}
    return post(proxy, "/fakevllm/tasks", key, {"tasks": [task]})


def column(proxy: Process, query: str) -> list[Any]:
    return [value for (value,) in rows(proxy, query)]


def test_the_task_keys_of_a_revoked_key_are_refused_also_after_a_restart(
    processes: Processes,
) -> None:
    proxy = start_proxy(processes, "")
    (task_key,) = register(proxy, KEYS["alice"], "t1").json()["keys"]
    chat = "/v1/chat/completions"
    assert post(proxy, chat, task_key, CHAT).status_code == 200
    assert wait_for_groups(proxy, 1)[0]["task_id"] == "t1"
    (processes.folder / "keys").write_text(f"{KEYS['bob']}\n")
    wait_until(lambda: post(proxy, chat, task_key, CHAT).status_code == 401, 10, proxy.name)
    assert "error" in post(proxy, chat, task_key, CHAT).json()
    proxy.stop()
    proxy.start()
    proxy.wait_until_healthy()
    assert post(proxy, chat, task_key, CHAT).status_code == 401
    assert post(proxy, chat, KEYS["bob"], CHAT).status_code == 200


def test_a_task_key_shares_the_limit_and_the_skip_rules_of_its_key(processes: Processes) -> None:
    rule = f'[[policy.skip]]\nname = "alices"\nkey = "{fingerprint(KEYS["alice"])}"\n'
    proxy = start_proxy(processes, f"[limits]\nnum_open_per_key = 1\n{rule}")
    (task_key,) = register(proxy, KEYS["alice"], "t1").json()["keys"]
    chat = "/v1/chat/completions"
    bearer = {"Authorization": f"Bearer {KEYS['alice']}"}
    with httpx.stream("POST", f"{proxy.url}{chat}", json=SLOW, headers=bearer, timeout=30) as open_:
        refused = post(proxy, chat, task_key, CHAT)
        assert (
            refused.status_code == 429 and "1 requests open" in refused.json()["error"]["message"]
        )
        assert post(proxy, chat, KEYS["bob"], CHAT).status_code == 200
        open_.read()
    wait_until(lambda: post(proxy, chat, task_key, CHAT).status_code == 200, 10, proxy.name)
    wait_for_groups(proxy, 1)
    query = "SELECT DISTINCT reason FROM groups WHERE task_id = 't1'"
    wait_until(lambda: column(proxy, query) == ["skip_rule: alices"], 10, proxy.name)


def test_a_client_that_registers_the_task_of_another_client_gets_409(processes: Processes) -> None:
    proxy = start_proxy(processes, "")
    (task_key,) = register(proxy, KEYS["alice"], "t1", answer="4").json()["keys"]
    with ThreadPoolExecutor() as threads:
        attempts = [
            threads.submit(register, proxy, KEYS["bob"], "t1", answer="5") for _ in range(4)
        ]
        replies = [attempt.result() for attempt in attempts]
    assert [reply.status_code for reply in replies] == [409] * 4
    assert replies[0].json()["error"]["code"] == 409
    query = "SELECT metadata_json FROM tasks"
    assert column(proxy, query) == ['{"answer":"4"}']
    assert register(proxy, KEYS["alice"], "t1", answer="four").json()["keys"] == [task_key]
    assert column(proxy, query) == ['{"answer":"four"}']
