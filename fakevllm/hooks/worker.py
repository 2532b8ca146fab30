"""Runs the hooks in one spawned process and survives whatever they do.

The parent never imports the user's code. A hook that hangs costs its own call: async hooks are
cancelled inside the process; for a sync hook, or a process that no longer answers, the process is
killed and started again, and the other calls that were in flight are made once more.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import fields
from pathlib import Path

from fakevllm.errors import HookError
from fakevllm.hooks.process import EXIT_TIMEOUT_S, HookInfo, HookProcess, Lost
from fakevllm.hooks.results import FeedbackValue, HookFailure, Json, RewardOutcome, SubmitPlan
from fakevllm.hooks.spec import Feedback, Sibling, Task

log = logging.getLogger("fakevllm.hooks")

ANSWER_GRACE_S = 1.0
"""After an async hook's time-out, for the process to say so before it counts as hung."""
MAX_BACKOFF_S = 1.0
"""Between two starts of a process that keeps dying; longer would hold up the app."""


class HookWorker:
    """Owns the hook process. One event loop; start() first, close() last."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._process: HookProcess | None = None
        self._is_closed = False
        # Guards _process: one start at a time.
        self._starting = asyncio.Lock()
        # Guards the process's one sync thread: a sync hook's time-out starts when the hook does.
        self._sync_turn = asyncio.Lock()
        self._deaths = 0
        self._calls: set[asyncio.Task[Json]] = set()

    @property
    def info(self) -> HookInfo:
        """Of the code that runs now: after a restart the files may have changed."""
        assert self._process is not None, "start() comes first"
        return self._process.info

    async def start(self) -> HookInfo:
        """Raises HookError."""
        assert self._process is None, "a worker starts once"
        return (await self._living()).info

    async def submit(self, request_id: str, task: Task) -> SubmitPlan | HookFailure:
        if not self.info.has_submit:
            return SubmitPlan()
        call: Json = {"kind": "submit", "request_id": request_id, "task": task.model_dump()}
        reply = await self._shielded(call)
        if reply["reason"] is not None:
            return HookFailure(reply["reason"])
        return SubmitPlan(reply["num"], reply["overrides"])

    async def reward(
        self, siblings: list[Sibling], answers: list[Json], question: str
    ) -> RewardOutcome:
        assert siblings and len(siblings) == len(answers), "one answer per sibling, at least one"
        call: Json = {
            "kind": "reward",
            "task": siblings[0].task.model_dump(),
            "messages": siblings[0].messages,
            "siblings": [_packed(sibling) for sibling in siblings],
            "answers": answers,
            "question": question,
        }
        reply = await self._shielded(call)
        notes: list[Json] = reply.get("annotations") or [{} for _ in answers]
        content_hash = reply.get("content_hash", "")
        return RewardOutcome(reply.get("rewards"), reply["reason"], notes, content_hash)

    async def feedback(self, feedback: Feedback) -> FeedbackValue | HookFailure:
        """Only where there is an on_feedback."""
        assert self.info.has_feedback, "look at `info` first"
        told = {one.name: getattr(feedback, one.name) for one in fields(feedback)}
        task: Task = told.pop("task")
        call: Json = {"kind": "feedback", "task": task.model_dump(), "feedback": told}
        reply = await self._shielded(call)
        if reply["reason"] is not None:
            return HookFailure(reply["reason"])
        return FeedbackValue(reply["value"], reply["content_hash"])

    async def close(self) -> None:
        self._is_closed = True
        async with self._starting:
            if self._process is not None:
                await self._process.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=EXIT_TIMEOUT_S)

    async def _shielded(self, call: Json) -> Json:
        """A caller that goes away does not stop the watch over its hook."""
        task = asyncio.ensure_future(self._call(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _call(self, call: Json) -> Json:
        """Once, and once more where another call's hook took the process down."""
        reason = ""
        for _ in range(2):
            try:
                process = await self._living()
            except HookError as error:
                return {"reason": f"hook_load: {error}"}
            outcome = await self._ask(process, call)
            if not isinstance(outcome, Lost):
                self._deaths = 0
                return outcome | {"content_hash": process.info.content_hash}
            reason = outcome.reason
            if outcome.is_to_blame:
                break
        return {"reason": reason}

    async def _ask(self, process: HookProcess, call: Json) -> Json | Lost:
        if process.is_async[call["kind"]]:
            return await process.ask(call, self._timeout_s + ANSWER_GRACE_S, self._timeout_s)
        async with self._sync_turn:
            return await process.ask(call, self._timeout_s, self._timeout_s)

    async def _living(self) -> HookProcess:
        async with self._starting:
            if self._is_closed:
                raise HookError("the proxy is stopping")
            if self._process is None or self._process.is_dead:
                before = self._process
                if before is not None:
                    await before.close()
                    if self._deaths:
                        await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2**self._deaths))
                    self._deaths += 1
                self._process = await HookProcess.start(self._path, self._timeout_s)
                if before is not None:
                    log.warning("%s", _restarted(before, self._process))
            return self._process


def _restarted(before: HookProcess, now: HookProcess) -> str:
    told = f"hook process ended ({before.end}), started again"
    old, new = before.info.content_hash, now.info.content_hash
    return told if old == new else f"{told}; the hooks changed on disk: {old} -> {new}"


def _packed(sibling: Sibling) -> Json:
    return {
        "index": sibling.index,
        "episode_id": sibling.episode_id,
        "finish_reason": sibling.finish_reason,
        "usage": sibling.usage,
    }
