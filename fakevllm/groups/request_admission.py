"""Decide for each arriving request whether it is trained. The decision uses the admission rules,
the state of the kill switch, and this module's summaries of the sessions (conversations)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from fakevllm.admission.admission_rules import AdmissionRules, RequestFacts, Ruling
from fakevllm.admission.held_out import HeldOutRows
from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.admission.side_calls import SessionSummaries, SessionSummary
from fakevllm.config.policy import PolicySection
from fakevllm.sessions.request_placement import Placement
from fakevllm.transport.request import Request

log = logging.getLogger("fakevllm.admission.admission_rules")


class TrafficGate:
    """Decides for each request of one proxy whether the request is trained. The object has the
    admission rules, the kill switch and the summaries of the sessions (conversations)."""

    def __init__(
        self,
        settings: PolicySection,
        pause: KillSwitch,
        key_names: Callable[[str | None], tuple[str, ...]] = lambda _: (),
        *,
        held_out: HeldOutRows | None = None,
        trains: bool = True,
    ) -> None:
        """Create the object. `pause` is the kill switch. While it is on, no request is trained.
        `key_names` is a function that takes an API key, and returns the names by which an admission
        rule may refer to this key. `held_out` are the dataset rows that are never trained. `trains`
        is False if the proxy has no hooks and therefore trains no request. In this case, `ruling`
        does not look up the sessions of requests."""
        self.pause = pause
        self._rules = AdmissionRules(settings)
        for name, route in settings.likely_misspelt_routes:
            log.warning(
                "[policy] n: %r is not a route and is used as a model name; did you mean route %s?",
                name,
                route,
            )
        self._rules_use_keys = any(rule.key is not None for rule in settings.skip)
        self._key_names = key_names
        self._held_out = held_out or HeldOutRows()
        self._trains = trains
        self._sessions = SessionSummaries()

    def ruling(
        self, request: Request, placement: Placement, key: str | None, texts: Sequence[str] = ()
    ) -> Ruling:
        """Decide whether a request is trained, and return the decision. If this proxy trains, and
        the request is a main call (of the user or the agent), also add it to the summary of its
        session (conversation).

        `key` is the app's API key. `texts` are the texts of the request that are searched for
        held-out rows.
        """
        facts = RequestFacts(
            route=request.adapter.name,
            model=request.model,
            headers=request.app_headers,
            body=request.body,
            # looking up a name costs a hash
            key_names=self._key_names(key) if self._rules_use_keys else (),
        )
        side_call = self._rules.side_call(facts, self._session(placement))
        if side_call is not None:
            return side_call
        subject = request.id
        if self._trains and (place := placement.place(is_side=False)) is not None:
            subject = place.session_id
            self._sessions.note(subject, request.body)
        return self._rules.decide(
            facts,
            subject,
            is_paused=self.pause.is_on,
            is_held_out=partial(self._held_out.are_quoted, *texts),
        )

    def _session(self, placement: Placement) -> SessionSummary | None:
        """Return the summary of the earlier main calls (requests of the user or the agent) in the
        request's session. Return None if there are no earlier main calls."""
        session_id = placement.session_id() if self._trains else None
        return None if session_id is None else self._sessions.get(session_id)
