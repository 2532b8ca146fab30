"""Send mixed traffic through a proxy while processes are killed.

    python -m benchmarks.mixed_traffic [--minutes 30] [--opencode COMMAND] [--model FOLDER]

The benchmark checks that every request is answered, that memory does not grow, and that the ledger
is consistent.

These clients use the proxy: the openai package, a plain HTTP client that sends three formats and
cuts some connections, an app that sends side calls, the web chat's users, and opencode. The server
is killed every two to four minutes. The proxy is killed twice. All kills are SIGKILL. The exit code
is 1 if a check fails. The benchmark needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.ledger_checks import (
    Finding,
    check_file,
    check_states,
    check_trained_once,
    is_waiting,
)
from benchmarks.mixed_parts.checks import (
    check_apps,
    check_coding,
    check_memory,
    check_one_group_each,
    check_side_calls,
    read_feedback_samples,
    read_groups,
)
from benchmarks.mixed_parts.clients import (
    MODEL,
    Traffic,
    TrafficLog,
    run_http_client,
    run_openai_client,
)
from benchmarks.mixed_parts.stack import (
    Stack,
    find_remaining_processes,
    start_stack,
    start_web_chat,
)
from benchmarks.mixed_parts.whole_apps import run_opencode_sessions, run_web_chat_users
from benchmarks.opencode_sessions import make_model
from benchmarks.results import conditions, markdown_table, replace_section
from benchmarks.run_log_reader import read_log_entries
from examples.opencode.opencode_command import locate_command
from tests.e2e.processes import Processes

TITLE = "mixed_traffic"
SERVER_KILL_INTERVAL_S = (120.0, 240.0)
"""Range of the time between two kills of the server."""
PROXY_KILLS_AT = (0.15, 0.35)
"""Times at which the proxy is killed, as fractions of the run's duration."""
MEMORY_INTERVAL_S = 5.0
SETTLE_TIMEOUT_S = 120.0


async def run(started: Processes, options: argparse.Namespace) -> tuple[Stack, TrafficLog]:
    """Run the traffic and the kills, and wait until no group waits to be trained."""
    folder = started.folder
    stack = start_stack(started, options.model)
    chat_app = start_web_chat(started, stack.proxy)
    log = TrafficLog()
    seconds = options.minutes * 60
    traffic = Traffic(stack.proxy.url, time.monotonic() + seconds, random.Random(options.seed), log)
    clients = [
        run_openai_client(traffic, "sdk", 3.0),
        run_openai_client(traffic, "side", 8.0),
        run_http_client(traffic, "http", 3.0, 0.0),
        run_http_client(traffic, "cuts", 4.0, 0.7),
        run_web_chat_users(traffic, chat_app.url, chat_app.log_file, 6.0),
    ]
    if options.opencode is not None:
        workspaces = folder / "opencode"
        clients.append(run_opencode_sessions(traffic, options.opencode, workspaces, 40.0))
    memory = asyncio.create_task(record_memory(stack))
    async with asyncio.TaskGroup() as group:
        group.create_task(kill_processes(stack, seconds, random.Random(options.seed)))
        for client in clients:
            group.create_task(client)
    memory.cancel()
    await settle(stack)
    return stack, log


async def kill_processes(stack: Stack, seconds: float, chance: random.Random) -> None:
    """Kill server and proxy at random moments, never both at once, and not in the last 20 s."""
    started = time.monotonic()
    proxy_due = [share * seconds for share in PROXY_KILLS_AT]
    low, high = SERVER_KILL_INTERVAL_S
    if seconds <= 4 * low:  # a short run
        low, high = seconds / 5, seconds / 4
    server_due = chance.uniform(low, high)
    while (passed := time.monotonic() - started) < seconds - 20:
        if proxy_due and passed >= proxy_due[0]:
            proxy_due.pop(0)
            await stack.kill(stack.proxy)
        elif passed >= server_due:
            await stack.kill(stack.server)
            server_due = time.monotonic() - started + chance.uniform(low, high)
        await asyncio.sleep(0.5)


async def record_memory(stack: Stack) -> None:
    """Read the memory of server and proxy regularly until cancelled."""
    while True:
        stack.read_memory()
        await asyncio.sleep(MEMORY_INTERVAL_S)


