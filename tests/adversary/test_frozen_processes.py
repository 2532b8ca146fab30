"""SIGSTOP: processes that keep their connections but do nothing.

A frozen server is tested in tests/e2e/test_traffic.py, and an engine that stays frozen in
tests/swarm_server/backends/process/test_child_engine.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fakevllm.hooks.hook_runner import HookWorker
from tests.adversary.stack_processes import (
    LIMIT_S,
    engine_pid,
    freeze,
    hook_pid,
    kill,
    num_running,
    send_until_answered,
)
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import STOP_GRACE_S, Process, Processes, wait_until
from tests.proxy.hooks.hook_calls import reward

FREEZE_S = 1.5
HOOK_TIMEOUT_S = 3.0
HI: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
SLOW: dict[str, Any] = HI | {
    "messages": [{"role": "user", "content": "yes or no? [[slow 0.3]]"}],
}


@contextlib.contextmanager
def frozen(pid: int) -> Generator[None]:
    """Suspend a process until the block ends."""
    freeze(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- the hook process alone


def process_id(worker: HookWorker) -> int:
    process = worker._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    pid = process._process.pid  # pyright: ignore[reportPrivateUsage]
    assert pid is not None
    return pid


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_call_of_a_frozen_hook_process_fails_in_time_and_the_next_one_succeeds(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "hook.py").write_text(PREFER_YES.replace("def", kind, 1))
    worker = HookWorker(tmp_path, 2.0)
    await worker.start()
    freeze(process_id(worker))
    assert (await reward(worker, "yes")).reason == "hook_timeout: 2 s"
    assert (await reward(worker, "yes")).rewards == [1.0]
    await worker.close()


async def test_a_worker_with_a_frozen_process_closes_in_time(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(PREFER_YES)
    worker = HookWorker(tmp_path, 60.0)
    await worker.start()
    pid = process_id(worker)
    freeze(pid)
    start = time.monotonic()
    await worker.close()
    assert time.monotonic() - start < STOP_GRACE_S
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- the whole stack


class Stack:
    def __init__(self, processes: Processes) -> None:
        hooks = write_hooks(processes.folder / "hooks", PREFER_YES)
        config = processes.folder / "fakevllm.toml"
        job = "num_repeat = 2\nbatch_size = 1\nlr = 0.1\nfilter_groups = false\n"
        config.write_text(f"[job]\n{job}[hooks]\ntimeout_s = {HOOK_TIMEOUT_S}\n")
        self.server = processes.server("--backend", "fake")
        arguments = ("--hooks", str(hooks), "--config", str(config))
        self.proxy: Process = processes.proxy(self.server, *arguments)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Processes(tmp_path_factory.mktemp("stack")) as processes:
        yield Stack(processes)


VICTIMS: dict[str, Callable[[Stack], int]] = {
    "server": lambda stack: stack.server.pid,
    "engine": lambda stack: engine_pid(stack.server),
    "proxy": lambda stack: stack.proxy.pid,
    "hook process": lambda stack: hook_pid(stack.proxy),
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_an_app_gets_its_answer_when_a_frozen_process_continues(stack: Stack, victim: str) -> None:
    with ThreadPoolExecutor() as threads:
        app = threads.submit(send_until_answered, stack.proxy, SLOW, f"frozen {victim}")
        wait_until(lambda: num_running(stack.server) > 0, LIMIT_S, "a call at the engine")
        with frozen(VICTIMS[victim](stack)):
            time.sleep(FREEZE_S)
        assert app.result() == [200]


@pytest.mark.slow
def test_an_app_gets_its_answer_when_a_frozen_engine_is_killed(stack: Stack) -> None:
    with ThreadPoolExecutor() as threads:
        pid = engine_pid(stack.server)
        with frozen(pid):
            app = threads.submit(send_until_answered, stack.proxy, HI, "killed engine")
            time.sleep(FREEZE_S)
            kill(pid)
        assert app.result() == [200]
    stack.proxy.wait_until_healthy()


@pytest.mark.slow
def test_with_a_frozen_hook_process_apps_get_answers_and_it_is_replaced(stack: Stack) -> None:
    freeze(hook_pid(stack.proxy))
    for number in range(2):
        assert send_until_answered(stack.proxy, HI, f"frozen hook {number}") == [200]
    query = "SELECT state, reason FROM groups ORDER BY received_at DESC LIMIT 2"
    wanted = [("trained", None), ("dropped", f"hook_timeout: {HOOK_TIMEOUT_S:g} s")]
    wait_until(
        lambda: [tuple(row) for row in rows(stack.proxy, query)] == wanted,
        LIMIT_S,
        lambda: f"{wanted} in the ledger",
    )


@pytest.mark.slow
def test_a_proxy_with_a_frozen_hook_process_stops_in_time(stack: Stack) -> None:
    freeze(hook_pid(stack.proxy))
    assert stack.proxy.stop() == 0
    stack.proxy.start()
    stack.proxy.wait_until_healthy()
