"""Mixed traffic while processes are killed: every request must be answered, memory stay flat, and
the ledger be consistent.

    python -m benchmarks.mixed_traffic [--minutes 30] [--opencode COMMAND] [--model FOLDER]

The openai package, plain HTTP in three formats with connections that are cut, side calls, the web
chat's users and opencode ask one proxy. The server is killed every two to four minutes and the
proxy twice, both by SIGKILL. Exits with 1 where something does not hold. Linux.
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

from benchmarks.mixed_apps import coding, web_chat
from benchmarks.mixed_checks import (
    Finding,
    check_apps,
    check_coding,
    check_file,
    check_memory,
    check_one_group_each,
    check_side_calls,
    check_states,
    check_trained_once,
    is_waiting,
    read_groups,
    read_samples,
)
from benchmarks.mixed_clients import MODEL, Heard, Traffic, plain, sdk
from benchmarks.mixed_stack import Stack, left_behind, start, start_web_chat
from benchmarks.opencode_sessions import make_model
from benchmarks.results import conditions, markdown_table, replace_section
from benchmarks.run_logs import entries_of
from examples.opencode.recorded import found
from tests.e2e.processes import Processes

TITLE = "mixed_traffic"
KILL_SERVER_S = (120.0, 240.0)
KILL_PROXY_AT = (0.15, 0.35)
"""Shares of the run."""
WEIGH_EVERY_S = 5.0
SETTLE_S = 120.0


async def run(started: Processes, options: argparse.Namespace) -> tuple[Stack, Heard]:
    folder = started.folder
    stack = start(started, options.model)
    chat_app = start_web_chat(started, stack.proxy)
    heard = Heard()
    seconds = options.minutes * 60
    traffic = Traffic(
        stack.proxy.url, time.monotonic() + seconds, random.Random(options.seed), heard
    )
    clients = [
        sdk(traffic, "sdk", 3.0),
        sdk(traffic, "side", 8.0),
        plain(traffic, "http", 3.0, 0.0),
        plain(traffic, "cuts", 4.0, 0.7),
        web_chat(traffic, chat_app.url, chat_app.log_file, 6.0),
    ]
    if options.opencode is not None:
        clients.append(coding(traffic, options.opencode, folder / "opencode", 40.0))
    watch = asyncio.create_task(weighing(stack))
    async with asyncio.TaskGroup() as group:
        group.create_task(killing(stack, seconds, random.Random(options.seed)))
        for client in clients:
            group.create_task(client)
    watch.cancel()
    await settle(stack)
    return stack, heard


async def killing(stack: Stack, seconds: float, chance: random.Random) -> None:
    """Never both at once, and none so late that it would not be back."""
    began = time.monotonic()
    proxy_due = [share * seconds for share in KILL_PROXY_AT]
    low, high = KILL_SERVER_S if seconds > 4 * KILL_SERVER_S[0] else (seconds / 5, seconds / 4)
    server_due = chance.uniform(low, high)
    while (passed := time.monotonic() - began) < seconds - 20:
        if proxy_due and passed >= proxy_due[0]:
            proxy_due.pop(0)
            await stack.kill(stack.proxy)
        elif passed >= server_due:
            await stack.kill(stack.server)
            server_due = time.monotonic() - began + chance.uniform(low, high)
        await asyncio.sleep(0.5)


async def weighing(stack: Stack) -> None:
    while True:
        stack.weigh()
        await asyncio.sleep(WEIGH_EVERY_S)


async def settle(stack: Stack) -> None:
    """Groups wait in the pool for a whole batch: a few more are asked for until none waits."""
    ledger = stack.proxy.folder / "ledger.sqlite"
    deadline = time.monotonic() + SETTLE_S
    async with httpx.AsyncClient(base_url=stack.proxy.url, timeout=SETTLE_S) as http:
        number = 0
        while time.monotonic() < deadline:
            if not any(map(is_waiting, [*read_groups(ledger), *read_samples(ledger)])):
                return
            text = f"What is filler-{number} plus 5?"
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
            (await http.post("/v1/chat/completions", json=body | {"max_tokens": 16})).read()
            number += 1
            await asyncio.sleep(3.0)


# --- the report


def findings(stack: Stack, heard: Heard) -> list[Finding]:
    ledger = stack.proxy.folder / "ledger.sqlite"
    groups, samples, kills = read_groups(ledger), read_samples(ledger), stack.kills
    entries = entries_of(stack.server.folder)
    times = {
        name: [f"{kill.healthy_after_s:.0f}" for kill in kills if kill.name == name]
        for name in ("server", "proxy")
    }
    return [
        what_was_asked(heard),
        Finding("both were killed, and back after seconds", f"{times}", all(times.values())),
        *check_apps(heard.asked, heard.troubles, kills, heard.num_turns_given_up),
        check_file(ledger),
        *check_one_group_each(groups, heard.asked, kills),
        check_coding(groups),
        check_side_calls(groups),
        *check_states(groups, samples),
        *check_trained_once(entries, [*groups, *samples]),
        *check_memory(stack.weights),
    ]


def what_was_asked(heard: Heard) -> Finding:
    apps, web = Counter(one.app for one in heard.asked), heard.web
    slowest = max((one.ended - one.began for one in heard.asked if one.ended), default=0.0)
    told = f"{dict(apps)}; {heard.num_web_chats} web chats ({web.answers} answers, "
    told += f"{web.regenerated} regenerated, {web.failed} empty or failed); {heard.num_turns} "
    told += f"turns of opencode, which was started {heard.num_opencodes} times; slowest "
    told += f"{slowest:.0f} s"
    return Finding("what was asked", told, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--opencode", default=shutil.which("opencode"), type=found, help="its command"
    )
    parser.add_argument("--model", type=Path, help="agent-tiny, where it is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run in this new folder, and leave it")
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    options = parser.parse_args()
    told = conditions()
    left_out = "" if options.opencode else "opencode was left out: its command was not found.\n"
    print(left_out, end="")
    with tempfile.TemporaryDirectory(prefix="fakevllm-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        options.model = model_of(options, folder.absolute())
        with Processes(folder.absolute()) as started, contextlib.redirect_stdout(io.StringIO()):
            stack, heard = asyncio.run(run(started, options))
        left = left_behind(folder.absolute())
        results = [*findings(stack, heard), Finding("no process is left", f"{left}", not left)]
    header = ["", "what must hold", "figures"]
    rows = [[one.mark, one.what, one.told] for one in results]
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if options.write:
        replace_section(TITLE, f"{told}\n{markdown_table(header, rows)}\n{left_out}")
    sys.exit(1 if any(one.is_good is False for one in results) else 0)


def model_of(options: argparse.Namespace, folder: Path) -> str:
    """agent-tiny where opencode is there to make it; else the demo's, which knows no tools."""
    if options.model is not None:
        return str(options.model.absolute())
    if options.opencode is None:
        return "demo"
    return str(make_model(folder / "agent-tiny", options.opencode))


if __name__ == "__main__":
    main()
