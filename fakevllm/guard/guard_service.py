"""The guard of one proxy. It follows the server's run log, feeds the detectors, raises alarms, and
carries out their actions.

The guard reads the run log with a cursor of its own, so that a step is seen once, also after a
restart of the proxy. Its memory is stored in the ledger after the alarms of a step are raised. If
the process dies in between, the alarms are raised again. The ids of decisions and of alerts depend
only on run, version, step and detector, so that the server carries out a repeated decision once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean, stdev
from typing import Any, Protocol

import aiohttp

from fakevllm.config.guard import GuardAction
from fakevllm.guard.answer_figures import (
    MAX_GROUPS,
    MeasuredAnswer,
    MeasuredGroup,
    answer_figures,
)
from fakevllm.guard.detector_bank import Alarm, GuardRules, HeldOutMean
from fakevllm.guard.guard_state import MAX_PENDING, GuardState, restored
from fakevllm.ledger.guard_rows import GuardRows, HeldOutRow, TrainedAnswer
from fakevllm.swarm.errors import NETWORK_ERRORS, RELEASES_NEED_ADMIN_KEY, describe_error
from fakevllm_adapters.protocol.releases import (
    GUARD,
    Decision,
    ReleaseReply,
    ReleaseRequest,
    RollbackRequest,
)
from fakevllm_adapters.protocol.swarm import EngineStatusReply, LogEntry, TrainedGroup

log = logging.getLogger("fakevllm.guard")

CHECK_EVERY_S = 1.0
"""Seconds between two looks at the run log."""
MAX_STEPS_AT_ONCE = 50
"""Number of entries of the run log that are read without pauses. There are more only if the guard
sees a run for the first time, or was away."""
CATCH_UP_PAUSE_S = 0.02
"""Seconds between two steps while the guard reads a long run log. Measuring the answers of a step
takes a few milliseconds of a thread."""
RETRY_EVERY_S = 15.0
"""Seconds after an error before the next attempt."""
HELD_OUT_EVERY_S = 30.0
"""Seconds between two looks at the evaluations in the ledger. Such a look reads up to 2,000 rows,
and an evaluation takes minutes."""


class GuardedServer(Protocol):
    """Interface of the connection to the server, with only the members that the guard uses."""

    @property
    def status(self) -> EngineStatusReply | None: ...

    async def run_log(self, after: int) -> list[LogEntry]: ...

    async def decide(self, request: ReleaseRequest) -> ReleaseReply: ...

    async def roll_back(self, request: RollbackRequest) -> ReleaseReply: ...


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The settings of the guard."""

    rules: GuardRules
    actions: Mapping[str, GuardAction]
    """The action of each detector that runs."""
    second_judge_annotation: str | None = None
    """Key of the hook's annotations with the score of a second judge."""


@dataclass(frozen=True, slots=True)
class GuardOutlets:
    """What the guard calls when an alarm begins."""

    pause_training: Callable[[], str | None] | None = None
    """Function that pauses training, and returns the reason if the pause cannot be stored. It is
    called for the action `hold` if no version is ever released. None if versions are released."""
    send_alert: Callable[[Mapping[str, Any]], None] = field(default=lambda alert: None)
    """Function that queues an alert for the webhook."""


@dataclass(frozen=True, slots=True)
class ShownAlarm:
    """An alarm that has not ended, for `fakevllm status` and the console."""

    detector: str
    step: int
    version: int
    message: str
    remedy: str
    action: GuardAction
    is_pending: bool
    """Whether the action is not carried out yet."""


@dataclass(frozen=True, slots=True)
class GuardView:
    """The state of the guard."""

    alarms: Sequence[ShownAlarm]
    """The alarms that have not ended."""
    trouble: str | None
    """Reason why the guard cannot read the run log or carry out an action; None if it can."""


