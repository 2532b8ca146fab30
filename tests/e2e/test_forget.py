"""`fakevllm forget` on ledgers and journals of real runs, with and without a running proxy."""

from __future__ import annotations

import re
import sqlite3
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from fakevllm_server.journal.compression import decompress_numbers
from tests.e2e.ledgers import ledger_file, rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, wait_until

SYSTEM = "You answer with yes or no. " * 60
SECRET, KEPT = "Zanzibar-4711", "Timbuktu-0815"


def ask(proxy: Process, *texts: str, key: str = "app") -> None:
    """Have a conversation of one turn per text."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for text in texts:
        messages.append({"role": "user", "content": text})
        reply = httpx.post(
            f"{proxy.url}/v1/chat/completions",
            json={"model": "fake", "messages": messages},
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])


def new_key(folder: Path, name: str) -> str:
    """Add a key to the key file `keys`, and return it."""
    command = ["-m", "fakevllm", "keys", "add", name, "--key-file", str(folder / "keys")]
    done = PRELOADED_PYTHON.run(command, folder)
    assert done.returncode == 0, done.stderr
    return next(word for word in done.stdout.split() if word.startswith("sk-"))


def forget(folder: Path, proxy: Process, server: Process, *arguments: str) -> Any:
    command = ["-m", "fakevllm", "forget", "--ledger", str(ledger_file(proxy))]
    where = ["--url", proxy.url, "--swarm", server.url]
    return PRELOADED_PYTHON.run([*command, *where, *arguments], folder)


def session_of(proxy: Process, text: str) -> str:
    found = rows(proxy, f"SELECT session_id FROM groups WHERE question LIKE '%{text}%'")
    return found[0]["session_id"]


def files(*processes: Process) -> Iterator[tuple[Path, bytes]]:
    """Yield the databases of the processes, with their write-ahead logs."""
    for process in processes:
        for file in process.folder.rglob("*.sqlite*"):
            yield file, file.read_bytes()


def decoded(*processes: Process) -> str:
    """Return all stored token ids as text. The fake engine's ids are the numbers of characters."""
    parts: list[bytes] = []
    for process in processes:
        for file in process.folder.rglob("*.sqlite"):
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
                is_journal = file.name == "journal.sqlite"
                table = "calls" if is_journal else "call_rows"
                raw = [data for (data,) in db.execute("SELECT data FROM pieces")]
                for row in db.execute(f"SELECT prompt_ids, response_ids FROM {table}"):
                    raw.extend(row)
                parts += [decompress_numbers(one) if is_journal and one else one for one in raw]
    return "".join(
        chr(number)
        for part in parts
        for number in array("i", part[: len(part) // 4 * 4])
        if 0 < number < 0x110000
    )


def assert_gone(text: str, *processes: Process) -> None:
    for file, data in files(*processes):
        assert text.encode() not in data, file
        assert array("i", map(ord, text)).tobytes() not in data, file
    assert text not in decoded(*processes)


def test_a_running_proxy_forgets_a_session_and_serves_meanwhile(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    ask(proxy, f"Is it {SECRET}?", f"Is {SECRET} far? " + "x" * 600)
    ask(proxy, f"Is it {KEPT}?", f"Is {KEPT} far? " + "x" * 600)
    wait_for_groups(proxy, 4, states="pooled trained dropped")
    kept = session_of(proxy, KEPT)
    query = f"SELECT group_id, request_json, question FROM groups WHERE session_id = '{kept}'"
    before = [tuple(row) for row in rows(proxy, query)]
    calls = "SELECT c.* FROM calls AS c JOIN groups USING (group_id) WHERE session_id = '{}'"
    calls_before = [tuple(row) for row in rows(proxy, calls.format(kept))]
    assert SECRET in decoded(proxy) and KEPT in decoded(proxy)

    num_answered, is_over = 4, threading.Event()

    def keep_asking(number: int) -> None:
        nonlocal num_answered
        while not is_over.is_set():
            ask(proxy, f"Another question of {number}?")
            num_answered += 1

    with ThreadPoolExecutor(4) as apps:
        asking = [apps.submit(keep_asking, number) for number in range(4)]
        try:
            done = forget(tmp_path, proxy, server, "--session", session_of(proxy, SECRET))
        finally:
            is_over.set()
        for one in asking:
            one.result(timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 groups were forgotten" in done.stdout
    wait_for_groups(proxy, num_answered, states="pooled trained dropped")
    assert_gone(SECRET, proxy, server)
    assert [tuple(row) for row in rows(proxy, query)] == before
    assert [tuple(row) for row in rows(proxy, calls.format(kept))] == calls_before
    assert KEPT in decoded(proxy)
    assert len(rows(proxy, "SELECT reward FROM siblings WHERE reward IS NOT NULL")) > 8

    again = forget(tmp_path, proxy, server, "--session", kept)
    assert again.returncode == 0, again.stderr
    assert_gone(KEPT, proxy, server)


def test_an_answer_with_a_redacted_id_is_forgotten_and_a_retry_does_not_get_it(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    own_id = "ann@mail.example"
    settings = tmp_path / "own.toml"
    settings.write_text('[privacy]\nredact = ["email"]\n')
    server = processes.server("--backend", "fake")
    flags = ("--hooks", str(yes_hooks), "--n", "2", "--config", str(settings))
    proxy = processes.proxy(server, *flags)

    def group_of_answer() -> str:
        reply = httpx.post(
            f"{proxy.url}/v1/chat/completions",
            json={"model": "fake", "messages": [{"role": "user", "content": f"{SECRET}?"}]},
            headers={"X-Request-Id": own_id, "Idempotency-Key": "k"},
            timeout=60,
        )
        assert own_id in reply.json()["id"]
        return reply.headers["x-fakevllm-group"]

    first = group_of_answer()
    assert group_of_answer() == first
    wait_for_groups(proxy, 1, states="pooled trained dropped")
    assert_gone(own_id, proxy, server)
    done = forget(tmp_path, proxy, server, "--id", f"chatcmpl-{own_id}")
    assert done.returncode == 0, done.stderr
    assert "1 group was forgotten" in done.stdout
    assert_gone(SECRET, proxy, server)
    assert group_of_answer() != first


def test_a_stopped_proxy_leaves_no_byte_and_the_server_is_asked_later(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    ask(proxy, f"Is it {SECRET}?")
    ask(proxy, f"Is it {KEPT}?")
    wait_for_groups(proxy, 2, states="pooled trained dropped")
    group_id = rows(proxy, f"SELECT group_id FROM groups WHERE question LIKE '%{SECRET}%'")[0][0]
    proxy.stop()
    server.kill()

    done = forget(tmp_path, proxy, server, "--id", group_id)
    assert done.returncode == 1
    assert "out of reach" in done.stderr and "1 group" in done.stderr
    assert_gone(SECRET, proxy)

    server.start()
    server.wait_until_healthy()
    proxy.start()
    proxy.wait_until_healthy()
    unsent = "SELECT COUNT(*) FROM forgotten_groups WHERE NOT is_sent"
    wait_until(lambda: rows(proxy, unsent)[0][0] == 0, 60, lambda: proxy.log)
    assert_gone(SECRET, proxy, server)


def test_a_user_who_names_nothing_or_something_unknown_reads_one_line(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")
    ask(proxy, "Is it 1?")
    for arguments, message in (
        ((), "Name what to forget"),
        (("--session", "none"), "No session id begins with"),
        (("--id", "none"), "has no request"),
        (("--key", "none"), "has no request"),
    ):
        done = forget(tmp_path, proxy, server, *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_key_is_forgotten_by_its_name_and_its_answers_cannot_be_used_any_more(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    alice, bob = new_key(tmp_path, "alice"), new_key(tmp_path, "bob")
    server = processes.server("--backend", "fake")
    keys = ("--key-file", str(tmp_path / "keys"))
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2", *keys)

    def send(method: str, path: str, key: str = alice, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        json = body or None
        return httpx.request(method, proxy.url + path, json=json, headers=headers, timeout=60)

    said = send("POST", "/v1/responses", model="fake", input=f"Is it {SECRET}?").json()
    other = send("POST", "/v1/responses", bob, model="fake", input=f"Is it {KEPT}?").json()
    comment = f"{SECRET} is wrong"
    send("POST", "/v1/feedback", id=said["id"], thumbs="down", comment=comment).raise_for_status()
    wait_for_groups(proxy, 2, states="pooled trained dropped")
    (group_id,) = rows(proxy, f"SELECT group_id FROM groups WHERE question LIKE '%{SECRET}%'")[0]
    assert send("GET", f"/v1/responses/{said['id']}").status_code == 200

    arguments = ("--key", "alice", "--key-file", str(tmp_path / "keys"), "--proxy-key", bob)
    done = forget(tmp_path, proxy, server, *arguments)
    assert done.returncode == 0, done.stderr
    assert "1 group was forgotten" in done.stdout
    assert_gone(SECRET, proxy, server)
    assert send("GET", f"/v1/responses/{said['id']}").status_code == 404
    follow_up = {"model": "fake", "input": "And now?", "previous_response_id": said["id"]}
    assert send("POST", "/v1/responses", **follow_up).status_code == 404
    for name in (said["id"], group_id):
        assert send("POST", "/v1/feedback", id=name, comment=comment).status_code == 404
    assert_gone(SECRET, proxy, server)
    assert send("GET", f"/v1/responses/{other['id']}", bob).status_code == 200
    stats = send("GET", "/fakevllm/stats", bob).json()
    assert (stats["privacy"]["forgotten"], stats["privacy"]["unsent"]) == (1, 0)


def test_a_server_that_is_killed_after_it_forgot_a_trained_group_trains_it_no_more(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    job = tmp_path / "proxy.toml"
    job.write_text("[job]\nbatch_size = 1\nlr = 0.1\nsave_freq = 1000\n")
    server = processes.server("--backend", "fake")
    flags = ("--hooks", str(yes_hooks), "--n", "4", "--config", str(job))
    proxy = processes.proxy(server, *flags)
    trained: list[Any] = []
    while not trained:
        ask(proxy, f"Is it {SECRET}?")
        wait_for_groups(proxy, 1, states="pooled trained dropped")
        trained = rows(proxy, "SELECT * FROM groups WHERE state = 'trained'")
    group_id, version = trained[0]["group_id"], trained[0]["trained_version"]

    done = forget(tmp_path, proxy, server, "--id", group_id)
    assert done.returncode == 0, done.stderr
    assert "saved a checkpoint first" in done.stdout
    assert f"): {version}. Later versions" in done.stdout
    server.kill()
    server.start()
    server.wait_until_healthy()
    ask(proxy, "Is it another?")
    (again,) = rows(proxy, f"SELECT * FROM groups WHERE group_id = '{group_id}'")
    assert (again["state"], again["trained_version"]) == ("trained", version)
    with closing(sqlite3.connect(server.folder / "journal.sqlite")) as db:
        calls = "SELECT COUNT(*) FROM calls WHERE group_id = ?"
        assert db.execute(calls, (group_id,)).fetchone() == (0,)
        entries = "SELECT COUNT(*) FROM entries WHERE kind = 'step' AND entry_json LIKE ?"
        assert db.execute(entries, (f"%{group_id}%",)).fetchone() == (1,)


def test_old_groups_are_pruned_and_the_status_says_so(
    processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "proxy.toml"
    settings.write_text("[job]\nbatch_size = 1\n")
    server = processes.server("--backend", "fake")
    flags = ("--hooks", str(yes_hooks), "--n", "2", "--config", str(settings))
    proxy = processes.proxy(server, *flags)
    for number in range(4):
        ask(proxy, f"Is {number} at {SECRET}?")
    ended = "SELECT COUNT(*) FROM groups WHERE state IN ('trained', 'dropped')"
    wait_until(lambda: rows(proxy, ended)[0][0] == 4, 60, lambda: proxy.log)
    counts = rows(proxy, "SELECT SUM(reward), COUNT(*) FROM siblings")[0]
    proxy.stop()

    settings.write_text("[job]\nbatch_size = 1\n[privacy]\nretention_days = 0.0000001\n")
    proxy = processes.proxy(server, *flags)

    def privacy() -> dict[str, Any]:
        return httpx.get(f"{proxy.url}/fakevllm/stats", timeout=20).json()["privacy"]

    wait_until(lambda: (privacy()["pruned"], privacy()["unsent"]) == (4, 0), 60)
    assert sum(map(int, re.findall(r"pruned (\d+) old group", proxy.log))) == 4
    assert_gone(SECRET, proxy, server)
    assert tuple(rows(proxy, "SELECT SUM(reward), COUNT(*) FROM siblings")[0]) == tuple(counts)
    status = PRELOADED_PYTHON.run(["-m", "fakevllm", "status", "--url", proxy.url], tmp_path)
    assert "4 pruned" in status.stdout
    ask(proxy, "Is it still served?")
