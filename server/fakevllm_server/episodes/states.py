"""The engine's states: one transition table and one method that changes them. Pure."""

from __future__ import annotations

import asyncio

from fakevllm_adapters.protocol.swarm import EngineStatus

OFFLINE, BOOTING, ROLLING, ROLLING_POST, WEIGHT_SYNCING = EngineStatus

TRANSITIONS: dict[EngineStatus, frozenset[EngineStatus]] = {
    OFFLINE: frozenset({BOOTING}),
    BOOTING: frozenset({ROLLING, OFFLINE}),
    ROLLING: frozenset({ROLLING_POST, WEIGHT_SYNCING, BOOTING, OFFLINE}),
    ROLLING_POST: frozenset({WEIGHT_SYNCING, BOOTING, OFFLINE}),
    WEIGHT_SYNCING: frozenset({ROLLING, BOOTING, OFFLINE}),
}
"""BOOTING is reached from a running state when an engine process has died and is started again;
WEIGHT_SYNCING out of turn when only the trainer has, while calls go on being answered."""

SERVING = frozenset({ROLLING, ROLLING_POST, WEIGHT_SYNCING})
"""States in which calls are answered."""

POST_DEADLINE_S = 60.0
"""How long ROLLING_POST waits for claimed episodes; the unfinished ones go to the next batch."""


class IllegalTransition(Exception):
    """A move the table does not allow: a defect of ours, never of a client."""


class EngineLifecycle:
    """Where the engine stands: state, step being collected, version being served."""

    def __init__(self) -> None:
        self.status = OFFLINE
        self.detail: str | None = None
        self.global_step = 1
        self.version = 0
        self._since = 0.0
        self._rolled_s = 0.0
        self._moved = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.status in SERVING

    @property
    def collecting_step(self) -> int:
        """The step a group that ends now may be trained in: while one is trained, the next."""
        return self.global_step + (self.status is WEIGHT_SYNCING)

    def move(self, to: EngineStatus, now: float, detail: str | None = None) -> None:
        if to not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self.status} -> {to}")
        self._rolled_s = self.seconds_rolling(now)
        self.status, self.detail, self._since = to, detail, now
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def next_move(self) -> None:
        """Wait until the status changes."""
        await self._moved.wait()

    def seconds_in_state(self, now: float) -> float:
        return now - self._since

    def seconds_rolling(self, now: float) -> float:
        """In ROLLING, where episodes may be claimed, all told: a clock that stands meanwhile."""
        return self._rolled_s + (now - self._since if self.status is ROLLING else 0.0)

    def post_is_over(self, now: float, num_claimed: int) -> bool:
        """Whether ROLLING_POST may end."""
        return num_claimed == 0 or now - self._since >= POST_DEADLINE_S

    def next_version(self) -> int:
        """Versions only ever grow, also when an older checkpoint is restored."""
        return self.version + 1
