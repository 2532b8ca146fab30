"""The release gate. The gate evaluates versions of the weights on held-out rows, and sends
decisions about versions to the server. The decisions themselves are made by `release/controller`.

The gate stores no state of its own. The server keeps the history of decisions, and the ledger (the
proxy's database) keeps the evaluated rows. After a restart, the gate reads the history and these
rows, and continues the evaluation with the next row. Only the comparison of the rewards in the
sessions of apps begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp

from fakevllm.evaluation.messages import HOW_TO_SCORE
from fakevllm.gate.compared_versions import Reference, open_beside_training
from fakevllm.gate.held_out_evaluation import (
    EvaluationKey,
    EvaluationRows,
    HeldOutEvaluation,
    HooksChanged,
    VersionChanged,
)
from fakevllm.gate.live_sessions import LiveSessions
from fakevllm.release.actions import (
    HELD_OUT,
    Action,
    Decide,
    Evaluate,
    LimitTraining,
    SampleReference,
    Wait,
)
from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.between_steps import BetweenStepsController
from fakevllm.release.controller import GateController, GateRules
from fakevllm.runtime.error_cause import one_line
from fakevllm.swarm.errors import (
    NETWORK_ERRORS,
    RELEASES_NEED_ADMIN_KEY,
    RELEASES_NEED_NEWER_SERVER,
    describe_error,
)
from fakevllm.swarm.server_client import RELEASE_TIMEOUT_S
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.releases import (
    GATE,
    Decision,
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
)
from fakevllm_adapters.protocol.swarm import EngineStatusReply, SuccessReply

log = logging.getLogger("fakevllm.gate.release_gate")

CHECK_EVERY_S = 1.0
"""Seconds between two checks whether there is a new version. The server's status has the newest
version."""
RETRY_EVERY_S = 15.0
"""Seconds after an error before the next attempt. After an outage of the server or the engine, the
first attempts come sooner, because a restart takes only seconds."""
MAX_REFUSALS = 20
"""Number of consecutive refusals of a row after which the gate gives up the evaluation, so that the
candidate stays undecided. A refusal is not an outage. Its cause may be a damaged checkpoint, for
example. Because of the pauses of RETRY_EVERY_S, the gate gives up after five minutes at the
earliest."""
NUM_UNSCORED = 10
"""Number of consecutive rows without any reward after which the gate reports the problem, and waits
for RETRY_EVERY_S before the next row. The cause may be temporary, such as an outage of a judge that
the hook calls. The rows themselves may also be the cause."""
DISK_TROUBLE = "the ledger cannot store the evaluated rows: see if its disk is full"
MAX_REASON_CHARS = 500
"""Maximum length, in characters, of a reason that is stored in the history of releases."""


_Rows = TypeVar("_Rows")


class ReleaseServer(Protocol):
    """Interface of the proxy's connection to the server, with only the members that the release
    gate uses."""

    @property
    def status(self) -> EngineStatusReply | None: ...

    @property
    def is_serving(self) -> bool: ...

    async def releases(self) -> ReleasesReply: ...

    async def decide(self, request: ReleaseRequest) -> ReleaseReply: ...

    async def limit_training(self, version: int | None) -> SuccessReply: ...


@dataclass(frozen=True, slots=True)
class ReleasedArm:
    """The functions with which the gate controls the released arm. The released arm is the share of
    the sessions that the released version answers."""

    set_version: Callable[[int], None]
    """Function that sets the version that answers the arm."""
    trouble: Callable[[], str | None]
    """Function that returns the reason if the version of the arm cannot be sampled, else None."""
    is_loading: Callable[[], bool]
    """Function that returns True while the version is being loaded and no attempt to load it has
    failed yet."""


NO_RELEASED_ARM = ReleasedArm(lambda version: None, lambda: None, lambda: False)
"""Released arm of a proxy whose newest version answers all sessions: functions that do nothing."""


@dataclass(frozen=True, slots=True)
class GateView:
    """The state of the gate, for `fakevllm status` and for the metrics."""

    released: int | None
    """Version that answers the released arm; None while the server has not sent the history."""
    candidate: int | None
    """Version that is being evaluated; None if no version is being evaluated."""
    is_held: bool
    num_pairs: int
    """Number of rows that both versions have answered in the current evaluation; 0 without a
    candidate."""
    trouble: str | None
    """Reason why the gate can make no decision at present; None if there is no such reason."""
    is_blocked: bool
    """Whether a person must remove the cause of `trouble`. The value is False if the trouble ends
    by itself in normal operation, as during a training step or while a released version is being
    loaded."""
    num_decisions: Mapping[str, int]
    """Number of decisions in the history of the server's run, by their kind."""
    progress: Callable[[], dict[str, Any]]
    """Function that computes the figures of the current evaluation, which may take 50 ms."""
    next_candidate: int | None = None
    """Version that will be evaluated next. None while another version is being evaluated, or if no
    evaluation is planned."""
    has_released_arm: bool = True
    """Whether the released version answers some sessions, and the newest version the others."""

    @property
    def evaluation(self) -> dict[str, Any]:
        """Figures of the current evaluation. The figures include the progress of the reference (the
        released version's answers to the held-out rows) while the reference is being sampled."""
        return self.progress()


