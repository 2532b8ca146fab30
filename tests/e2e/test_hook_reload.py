"""Hooks are edited while 50 clients use the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.hooks.loader import content_hash
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_feedback import chat, send_feedback, start_stack
from tests.e2e.test_trouble import ask

NUM_CLIENTS = 50
PAUSE_S = 0.3
"""Seconds that a client waits between two requests. The machine of the tests may be small."""
VERSION = """
import asyncio

def on_user_submit_new_requests(request_id, task):
    return {num}

async def on_compute_relative_reward(valid_results, all_answers):
    await asyncio.sleep(0.05)
    return [{base} + float((one["content"] or "").startswith("yes")) for one in all_answers]
"""
OLD, NEW = VERSION.format(num=2, base=100), VERSION.format(num=3, base=200)
SETTINGS = "[job]\nbatch_size = 8\nlr = 0.0001\n[hooks.reload]\nmax_s = {max_s}\n"
REWARD = "async def on_compute_relative_reward(valid_results, all_answers):\n    "
BROKEN = {
    "def (\n": "fix the syntax",
    "import no_such_module\n" + NEW: "install it beside fakevllm",
    "x = 1\n": "no function `on_compute_relative_reward`",
    "import os\nos._exit(4)\n": "exit code 4",
    "import time\ntime.sleep(600)\n": "loading them took longer than 10 s",
    f"{REWARD}raise KeyError('answer')\n": "hook_raised: KeyError: 'answer'",
    f"import os\n{REWARD}os._exit(3)\n": "hook_crashed",
    f"import asyncio\n{REWARD}await asyncio.sleep(600)\n": "were tried within 10 s",
    f"{REWARD}return [7.0 for _ in all_answers]\n": "lose their signal",
    NEW.replace("return 3", "return 0"): "hook_value: got 0",
}
"""Hook files that the proxy must refuse, each with a part of the expected reason."""


@dataclass
class Clients:
    """The answers and errors that the clients received."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    latest_s: float = 0.0
    """Longest time that a request took."""


def write(folder: Path, text: str) -> str:
    """Write the only hook file as an editor does, and return its digest."""
    folder.mkdir(exist_ok=True)
    (folder / "hook.py.new").write_text(text)
    (folder / "hook.py.new").replace(folder / "hook.py")
    return content_hash(folder)


@contextlib.contextmanager
def asking(proxy: Process) -> Generator[Clients]:
    """Let 50 clients ask until the end of the block."""
    clients, is_over = Clients(), threading.Event()

    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": f"Yes or no? {number}"}]}
        loop = asyncio.get_running_loop()
        while not is_over.is_set():
            began = loop.time()
            reply = await http.post(f"{proxy.url}/v1/chat/completions", json=body)
            clients.statuses[reply.status_code] += 1
            clients.latest_s = max(clients.latest_s, loop.time() - began)
            await asyncio.sleep(PAUSE_S)

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(limits=limits, timeout=60) as http:
            await asyncio.gather(*(one(http, number) for number in range(NUM_CLIENTS)))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, all_clients())
        try:
            yield clients
        finally:
            is_over.set()
        running.result(timeout=120)


def stats(proxy: Process) -> dict[str, Any]:
    return httpx.get(f"{proxy.url}/fakevllm/stats", timeout=30).json()


def reload(proxy: Process) -> tuple[int, str]:
    words = ["-m", "fakevllm", "hooks", "reload", "--url", proxy.url]
    done = PRELOADED_PYTHON.run(words, proxy.folder)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def start(processes: Processes, hooks: Path, *flags: str, max_s: float = 60.0) -> Process:
    file = processes.folder / "fakevllm.toml"
    file.write_text(SETTINGS.format(max_s=max_s))
    server = processes.server("--backend", "fake")
    arguments = ("--config", str(file), "--hooks", str(hooks), *flags)
    return processes.proxy(server, *arguments)


