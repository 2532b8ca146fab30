"""Derive the state of a demo from the server's history of releases. The caller polls this history.
In this demo, the release gate evaluates versions before they answer the app (the mode `gated`).
This module does no I/O."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from fakevllm.demo.gate_settings import PlantedSteps
from fakevllm.release.evidence_text import difference
from fakevllm.replay.row_senders import Player
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord, ReleasesReply
from fakevllm_adapters.protocol.swarm import Task

MAX_PAUSE_S = 60.0
"""Maximum seconds for which a question waits for the end of an evaluation. After this time, the
demo goes on even if the release gate has not ended the evaluation."""


@dataclass(frozen=True, slots=True)
class PlantedTimes:
    """Unix times in seconds at which the planted steps began and ended. Planted steps train with
    the opposite rewards. A time is None until the event has happened."""

    began_at: float | None = None
    ended_at: float | None = None


class PausingPlayer:
    """A Player that sends no question while a version is evaluated.

    On a machine with two cores, questions would slow the evaluation down. During a slow evaluation,
    training could recover from planted bad steps, so that the evaluation would not find them.
    """

    def __init__(self, player: Player, no_candidate: asyncio.Event) -> None:
        self._player = player
        self._no_candidate = no_candidate

    async def play(self, task: Task, key: str) -> str:
        """Wait while a version of the weights is evaluated, but at most MAX_PAUSE_S seconds. Then
        let the wrapped Player send the dataset row `task`, and return the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_PAUSE_S):
                await self._no_candidate.wait()
        return await self._player.play(task, key)


class ReleaseWatch:
    """The latest history of releases, and the time of the planted steps. Planted steps train with
    the opposite rewards."""

    def __init__(
        self, planted: PlantedSteps | None = None, times: PlantedTimes | None = None
    ) -> None:
        """Create the watch. Planted steps train with the opposite rewards. `times` are the times of
        the planted steps that an interrupted run of the demo has stored, or None."""
        self.history: ReleasesReply | None = None
        self.times = times or PlantedTimes()
        self.no_candidate = asyncio.Event()
        """Event that is set while no version is evaluated."""
        self.no_candidate.set()
        self._planted = planted

    def history_read(self, history: ReleasesReply) -> list[str]:
        """Store `history` as the latest history of releases, and return lines of text about the new
        decisions in it."""
        num_known = 0 if self.history is None else len(self.history.records)
        is_first, self.history = self.history is None, history
        if history.candidate is None:
            self.no_candidate.set()
        else:
            self.no_candidate.clear()
        new = [] if is_first else history.records[num_known:]
        return [line for record in new if (line := describe(record))]

    def version_seen(self, version: int, now: float) -> list[str]:
        """Record that `version` is the newest version of the weights at the time `now`, in Unix
        seconds. Planted steps train with the opposite rewards. If they begin or end with this
        version, return a line that says so. Otherwise return []."""
        planted, times = self._planted, self.times
        if planted is None:
            return []
        if times.began_at is None and version >= planted.begins_at:
            self.times = PlantedTimes(now)
            return [f"step {planted.first_step}: rewards train with the opposite sign now"]
        if times.began_at is not None and times.ended_at is None and version >= planted.ends_at:
            self.times = PlantedTimes(times.began_at, now)
            return ["rewards train with the right sign again"]
        return []

    def line(self) -> str:
        """Return one line of text that says which version of the weights answers the app, and which
        version is being evaluated."""
        if self.history is None:
            return "unknown"
        released, candidate = self.history.released, self.history.candidate
        text = f"version {released} answers the app"
        return text if candidate is None else f"{text}, version {candidate} is evaluated"

    def is_due(self, version: int, evaluate_every: int) -> bool:
        """Return True if a version of the weights is being evaluated, or if `version`, the newest
        version, will be evaluated next. Also return True if the history of releases is not known
        yet."""
        history = self.history
        if history is None or history.candidate is not None:
            return True
        verdicts = [
            record.version
            for record in history.records
            if record.decision is not Decision.CANDIDATE and record.version is not None
        ]
        return version - max([0, *verdicts, *history.rejected]) >= evaluate_every


def describe(record: ReleaseRecord) -> str:
    """Return a line of text about a decision if it releases a version of the weights, rejects one,
    or leaves one undecided. Return "" for any other decision."""
    figures = difference(record.evidence)
    figures = "" if figures == "-" else f": {figures}"
    match record.decision:
        case Decision.RELEASED:
            return f"version {record.version} is released{figures}"
        case Decision.REJECTED:
            back = record.evidence.get("restored")
            goes_back = "" if back is None else f", training goes back to version {back}"
            return f"version {record.version} is rejected{goes_back}{figures}"
        case Decision.UNDECIDED:
            return f"version {record.version} is undecided{figures}"
        case _:
            return ""
