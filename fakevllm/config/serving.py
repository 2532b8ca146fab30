"""Which sibling an app gets, and when: `[serve]` in fakevllm.toml, the whole of it and by route."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from fakevllm.config.base import Section
from fakevllm.config.policy import Route

PolicyName = Literal["best", "lead", "greedy"]
OnDisconnect = Literal["cancel", "finish"]

_ONLY_FOR_BEST = ("quorum", "deadline_s", "random_fraction")


class ServeRules(Section):
    """How the requests of one route are answered."""

    policy: PolicyName = "best"
    quorum: int | None = Field(default=None, ge=1)
    """Answers among which the best is chosen; None: all of them."""
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """From a request's start; then the best of what there is."""
    random_fraction: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Share of requests that get any sibling, to see what choosing the best is worth."""
    on_disconnect: OnDisconnect = "finish"
    """Whether a group goes on whose app has left: it is trained all the same, and answers the
    request should it be sent again."""

    @property
    def streams_lead(self) -> bool:
        """Whether the lead's answer is the app's, without waiting for others."""
        return self.policy != "best"

    @field_validator(*_ONLY_FOR_BEST)
    @classmethod
    def _only_what_counts(cls, value: float | None, info: ValidationInfo) -> float | None:
        _check_counts(value, info.data.get("policy", "best"))
        return value


class RouteRules(Section):
    """What a route has of its own."""

    policy: PolicyName | None = None
    quorum: int | None = Field(default=None, ge=1)
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    random_fraction: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    on_disconnect: OnDisconnect | None = None


class ServeSection(ServeRules):
    max_siblings_in_flight: int = Field(default=0, ge=0)
    """Of all requests together, beside their leads; 0: no bound."""
    resend_window_s: float = Field(default=600, ge=0, allow_inf_nan=False)
    """How long a request that is sent again gets the answer it was to get at first; 0: never."""
    routes: dict[Route, RouteRules] = Field(default_factory=dict[str, RouteRules])

    def rules(self, route: str) -> ServeRules:
        """Of one format.

        >>> ServeSection(quorum=3, routes={"chat": RouteRules(policy="lead")}).rules("chat").policy
        'lead'
        """
        own = self.routes.get(route, RouteRules()).model_dump(exclude_none=True)
        whole = self.model_dump(exclude={"max_siblings_in_flight", "resend_window_s", "routes"})
        if own.get("policy", self.policy) != "best":
            whole = {name: value for name, value in whole.items() if name not in _ONLY_FOR_BEST}
        whole |= own
        return ServeRules.model_validate(whole)

    @field_validator("routes")
    @classmethod
    def _only_what_counts_there(
        cls, routes: dict[str, RouteRules], info: ValidationInfo
    ) -> dict[str, RouteRules]:
        for name, own in routes.items():
            policy = own.policy or info.data.get("policy", "best")
            for key in _ONLY_FOR_BEST:
                value = getattr(own, key)
                _check_counts(value, policy, f"{name}.{key} = {value} ")
        return routes


def _check_counts(value: float | None, policy: str, said: str = "") -> None:
    """Of a setting that counts for the policy "best" alone. Raises ValueError."""
    if value and policy != "best":
        raise ValueError(f'{said}is for policy = "best", not for "{policy}": take one of them out')
