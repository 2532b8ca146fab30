"""Tests that nothing of a redacted text, and nothing of a request that must not be stored, is in
any file of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import ledger_file, rows, wait_for_groups
from tests.e2e.planted_secrets import HOOK, REDACTING, found, secrets, send
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, wait_until

CHAT = "/v1/chat/completions"
NUM_SECRETS = 300


def _config(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.toml").write_text(text)
    return str(folder / "own.toml")


def _ask(process: Process, text: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]} | fields
    return httpx.post(f"{process.url}{CHAT}", json=body, headers=headers, timeout=30)


def _plant(
    processes: Processes, config: Path, num: int, redacting: str = REDACTING
) -> tuple[Process, list[str]]:
    """Send secrets to a new proxy and a new server, also by an agent that calls the server itself.
    Return the proxy and the secrets, after the processes were stopped."""
    hooks = write_hooks(config / "hooks", HOOK)
    server = processes.server("--backend", "fake", "--keep-latest-call")
    proxy = processes.proxy(
        server, "--hooks", str(hooks), "--n", "3", "--config", _config(config, redacting)
    )
    planted = secrets(num, seed=num)
    in_proxy, in_episodes = planted[: num * 4 // 5], planted[num * 4 // 5 :]
    assert send(proxy.url, in_proxy) > num // 2
    _run_episodes(server, in_episodes)
    page = httpx.post(f"{server.url}/replay_latest_llm_call", timeout=10)
    log = {"tag": "t", "message": planted[0]}
    httpx.post(f"{server.url}/push_verbose_log", json=log, timeout=10)
    pages = page.text + httpx.get(f"{server.url}/get_verbose_logs", timeout=10).text
    group = rows(proxy, "select group_id from groups limit 1")[0]["group_id"]
    pages += httpx.get(f"{proxy.url}/fakevllm/groups/{group}", timeout=10).text
    wait_for_groups(proxy, len(in_proxy))
    shown = [secret for secret in planted if secret in pages]
    assert not (shown and redacting), "a page shows a secret"
    proxy.stop()
    server.stop()
    _export(proxy, processes.folder)
    return proxy, planted


def _export(proxy: Process, folder: Path) -> None:
    for name in ("groups", "messages", "preference"):
        target = folder / f"{name}.jsonl"
        command = ["-m", "fakevllm", "export", "--as", name, "--ledger", str(ledger_file(proxy))]
        done = PRELOADED_PYTHON.run([*command, "--to", str(target)], folder, timeout_s=600)
        assert done.returncode == 0, done.stderr
        assert target.stat().st_size


def _claim(http: httpx.Client, timeout_s: int = 60) -> dict[str, Any]:
    """Claim an episode, as soon as the server lets episodes be claimed."""
    body = {"client_uuid": "c", "episode_type": "train", "discard_episode_timeout": timeout_s}
    claim: dict[str, Any] = {}

    def is_claimed() -> bool:
        claim.update(http.post("/claim_episode", json=body).json())
        return bool(claim.get("success"))

    wait_until(is_claimed, 30, "an episode is claimed")
    return claim


def _run_episodes(server: Process, planted: list[str]) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for secret in planted:
            claim = _claim(http)
            uuid = claim["episode_uuid"]
            key = {"Authorization": f"Bearer {claim['openai_api_key']}"}
            body = {"model": "x", "messages": [{"role": "user", "content": f"[[say {secret}]]"}]}
            reply = http.post(f"/e/{uuid}{CHAT}", json=body, headers=key)
            assert secret in reply.text
            output = {"reward": 1.0, "metadata": {"task_id": "t", "answer": secret}}
            end = {"client_uuid": "c", "episode_uuid": uuid, "task_id": "t"}
            http.post("/end_episode", json=end | {"workflow_output": output}).raise_for_status()


def test_no_file_of_a_run_has_a_redacted_secret(processes: Processes, tmp_path: Path) -> None:
    proxy, planted = _plant(processes, tmp_path / "config", NUM_SECRETS)
    assert found(processes.folder, planted) == []
    reasons = {row[0] for row in rows(proxy, "select distinct reason from groups")}
    assert "redacted" in reasons
    assert rows(proxy, "select * from groups where state = 'trained'") == []


def test_the_search_finds_secrets_if_nothing_is_redacted(
    processes: Processes, tmp_path: Path
) -> None:
    _, planted = _plant(processes, tmp_path / "config", 60, redacting="")
    assert len({secret for _, secret in found(processes.folder, planted)}) > 50


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_file_of_a_long_run_has_one_of_ten_thousand_secrets(
    processes: Processes, tmp_path: Path
) -> None:
    _, planted = _plant(processes, tmp_path / "config", 10_000)
    assert found(processes.folder, planted) == []


def test_an_answer_that_is_redacted_has_no_tokens_and_the_others_of_its_group_are_trained(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)
    config = "[job]\nbatch_size = 2\nlr = 0.1\n[privacy.patterns]\nassent = '^yes'\n"
    server = processes.server("--backend", "fake")
    flags = ("--hooks", str(hooks), "--n", "6", "--config", _config(tmp_path / "c", config))
    proxy = processes.proxy(server, *flags)
    answers: set[str] = set()

    def is_trained() -> bool:
        for stream in (False, True):
            reply = _ask(proxy, "well?", stream=stream)
            if not stream:
                answers.add(reply.json()["choices"][0]["message"]["content"][:3])
        return bool(rows(proxy, "select * from groups where state = 'trained'"))

    wait_until(is_trained, 60, "a group with a redacted answer is trained")
    assert "yes" in answers, "apps get the answers as they are"
    wait_for_groups(proxy, 4)
    proxy.stop()
    server.stop()
    calls = rows(
        proxy,
        "select s.text, c.untrainable, c.response_ids, c.prompt_ids, s.trained from siblings s "
        'join calls c on c.group_id = s.group_id and c.sibling = s."index"',
    )
    redacted = [call for call in calls if "redacted" in call["text"]]
    assert redacted
    for call in calls:
        is_redacted = call in redacted
        assert (call["untrainable"] == "redacted") == is_redacted
        assert bool(call["response_ids"]) != is_redacted
        assert bool(call["prompt_ids"]) != is_redacted
        assert not (call["trained"] and is_redacted)
    assert not rows(proxy, "select * from siblings where text like 'yes%'")


def test_the_servers_own_patterns_are_used_by_the_proxy_too(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)
    file = tmp_path / "server.yaml"
    file.write_text("backend: fake\nredact: [email]\nredact-pattern: ['own=K-[0-9]+']\n")
    server = processes.server("--config", str(file))
    config = _config(tmp_path / "c", '[privacy]\nredact = ["card"]\n')
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "2", "--config", config)
    planted = ["ann@mail.example", "K-123", "4111 1111 1111 1111"]
    for secret in planted:
        assert secret in _ask(proxy, f"[[say {secret}]]").text
    wait_for_groups(proxy, 3)
    proxy.stop()
    server.stop()
    assert found(processes.folder, planted) == []


def test_a_running_engine_with_another_job_captures_nothing_for_a_proxy_that_redacts(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)
    server = processes.server("--backend", "fake")
    job = "[job]\nbatch_size = 2\nlr = 0.1\n"
    flags = ("--hooks", str(hooks), "--n", "3", "--config")
    first = processes.proxy(server, *flags, _config(tmp_path / "one", job))
    assert _ask(first, "well?").status_code == 200
    wait_for_groups(first, 1)
    first.stop()
    skip = '[[policy.skip]]\nname = "titles"\nfirst_message = "^title"\n'
    redacting = _config(tmp_path / "two", job + '[privacy]\nredact = ["email"]\n' + skip)
    second = processes.proxy(server, *flags, redacting)
    assert "ann@mail.example" in _ask(second, "[[say ann@mail.example]]").text
    assert _ask(second, "well, then?").status_code == 200
    assert _ask(second, "title of this chat?").status_code == 200
    wait_for_groups(second, 4)
    second.stop()
    server.stop()
    reasons = [
        row["reason"] for row in rows(second, "select reason from groups order by received_at")
    ]
    assert reasons[1:] == ["server_does_not_redact"] * 2 + ["skip_rule: titles"]
    assert second.log.count("server_does_not_redact") == 1
    assert found(processes.folder, ["ann@mail.example"]) == []


def test_a_secret_that_begins_in_the_prompt_and_ends_in_the_answer_is_redacted(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    server = processes.server("--backend", "fake")
    config = _config(tmp_path / "c", REDACTING)
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "2", "--config", config)
    body = {"model": "fake", "prompt": "[[say mail.example now]] ann@", "max_tokens": 40}
    reply = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=20)
    assert "mail.example now" in reply.text
    wait_for_groups(proxy, 1)
    proxy.stop()
    server.stop()
    query = "select s.text, c.untrainable, length(c.response_ids) from siblings s join calls c on "
    stored = rows(proxy, query + 'c.group_id = s.group_id and c.sibling = s."index"')
    assert stored
    assert {tuple(row) for row in stored} == {(" now", "redacted", 0)}


def test_calls_that_are_not_stored_keep_an_episode_claimed(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    body = {"model": "x", "messages": [{"role": "user", "content": "yes?"}]}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for path, request in (
            ("/sync_train_config", {"yaml_as_string": "job: {batch_size: 2}"}),
            ("/start_engine", {}),
        ):
            http.post(path, json=request).raise_for_status()
        claim = _claim(http, timeout_s=4)
        path = f"/e/{claim['episode_uuid']}{CHAT}"
        key = {"Authorization": f"Bearer {claim['openai_api_key']}"}
        for headers in [key | {"X-Fakevllm-Store": "none"}] * 6 + [key]:
            assert http.post(path, json=body, headers=headers).status_code == 200
            time.sleep(1.2)
    server.stop()


def test_nothing_is_stored_of_a_request_that_asks_for_it(
    processes: Processes, tmp_path: Path
) -> None:
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    server = processes.server("--backend", "fake", "--keep-latest-call")
    proxy = processes.proxy(server, "--hooks", str(hooks), "--n", "3")
    planted = secrets(60, seed=1)
    none = {"X-Fakevllm-Store": "none"}
    assert send(proxy.url, planted, headers=none) > 30
    reply = _ask(proxy, "[[say kept]]", headers={"Idempotency-Key": "k"} | none)
    again = _ask(proxy, "[[say kept]]", headers={"Idempotency-Key": "k"} | none)
    assert reply.json()["id"] != again.json()["id"]
    feedback = {"id": reply.json()["id"], "thumbs": "up"}
    refused = httpx.post(f"{proxy.url}/v1/feedback", json=feedback, timeout=10)
    assert refused.status_code == 404
    assert "X-Fakevllm-Store" in refused.text
    assert _ask(proxy, "x", headers={"X-Fakevllm-Store": "some"}).status_code == 400
    response = {"model": "fake", "input": "[[say kept]]"}
    stored = httpx.post(f"{proxy.url}/v1/responses", json=response, headers=none, timeout=10)
    path = f"{proxy.url}/v1/responses/{stored.json()['id']}"
    assert httpx.get(path, timeout=10).status_code == 404
    latest = httpx.post(f"{server.url}/replay_latest_llm_call", timeout=10)
    assert latest.status_code == 404
    assert "fakevllm_requests_total{" in httpx.get(f"{proxy.url}/metrics", timeout=10).text
    assert _ask(proxy, "yes or no?").status_code == 200
    wait_for_groups(proxy, 1)
    proxy.stop()
    server.stop()
    assert len(rows(proxy, "select * from groups")) == 1
    assert found(processes.folder, planted) == []


def test_nothing_is_stored_of_the_requests_of_a_key_that_stores_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    from fakevllm_adapters.protocol.keys import named_key

    lines = [
        named_key("sk-one", "one", "now", stores_nothing=True).line,
        named_key("sk-two", "two", "now").line,
    ]
    (tmp_path / "keys").write_text("\n".join(lines) + "\n")
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--key-file", str(tmp_path / "keys"))
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer sk-{key}"}
        assert _ask(proxy, f"[[say of {key}]]", headers=headers).status_code == 200
    wait_for_groups(proxy, 1)
    proxy.stop()
    server.stop()
    assert {secret for _, secret in found(processes.folder, ["of one", "of two"])} == {"of two"}
