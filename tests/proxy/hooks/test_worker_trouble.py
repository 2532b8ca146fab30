"""Hooks that hang or crash, and callers that are cancelled, with real processes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from fakevllm.hooks.results import HookFailure
from tests.proxy.hooks.hook_calls import TASK, Start, reward, until_exists
from tests.proxy.hooks.test_on_feedback import FEEDBACK

FORGE = """
import gc, json
def forge(*ignored):
    child = next(one for one in gc.get_objects() if type(one).__name__ == "_Child")
    child.send(json.loads(%r))
on_user_submit_new_requests = on_compute_relative_reward = on_feedback = forge
"""
"""Hooks that write a reply of their own to the connection to the proxy."""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("", "hook_crashed: "),
        (', "reason": 5', "hook_crashed: "),
        (', "reason": null, "rewards": ["a"], "num": "a", "value": "a"', "hook_type: "),
        (', "reason": null, "rewards": {}, "overrides": [1], "value": []', "hook_type: "),
        (', "reason": "hook_raised: mine", "annotations": 5', "hook_raised: mine"),
    ],
)
async def test_a_malformed_reply_that_a_hook_has_written_is_a_failure_of_the_hook(
    start: Start, fields: str, reason: str
) -> None:
    worker = await start(FORGE % f'{{"id": 1{fields}}}')
    outcome = await reward(worker, "a")
    assert outcome.rewards is None and outcome.annotations == [{}]
    assert (outcome.reason or "").startswith(reason)
    worker = await start(FORGE % f'{{"id": 1{fields}}}')
    plan = await worker.submit("r", TASK)
    assert isinstance(plan, HookFailure) and plan.reason.startswith(reason)
    worker = await start(FORGE % f'{{"id": 1{fields}}}')
    value = await worker.feedback(FEEDBACK)
    assert isinstance(value, HookFailure) and value.reason.startswith(reason)


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


async def test_calls_that_begin_while_a_crashed_process_is_reaped_blame_no_other_call(
    start: Start, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    worker = await start(
        f"""
import asyncio, gc, os, pathlib, socket, time
async def on_compute_relative_reward(v, a, q):
    if q == "crash":
        pathlib.Path({str(gone)!r}).touch()
        # The proxy sees the end of the connection, and waits for the end of the process.
        for one in gc.get_objects():
            if isinstance(one, socket.socket) and one.family == socket.AF_UNIX:
                one.shutdown(socket.SHUT_RDWR)
        time.sleep(0.3)
        os._exit(3)
    await asyncio.sleep(0 if pathlib.Path({str(gone)!r}).exists() else 600)
    return [1]
"""
    )
    innocent = [asyncio.create_task(reward(worker, "a")) for _ in range(4)]
    await asyncio.sleep(0.1)
    crashed = asyncio.create_task(reward(worker, "a", question="crash"))
    await until_exists(gone)
    while not crashed.done():
        innocent.append(asyncio.create_task(reward(worker, "a")))
        await asyncio.sleep(0.001)
    assert (await crashed).reason == "hook_crashed: the hook ended its process with exit code 3"
    outcomes = await asyncio.gather(*innocent)
    assert {outcome.reason for outcome in outcomes} == {None}


async def test_a_sync_hook_that_hangs_fails_only_its_own_call(start: Start) -> None:
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


async def test_a_hook_that_blocks_the_event_loop_fails_and_waiting_hooks_run_again(
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


async def test_a_regular_expression_that_never_releases_the_interpreter_is_killed(
    start: Start,
) -> None:
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
async def test_a_hook_that_ends_its_process_fails_and_other_calls_succeed(
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


async def test_a_process_that_ends_is_started_again_with_the_hooks_that_were_loaded(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("value = 1\n")
    worker = await start(DIES_ON_REQUEST.replace("[1]", "[__import__('helper').value]"))
    before = worker.info.content_hash
    for edit in ("def (\n", "def on_compute_relative_reward(v, a, q):\n    return [2]\n"):
        (tmp_path / "hook.py").write_text(edit)
        (tmp_path / "helper.py").write_text("value = 2\n")
        crashed = await reward(worker, "a", question="die")
        assert crashed.reason is not None and crashed.reason.startswith("hook_crashed")
        restarted = await reward(worker, "a")
        assert restarted.rewards == [1.0]
        assert before == crashed.hook_hash == restarted.hook_hash == worker.info.content_hash


async def test_hooks_that_no_longer_load_fail_their_calls_with_the_reason(
    start: Start, tmp_path: Path
) -> None:
    worker = await start(f"""
import os, pathlib
if pathlib.Path({str(tmp_path / "broken")!r}).exists():
    raise RuntimeError("broken")
def on_compute_relative_reward(v, a, q):
    if q == "die":
        os._exit(3)
    return [1]
""")
    (tmp_path / "broken").touch()
    await reward(worker, "a", question="die")
    outcome = await reward(worker, "a")
    assert outcome.reason is not None and outcome.reason.startswith("hook_load: ")
    (tmp_path / "broken").unlink()
    assert (await reward(worker, "a")).rewards == [1.0]


async def test_the_worker_stays_usable_after_a_caller_was_cancelled(
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


async def test_calls_during_and_after_close_fail_with_a_reason(
    start: Start, tmp_path: Path
) -> None:
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


DIES_ON_REQUEST = """
import os
def on_compute_relative_reward(v, a, q):
    if q == "die":
        os._exit(3)
    return [1]
"""


async def test_a_restart_of_the_hook_process_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.hooks")
    worker = await start(DIES_ON_REQUEST)
    await reward(worker, "a", question="die")
    assert (await reward(worker, "a")).rewards == [1.0]
    crash = "hook_crashed: the hook ended its process with exit code 3"
    digest = worker.info.content_hash
    assert caplog.messages == [f"hook process {digest} ended ({crash}), started again"]


async def test_a_hang_is_logged_as_the_reason_of_the_restart(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
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
    await reward(worker, "a", question="hang")
    await reward(worker, "a")
    digest = worker.info.content_hash
    assert caplog.messages == [f"hook process {digest} ended (hook_timeout: 0.4 s), started again"]
