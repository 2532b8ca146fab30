"""Reward an answer with 1 if a command of yours accepts it, else with 0.

The command gets one JSON object on its standard input, with the `question`, the `answer` and the
`metadata` of the task. It accepts the answer by exiting with 0. Copy the file and edit the
constants.

The command runs with the rights of the proxy. If it executes code from answers, let it do so in a
sandbox of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path

from fakevllm.hooks.spec import Json, Sibling

COMMAND: Sequence[str] = (
    sys.executable,
    str(Path(__file__).resolve().parent / "check_answer.py"),
)
"""The command and its arguments. What it writes to stderr goes to the proxy's log."""
TIMEOUT_S = 5.0
"""Seconds that the command may take for one answer. A command that takes longer is killed, with all
processes that it has started, and the answer counts as wrong."""
NUM_PARALLEL = 4
"""Maximum number of commands that run at the same time for one request. The command is run for all
answers within the proxy's `hooks.timeout_s`."""
MUST_FINISH = True
"""Whether an answer that was cut off, or that calls a tool, counts as wrong without running the
command."""


async def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    slots = asyncio.Semaphore(NUM_PARALLEL)

    async def score(sibling: Sibling, answer: Json) -> float | None:
        if MUST_FINISH and answer["finish_reason"] != "stop":
            return 0.0
        text = answer.get("content") or ""
        request = {"question": question, "answer": text, "metadata": sibling.task.metadata}
        async with slots:
            exit_code = await run_command(json.dumps(request).encode())
        answer["exit_code"] = exit_code
        return float(exit_code == 0)

    pairs = zip(valid_results, all_answers, strict=True)
    return list(await asyncio.gather(*(score(sibling, answer) for sibling, answer in pairs)))


async def run_command(request: bytes) -> int | None:
    """Run the command with the request on its standard input, and return its exit code. Return None
    if the command did not end within TIMEOUT_S.

    Raises OSError if the command cannot be started. The group is then not trained, and the proxy's
    log has the error.
    """
    process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=DEVNULL)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await process.communicate(request)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            # Not a process group of its own: the proxy kills the group of its hooks at the end.
            for pid in (process.pid, *descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):  # it ended in the meantime
                    os.kill(pid, signal.SIGKILL)
            await process.wait()
    return process.returncode


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, or [] if the system has no /proc."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended in the meantime
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found