class Guard:
    """The guard of one proxy."""

    def __init__(
        self,
        settings: GuardSettings,
        server: GuardedServer,
        rows: GuardRows,
        outlets: GuardOutlets = GuardOutlets(),
        *,
        clock: Callable[[], float] = time.time,
        check_every_s: float = CHECK_EVERY_S,
        retry_every_s: float = RETRY_EVERY_S,
        held_out_every_s: float = HELD_OUT_EVERY_S,
    ) -> None:
        self._settings = settings
        self._server = server
        self._rows = rows
        self._outlets = outlets
        self._clock = clock
        self._check_every_s = check_every_s
        self._retry_every_s = retry_every_s
        self._held_out_every_s = held_out_every_s
        self._held_out_at = -math.inf
        self._state: GuardState | None = None
        self._trouble: str | None = None

    async def run(self) -> None:
        """Follow the run log until this task is cancelled."""
        while True:
            pause_s, trouble = self._check_every_s, None
            try:
                await self._check()
            except aiohttp.ClientResponseError as error:
                # 503: the decision waits for the end of a training step.
                is_admin = error.status != 403
                trouble = f"the server {describe_error(error)}"
                trouble = trouble if is_admin else RELEASES_NEED_ADMIN_KEY
                pause_s = self._check_every_s if error.status == 503 else self._retry_every_s
            except (*NETWORK_ERRORS, ValueError) as error:
                trouble = f"the server {describe_error(error)}"
            except Exception as error:  # isolates: apps are served whatever happens to the guard
                log.exception("the guard failed")
                trouble, pause_s = f"{type(error).__name__}: {error}", self._retry_every_s
            self._report(trouble)
            await asyncio.sleep(pause_s)

    @property
    def detectors_on(self) -> dict[str, float]:
        """1 for each detector whose alarm has not ended, and 0 for the others."""
        active = {} if self._state is None else self._state.bank.active
        return {name: float(name in active) for name in self._settings.actions}

    def view(self) -> GuardView:
        state = self._state
        if state is None:
            return GuardView((), self._trouble)
        pending = {alarm.detector: alarm for alarm in state.pending}
        shown = pending | state.bank.active  # an action also waits if its alarm has ended meanwhile
        alarms = [
            ShownAlarm(
                *(one.detector, one.step, one.version, one.message, one.remedy),
                action=self._settings.actions[one.detector],
                is_pending=one.detector in pending,
            )
            for one in shown.values()
            if one.detector in self._settings.actions
        ]
        return GuardView(alarms, self._trouble)

    async def _check(self) -> None:
        status = self._server.status
        if status is None or not status.run_id:
            return
        state = self._state
        if state is None or state.run_id != status.run_id:
            stored = await asyncio.to_thread(self._rows.state)
            state = self._state = restored(stored, status.run_id, self._settings.rules)
            self._held_out_at = -math.inf
        await self._read_log(state)
        await self._look_at_held_out(state)
        for alarm in state.begun:
            # Trouble that ended before the guard read of it needs no action.
            if state.bank.active.get(alarm.detector) is alarm:
                self._raise(state, alarm)
        if state.begun or state.seq != state.stored_seq:
            state.begun.clear()
            self._store(state)
        while state.pending:
            went_back = await self._act(state, state.pending[0])
            del state.pending[0]
            if went_back:  # once is enough for all alarms of the same weights
                state.pending = [one for one in state.pending if not self._goes_back(one)]
            self._store(state)

    async def _read_log(self, state: GuardState) -> None:
        """Feed the detectors with all new entries of the run log."""
        while True:
            entries = [
                entry
                for entry in await self._server.run_log(state.seq)
                if entry.seq > state.seq  # a server that ignores the cursor must not be asked again
            ]
            if not entries:
                return
            for entry in entries:
                if entry.kind == "step":
                    await self._add_step(state, entry)
                elif entry.kind == "restored" and entry.reason:
                    state.bank.training_went_back()
                    state.pending.clear()
                state.seq = entry.seq
            if len(entries) >= MAX_STEPS_AT_ONCE and not state.begun:
                self._store(state)

    async def _add_step(self, state: GuardState, entry: LogEntry) -> None:
        if entry.changed:
            state.bank.rewards_changed()
        state.hooks = entry.hooks
        figures = await asyncio.to_thread(self._answer_figures, entry.groups)
        if entry.seq - state.stored_seq > MAX_STEPS_AT_ONCE:  # many old steps must not slow apps
            await asyncio.sleep(CATCH_UP_PAUSE_S)
        state.begun += state.bank.step_trained(entry.step, entry.version, entry.metrics | figures)

    def _answer_figures(self, groups: Sequence[TrainedGroup]) -> dict[str, float]:
        answers = self._rows.answers([group.group_id for group in groups[:MAX_GROUPS]])
        return answer_figures(measured_groups(answers, self._settings.second_judge_annotation))

    async def _look_at_held_out(self, state: GuardState) -> None:
        """Feed the detectors with the means of versions on held-out rows, from time to time."""
        now = time.monotonic()
        is_due = now - self._held_out_at >= self._held_out_every_s
        if not is_due or "held_out_gap" not in self._settings.actions:
            return
        self._held_out_at = now
        rows = await asyncio.to_thread(self._rows.held_out, state.run_id)
        status = self._server.status
        step = 0 if status is None else max((status.global_step or 1) - 1, 0)
        for mean in held_out_means(rows, state.hooks):
            state.begun += state.bank.held_out_measured(step, mean)

    def _raise(self, state: GuardState, alarm: Alarm) -> None:
        """Report an alarm, and plan its action."""
        action = self._settings.actions[alarm.detector]
        text = f"{alarm.message}. {alarm.remedy}"
        log.warning("step %d, %s (action: %s)", alarm.step, text, action)
        self._outlets.send_alert(alert(state.run_id, alarm, action, self._clock()))
        if action in ("hold", "rollback") and len(state.pending) < MAX_PENDING:
            state.pending.append(alarm)

    def _goes_back(self, alarm: Alarm) -> bool:
        return self._settings.actions.get(alarm.detector) == "rollback"

    async def _act(self, state: GuardState, alarm: Alarm) -> bool:
        """Carry out the action of an alarm. Return True if training went back to an earlier
        version. Raises an error if this must be tried again."""
        action = self._settings.actions.get(alarm.detector)
        if action == "hold" and self._outlets.pause_training is not None:
            trouble = self._outlets.pause_training()
            log.warning(
                "training is paused until `fakevllm resume`, because of %s%s",
                alarm.detector,
                "" if trouble is None else f" ({trouble})",
            )
            return False
        if action not in ("hold", "rollback"):  # the settings have changed since the alarm
            return False
        try:
            reply = await self._decide(state, alarm, action)
        except aiohttp.ClientResponseError as error:
            if error.status != 409:  # the server has this decision already
                raise
            return action == "rollback"
        done = "releases are on hold until `fakevllm release resume`"
        if action == "rollback":
            done = "training went back to the released version"
        if reply.success:
            log.warning("%s, because of %s", done, alarm.detector)
        else:
            log.warning(
                "the action %s of %s was refused: %s", action, alarm.detector, reply.failure_reason
            )
        return reply.success and action == "rollback"

    async def _decide(self, state: GuardState, alarm: Alarm, action: str) -> ReleaseReply:
        id, run_id = alarm_id(state.run_id, alarm), state.run_id
        evidence: dict[str, Any] = {
            "source": GUARD,
            "detector": alarm.detector,
            "step": alarm.step,
            "value": alarm.value,
            "threshold": alarm.threshold,
        }
        if action == "hold":
            return await self._server.decide(
                ReleaseRequest(id=id, run_id=run_id, decision=Decision.HOLD, evidence=evidence)
            )
        return await self._server.roll_back(
            RollbackRequest(id=id, run_id=run_id, evidence=evidence)
        )

    def _store(self, state: GuardState) -> None:
        state.stored_seq = state.seq
        self._rows.put_state(state.to_json())

    def _report(self, trouble: str | None) -> None:
        """Record why the guard cannot work. Log the reason if it is a new one, and while the server
        is known: the connection itself logs that the server is away."""
        if trouble is not None and trouble != self._trouble and self._server.status is not None:
            log.warning("the guard waits: %s; retrying", trouble)
        self._trouble = trouble