def check_groups(proxy: Process, num: int, bases: dict[str, tuple[int, int]]) -> Counter[str]:
    """Check that the number of siblings and the rewards of each group are those of the hook version
    that the group's row names. `bases` has the number of siblings and the lowest reward of each
    version."""
    groups = wait_for_groups(proxy, num, states="pooled trained dropped")
    rewards: dict[str, list[float]] = {}
    for row in rows(proxy, "SELECT group_id, reward FROM siblings"):
        rewards.setdefault(row["group_id"], []).append(row["reward"])
    assert len(groups) == num
    for group in groups:
        num_siblings, base = bases[group["hook_hash"]]
        assert group["num_siblings"] == num_siblings or group["cut"] is not None
        assert set(rewards[group["group_id"]]) <= {base, base + 1.0}, dict(group)
    return Counter(group["hook_hash"] for group in groups)


def test_no_request_fails_and_no_group_is_scored_by_two_versions_while_a_hook_is_edited(
    processes: Processes,
) -> None:
    folder = processes.folder / "hooks"
    old = write(folder, OLD)
    proxy = start(processes, folder, "--watch-hooks")
    with asking(proxy) as clients:
        wait_until(lambda: clients.statuses.total() > 100, 60, "100 requests")
        new = write(folder, NEW)
        wait_until(lambda: stats(proxy)["hooks"]["digest"] == new, 60, "the new hooks")
        num = clients.statuses.total()
        wait_until(lambda: clients.statuses.total() > num + 100, 60, "100 more requests")
        wait_until(lambda: stats(proxy)["hooks"]["num_versions"] == 1, 60, "the old hooks to end")
        write(folder, "def (\n")
        wait_until(lambda: "fix the syntax" in last_message(proxy), 60, "the refusal")
        back = write(folder, OLD)
        wait_until(lambda: stats(proxy)["hooks"]["digest"] == back, 60, "the old hooks again")
    assert set(clients.statuses) == {200}
    num_of = check_groups(proxy, clients.statuses.total(), {old: (2, 100), new: (3, 200)})
    assert num_of[old] > 50 and num_of[new] > 50
    assert f"The new hooks {new} took over from {old}: tried on 50 groups." in proxy.log
    assert "several siblings share the highest reward in" in proxy.log
    steps = [set(step["hooks"]) for step in stats(proxy)["curve"]]
    assert {old} in steps and {new} in steps  # as the server reports them


def last_message(proxy: Process) -> str:
    return stats(proxy)["hooks"]["last_reload"]["message"]


def test_a_broken_edit_changes_nothing_for_apps(processes: Processes) -> None:
    folder = processes.folder / "hooks"
    old = write(folder, OLD)
    proxy = start(processes, folder, max_s=10.0)
    with asking(proxy) as clients:
        wait_until(lambda: clients.statuses.total() > 150, 60, "150 requests")
        for text, reason in BROKEN.items():
            write(folder, text)
            code, output = reload(proxy)
            assert code == 1 and reason in output, (text, output)
            assert f"were not taken over, and the hooks {old} stay in use" in output
            assert output.splitlines()[0] in proxy.log
        write(folder, OLD + "# edited\n")
        code, output = reload(proxy)
        assert code == 0 and "took over" in output, output
        assert reload(proxy)[1].startswith("The hook files did not change")
    assert set(clients.statuses) == {200}
    bases = {old: (2, 100), content_hash(folder): (2, 100)}
    check_groups(proxy, clients.statuses.total(), bases)
    assert clients.latest_s < 20
    assert f"hook process {old} ended" not in proxy.log


@pytest.mark.parametrize("num_groups", [0, 3])
def test_hooks_take_over_and_say_on_how_few_groups_they_were_tried(
    processes: Processes, num_groups: int
) -> None:
    folder = processes.folder / "hooks"
    old = write(folder, OLD)
    proxy = start(processes, folder)
    for _ in range(num_groups):
        ask(proxy)
    wait_for_groups(proxy, num_groups, states="pooled trained dropped")
    new = write(folder, NEW)
    expected = f"The new hooks {new} took over from {old}: tried on {num_groups} groups."
    code, output = reload(proxy)
    assert code == 0 and output.startswith(expected), output
    ask(proxy)
    check_groups(proxy, num_groups + 1, {old: (2, 100), new: (3, 200)})
    status = PRELOADED_PYTHON.run(["-m", "fakevllm", "status", "--url", proxy.url], proxy.folder)
    assert f"{new} since 20" in status.stdout


