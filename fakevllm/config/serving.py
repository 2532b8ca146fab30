"""The section `[serve]` of fakevllm.toml: which sibling (one of the sampled answers) an app gets,
and when. The rules apply to all routes or to single routes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from fakevllm.config.base import Section
from fakevllm.config.policy import Route

PolicyName = Literal["best", "lead", "greedy"]
OnDisconnect = Literal["cancel", "finish"]

_ONLY_FOR_BEST = ("quorum", "deadline_s", "random_fraction")


class ServeRules(Section):
    """The rules by which requests of one route are answered."""

    policy: PolicyName = "best"
    """Policy by which the served sibling is chosen: the highest reward (best), the app's own
    request (lead), or the app's own request at temperature 0 (greedy)."""
    quorum: int | None = Field(default=None, ge=1)
    """Number of answers that the app waits for, and among which the best is chosen; None means all
    answers."""
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds after the request's start when the best answer so far is served; None means no
    limit."""
    random_fraction: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Fraction of requests that get a random sibling, to measure the effect of choosing the
    best."""
    on_disconnect: OnDisconnect = "finish"
    """Treatment of a group whose client has disconnected. With `finish`, the group is still sampled
    and trained, and its answer serves a retry of the request. With `cancel`, the group ends."""

    @property
    def streams_lead(self) -> bool:
        """Whether the app gets the answer of the lead (its own request) as it arrives, without
        waiting for the other siblings."""
        return self.policy != "best"

    @field_validator(*_ONLY_FOR_BEST)
    @classmethod
    def _check_that_the_setting_applies(
        cls, value: float | None, info: ValidationInfo
    ) -> float | None:
        _check_policy_is_best(value, info.data.get("policy", "best"))
        return value


class RouteRules(Section):
    """The section `[serve.routes.NAME]`: settings that apply to one route only.

    A setting with the value None has the value of the section `[serve]`.
    """

    policy: PolicyName | None = None
    quorum: int | None = Field(default=None, ge=1)
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    random_fraction: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    on_disconnect: OnDisconnect | None = None


class ServeSection(ServeRules):
    """The section `[serve]`: the rules for all routes, and the different rules for single
    routes."""

    max_siblings_in_flight: int = Field(default=0, ge=0)
    """Maximum number of siblings of all requests together, without leads; 0 means no fixed
    limit."""
    resend_window_s: float = Field(default=600, ge=0, allow_inf_nan=False)
    """Seconds for which a client's retry gets the answer of the first attempt; 0 means never."""
    routes: dict[Route, RouteRules] = Field(default_factory=dict[str, RouteRules])

    def rules(self, route: str) -> ServeRules:
        """Return the rules of one route. Settings that the route does not have come from the
        section `[serve]`.

        >>> ServeSection(quorum=3, routes={"chat": RouteRules(policy="lead")}).rules("chat").policy
        'lead'
        """
        own = self.routes.get(route, RouteRules()).model_dump(exclude_none=True)
        shared = self.model_dump(exclude={"max_siblings_in_flight", "resend_window_s", "routes"})
        if own.get("policy", self.policy) != "best":
            shared = {name: value for name, value in shared.items() if name not in _ONLY_FOR_BEST}
        return ServeRules.model_validate(shared | own)

    @field_validator("routes")
    @classmethod
    def _check_that_route_settings_apply(
        cls, routes: dict[str, RouteRules], info: ValidationInfo
    ) -> dict[str, RouteRules]:
        for name, own in routes.items():
            policy = own.policy or info.data.get("policy", "best")
            for key in _ONLY_FOR_BEST:
                value = getattr(own, key)
                _check_policy_is_best(value, policy, f"{name}.{key} = {value} ")
        return routes


def _check_policy_is_best(value: float | None, policy: str, setting: str = "") -> None:
    """Raise ValueError if a setting that works only with the serve policy "best" is set, and the
    policy is a different one."""
    if value and policy != "best":
        raise ValueError(
            f'{setting}is for policy = "best", not for "{policy}": take one of them out'
        )