class _NotDue(Exception):
    """Raised to stop the sampling of held-out rows that the release gate no longer needs."""


class ReleaseGate:
    """The release gate of one proxy. It evaluates versions of the weights on held-out rows, and
    sends decisions about their release to the server."""

    def __init__(
        self,
        rules: GateRules,
        rows: EvaluationRows,
        server: ReleaseServer,
        arm: ReleasedArm = NO_RELEASED_ARM,
        *,
        pinned: Sequence[int] = (),
        controller: Callable[[GateRules], GateController] = GateController,
        retry_every_s: float = RETRY_EVERY_S,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        """Create the gate. `pinned` lists versions, such as the baseline, whose checkpoints the
        server is asked to keep. `controller` creates the object that makes the decisions. A new
        controller is created when the server changes to another training run."""
        self._rows = rows
        self._server = server
        self._arm = arm
        self._pinned = list(pinned)
        self._retry_every_s = retry_every_s
        self._check_every_s = check_every_s
        self._rules = rules
        self._new_controller = lambda: controller(rules)
        self._controller = self._new_controller()
        self._run_id = ""
        self._read_at_version = 0
        """Newest version of the weights when the history was requested last."""
        self._history: ReleasesReply | None = None
        self._num_decisions: Counter[str] = Counter()
        self._reference: Reference | None = None
        self._evaluation: HeldOutEvaluation | None = None
        self._num_refused = 0
        """Number of consecutive refusals of the present row."""
        self._unusable: str | None = None
        """Reason why the held-out rows cannot measure versions; None if they can."""
        self._num_unscored = 0
        """Number of rows without any reward since the last row with a reward."""
        self._num_outages = 0
        """Number of consecutive attempts that failed because of an outage."""
        self._live = LiveSessions()
        self._trouble: str | None = None
        self._is_blocked = False

    async def run(self) -> None:
        """Carry out each action of the release gate when it is due, until this asyncio task is
        cancelled. An action is, for example, a decision or the sampling of held-out rows."""
        await self._check()
        while True:
            pause_s = self._retry_every_s
            try:
                pause_s = await self._step()
                self._num_outages = 0
            except aiohttp.ClientResponseError as error:
                if error.status == 503:  # a decision waits for the end of a training step
                    self._set_trouble("the server is busy", is_blocked=False)
                    pause_s = self._check_every_s
                else:
                    self._report(_refusal(error))
            except (*NETWORK_ERRORS, ValueError) as error:
                self._report(f"the server {describe_error(error, RELEASE_TIMEOUT_S)}")
                pause_s = self._outage_pause_s()
            except WireError as error:
                has_candidate = self._history is not None and self._history.candidate is not None
                self._report(_unsampled(error, has_candidate=has_candidate))
                if error.status != 400:
                    pause_s = self._outage_pause_s()
            except Exception as error:  # isolates: apps are served whatever happens to the gate
                log.exception("the gate failed")
                self._report(f"{type(error).__name__}: {error}")
            await asyncio.sleep(pause_s)

    async def _check(self) -> None:
        """Check whether the held-out rows can be used to compare versions. Rows that were trained,
        for example, cannot be used."""
        try:
            self._unusable = await asyncio.to_thread(self._rows.check)
        except Exception:  # isolates: the versions are evaluated without the check
            log.exception("the held-out rows could not be checked")
        if self._unusable is not None:
            self._controller.rows_unusable(self._unusable)

    async def prepare(self, timeout_s: float) -> None:
        """Wait until the history of releases has been read, but at most `timeout_s` seconds. The
        history tells the gate which version is released.

        If versions are evaluated between training steps, also wait until the server has a training
        limit (the newest version that training may make). The limit delays the first training step
        until the released version has answered the held-out rows. After the step, the engine would
        no longer hold the released version.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._is_prepared():
                    await asyncio.sleep(0.1)

    async def _is_prepared(self) -> bool:
        """Make one attempt to finish the preparation that `prepare` waits for. Return True if the
        preparation is finished."""
        try:
            if self._history is None:
                await self._read()
            return not isinstance(self._controller, BetweenStepsController) or (
                await self._try_to_limit_training()
            )
        except (*NETWORK_ERRORS, ValueError):
            return False
        except Exception:  # isolates: apps are served whatever happens to the gate
            log.exception("the gate could not be prepared")
            return True

    async def _try_to_limit_training(self) -> bool:
        """Send a new training limit (the newest version that training may make) to the server, if
        one is due. Return True if none was due. Return False if a limit was sent, or if the
        server's status is not known yet."""
        status = self._server.status
        if status is None:
            return False
        if not self._is_current(status):
            await self._read()
        self._observe(status)
        await self._read_reference()
        action = self._controller.next_action()
        if isinstance(action, LimitTraining):
            await self._limit_training(action.version)
            return False
        return True

    def rewards_seen(self, rewards: Sequence[float]) -> None:
        """Check the rewards of a group (a request with its sampled answers) against the setting
        `release.reward_range`. A reward outside of this range stops all releases, no matter which
        version sampled the answers."""
        self._controller.rewards_seen(*rewards)

    def group_scored(self, group: GroupOutcome) -> None:
        """Add a scored group (a request with its sampled answers) to the comparison of the arms. An
        arm is a share of the sessions that one version answers. Only the first scored group of a
        session counts."""
        session = self._live.add(group)
        if session is not None:
            self._controller.session_scored(session)

    @property
    def open_evaluations(self) -> set[str]:
        """Ids of the evaluations whose rows the gate may still read from the ledger (the proxy's
        database)."""
        ids = {one.eval_id for one in [self._reference] if one is not None}
        return ids | {one.key.eval_id for one in [self._evaluation] if one is not None}

    def view(self) -> GateView:
        history = self._history
        return GateView(
            None if history is None else history.released,
            None if history is None else history.candidate,
            history is not None and history.is_held,
            self._controller.num_pairs,
            self._trouble,
            self._is_blocked,
            self._num_decisions,
            lambda: self._controller.progress,
            self._controller.next_candidate,
            self._arm is not NO_RELEASED_ARM,
        )

    async def _step(self) -> float:
        """Carry out the action that is due. Return the number of seconds until the next step."""
        status = self._server.status
        if status is None:
            self._set_trouble("the server cannot be reached")  # logged by the connection
            return self._check_every_s
        if not self._is_current(status):
            await self._read()
        self._observe(status)
        await self._read_reference()
        action = self._controller.next_action()
        if _needs_released_arm(action) and (trouble := self._arm.trouble()) is not None:
            # The module `arm_policies` logs this trouble.
            is_blocked = not self._arm.is_loading()
            self._set_trouble(f"the released arm: {trouble}", is_blocked=is_blocked)
            return self._check_every_s
        match action:
            case Decide() as decision:
                return await self._decide(decision)
            case LimitTraining(version=version):
                return await self._limit_training(version)
            case Evaluate() | SampleReference() as rows if self._server.is_serving:
                return await self._sample(rows)
            case Evaluate() | SampleReference() | Wait():
                self._report(self._controller.trouble)
                return self._check_every_s

    def _observe(self, status: EngineStatusReply) -> None:
        """Pass the newest version of the weights and the hash of the hooks to the controller (the
        object that makes the decisions about releases)."""
        self._controller.version_published(status.weight_version)
        self._live.published(status.weight_version, time.time())
        self._controller.scorer_changed(self._rows.hook_hash())

    def _is_current(self, status: EngineStatusReply) -> bool:
        """Return True if the gate's copy of the history of decisions is still up to date.

        The history is out of date if an operator has added a decision. If versions are evaluated
        between training steps, the history is also out of date after each new version and after
        each change of the training limit. (A new version may be a copy of an older version, and the
        history lists the copies.)
        """
        history = self._history
        if history is None or status.run_id != self._run_id:
            return False
        if isinstance(self._controller, BetweenStepsController):
            is_newer = status.weight_version != self._read_at_version
            if is_newer or status.training_limit != history.training_limit:
                return False
        return status.num_releases == len(history.records)

    async def _read(self) -> None:
        """Read the history of releases of the server's present run. If the run has changed, create
        a new controller (the object that makes the decisions)."""
        status = self._server.status
        version = 0 if status is None else status.weight_version
        history = await self._server.releases()
        self._read_at_version = version
        run_id = self._run_id if status is None else status.run_id
        if run_id != self._run_id:
            self._run_id = run_id
            self._controller = self._new_controller()
            if self._unusable is not None:
                self._controller.rows_unusable(self._unusable)
            self._live = LiveSessions()
        before, self._history = self._history, history
        self._num_decisions = Counter(record.decision.value for record in history.records)
        self._controller.history_read(history)
        self._live.begin(self._controller.latest_verdict)
        self._arm.set_version(history.released)
        ended = None if before is None else before.candidate
        if ended is not None and ended not in (history.candidate, history.released):
            await self._rows.unload(ended)

    async def _decide(self, decision: Decide) -> float:
        """Send a decision to the server. Then read the history again, because it contains the new
        decision. Return the number of seconds until the next step."""
        # After a crash, the next process needs the rows of this decision to make the same decision.
        if decision.source == HELD_OUT and not await self._rows.flush():
            self._report(DISK_TROUBLE)
            return self._retry_every_s
        reply = await self._server.decide(
            ReleaseRequest(
                id=decision.id,
                decision=decision.decision,
                version=decision.version,
                evidence=decision.evidence,
                pinned=self._pinned,
            )
        )
        await self._read()
        if reply.record is None or not reply.success:
            self._controller.decision_refused(decision)
            self._report(f"the server refused a decision: {reply.failure_reason}")
            return self._retry_every_s
        self._report(self._controller.trouble)
        log.info(
            "version %s is %s%s",
            reply.record.version,
            reply.record.decision.value,
            _figures(decision.evidence),
        )
        return 0.0

    async def _limit_training(self, version: int) -> float:
        """Set the newest version that training may make. The limit holds until the next limit is
        sent. Return the number of seconds until the next step."""
        # After more training, the reference cannot be sampled any more, so the next process must
        # have it. A limit that stops training needs no record, and is set although a disk is full.
        before = None if self._history is None else self._history.training_limit
        lets_train = before is not None and version > before
        if lets_train and not await self._rows.flush():
            self._report(DISK_TROUBLE)
            return self._retry_every_s
        reply = await self._server.limit_training(version)
        if not reply.success:
            self._report(f"the server does not limit training: {reply.failure_reason}")
            return self._retry_every_s
        await self._read()
        return 0.0

    async def _read_reference(self) -> None:
        """Read the reference (the released version's answers to the held-out rows) from the ledger,
        if the controller needs the reference."""
        controller = self._controller
        if not isinstance(controller, BetweenStepsController) or not controller.needs_reference:
            return
        name = controller.reference
        assert name is not None, "the controller names the reference that it needs"
        self._reference = Reference(
            self._eval_id(f"reference-{name}"), self._rows, self._retry_every_s
        )
        self._evaluation = None  # it uses the answers of the previous reference
        await self._reference.read(lambda: controller.released_copies)
        num_known = self._reference.answers.num_known(self._rules.max_draws)
        controller.reference_answered(name, num_known)

    async def _sample(self, due: Evaluate | SampleReference) -> float:
        """Sample the rows that are due, and pass the rewards to the controller. Return the number
        of seconds until the next step.

        Sampling stops as soon as another action is due, such as a decision or the evaluation of
        another version. An operator therefore does not wait for the rows.
        """
        try:
            if isinstance(due, Evaluate):
                num_sampled, reason = await self._sample_pairs(due)
            else:
                num_sampled, reason = await self._sample_reference(due)
        except (_NotDue, HooksChanged):
            return 0.0
        except VersionChanged:
            return self._check_every_s
        self._num_refused = 0
        unscored = _unscored(reason) if self._num_unscored >= NUM_UNSCORED else None
        self._report(unscored or self._controller.trouble)
        # Rows that the ledger has are not sampled again, so they need no pause.
        return self._retry_every_s if unscored is not None and num_sampled else 0.0

    async def _sample_pairs(self, due: Evaluate) -> tuple[int, str | None]:
        """Sample the due held-out rows with the released version and with the candidate (the
        version under evaluation). Rows whose samples the ledger already has are not sampled again.
        Return the number of rows that were sampled, and the reason if a row has no reward. The
        reason is None if all rows have rewards."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.key != self._evaluation_key(due):
            evaluation = self._evaluation = await self._open_evaluation(due)
            self._num_refused, self._num_unscored = 0, 0
        num_before = evaluation.num_sampled
        try:
            pairs = await self._while_due(due, evaluation.pairs(due.draw, due.num_draws))
        except WireError as error:
            self._count_refusal(due.candidate, error)
            raise
        for draw, pair in enumerate(pairs, start=due.draw):
            self._controller.pair_scored(due.candidate, due.released, draw, pair)
            self._count_unscored(is_scored=bool(pair.released or pair.candidate))
        return evaluation.num_sampled - num_before, evaluation.reason

    async def _sample_reference(self, due: SampleReference) -> tuple[int, str | None]:
        """Sample the due held-out rows with the served version, which has the released weights. The
        answers become part of the reference, with which later versions are compared. Rows whose
        samples the ledger already has are not sampled again. Return the number of rows that were
        sampled, and the reason if a row has no reward. The reason is None if all rows have rewards.
        """
        reference, controller = self._reference, self._controller
        assert reference is not None, "a reference is read before its rows are due"
        assert isinstance(controller, BetweenStepsController), "it alone has a reference"
        num_before = reference.answers.num_sampled
        for rewards in await self._while_due(due, reference.sample(due.draw, due.num_draws)):
            controller.rewards_seen(*rewards)
            self._count_unscored(is_scored=bool(rewards))
        controller.reference_answered(due.reference, due.draw + due.num_draws)
        return reference.answers.num_sampled - num_before, reference.answers.reason

    def _evaluation_key(self, due: Evaluate) -> EvaluationKey:
        name = str(due.candidate)
        if isinstance(self._controller, BetweenStepsController):
            name += f"-{self._rules.num_samples}samples"
        return EvaluationKey(self._eval_id(name), due.released, due.candidate)

    async def _open_evaluation(self, due: Evaluate) -> HeldOutEvaluation:
        key, controller = self._evaluation_key(due), self._controller
        if not isinstance(controller, BetweenStepsController):
            return await open_beside_training(self._rows, key)
        assert self._reference is not None, "a reference is read before it is compared"
        return await self._reference.open(key, lambda: controller.newest_copies)

    async def _while_due(self, due: Action, sampling: Coroutine[Any, Any, _Rows]) -> _Rows:
        """Run the coroutine `sampling`, and return its result. Cancel the coroutine and raise
        _NotDue if another action becomes due meanwhile, or if the hooks change."""
        hooks, task = self._rows.hook_hash(), asyncio.create_task(sampling)
        try:
            is_sampled = False
            while not is_sampled:
                done, _ = await asyncio.wait({task}, timeout=self._check_every_s)
                is_sampled = bool(done)
                if not self._is_still_due(due) or self._rows.hook_hash() != hooks:
                    raise _NotDue
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _count_unscored(self, *, is_scored: bool) -> None:
        self._num_unscored = 0 if is_scored else self._num_unscored + 1

    def _eval_id(self, name: str) -> str:
        """Return the id under which the ledger keeps the rows of an evaluation. The id contains the
        hash of the hooks, because rewards of different hooks cannot be compared."""
        hooks = self._rows.hook_hash()[:8]
        return "-".join(filter(None, (GATE, name, hooks, self._run_id)))[:100]

    def _is_still_due(self, due: Action) -> bool:
        """Return True if the action `due` is still the controller's next action."""
        status = self._server.status
        if status is not None:
            if not self._is_current(status):
                return False
            self._observe(status)
        return self._controller.next_action() == due

    def _count_refusal(self, candidate: int, error: WireError) -> None:
        """Count one refusal by the server to sample a row with `candidate`, the version under
        evaluation. After MAX_REFUSALS consecutive refusals, give up the evaluation, and neither
        release nor reject `candidate`."""
        self._num_refused = self._num_refused + 1 if error.status == 400 else 0
        if self._num_refused >= MAX_REFUSALS:
            self._controller.give_up(candidate, error.message[:MAX_REASON_CHARS])

    def _outage_pause_s(self) -> float:
        """Return the number of seconds until the next attempt after an outage. Each pause is twice
        as long as the previous one, up to the usual pause after an error."""
        self._num_outages += 1
        pause_s = self._check_every_s * 2.0 ** min(self._num_outages - 1, 10)
        return min(pause_s, self._retry_every_s)

    def _report(self, trouble: str | None) -> None:
        """Record the reason why the gate can make no decision at present. Log the reason if it
        differs from the last reason."""
        if trouble is not None and trouble != self._trouble:
            if trouble == self._controller.trouble:  # only the user can end it
                log.warning("no version is evaluated or released: %s", trouble)
            else:
                log.warning("no version can be released or rejected now: %s; retrying", trouble)
        self._set_trouble(trouble)

    def _set_trouble(self, trouble: str | None, *, is_blocked: bool = True) -> None:
        self._trouble = trouble
        self._is_blocked = is_blocked and trouble is not None


def _needs_released_arm(action: Action) -> bool:
    """Return True if the gate may carry out `action` only while the released version can be
    sampled. A rejection never waits for the released version, because the rejected version must
    stop answering apps at once."""
    if isinstance(action, Decide):
        return action.decision in (Decision.CANDIDATE, Decision.RELEASED)
    return True


def _unsampled(error: WireError, *, has_candidate: bool) -> str:
    """Return a line for the log about a row that cannot be sampled."""
    line = f"a held-out row cannot be sampled: {error.message}"
    if error.status == 400 and has_candidate:
        line += f" After {MAX_REFUSALS} such refusals, the candidate is undecided"
    return line


def _unscored(reason: str | None) -> str:
    """Return a line for the log about rows that get no reward."""
    cause = "" if reason is None else f" ({one_line(reason)})"
    return f"none of {NUM_UNSCORED} held-out rows in a row got a reward{cause}: {HOW_TO_SCORE}"


def _refusal(error: aiohttp.ClientResponseError) -> str:
    """Return a line for the log about an error response of the server."""
    if error.status == 403:
        return RELEASES_NEED_ADMIN_KEY
    if error.status in (404, 405):
        return RELEASES_NEED_NEWER_SERVER
    return f"the server {describe_error(error, RELEASE_TIMEOUT_S)}"


def _figures(evidence: dict[str, Any]) -> str:
    """Return the figures of a decision for a log line.

    >>> _figures({"difference": -0.1, "low": -0.14, "high": -0.06, "pairs": 120, "released": 7})
    ': difference to version 7 -0.100 (-0.140 to -0.060), from 120 pairs'
    """
    if "trouble" in evidence:
        return f": {evidence['trouble']}"
    if evidence.get("difference") is None:
        return ""
    return (
        f": difference to version {evidence['released']} {evidence['difference']:+.3f} "
        f"({evidence['low']:+.3f} to {evidence['high']:+.3f}), from {evidence['pairs']} pairs"
    )