def alarm_id(run_id: str, alarm: Alarm) -> str:
    """Return the id of an alarm, of its alert, and of the decision that follows from it. After a
    return to an earlier version, steps have the same numbers again, and versions do not."""
    return f"{GUARD}-{run_id}-{alarm.version}-{alarm.step}-{alarm.detector}"


def alert(run_id: str, alarm: Alarm, action: GuardAction, at: float) -> dict[str, Any]:
    """Return the JSON of an alert. The key `text` is what Slack and similar services show."""
    return {
        "text": f"fakevllm, step {alarm.step}: {alarm.message}. {alarm.remedy} (action: {action})",
        "id": alarm_id(run_id, alarm),
        "event": "guard_alarm",
        "at": at,
        "run_id": run_id,
        "detector": alarm.detector,
        "action": action,
        "step": alarm.step,
        "version": alarm.version,
        "value": alarm.value,
        "threshold": alarm.threshold,
        "message": alarm.message,
        "remedy": alarm.remedy,
    }


def measured_groups(
    answers: Sequence[TrainedAnswer], second_judge_annotation: str | None
) -> list[MeasuredGroup]:
    """Return the groups of a step from the rows of their answers."""
    return [
        MeasuredGroup(
            question,
            [
                MeasuredAnswer(
                    *(one.text, one.reward, one.tool_calls_json is not None, one.failure),
                    second_score=_second_score(one.annotations_json, second_judge_annotation),
                )
                for one in siblings
            ],
        )
        for (_, question), siblings in groupby(answers, lambda one: (one.group_id, one.question))
    ]


def held_out_means(rows: Sequence[HeldOutRow], hooks: Sequence[str]) -> list[HeldOutMean]:
    """Return the mean of each version on held-out rows, oldest version first. `hooks` are the
    digests of the hooks that scored the latest step. Rows that other hooks have scored cannot be
    compared with it, and are left out."""
    by_version: dict[int, list[float]] = {}
    for row in rows:
        if row.hook_hash in hooks:
            by_version.setdefault(row.version, []).append(row.mean)
    return [
        HeldOutMean(version, fmean(means), stdev(means) / math.sqrt(len(means)), len(means))
        for version, means in sorted(by_version.items())
        if len(means) > 1
    ]


def _second_score(annotations_json: str | None, key: str | None) -> float | None:
    """Return the score of the second judge. Return None if the hook gave no finite number."""
    if annotations_json is None or key is None:
        return None
    try:
        score = json.loads(annotations_json).get(key)
    except (ValueError, AttributeError):  # translates: redaction may have changed the text
        return None
    is_number = isinstance(score, int | float) and math.isfinite(score)
    return float(score) if is_number else None
