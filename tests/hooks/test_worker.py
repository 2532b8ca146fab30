"""The hook process: real processes, real hangs, real crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fakevllm.errors import HookError
from fakevllm.hooks.outcomes import HookFailure, RewardOutcome, SubmitPlan
from fakevllm.hooks.spec import Sibling, Task
from fakevllm.hooks.worker import HookWorker

TASK = Task(task_id="t", metadata={"answer": "42"})

Start = Callable[..., Awaitable[HookWorker]]


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a worker on the given hook text."""
    workers: list[HookWorker] = []

    async def begin(text: str, timeout_s: float = 20.0) -> HookWorker:
        (tmp_path / "hook.py").write_text(text)
        worker = HookWorker(tmp_path, timeout_s)
        workers.append(worker)
        await worker.start()
        return worker

    yield begin
    for worker in workers:
        await worker.close()


async def reward(worker: HookWorker, *contents: str, question: str = "q") -> RewardOutcome:
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": content, "finish_reason": "stop"} for content in contents
    ]
    siblings = [Sibling(i, TASK, f"g/{i}", "stop", {"i": i}) for i in range(len(answers))]
    return await worker.reward(siblings, answers, question)


async def until_exists(path: Path) -> None:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    """A zombie counts as gone: who its parent is depends on the machine's init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while not is_gone(pid):
            await asyncio.sleep(0.01)


SYNC = """
def on_compute_relative_reward(valid_results, all_answers, question):
    for sibling, answer in zip(valid_results, all_answers):
        answer["seen"] = [sibling.index, sibling.task.metadata["answer"], sibling.episode_id,
                          sibling.usage["i"], answer["finish_reason"], question]
    return [len(answer["content"]) for answer in all_answers]
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_hook_gets_siblings_answers_and_question(start: Start, kind: str) -> None:
    worker = await start(SYNC.replace("def", kind, 1))
    outcome = await reward(worker, "a", "bcd", question="why?")
    assert outcome.rewards == [1.0, 3.0]
    assert outcome.reason is None
    assert outcome.annotations[1] == {"seen": [1, "42", "g/1", 1, "stop", "why?"]}
    assert outcome.hook_hash == worker.info.content_hash


async def test_the_two_argument_form_works(start: Start) -> None:
    worker = await start("def on_compute_relative_reward(v, a):\n    return [1, 0]")
    assert (await reward(worker, "a", "b")).rewards == [1.0, 0.0]


async def test_a_sync_hook_may_return_an_awaitable(start: Start) -> None:
    worker = await start("""
import asyncio
async def score():
    await asyncio.sleep(0)
    return [None, 1]
def on_compute_relative_reward(v, a, q):
    return score()
""")
    assert (await reward(worker, "a", "b")).rewards == [None, 1.0]


async def test_the_submit_hook_plans_and_its_absence_keeps_n(start: Start) -> None:
    worker = await start(SYNC)
    assert await worker.submit("r", TASK) == SubmitPlan()
    plan = "[{}, {'seed': int(task.metadata['answer'])}]"
    submit = f"def on_user_submit_new_requests(request_id, task):\n    return {plan}\n"
    worker = await start(SYNC + submit)
    assert worker.info.has_submit
    assert await worker.submit("r", TASK) == SubmitPlan(overrides=[{}, {"seed": 42}])


async def test_a_failing_submit_hook_says_why(start: Start) -> None:
    worker = await start(SYNC + "def on_user_submit_new_requests(r, t):\n    return 0")
    assert await worker.submit("r", TASK) == HookFailure("hook_value: got 0, want at least 1")


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('bad')", "hook_raised: ValueError: bad (hook.py:3)"),
        ("raise SystemExit(3)", "hook_raised: SystemExit: 3 (hook.py:3)"),
        ("raise TimeoutError('mine')", "hook_raised: TimeoutError: mine (hook.py:3)"),
        ("return [1]", "hook_length: got 1, want 2"),
        ("return [1, float('nan')]", "hook_nan: reward 1 is nan"),
        ("return 5", "hook_type: got int, want a list"),
    ],
)
async def test_a_hook_that_fails_gives_no_reward_but_a_reason(
    start: Start, kind: str, body: str, reason: str
) -> None:
    worker = await start(
        f"{kind} on_compute_relative_reward(v, a, q):\n    a[0]['note'] = 'kept'\n    {body}\n"
    )
    outcome = await reward(worker, "a", "b")
    assert outcome.rewards is None
    assert outcome.reason == reason
    assert outcome.annotations == [{"note": "kept"}, {}]