def test_a_crash_after_an_edit_starts_the_hooks_that_the_proxy_has_loaded(
    processes: Processes,
) -> None:
    folder = processes.folder / "hooks"
    dies = OLD.replace("    await asyncio.sleep(0.05)", "    die_once()")
    flag = processes.folder / "died"
    dies += f"""
import os, pathlib
def die_once():
    flag = pathlib.Path({str(flag)!r})
    if not flag.exists():
        flag.touch()
        os._exit(1)
"""
    digest = write(folder, dies)
    proxy = start(processes, folder)
    write(folder, "def (\n")
    for _ in range(3):
        ask(proxy)
    groups = wait_for_groups(proxy, 3)
    assert [group["hook_hash"] for group in groups] == [digest] * 3
    assert [group["state"] for group in groups].count("dropped") >= 1
    scored = rows(proxy, "SELECT COUNT(*) FROM siblings WHERE reward >= 100")[0][0]
    assert scored == 4


def test_feedback_in_the_window_is_valued_by_the_hooks_that_scored_the_group(
    processes: Processes, tmp_path: Path
) -> None:
    def write_hook(value: int) -> str:
        text = f"def on_feedback(feedback):\n    return {value}\n"
        (tmp_path / "hooks" / "on_feedback.py").write_text(text)
        return content_hash(tmp_path / "hooks")

    _, proxy = start_stack(
        processes, tmp_path, window_s=600, hook="def on_feedback(feedback):\n    return 10\n"
    )
    old = content_hash(tmp_path / "hooks")
    first = chat(proxy, "first")
    new = write_hook(20)
    assert reload(proxy)[0] == 0
    second = chat(proxy, "second")
    wait_for_groups(proxy, 2, states="scored")
    assert stats(proxy)["hooks"]["num_versions"] == 2
    for answer in (second, first):
        assert send_feedback(proxy, id=answer["id"], thumbs="up").status_code == 200
    wait_for_groups(proxy, 2, states="pooled trained dropped")
    added = rows(
        proxy,
        "SELECT f.hook_hash, f.value, g.hook_hash AS scored_by FROM feedback AS f "
        "JOIN groups AS g USING (group_id) ORDER BY f.value",
    )
    assert [tuple(row) for row in added] == [(old, 10.0, old), (new, 20.0, new)]
    wait_until(lambda: stats(proxy)["hooks"]["num_versions"] == 1, 20, "the old hooks to end")


def test_a_proxy_without_hooks_says_so(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server)
    words = ["-m", "fakevllm", "hooks", "reload", "--url", proxy.url]
    done = PRELOADED_PYTHON.run(words, proxy.folder)
    assert done.returncode == 2 and "The proxy has no hooks: start it" in done.stderr
    words = ["-m", "fakevllm", "serve", "--watch-hooks", "--port", "0"]
    done = PRELOADED_PYTHON.run([*words, "--run-dir", "other"], proxy.folder)
    assert done.returncode == 2 and "--watch-hooks) needs hooks" in done.stderr


def test_a_stop_of_the_proxy_ends_a_reload_with_a_clear_error(processes: Processes) -> None:
    folder = processes.folder / "hooks"
    write(folder, OLD)
    proxy = start(processes, folder)
    begun = processes.folder / "begun"
    write(folder, f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n")
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(httpx.post, f"{proxy.url}/fakevllm/hooks/reload", timeout=60)
        wait_until(begun.exists, 30, "the reload")
        proxy.stop()
        reply = call.result(timeout=60)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "The proxy is stopping."
    assert "Traceback" not in proxy.log and "ERROR" not in proxy.log
