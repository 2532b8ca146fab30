"""`fakevllm forget` on ledgers and journals of real runs, with and without a running proxy."""

from __future__ import annotations

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
