"""What happens next to a request with several siblings: events in, decisions out. Pure; chance is
passed in.

Two things go on side by side. The app gets one answer: a sibling's, the lead's trouble, or what
breaks it off. And the group ends once, settled or aborted; nothing is started behind that. Who
executes the decisions tells of the end of every sibling that was started and not cancelled, of
every scoring, and of the end of the app's answer; each event may come at any time, and late ones
change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fakevllm.config.serving import ServeRules
from fakevllm.groups.selection import Selection, best_of, decide
from fakevllm.transport.request import Came


@dataclass(frozen=True, slots=True)
class Start:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relay:
    """Start the lead; the app gets its answer as it comes."""


@dataclass(frozen=True, slots=True)
class Cancel:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    indices: tuple[int, ...]
    """At least two, in order."""


@dataclass(frozen=True, slots=True)
class Serve:
    index: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The app gets the lead's trouble."""


@dataclass(frozen=True, slots=True)
class BreakOff:
    """The app's answer ends with an error, wherever it is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """The group is over, with the scores of the last scoring."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The group is given up."""

    reason: str


Decision = Start | Relay | Cancel | Score | Serve | Refuse | BreakOff | Settle | Abort


class AppState(StrEnum):
    WAITING = "waiting"
    RELAYED = "relayed"
    """It gets the lead's answer as it comes."""
    CHOSEN = "chosen"
    """Its answer is known and on its way."""
    ANSWERED = "answered"
    LEFT = "left"


class GroupScheduler:
    """One request. `verdict` is final once the group is settled."""

    def __init__(
        self, num: int, rules: ServeRules, chance: random.Random, *, comes_live: bool
    ) -> None:
        """`comes_live`: the app gets the lead's answer as it comes, where the policy is to give it
        the lead's."""
        assert num >= 2, "one sibling is no group"
        self._rules = rules
        self._chance = chance
        self._is_relayed = rules.streams_lead and comes_live
        self._waiting = set(range(num))
        """Not started."""
        self._running: set[int] = set()
        self._answered: set[int] = set()
        self._showable: set[int] = set()
        self._scoring: frozenset[int] | None = None
        self._scored: frozenset[int] = frozenset()
        self.rewards: Mapping[int, float | None] = {}
        """By index, as far as they count."""
        self._quorum = num if rules.quorum is None else min(rules.quorum, num)
        self.app = AppState.WAITING
        self.verdict = Selection(None, None)
        self.is_over = False

    # --- events

    def begin(self) -> list[Decision]:
        if self._is_relayed:
            self.app = AppState.RELAYED
            self._waiting.discard(0)
            self._running.add(0)
            return [Relay()]
        return self._start()

    def lead_began(self) -> list[Decision]:
        """Its first token: its prompt is in the engine's cache."""
        return self._start() if self._is_relayed and not self.is_over else []

    def finished(self, index: int, came: Came) -> list[Decision]:
        if self.is_over or index not in self._running:
            return []
        self._running.remove(index)
        if came in (Came.ANSWERED, Came.HIDDEN):
            self._answered.add(index)
        if came is Came.ANSWERED:
            self._showable.add(index)
        if index == 0 and self._is_relayed:
            return self._relayed(came)
        if index == 0 and came is Came.REFUSED and self.app is AppState.WAITING:
            return self._refused()
        return self._go_on()

    def scored(self, rewards: Mapping[int, float | None]) -> list[Decision]:
        """By index; what is missing has none."""
        if self.is_over or self._scoring is None:
            return []
        self._scored, self._scoring = self._scoring, None
        self.rewards = dict(rewards)
        return self._go_on()

    def deadline_passed(self) -> list[Decision]:
        """From now on one answer is enough."""
        self._quorum = 1
        return self._go_on()

    def answer_ended(self) -> list[Decision]:
        """The last byte of a chosen answer is out."""
        if self.is_over or self.app is not AppState.CHOSEN:
            return []
        self.app = AppState.ANSWERED
        return self._go_on()

    def app_left(self) -> list[Decision]:
        """Before its answer was there. One that is on its way goes out, to nobody; and so does one
        that is still to be chosen, for it may be asked for again."""
        is_answered = self.app not in (AppState.WAITING, AppState.RELAYED)
        if self.is_over or is_answered or self._rules.on_disconnect == "finish":
            return []
        self.app = AppState.LEFT
        return self._abort("client_disconnected")

    def give_up(self, reason: str) -> list[Decision]:
        """The proxy stops, or has a defect."""
        if self.is_over:
            return []
        told: list[Decision] = [] if self.app is AppState.ANSWERED else [BreakOff(reason)]
        return [*told, *self._abort(reason)]

    # --- what follows from them

    def _start(self) -> list[Decision]:
        indices = tuple(sorted(self._waiting))
        self._running |= self._waiting
        self._waiting.clear()
        return [Start(indices)] if indices else []

    def _cancel(self) -> list[Decision]:
        indices = tuple(sorted(self._running))
        self._running.clear()
        self._waiting.clear()
        return [Cancel(indices)] if indices else []

    def _abort(self, reason: str) -> list[Decision]:
        cancelled = self._cancel()
        self.is_over = True
        return [*cancelled, Abort(reason)]

    def _settle(self) -> list[Decision]:
        served = self.verdict.served
        best = best_of(sorted(self._scored), self.rewards, self._chance, served)
        self.verdict = replace(self.verdict, best=best)
        self.is_over = True
        return [Settle()]

    def _relayed(self, came: Came) -> list[Decision]:
        """The lead's end, which is the end of the app's answer."""
        self.app = AppState.ANSWERED
        if came is Came.ANSWERED:
            self.verdict = Selection(0, None, 1.0)
            return [*self._start(), *self._go_on()]
        return [*self._cancel(), *self._settle()]

    def _refused(self) -> list[Decision]:
        """What one engine refuses one sibling it refuses all: the others are not waited for."""
        self._answered.clear()
        self._showable.clear()
        self._scoring = None
        self.app = AppState.CHOSEN
        return [*self._cancel(), Refuse()]

    def _go_on(self) -> list[Decision]:
        if self.is_over or self._scoring is not None:
            return []
        is_all = not self._running and not self._waiting
        unscored = len(self._answered) >= 2 and not self._answered <= self._scored
        if self.app is AppState.WAITING and (is_all or self._is_enough()):
            # What came in while some were scored does not hold up the app.
            if self._scored or not unscored or self._rules.streams_lead:
                return [self._choose(), *self._go_on()]
        elif not is_all:
            return []
        if unscored:
            self._scoring = frozenset(self._answered)
            return [Score(tuple(sorted(self._scoring)))]
        return self._settle() if is_all and self.app is AppState.ANSWERED else []

    def _is_enough(self) -> bool:
        if self._rules.streams_lead:
            return 0 in self._showable or (not self._is_lead_awaited() and bool(self._showable))
        return len(self._showable) >= self._quorum

    def _is_lead_awaited(self) -> bool:
        return 0 in self._running or 0 in self._waiting

    def _choose(self) -> Decision:
        self.app = AppState.CHOSEN
        rules, rewards, fraction = self._rules, self.rewards, self._rules.random_fraction
        among = sorted(self._scored or self._answered)
        if rules.streams_lead:
            among, rewards, fraction = sorted(self._answered), None, 0.0
        self.verdict = decide(among, rewards, self._chance, self._showable, fraction)
        return Refuse() if self.verdict.served is None else Serve(self.verdict.served)
