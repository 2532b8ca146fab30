"""What becomes of each request, told as it arrives: the policy, with what it has to remember."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fakevllm.admission.kill_switch import KillSwitch
from fakevllm.admission.rules import AdmissionRules, RequestFacts, Ruling
from fakevllm.admission.side_calls import SessionSummaries, SessionSummary
from fakevllm.config.policy import PolicySection
from fakevllm.sessions.placement import Placement
from fakevllm.transport.request import Request

log = logging.getLogger("fakevllm.admission.rules")


class TrafficGate:
    def __init__(
        self,
        settings: PolicySection,
        pause: KillSwitch,
        key_name: Callable[[str | None], str | None] = lambda _: None,
        *,
        trains: bool = True,
    ) -> None:
        """`key_name`: whose key it is. `trains`: whether anything is fanned out at all; where not,
        nobody's session is looked up before the answer is out."""
        self.pause = pause
        self._policy = AdmissionRules(settings)
        for name, route in settings.likely_misspelt_routes:
            log.warning("[policy] n: %r is no route and taken for a model; %s is one", name, route)
        self._asks_for_keys = any(rule.key is not None for rule in settings.skip)
        self._key_name = key_name
        self._trains = trains
        self._sessions = SessionSummaries()

    def ruling(
        self, request: Request, placement: Placement, key: str | None, app_key: str | None
    ) -> Ruling:
        """`key`, `app_key`: the app's, and its fingerprint. Places the request in its session."""
        asked = RequestFacts(
            route=request.adapter.name,
            model=request.model,
            headers=request.apps_headers,
            body=request.body,
            key_names=self._key_names(key, app_key),
        )
        side_call = self._policy.side_call(asked, self._session(placement))
        if side_call is not None:
            return side_call
        subject = request.id
        if self._trains and (place := placement.place(is_side=False)) is not None:
            subject = place.session_id
            self._sessions.note(subject, request.body)
        return self._policy.decide(asked, subject, is_paused=self.pause.is_on)

    def _key_names(self, key: str | None, app_key: str | None) -> tuple[str, ...]:
        if not self._asks_for_keys:  # the name costs a hash
            return ()
        return tuple(filter(None, (self._key_name(key), app_key)))

    def _session(self, placement: Placement) -> SessionSummary | None:
        """What the main calls before it tell, where there were any."""
        session_id = placement.session_id() if self._trains else None
        return None if session_id is None else self._sessions.get(session_id)
