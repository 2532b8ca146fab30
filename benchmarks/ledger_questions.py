"""Measure how long questions to the ledger take, in small and in large ledgers.

    python -m benchmarks.ledger_questions [--groups 1000 100000 1000000] [--write]

Each ledger has the groups of one run, with two siblings in each group, eight groups in each step
and ten groups in each session. The rows are inserted with SQL. A proxy is started on each ledger.
In each round, the commands `fakevllm status` and `fakevllm sessions` and the route
`/fakevllm/stats` are measured on every ledger. The floor is the time of a Python process that
parses a status and does nothing else.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import httpx
from sqlalchemy import create_engine

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm.ledger.migrations import fill_counters, fill_token_counters
from fakevllm.ledger.store import Ledger
from tests.e2e.processes import Process, Processes

TITLE = "ledger_questions"
RUN_ID = "run"
"""Training run of all groups."""
GROUPS_PER_STEP = 8
GROUPS_PER_SESSION = 10
ROUNDS = 9
GOAL_S = 0.3
HEADER = (
    "groups",
    "ledger MB",
    "counting a ledger of 0.4.0, s",
    "`fakevllm status`, s",
    "`fakevllm sessions`, s",
    "statistics with the ends of the curve, ms",
    "statistics with the whole curve, ms",
)

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1)"
_GROUPS = f"""
    {_NUMBERS} INSERT INTO group_rows (group_id, received_at, route, model, streamed, request_json,
        question, num_siblings, status, latency_s, served_index, best_index, state, reason,
        hook_hash, step, trained_step, session_id, kind, evidence, turn, run_id, job_hash, app_key)
    SELECT printf('%032x', i), 1e9 + i, '/v1/chat/completions', 'model', 0,
        '{{"model":"model","messages":[{{"role":"user","content":"question ' || i || '"}}]}}',
        'question ' || i, 2, 200, 0.5, 0, 0,
        CASE i % 10 WHEN 0 THEN 'dropped' ELSE 'trained' END,
        CASE i % 10 WHEN 0 THEN 'stale' END, 'hooks', i / {GROUPS_PER_STEP} + 1,
        CASE i % 10 WHEN 0 THEN NULL ELSE i / {GROUPS_PER_STEP} + 1 END,
        printf('%032x', i / {GROUPS_PER_SESSION}), 'new', 'prefix', 1, '{RUN_ID}', 'job', 'app'
    FROM n
"""
_SIBLINGS = f"""
    {_NUMBERS} INSERT INTO sibling_rows (group_id, "index", served, best, status, text,
        message_json, completion_tokens, reward, trained, advantage)
    SELECT printf('%032x', i / 2), i % 2, i % 2 = 0, i % 2 = 0, 200, 'answer',
        '{{"role":"assistant","content":"answer"}}', 12, (i * 7919 % 100) / 100.0, 1, 0.5
    FROM n
"""
_COUNTERS = (
    *("counters", "step_counters", "step_digests", "step_tokens"),
    *("run_digests", "run_counters", "session_counters"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as started:
        rows, floor_s, status_s = _measure(started, args.groups)
    print_table(HEADER, rows)
    summary = (
        f"Medians of {ROUNDS} rounds. A Python process that imports what `status` imports takes "
        f"{floor_s:.2f} s. The goal for `status` is {GOAL_S} s."
    )
    print(summary)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(HEADER, rows)}\n{summary}")
    if max(status_s) > GOAL_S:
        sys.exit(1)


def _measure(
    started: Processes, sizes: Sequence[int]
) -> tuple[list[tuple[str, ...]], float, list[float]]:
    """Return the rows of the table, the floor in seconds, and the seconds of `status`."""
    server = started.server("--backend", "fake")
    counting_s = [make_ledger(_ledger(started, size), size) for size in sizes]
    proxies = [started.proxy(server, folder=f"proxy-{size}") for size in sizes]
    imports = "import fakevllm.cli.main, fakevllm.cli.status_table, rich.console, rich.table"
    floors: list[float] = []
    times: dict[int, list[list[float]]] = {size: [[], [], [], []] for size in sizes}
    for _ in range(ROUNDS):
        floors.append(_seconds(lambda: _run("-c", imports)))
        for size, proxy in zip(sizes, proxies, strict=True):
            for values, question in zip(times[size], _questions(proxy), strict=True):
                values.append(_seconds(question))
    rows: list[tuple[str, ...]] = []
    for size, counted_s in zip(sizes, counting_s, strict=True):
        status, sessions, ends, whole = map(statistics.median, times[size])
        megabytes = _ledger(started, size).stat().st_size / 1e6
        row = (f"{size:,}", f"{megabytes:.0f}", f"{counted_s:.1f}", f"{status:.2f}")
        rows.append((*row, f"{sessions:.2f}", f"{1000 * ends:.0f}", f"{1000 * whole:.0f}"))
    status_s = [statistics.median(times[size][0]) for size in sizes]
    return rows, statistics.median(floors), status_s


def _ledger(started: Processes, num_groups: int) -> Path:
    return started.folder / f"proxy-{num_groups}" / "ledger.sqlite"


def make_ledger(path: Path, num_groups: int) -> float:
    """Write a ledger. Return the seconds that it took to fill the ledger's counters from its rows.
    A proxy fills the counters at the first start after an update from a version without
    counters."""
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute(_GROUPS, (num_groups,))
        db.execute(_SIBLINGS, (2 * num_groups,))
        for name in _COUNTERS:
            db.execute(f"DELETE FROM {name}")
    engine = create_engine(f"sqlite:///{path}")
    started_at = time.monotonic()
    with engine.begin() as db:
        fill_counters(db)
        fill_token_counters(db)
    seconds = time.monotonic() - started_at
    engine.dispose()
    return seconds


def _questions(proxy: Process) -> tuple[Callable[[], object], ...]:
    folder = str(proxy.folder)
    return (
        lambda: _run("-m", "fakevllm", "status", "--url", proxy.url),
        lambda: _run("-m", "fakevllm", "sessions", "--run-dir", folder),
        lambda: _get(f"{proxy.url}/fakevllm/stats?curve=ends"),
        lambda: _get(f"{proxy.url}/fakevllm/stats"),
    )


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def _get(url: str) -> None:
    httpx.get(url, timeout=60).raise_for_status()


def _seconds(call: Callable[[], object]) -> float:
    started_at = time.monotonic()
    call()
    return time.monotonic() - started_at


if __name__ == "__main__":
    main()
