"""The decisions for one group (a request with its siblings, the answers that are sampled for it),
as a state machine without I/O.

The methods of `GroupScheduler` take events and return decisions. `group_executor.py` carries the
decisions out. The caller passes the random number generator.

The scheduler gives two independent guarantees:

* The app gets exactly one answer or error. The answer is that of a sibling. If no sibling has an
  answer for the app, the app gets the error of the lead (sibling 0, the app's own request). If the
  group was aborted, the app gets an error about the abort.
* The group ends exactly once, and nothing is started after that. A group that ends is either
  settled (its rewards are final) or aborted.

The executor must report these events:

* the end of each sibling that was started and not cancelled
* the end of each call of the reward hook
* the moment when the chosen answer was completely sent to the app

The executor also reports the start of the group, the first token of a streamed lead, the deadline
for the app's answer, a disconnect of the app, and an abort.

Events may arrive in any order. Events after the group's end have no effect.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fakevllm.config.serving import ServeRules
from fakevllm.groups.sibling_selection import Selection, best_sibling, select
from fakevllm.ledger.reasons import EndReason
from fakevllm.transport.request import SiblingOutcome


@dataclass(frozen=True, slots=True)
class Start:
    """Decision to start sampling the siblings with these indices. Siblings are the answers to one
    request."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relay:
    """Decision to sample the lead (sibling 0, the app's own request) and to stream its answer to
    the app."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decision to cancel sampling for the siblings (answers to one request) with these indices."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Decision to call the reward hook (the user's function) for the siblings with these indices.
    Siblings are the answers to one request."""

    indices: tuple[int, ...]
    """At least two sibling indices, in ascending order."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Decision to send the answer of the sibling with this index to the app. Siblings are sampled
    for the same request."""

    index: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decision to send the error of the lead (sibling 0, the app's own request) to the app."""


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Decision to end the response to the app with an error, even if a part of an answer was
    already sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Decision to end the group normally. The group's final rewards are those of the last call of
    the reward hook."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Decision to end the group (a request with its siblings) without training it."""

    reason: str


Decision = Start | Relay | Cancel | Score | Serve | Refuse | BreakOff | Settle | Abort


class AppState(StrEnum):
    """The state of the answer to the app: awaited, streamed, chosen, sent, or no longer wanted."""

    WAITING = "waiting"
    RELAYED = "relayed"
    """The answer of the lead (sibling 0) is being streamed to the app."""
    CHOSEN = "chosen"
    """The answer is chosen and is being sent."""
    ANSWERED = "answered"
    LEFT = "left"
    """The app disconnected before it had an answer."""


class GroupScheduler:
    """The state machine of one group (a request with its siblings, the answers that are sampled for
    it). The attribute `selection` has the sibling that the app gets, and the sibling with the
    highest reward. `selection` is final when the group has ended normally."""

    def __init__(
        self, num: int, rules: ServeRules, rng: random.Random, *, can_stream: bool
    ) -> None:
        """Create the state machine for `num` siblings. The lead (sibling 0, the app's own request)
        is streamed to the app if two conditions hold: `can_stream` is True, and the serve policy is
        to serve the lead."""
        assert num >= 2, "a group has at least two siblings"
        self._rules = rules
        self._rng = rng
        self._is_relayed = rules.streams_lead and can_stream
        self._unstarted = set(range(num))
        self._running: set[int] = set()
        self._answered: set[int] = set()
        self._servable: set[int] = set()
        """Siblings whose answers can be translated into the app's API format."""
        self._scoring: frozenset[int] | None = None
        """The siblings for which the reward hook is running; None if the hook is not running."""
        self._scored: frozenset[int] = frozenset()
        """The siblings for which the reward hook was last called."""
        self.rewards: Mapping[int, float | None] = {}
        """Rewards from the last call of the reward hook, by sibling index."""
        self._quorum = num if rules.quorum is None else min(rules.quorum, num)
        self.app = AppState.WAITING
        self.selection = Selection(None, None)
        self.is_over = False

    # --- events

    def begin(self) -> list[Decision]:
        """Return the first decisions. If the answer of the lead (sibling 0, the app's own request)
        is streamed to the app, only the lead is started. Otherwise all siblings are started."""
        if self._is_relayed:
            self.app = AppState.RELAYED
            self._unstarted.discard(0)
            self._running.add(0)
            return [Relay()]
        return self._start()

    def lead_began(self) -> list[Decision]:
        """Start the other siblings after the first token of a lead (sibling 0) that is streamed to
        the app.

        At the first token, the prompt is in the engine's prefix cache. The other siblings start
        only after the first token, so that they can use this cache.
        """
        return self._start() if self._is_relayed and not self.is_over else []

    def sibling_finished(self, index: int, outcome: SiblingOutcome) -> list[Decision]:
        """Handle the end of sampling for a sibling (one answer to the request) that was started and
        not cancelled."""
        if self.is_over or index not in self._running:
            return []
        self._running.remove(index)
        if outcome in (SiblingOutcome.ANSWERED, SiblingOutcome.HIDDEN):
            self._answered.add(index)
        if outcome is SiblingOutcome.ANSWERED:
            self._servable.add(index)
        if index == 0 and self._is_relayed:
            return self._on_relay_end(outcome)
        if index == 0 and outcome is SiblingOutcome.REFUSED and self.app is AppState.WAITING:
            return self._on_lead_refused()
        return self._advance()

    def scoring_finished(self, rewards: Mapping[int, float | None]) -> list[Decision]:
        """Handle the result of the reward hook. `rewards` maps the index of each scored sibling
        (answer to the request) to the sibling's reward. A sibling that is not in `rewards` has no
        reward."""
        if self.is_over or self._scoring is None:
            return []
        self._scored, self._scoring = self._scoring, None
        self.rewards = dict(rewards)
        return self._advance()

    def deadline_passed(self) -> list[Decision]:
        """Handle the deadline for the app's answer. After the deadline, the app no longer waits for
        the quorum (the configured number of answers). The app gets an answer as soon as one sibling
        (a sampled answer) is complete."""
        self._quorum = 1
        return self._advance()

    def answer_sent(self) -> list[Decision]:
        """Handle the event that the chosen answer was completely sent to the app."""
        if self.is_over or self.app is not AppState.CHOSEN:
            return []
        self.app = AppState.ANSWERED
        return self._advance()

    def app_disconnected(self) -> list[Decision]:
        """Handle the app's disconnect.

        If the answer for the app was already chosen, the disconnect has no effect. Otherwise the
        setting `on_disconnect` decides:

        * With `cancel`, the group is aborted.
        * With `finish`, the group continues and an answer is chosen, because the app may send the
          request again.

        While the answer of the lead (sibling 0) is being streamed, the answer does not count as
        chosen.
        """
        is_chosen = self.app not in (AppState.WAITING, AppState.RELAYED)
        if self.is_over or is_chosen or self._rules.on_disconnect == "finish":
            return []
        self.app = AppState.LEFT
        return self._abort(EndReason.CLIENT_DISCONNECTED.value)

    def abort(self, reason: str) -> list[Decision]:
        """Abort the group for a reason outside this state machine, such as a stop of the proxy."""
        if self.is_over:
            return []
        decisions: list[Decision] = []
        if self.app is not AppState.ANSWERED:
            decisions.append(BreakOff(reason))
        return [*decisions, *self._abort(reason)]

    # --- transitions

    def _start(self) -> list[Decision]:
        indices = tuple(sorted(self._unstarted))
        self._running |= self._unstarted
        self._unstarted.clear()
        return [Start(indices)] if indices else []

    def _cancel(self) -> list[Decision]:
        indices = tuple(sorted(self._running))
        self._running.clear()
        self._unstarted.clear()
        return [Cancel(indices)] if indices else []

    def _abort(self, reason: str) -> list[Decision]:
        cancellations = self._cancel()
        self.is_over = True
        return [*cancellations, Abort(reason)]

    def _settle(self) -> list[Decision]:
        served = self.selection.served
        best = best_sibling(sorted(self._scored), self.rewards, self._rng, served)
        self.selection = replace(self.selection, best=best)
        self.is_over = True
        return [Settle()]

    def _on_relay_end(self, outcome: SiblingOutcome) -> list[Decision]:
        """Handle the end of a lead (sibling 0) whose answer was streamed to the app. At this point,
        the app has its answer or an error."""
        self.app = AppState.ANSWERED
        if outcome is SiblingOutcome.ANSWERED:
            self.selection = Selection(0, None, 1.0)
            return [*self._start(), *self._advance()]
        return [*self._cancel(), *self._settle()]

    def _on_lead_refused(self) -> list[Decision]:
        """Handle a lead (sibling 0) that the engine has refused as a bad request: cancel the other
        siblings, and send the error to the app.

        The engine would refuse the other siblings too, so the app does not wait for them.
        """
        self._answered.clear()
        self._servable.clear()
        self._scoring = None
        self.app = AppState.CHOSEN
        return [*self._cancel(), Refuse()]

    def _advance(self) -> list[Decision]:
        """Return the next decisions for the group, given the events so far. The list is empty if
        the group must wait for another event."""
        if self.is_over or self._scoring is not None:
            return []
        all_ended = not self._running and not self._unstarted
        needs_scoring = len(self._answered) >= 2 and not self._answered <= self._scored
        if self.app is AppState.WAITING and (all_ended or self._has_quorum()):
            # Answers that arrived while others were scored do not delay the app's answer.
            if self._scored or not needs_scoring or self._rules.streams_lead:
                return [self._choose(), *self._advance()]
        elif not all_ended:
            return []
        if needs_scoring:
            self._scoring = frozenset(self._answered)
            return [Score(tuple(sorted(self._scoring)))]
        return self._settle() if all_ended and self.app is AppState.ANSWERED else []

    def _has_quorum(self) -> bool:
        if self._rules.streams_lead:
            return 0 in self._servable or (not self._is_lead_pending() and bool(self._servable))
        return len(self._servable) >= self._quorum

    def _is_lead_pending(self) -> bool:
        return 0 in self._running or 0 in self._unstarted

    def _choose(self) -> Decision:
        self.app = AppState.CHOSEN
        rules, rewards, fraction = self._rules, self.rewards, self._rules.random_fraction
        candidates = sorted(self._scored or self._answered)
        if rules.streams_lead:
            candidates, rewards, fraction = sorted(self._answered), None, 0.0
        self.selection = select(candidates, rewards, self._rng, self._servable, fraction)
        return Refuse() if self.selection.served is None else Serve(self.selection.served)