async def settle(stack: Stack) -> None:
    """Send a few more requests until no group waits to be trained. They are needed because the
    server trains only whole batches."""
    ledger = stack.proxy.folder / "ledger.sqlite"
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    async with httpx.AsyncClient(base_url=stack.proxy.url, timeout=SETTLE_TIMEOUT_S) as http:
        number = 0
        while time.monotonic() < deadline:
            if not any(map(is_waiting, [*read_groups(ledger), *read_feedback_samples(ledger)])):
                return
            text = f"What is filler-{number} plus 5?"
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
            (await http.post("/v1/chat/completions", json=body | {"max_tokens": 16})).read()
            number += 1
            await asyncio.sleep(3.0)


# --- the report


def check_run(stack: Stack, log: TrafficLog) -> list[Finding]:
    """Return the results of all checks."""
    ledger = stack.proxy.folder / "ledger.sqlite"
    groups, samples, kills = read_groups(ledger), read_feedback_samples(ledger), stack.kills
    entries = read_log_entries(stack.server.folder)
    times = {
        name: [f"{kill.healthy_after_s:.0f}" for kill in kills if kill.name == name]
        for name in ("server", "proxy")
    }
    return [
        summarize_traffic(log),
        Finding(
            "server and proxy were killed; ready again after seconds",
            f"{times}",
            all(times.values()),
        ),
        *check_apps(log.requests, log.errors, kills, log.num_turns_given_up),
        check_file(ledger),
        *check_one_group_each(groups, log.requests, kills),
        check_coding(groups),
        check_side_calls(groups),
        *check_states(groups, samples),
        *check_trained_once(entries, [*groups, *samples]),
        *check_memory(stack.memory),
    ]


def summarize_traffic(log: TrafficLog) -> Finding:
    """Return a line for the report, which is not checked: the number of requests of each app, and
    the time of the slowest answer."""
    apps, web = Counter(request.app for request in log.requests), log.web
    slowest = max(
        (one.answered_at - one.started_at for one in log.requests if one.answered_at), default=0.0
    )
    figures = (
        f"{dict(apps)}; {log.num_web_chats} web chats ({web.answers} answers, "
        f"{web.regenerated} regenerated, {web.failed} empty or failed); {log.num_turns} turns of "
        f"opencode, which was started {log.num_opencode_starts} times; slowest answer "
        f"{slowest:.0f} s"
    )
    return Finding("requests that were sent", figures, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the run")
    parser.add_argument(
        "--opencode",
        default=shutil.which("opencode"),
        type=locate_command,
        help="command of opencode",
    )
    parser.add_argument("--model", type=Path, help="folder of agent-tiny, if it exists")
    parser.add_argument("--seed", type=int, default=0, help="seed of traffic and kills")
    parser.add_argument("--keep", type=Path, help="run in this new folder, and keep it")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    text = conditions()
    left_out = (
        "" if options.opencode else "opencode was left out, because its command was not found.\n"
    )
    print(left_out, end="")
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        options.model = choose_model(options, folder.absolute())
        with Processes(folder.absolute()) as started, contextlib.redirect_stdout(io.StringIO()):
            stack, log = asyncio.run(run(started, options))
        remaining = find_remaining_processes(folder.absolute())
        no_process = Finding("no process is left", f"{remaining}", not remaining)
        findings = [*check_run(stack, log), no_process]
    header = ["", "what must hold", "figures"]
    rows = [[one.mark, one.claim, one.figures] for one in findings]
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if options.write:
        replace_section(TITLE, f"{text}\n{markdown_table(header, rows)}\n{left_out}")
    sys.exit(1 if any(one.holds is False for one in findings) else 0)


def choose_model(options: argparse.Namespace, folder: Path) -> str:
    """Return the model to serve.

    The result is the value of `--model`. Without `--model`, the result is agent-tiny, which is
    created with opencode. Without opencode, the result is the demo's model, which cannot use tools.
    """
    if options.model is not None:
        return str(options.model.absolute())
    if options.opencode is None:
        return "demo"
    return str(make_model(folder / "agent-tiny", options.opencode))


if __name__ == "__main__":
    main()
