"""Tests of the command lines: a user's mistake is reported in one line, with exit code 2."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from fakevllm_adapters.protocol.keys import fingerprint
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes, wait_until

PROXY = ("-m", "fakevllm")
SERVER = ("-m", "fakevllm_server")
KEYS_TIMEOUT_S = 60.0


def run(folder: Path, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return PRELOADED_PYTHON.run(arguments, folder, timeout_s)


def assert_mistake(done: subprocess.CompletedProcess[str], fix: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert fix in line


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ((*PROXY, "serve", "--port", "0", "--hooks", "nowhere"), "nowhere"),
        ((*PROXY, "serve", "--config", "nowhere.toml"), "nowhere.toml cannot be read"),
        ((*PROXY, "serve", "--host", "0.0.0.0"), "--key-file"),
        ((*PROXY, "serve", "--host", "0.0.0.0"), "fakevllm keys add NAME"),
        ((*PROXY, "serve", "--host", "0.0.0.0", "--key-file", "revoked"), "no valid key"),
        ((*PROXY, "serve", "--key-file", "nowhere"), "nowhere does not exist"),
        ((*PROXY, "keys", "add", "two words"), "a name is 1 to 64 letters"),
        ((*PROXY, "keys", "revoke", "app", "--key-file", "revoked"), "app has no key in revoked"),
        ((*PROXY, "keys", "list", "--config", "nowhere.toml"), "nowhere.toml cannot be read"),
        ((*PROXY, "serve", "--n", "0"), "`--n` (`job.num_repeat`)"),
        ((*PROXY, "serve", "--swarm", "localhost:10086"), "http://HOST:PORT"),
        ((*PROXY, "serve", "--port", "0", "--run-dir", "taken"), "taken"),
        ((*PROXY, "demo", "--backend", "fake", "--run-dir", "taken"), "another --run-dir"),
        ((*PROXY, "demo", "--track", "wand"), "Unknown tracker 'wand': --track takes"),
        ((*PROXY, "replay", "--dataset", "taken", "--url", "localhost:1"), "http://HOST:PORT"),
        ((*PROXY, "replay", "--dataset", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        ((*PROXY, "check-hook", "nowhere"), "nowhere"),
        ((*SERVER, "start", "--model", "nowhere"), "'nowhere' does not exist"),
        ((*SERVER, "start", "--backend", "magic"), "fake, embedded"),
        ((*SERVER, "start", "--backend", "fake", "--host", "0.0.0.0"), "--key-file"),
        ((*SERVER, "start", "--backend", "fake", "--key-file", "revoked"), "has no valid key"),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_its_fix(
    tmp_path: Path, arguments: tuple[str, ...], fix: str
) -> None:
    (tmp_path / "taken").write_text('{"question": "a file in place of a folder"}')
    (tmp_path / "revoked").write_text(f"sha256:{'0' * 64} app 2026-01-01 revoked 2026-01-02\n")
    assert_mistake(run(tmp_path, *arguments), fix)


def test_a_hooks_folder_without_the_reward_function_is_refused_by_name(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "mine.py").write_text("def something_else(): ...\n")
    done = run(tmp_path, *PROXY, "serve", "--port", "0", "--hooks", "hooks")
    assert_mistake(done, "on_compute_relative_reward")


def test_a_bad_toml_key_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "fakevllm.toml").write_text("[proxy]\nprot = 9000\n")
    assert_mistake(run(tmp_path, *PROXY, "serve"), "`proxy.prot`")


@pytest.mark.parametrize(
    "command", [(*PROXY, "serve"), (*SERVER, "start", "--backend", "fake")], ids=["proxy", "server"]
)
def test_a_port_in_use_is_refused_with_the_fix(tmp_path: Path, command: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_mistake(run(tmp_path, *command, "--port", port), "choose another --port")


def test_a_second_proxy_on_a_run_directory_is_refused_and_a_reader_is_not(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    second = (*PROXY, "serve", "--port", "0", "--run-dir", str(proxy.folder))
    assert_mistake(run(processes.folder, *second), "is used by another proxy: choose another")
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="any") as app:
        app.chat.completions.create(model="fake", messages=[{"role": "user", "content": "well?"}])
    wait_for_groups(proxy, 1)
    ledger = str(proxy.folder / "ledger.sqlite")
    read = run(processes.folder, *PROXY, "check-hook", str(yes_hooks), "--ledger", ledger)
    assert read.returncode == 0 and "question: well?" in read.stdout, read.stdout + read.stderr
    assert proxy.kill() < 0
    proxy.start()
    proxy.wait_until_healthy()


def test_the_last_log_line_after_ctrl_c_says_that_the_process_stopped(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks))
    for process in (proxy, server):
        process.signal(signal.SIGINT)
        wait_until(lambda one=process: one.returncode is not None, 20, f"{process.name} to end")
        lines = process.log.splitlines()
        assert "INFO" in lines[-1] and lines[-1].endswith(" stopped"), process.log
        assert sum(line.endswith(" stopped") for line in lines) == 1


def test_check_hook_shows_a_table_and_fails_for_a_hook_that_raises(tmp_path: Path) -> None:
    good = write_hooks(
        tmp_path / "good",
        "def on_compute_relative_reward(results, answers):\n"
        "    return [float(len(answer.get('content') or '')) for answer in answers]\n",
    )
    done = run(tmp_path, *PROXY, "check-hook", str(good))
    assert done.returncode == 0 and "reward" in done.stdout
    bad = write_hooks(
        tmp_path / "bad", "def on_compute_relative_reward(results, answers):\n    1 / 0\n"
    )
    done = run(tmp_path, *PROXY, "check-hook", str(bad))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "on_compute_relative_reward.py:2" in done.stdout


def test_replay_plays_each_row_once_and_continues_where_it_stopped(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    dataset = processes.folder / "rows.jsonl"
    questions = [{"question": f"[[say answer {i}]]", "answer": i} for i in range(6)]
    dataset.write_text("\n".join(map(json.dumps, questions)))
    command = (*PROXY, "replay", "--dataset", str(dataset), "--url", f"{proxy.url}/v1")
    assert run(processes.folder, *command, "--limit", "4").returncode == 0
    done = run(processes.folder, *command)
    assert done.returncode == 0 and "4 rows were finished by an earlier run" in done.stdout
    wait_for_groups(proxy, 6)
    tasks = rows(proxy, "select task_id, count(*) from groups group by task_id")
    assert len(tasks) == 6 and all(count == 1 for _, count in tasks)


def test_commands_find_the_proxy_at_the_configured_address(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    here = processes.folder / "here"
    here.mkdir()
    (here / "rows.jsonl").write_text('{"question": "one"}\n')
    file = here / "fakevllm.toml"
    file.write_text(f'[proxy]\nhost = "0.0.0.0"\nport = {proxy.port}\n')
    replay = ("replay", "--dataset", str(here / "rows.jsonl"), "--fresh")
    for command in (("pause",), ("resume",), ("status",), replay):
        for folder, flags in ((here, ()), (processes.folder, ("--config", str(file)))):
            done = run(folder, *PROXY, *command, *flags)
            assert done.returncode == 0, done.stdout + done.stderr
    assert len(wait_for_groups(proxy, 2)) == 2
    file.write_text("[proxy]\nport = 0\n")
    for command in (("pause",), ("resume",), ("status",), replay):
        assert_mistake(run(here, *PROXY, *command), "proxy.port is 0")
        done = run(here, *PROXY, *command, "--url", f"{proxy.url}/v1")
        assert done.returncode == 0, done.stdout + done.stderr


def test_replay_gives_an_app_the_address_and_the_key_of_its_row(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    app = processes.folder / "app.py"
    app.write_text(
        "import sys, openai\n"
        "with openai.OpenAI() as client:\n"
        "    reply = client.chat.completions.create(\n"
        "        model='fake', messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
        "print(reply.choices[0].message.content)\n"
    )
    dataset = processes.folder / "rows.jsonl"
    dataset.write_text('{"q": "one"}\n{"q": "two"}\n')
    command = [*PROXY, "replay", "--dataset", str(dataset), "--field", "q"]
    command += ["--url", f"{proxy.url}/v1", "--app", f"{sys.executable} {app} {{question}}"]
    done = run(processes.folder, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = wait_for_groups(proxy, 2)
    assert {group["question"] for group in groups} == {"one", "two"}
    assert all(group["task_id"] for group in groups)


def test_a_row_the_model_refuses_is_counted_and_the_others_are_played(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake", "--engine-arg", "--max-model-len=64")
    proxy = processes.proxy(server)
    dataset = processes.folder / "rows.jsonl"
    dataset.write_text(json.dumps({"question": "x" * 100}) + '\n{"question": "short"}\n')
    command = (*PROXY, "replay", "--dataset", str(dataset), "--url", f"{proxy.url}/v1")
    done = run(processes.folder, *command)
    assert done.returncode == 1
    assert "1 failed" in done.stdout and "maximum context length is 64 tokens" in done.stdout
    ends = [(group["state"], group["reason"]) for group in wait_for_groups(proxy, 2)]
    assert sorted(ends) == [("failed", "upstream_400"), ("served", "one_sibling")]


def test_a_key_is_shown_once_listed_by_its_fingerprint_and_revoked_for_good(
    tmp_path: Path,
) -> None:
    (tmp_path / "fakevllm.toml").write_text("[proxy]\nrun_dir = 'run'\n")
    key = run(tmp_path, *PROXY, "keys", "add", "my-app").stdout.strip()
    assert key.startswith("sk-") and len(key.splitlines()) == 1
    assert_mistake(run(tmp_path, *PROXY, "keys", "add", "my-app"), "my-app has a key already")
    listed = run(tmp_path, *PROXY, "keys", "list").stdout
    assert "my-app" in listed and fingerprint(key) in listed and key not in listed
    kept = (tmp_path / "run" / "keys").read_text()
    assert key not in kept and hashlib.sha256(key.encode()).hexdigest() in kept
    assert run(tmp_path, *PROXY, "keys", "add", "other").returncode == 0
    revoked = run(tmp_path, *PROXY, "keys", "revoke", "my-app")
    assert revoked.returncode == 0 and not revoked.stderr
    last = run(tmp_path, *PROXY, "keys", "revoke", "other")
    assert (
        last.returncode == 0 and "This was the last valid key: all apps get 401 now" in last.stderr
    )
    assert "without keys again, delete run/keys" in last.stderr
    assert_mistake(run(tmp_path, *PROXY, "serve", "--port", "0"), "has no valid key")
    again = run(tmp_path, *PROXY, "keys", "add", "my-app")
    assert again.returncode == 0 and again.stdout.strip() != key


def test_a_running_proxy_follows_created_and_revoked_keys(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    flags = ("--run-dir", str(proxy.folder))

    def status(**headers: str) -> int:
        return httpx.get(f"{proxy.url}/v1/models", headers=headers, timeout=30).status_code

    assert status() == 200
    key = run(processes.folder, *PROXY, "keys", "add", "my-app", *flags).stdout.strip()
    wait_until(lambda: status() == 401, KEYS_TIMEOUT_S, "requests without a key to be refused")
    assert status(authorization=f"Bearer {key}") == 200
    assert status(**{"x-api-key": key}) == 200
    assert status(authorization=f"Bearer {key}x") == 401
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=key) as app:
        reply = app.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "?"}]
        )
    assert reply.choices[0].message.content
    (group,) = wait_for_groups(proxy, 1)
    assert group["app_key"] == fingerprint(key)
    assert run(processes.folder, *PROXY, "keys", "revoke", "my-app", *flags).returncode == 0
    wait_until(
        lambda: status(authorization=f"Bearer {key}") == 401, KEYS_TIMEOUT_S, "the key to be ended"
    )
    assert status() == 401
    refused = httpx.get(f"{proxy.url}/v1/models")
    assert refused.content == b'{"error":"Unauthorized"}' and "vary" not in refused.headers
    assert httpx.get(f"{proxy.url}/health").status_code == 200
