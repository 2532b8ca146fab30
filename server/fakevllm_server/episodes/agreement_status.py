"""Decide which engine status is reported to clients that agree to training steps. This module does
no I/O, and gets the current time as an argument.

The server speaks the protocol of the framework AgentJet. A client of AgentJet first agrees to a
step and waits until it sees that the step has begun. After that, it waits for the status ROLLING.
The client reads the status every five seconds. If a state lasted less than five seconds, the client
could miss the state and would wait forever. Therefore the reported status stays at ROLLING_POST,
then at WEIGHT_SYNCING, and then at ROLLING, for at least HOLD_S seconds each. Only the report is
delayed. The engine continues at its own speed. If further steps begin while the report is delayed,
all of them are reported as one step.
"""

from __future__ import annotations

from fakevllm_adapters.protocol.swarm import EngineStatus

HOLD_S = 12.0
"""Minimum number of seconds for which each state of a step, and ROLLING after the step, is
reported. AgentJet's client reads the status every 5 s, and the status that it reads is up to 1 s
old. The client therefore sees each state at least twice."""
_OFF = (EngineStatus.OFFLINE, EngineStatus.BOOTING)


class AgreementStatus:
    """The engine status that is reported to clients. Each state of a training step (ROLLING_POST,
    then WEIGHT_SYNCING), and the state ROLLING after the step, is reported for at least HOLD_S
    seconds. A state that the engine left sooner, or skipped, is reported too.

    >>> status = AgreementStatus()
    >>> status.moved(EngineStatus.ROLLING_POST, 100.0)
    >>> status.moved(EngineStatus.ROLLING, 101.0)
    >>> [status.at(now).removeprefix("ENGINE.") for now in (111.0, 113.0, 125.0)]
    ['ROLLING_POST', 'WEIGHT_SYNCING', 'ROLLING']
    """

    def __init__(self) -> None:
        self._status = EngineStatus.OFFLINE
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._earlier_sync_until = float("-inf")
        """Time until which WEIGHT_SYNCING is reported for the previous step, the step before the
        latest step."""
        self._post_from = float("-inf")
        """Time from which ROLLING_POST is reported for the latest step. Between the end of the
        reported WEIGHT_SYNCING of the previous step and this time, ROLLING is reported."""
        self._sync_from = float("-inf")
        """Earliest time at which WEIGHT_SYNCING is reported for the latest step."""
        self._sync_until = float("-inf")
        """Time until which WEIGHT_SYNCING is reported for the latest step."""

    def moved(self, status: EngineStatus, now: float) -> None:
        """Record that the engine itself has changed to `status` at the time `now`."""
        before, self._status = self._status, status
        if status in _OFF:
            self._forget_steps()
        elif status is EngineStatus.ROLLING_POST and now >= self._sync_from:
            # The earlier step, and ROLLING after it, are reported to their ends. Further steps
            # until `_sync_from` are reported together with this step.
            self._earlier_sync_until = self._sync_until
            self._post_from = max(now, self._sync_until + HOLD_S)
            self._sync_from = self._post_from + HOLD_S
            self._sync_until = self._sync_from + HOLD_S
        elif before is EngineStatus.ROLLING_POST:
            self._sync_until = max(now, self._sync_from) + HOLD_S
        elif before is EngineStatus.WEIGHT_SYNCING:  # it may have lasted longer than HOLD_S
            self._sync_until = max(now, self._sync_until)

    def at(self, now: float) -> EngineStatus:
        """Return the status that clients see at the time `now`."""
        if self._status in _OFF:
            return self._status
        if now < self._earlier_sync_until:
            return EngineStatus.WEIGHT_SYNCING
        if now < self._post_from:
            return EngineStatus.ROLLING
        if now < self._sync_from:
            return EngineStatus.ROLLING_POST
        if self._status is EngineStatus.ROLLING and now < self._sync_until:
            return EngineStatus.WEIGHT_SYNCING
        return self._status