async def test_async_hooks_run_concurrently_and_sync_hooks_one_at_a_time(start: Start) -> None:
    together = """
import asyncio
waiting = 0
everyone = asyncio.Event()
async def on_compute_relative_reward(v, a, q):
    global waiting
    waiting += 1
    if waiting == 5:
        everyone.set()
    await everyone.wait()
    return [1]
"""
    worker = await start(together)
    outcomes = await asyncio.gather(*(reward(worker, "a") for _ in range(5)))
    assert [outcome.rewards for outcome in outcomes] == [[1.0]] * 5
    alone = """
import threading
turn = threading.Lock()
def on_compute_relative_reward(v, a, q):
    assert turn.acquire(blocking=False)
    sum(range(10_000))
    turn.release()
    return [1]
"""
    worker = await start(alone)
    outcomes = await asyncio.gather(*(reward(worker, "a") for _ in range(20)))
    assert [outcome.rewards for outcome in outcomes] == [[1.0]] * 20


async def test_a_late_async_hook_is_cancelled_and_the_process_stays(start: Start) -> None:
    worker = await start(
        """
import asyncio, os
async def on_compute_relative_reward(v, a, q):
    a[0]["pid"] = os.getpid()
    await asyncio.sleep(600 if q == "hang" else 0)
    return [1]
""",
        timeout_s=0.3,
    )
    before = await reward(worker, "a")
    late = await reward(worker, "a", question="hang")
    after = await reward(worker, "a")
    assert (late.rewards, late.reason) == (None, "hook_timeout: 0.3 s")
    assert before.annotations == late.annotations == after.annotations


async def test_a_hanging_sync_hook_costs_its_own_call_only(start: Start) -> None:
    worker = await start(
        """
import threading
def on_compute_relative_reward(v, a, q):
    if q == "hang":
        threading.Event().wait(600)
    return [1]
""",
        timeout_s=0.4,
    )
    hung, *others = await asyncio.gather(
        reward(worker, "a", question="hang"), reward(worker, "a"), reward(worker, "a")
    )
    assert hung.reason == "hook_timeout: 0.4 s"
    assert [other.rewards for other in others] == [[1.0], [1.0]]


async def test_a_hook_that_blocks_the_loop_is_blamed_and_the_waiting_ones_run_again(
    start: Start, tmp_path: Path
) -> None:
    worker = await start(
        f"""
import asyncio, pathlib, time
begun = pathlib.Path({str(tmp_path / "begun")!r})
async def on_compute_relative_reward(v, a, q):
    if q == "first":
        first_life = not begun.exists()
        begun.touch()
        await asyncio.sleep(600 if first_life else 0)
    if q == "block":
        time.sleep(600)
    return [1]
""",
        timeout_s=0.5,
    )
    waiting = asyncio.ensure_future(reward(worker, "a", question="first"))
    await until_exists(tmp_path / "begun")
    blocked = await reward(worker, "a", question="block")
    assert blocked.reason == "hook_timeout: 0.5 s"
    assert (await waiting).rewards == [1.0]


async def test_a_regular_expression_that_holds_the_interpreter_is_killed(start: Start) -> None:
    worker = await start(
        """
import re
async def on_compute_relative_reward(v, a, q):
    re.match(r"(a+)+$", a[0]["content"])
    return [1]
""",
        timeout_s=0.3,
    )
    assert (await reward(worker, "a" * 60 + "b")).reason == "hook_timeout: 0.3 s"
    assert (await reward(worker, "a")).rewards == [1.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_hook_that_ends_its_process_is_named_and_others_survive(
    start: Start, kind: str
) -> None:
    worker = await start(f"""
import os
{kind} on_compute_relative_reward(v, a, q):
    if q == "die":
        os._exit(7)
    return [1]
""")
    for _ in range(3):
        crashed, other = await asyncio.gather(
            reward(worker, "a", question="die"), reward(worker, "a")
        )
        assert crashed.reason == "hook_crashed: the hook ended its process with exit code 7"
        assert other.rewards == [1.0]


async def test_edited_hooks_that_no_longer_load_fail_their_calls_with_the_reason(
    start: Start, tmp_path: Path
) -> None:
    worker = await start("import os\ndef on_compute_relative_reward(v, a, q):\n    os._exit(1)\n")
    (tmp_path / "hook.py").write_text("def (\n")
    await reward(worker, "a")
    outcome = await reward(worker, "a")
    assert outcome.reason is not None and outcome.reason.startswith("hook_load: ")
    (tmp_path / "hook.py").write_text("def on_compute_relative_reward(v, a, q):\n    return [2]\n")
    mended = await reward(worker, "a")
    assert mended.rewards == [2.0]
    assert mended.hook_hash == worker.info.content_hash


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "no function `on_compute_relative_reward`"),
        ("import os\nos._exit(3)\n", "ended its process with exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)\n", "ended its process by SIGKILL"),
    ],
)
async def test_hooks_that_do_not_load_say_so_at_the_start(
    start: Start, text: str, said: str
) -> None:
    with pytest.raises(HookError, match=said):
        await start(text)


