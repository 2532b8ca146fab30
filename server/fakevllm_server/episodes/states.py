"""The states of the engine: a table of the allowed transitions, and the current state."""

from __future__ import annotations

import asyncio

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes.agreement_status import AgreementStatus

OFFLINE, BOOTING, ROLLING, ROLLING_POST, WEIGHT_SYNCING = EngineStatus

TRANSITIONS: dict[EngineStatus, frozenset[EngineStatus]] = {
    OFFLINE: frozenset({BOOTING}),
    BOOTING: frozenset({ROLLING, OFFLINE}),
    ROLLING: frozenset({ROLLING_POST, WEIGHT_SYNCING, BOOTING, OFFLINE}),
    ROLLING_POST: frozenset({WEIGHT_SYNCING, ROLLING, BOOTING, OFFLINE}),
    WEIGHT_SYNCING: frozenset({ROLLING, BOOTING, OFFLINE}),
}
"""The allowed next states of each state.

A running state changes to BOOTING when an engine process died and is restarted. ROLLING changes
directly to WEIGHT_SYNCING when only the trainer's process died. Calls are still answered in this
case. ROLLING_POST changes back to ROLLING without a step if a training limit (the newest version
that training may make) is set during ROLLING_POST.
"""

SERVING = frozenset({ROLLING, ROLLING_POST, WEIGHT_SYNCING})
"""States in which calls are answered."""

POST_DEADLINE_S = 60.0
"""Seconds that ROLLING_POST waits for claimed episodes. Episodes that end later go to the next
batch."""


class IllegalTransition(Exception):
    """Error for a change of the engine's status that the table TRANSITIONS forbids. The cause is a
    bug in the server."""


class EngineLifecycle:
    """The state of the engine: its status, and the version of the weights that it serves. The state
    also has the number of the training step for which groups are being collected."""

    def __init__(self) -> None:
        self.status = OFFLINE
        self.detail: str | None = None
        """Description of the engine's problem; None if it has no problem."""
        self.global_step = 1
        self.version = 0
        self.async_step_runs = False
        """Whether a training step runs while the status is ROLLING. Only a job with `async_steps`
        has such steps."""
        self.agreement_status = AgreementStatus()
        """The status as it is reported to clients that agree to training steps."""
        self._since = 0.0
        self._rolling_s = 0.0
        self._moved = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.status in SERVING

    @property
    def collecting_step(self) -> int:
        """Number of the first training step that can train a group which is completed now. If a
        training step is running, this is the number of the next step."""
        return self.global_step + (self.status is WEIGHT_SYNCING or self.async_step_runs)

    def move(self, to: EngineStatus, now: float, detail: str | None = None) -> None:
        """Change the engine's status. Raises IllegalTransition if the table TRANSITIONS forbids the
        change."""
        if to not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self.status} -> {to}")
        self._rolling_s = self.seconds_rolling(now)
        self.status, self.detail, self._since = to, detail, now
        self.agreement_status.moved(to, now)
        self._wake_waiting()

    def set_async_step_runs(self, runs: bool) -> None:
        """Record that a training step begins or ends while the status stays ROLLING."""
        self.async_step_runs = runs
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def next_move(self) -> None:
        """Wait until the engine's status changes the next time, or until a step that does not
        change the status begins or ends."""
        await self._moved.wait()

    def seconds_in_state(self, now: float) -> float:
        """Return the number of seconds since the engine's status last changed."""
        return now - self._since

    def seconds_rolling(self, now: float) -> float:
        """Return the total number of seconds that the engine has been in the state ROLLING. Clients
        may claim episodes only in this state.

        Quotas use this number as a clock that stops in all other states.
        """
        return self._rolling_s + (now - self._since if self.status is ROLLING else 0.0)

    def post_is_over(self, now: float, num_claimed: int) -> bool:
        """Return True if the state ROLLING_POST may end now. In this state, no new episode is
        claimed, and claimed episodes get time to end.

        The state is over when no claimed episode is left, or after POST_DEADLINE_S seconds.
        """
        return num_claimed == 0 or now - self._since >= POST_DEADLINE_S

    def next_version(self) -> int:
        """Return the version number for the next weights. It is higher than the current number,
        even if the next weights come from a restored checkpoint."""
        return self.version + 1
