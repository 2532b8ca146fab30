"""HookWorker, which runs the user's hooks in a separate process. When this process has ended,
HookWorker starts a new one.

The proxy's own process never imports the user's code. If a hook hangs, only the call of this hook
fails:

* An async hook that exceeds the time limit is cancelled, and the process continues.
* If a sync hook exceeds the time limit, or if the process no longer replies, the process is killed
  and restarted. Other calls that were pending are then repeated once.

A worker runs one version of the hooks: it reads the hook files once, when it starts, and each new
process gets the same texts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import fields
from pathlib import Path
from typing import cast

from fakevllm.errors import HookError
from fakevllm.hooks.hook_process import (
    EXIT_TIMEOUT_S,
    NO_REPLY,
    HookInfo,
    HookProcess,
    LostCall,
)
from fakevllm.hooks.loader import HookFiles
from fakevllm.hooks.results import (
    FeedbackValue,
    HookFailure,
    Json,
    RewardOutcome,
    SubmitPlan,
    read_plan,
    read_rewards,
    read_value,
)
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.hooks.spec import Feedback, Sibling, Task
from fakevllm_adapters.privacy.in_use import RedactionInUse

log = logging.getLogger("fakevllm.hooks")

ANSWER_GRACE_S = 1.0
"""Seconds after the time limit of an async hook within which the process must report the timeout.
If the process does not report the timeout, it counts as hung and is killed."""
MAX_BACKOFF_S = 1.0
"""Maximum number of seconds before a hook process that has ended repeatedly is started again. A
longer backoff would delay the answers to apps."""

_STOPPING = "the proxy is stopping"


class HookWorker:
    """The owner of the hook process, in which the user's hooks run. Use a worker in one event loop
    only. Call `start` first and `close` last."""

    def __init__(
        self,
        path: Path,
        timeout_s: float,
        sandbox: HookSandbox = DEFAULT_SANDBOX,
        *,
        redaction: RedactionInUse | None = None,
    ) -> None:
        """Create a worker without a process. `redaction` redacts what hooks print. The texts that
        hooks get are not redacted."""
        self._redaction = redaction
        self._path = path
        self._files: HookFiles | None = None
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._process: HookProcess | None = None
        self._starting: asyncio.Task[HookProcess] | None = None
        """Task that starts a process; None while no process is being started."""
        self._is_closed = False
        # Guards `_process`, so that only one process is started at a time.
        self._start_lock = asyncio.Lock()
        # Guards the process's one sync thread, so that the timeout of a sync hook begins when the
        # hook begins.
        self._sync_lock = asyncio.Lock()
        self._num_deaths = 0
        self._calls: set[asyncio.Task[Json]] = set()

    @property
    def info(self) -> HookInfo:
        """Which of the user's hooks the hook process has loaded, and the hash of their files."""
        assert self._process is not None, "start() must be called first"
        return self._process.info

    async def start(self) -> HookInfo:
        """Start the hook process and load the hooks. Raises HookError if the hooks cannot be
        loaded."""
        assert self._process is None, "a worker is started once"
        if self._files is None:
            await self.read_files()
        return (await self._running_process()).info

    async def read_files(self) -> str:
        """Read the hook files, and return their digest. `start` then loads the texts that were
        read. Raises HookError if the files cannot be read."""
        self._files = await asyncio.to_thread(HookFiles.read, self._path)
        return self._files.content_hash

    async def submit(self, request_id: str, task: Task) -> SubmitPlan | HookFailure:
        """Call the hook on_user_submit_new_requests and return its checked result. If the hook is
        not defined, return a result that does not change the configured number of siblings (answers
        to sample)."""
        if not self.info.has_submit:
            return SubmitPlan()
        call: Json = {"kind": "submit", "request_id": request_id, "task": task.model_dump()}
        reply = await self._shielded(call)
        reason, overrides = _reason_in(reply), reply.get("overrides")
        if reason is not None:
            return HookFailure(reason)
        return read_plan(reply.get("num") if overrides is None else overrides)

    async def reward(
        self, siblings: list[Sibling], answers: list[Json], question: str
    ) -> RewardOutcome:
        """Call the hook on_compute_relative_reward for these siblings, and return the checked
        result. Siblings are the answers that were sampled for one request."""
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
        reason, annotations = _reason_in(reply), _annotations_in(reply, len(answers))
        hook_hash = self.info.content_hash
        rewards = None if reason is not None else read_rewards(reply.get("rewards"), len(answers))
        if isinstance(rewards, HookFailure):
            return RewardOutcome(None, rewards.reason, annotations, hook_hash)
        return RewardOutcome(rewards, reason, annotations, hook_hash)

    async def feedback(self, feedback: Feedback) -> FeedbackValue | HookFailure:
        """Call the hook on_feedback and return its checked result. Call this method only if
        `info.has_feedback` is True."""
        assert self.info.has_feedback, "on_feedback is not defined"
        values = {field.name: getattr(feedback, field.name) for field in fields(feedback)}
        task: Task = values.pop("task")
        call: Json = {"kind": "feedback", "task": task.model_dump(), "feedback": values}
        reply = await self._shielded(call)
        reason = _reason_in(reply)
        number = HookFailure(reason) if reason is not None else read_value(reply.get("value"))
        if isinstance(number, HookFailure):
            return number
        return FeedbackValue(number, self.info.content_hash)

    async def close(self) -> None:
        """End the hook process. Calls that have no reply yet fail with the reason `hook_closed`. A
        process that still loads the hooks is killed."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
        async with self._start_lock:
            if self._process is not None:
                await self._process.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=EXIT_TIMEOUT_S)

    async def _shielded(self, call: Json) -> Json:
        """Run a hook call to its end, even if the caller is cancelled. Otherwise a hook that hangs
        would not be stopped at its time limit after the caller was cancelled."""
        task = asyncio.ensure_future(self._call(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _call(self, call: Json) -> Json:
        """Run a hook call and return the reply of the hook process. If the process ends because of
        a different call, repeat this call once."""
        reason = ""
        for _ in range(2):
            try:
                process = await self._running_process()
            except HookError as error:
                return {"reason": f"hook_load: {error}"}
            outcome = await self._send(process, call)
            if not isinstance(outcome, LostCall):
                self._num_deaths = 0
                return outcome
            reason = outcome.reason
            if outcome.is_to_blame:
                break
        return {"reason": reason}

    async def _send(self, process: HookProcess, call: Json) -> Json | LostCall:
        if self._privacy:
            call = call | {"privacy": self._privacy}
        if process.is_async[call["kind"]]:
            return await process.call(call, self._timeout_s + ANSWER_GRACE_S, self._timeout_s)
        async with self._sync_lock:
            return await process.call(call, self._timeout_s, self._timeout_s)

    @property
    def _privacy(self) -> Json:
        """The settings for the redaction of what hooks print; {} if nothing is redacted."""
        if self._redaction is None or not self._redaction.redactor:
            return {}
        return self._redaction.settings.model_dump(mode="json")

    async def _running_process(self) -> HookProcess:
        async with self._start_lock:
            self._check_open()
            if self._process is None or self._process.is_dead:
                before = self._process
                if before is not None:
                    await before.close()
                    if self._num_deaths:
                        await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2**self._num_deaths))
                    self._num_deaths += 1
                assert self._files is not None, "start() must be called first"
                self._check_open()
                self._process = await self._started(self._files)
                if before is not None:
                    digest = self.info.content_hash
                    log.warning("hook process %s ended (%s), started again", digest, before.end)
            return self._process

    async def _started(self, files: HookFiles) -> HookProcess:
        """Start a process that `close` can end while the process loads the hooks."""
        start = HookProcess.start(files, self._timeout_s, self._sandbox, self._privacy)
        self._starting = starting = asyncio.ensure_future(start)
        try:
            return await starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise HookError(_STOPPING) from None
        finally:
            self._starting = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise HookError(_STOPPING)


# A hook can write replies of its own to the connection of the hook process. Therefore the proxy
# checks each field of a reply again.


def _reason_in(reply: Json) -> str | None:
    """Return the reason why the hook failed, from a reply of the hook process. Return None if the
    hook succeeded."""
    reason: object = reply.get("reason", NO_REPLY)
    return reason if reason is None or isinstance(reason, str) else NO_REPLY


def _annotations_in(reply: Json, num: int) -> list[Json]:
    value: object = reply.get("annotations")
    listed = cast(list[object], value) if isinstance(value, list) else []
    annotations = [cast(Json, item) for item in listed if isinstance(item, dict)]
    return annotations if len(annotations) == len(listed) == num else [{} for _ in range(num)]


def _packed(sibling: Sibling) -> Json:
    return {
        "index": sibling.index,
        "episode_id": sibling.episode_id,
        "finish_reason": sibling.finish_reason,
        "usage": sibling.usage,
    }