async def test_the_parent_never_imports_the_hooks(start: Start, tmp_path: Path) -> None:
    worker = await start(SYNC)
    assert (await reward(worker, "a")).rewards == [1.0]
    files = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    assert str(tmp_path / "hook.py") not in files


async def test_a_caller_that_goes_away_leaves_the_worker_usable(
    start: Start, tmp_path: Path
) -> None:
    worker = await start(
        f"""
import pathlib, threading
def on_compute_relative_reward(v, a, q):
    if q == "hang":
        pathlib.Path({str(tmp_path / "begun")!r}).touch()
        threading.Event().wait(600)
    return [1]
""",
        timeout_s=0.5,
    )
    call = asyncio.ensure_future(reward(worker, "a", question="hang"))
    await until_exists(tmp_path / "begun")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await reward(worker, "a")).rewards == [1.0]


async def test_calls_after_and_during_close_are_told_so(start: Start, tmp_path: Path) -> None:
    worker = await start(f"""
import pathlib, threading
def on_compute_relative_reward(v, a, q):
    pathlib.Path({str(tmp_path / "begun")!r}).touch()
    threading.Event().wait(600)
""")
    during = asyncio.ensure_future(reward(worker, "a"))
    await until_exists(tmp_path / "begun")
    await worker.close()
    for outcome in (await during, await reward(worker, "a")):
        assert outcome.reason is not None and "the proxy is stopping" in outcome.reason


PROXY = """
import asyncio, sys
from pathlib import Path
from fakevllm.hooks.spec import Sibling, Task
from fakevllm.hooks.worker import HookWorker

async def main():
    worker = HookWorker(Path(sys.argv[1]), 60)
    await worker.start()
    print("started", flush=True)
    outcome = await worker.reward([Sibling(0, Task(), "g/0", "stop")], [{"content": ""}], "q")
    print(outcome.annotations[0]["pid"], flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
"""

PRINTING = """
import os
print("loading speaks")
def on_compute_relative_reward(v, a, q):
    print("calling speaks", flush=True)
    os.system("echo children speak")
    a[0]["pid"] = os.getpid()
    return [1]
"""


def start_proxy(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "proxy.py").write_text(PROXY)
    (tmp_path / "hook.py").write_text(PRINTING)
    return subprocess.Popen(
        [sys.executable, tmp_path / "proxy.py", tmp_path / "hook.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


async def test_the_process_dies_with_a_killed_proxy_and_prints_to_stderr(tmp_path: Path) -> None:
    with start_proxy(tmp_path) as proxy:
        assert proxy.stdout is not None and proxy.stderr is not None
        assert proxy.stdout.readline() == "started\n"
        pid = int(proxy.stdout.readline())
        proxy.send_signal(signal.SIGKILL)
        printed = proxy.stderr.read()
    await until_gone(pid)
    assert all(line in printed for line in ("loading speaks", "calling speaks", "children speak"))


@pytest.mark.parametrize("awaited", ["", "started\n"], ids=["while starting", "while running"])
async def test_ctrl_c_in_the_terminal_prints_nothing_from_the_worker(
    tmp_path: Path, awaited: str
) -> None:
    with start_proxy(tmp_path) as proxy:
        assert proxy.stdout is not None and proxy.stderr is not None
        if awaited:
            assert proxy.stdout.readline() == awaited
            pid = int(proxy.stdout.readline())
        else:
            pid = await first_child(proxy.pid)
        os.killpg(proxy.pid, signal.SIGINT)
        printed = proxy.stderr.read()
    await until_gone(pid)
    assert "Traceback" not in printed


async def first_child(parent: int) -> int:
    """The hook process, as early as it exists: the one that is not the resource tracker."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    async with asyncio.timeout(20):
        while True:
            for pid in children.read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if "spawn_main" in command:
                    return int(pid)
            await asyncio.sleep(0)
