"""The section `[serve]` of fakevllm.toml: which sibling (one of the sampled answers) an app gets,
and when. The rules apply to all routes, or to single routes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from fakevllm.config.base import Section
from fakevllm.config.policy import Route

PolicyName = Literal["best", "lead", "greedy"]
OnDisconnect = Literal["cancel", "finish"]

_ONLY_FOR_BEST = ("quorum", "deadline_s", "random_fraction")
_FOR_THE_WHOLE_PROXY = {"max_siblings_in_flight", "resend_window_s", "receipts", "routes"}
"""Settings of the section `[serve]` that cannot be set for single routes."""


class ServeRules(Section):
    """The rules for answers to requests of one route (an API format)."""

    policy: PolicyName = "best"
    """Policy by which the answer for the app is chosen from the sampled answers. `best` is the
    answer with the highest reward. `lead` is the answer to the app's own request. `greedy` is the
    answer to the app's own request at temperature 0. With `lead` and `greedy`, the answer is
    streamed while it is sampled."""
    quorum: int | None = Field(default=None, ge=1)
    """Number of sampled answers that the app waits for. The best of these answers is served. None
    means all answers. Answers that arrive later are trained too."""
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds from the start of a request that the app waits for sampled answers. After this time,
    the best answer so far is served. Answers that arrive later are trained too. None means no
    limit."""
    random_fraction: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Fraction of requests for which a random sampled answer is served. These requests show how
    much the apps gain from the best answer.
    """
    on_disconnect: OnDisconnect = "finish"
    """What happens to a group (a request with its sampled answers) when its client disconnects.
    With `finish`, the group is still sampled and trained, and a retry of the request gets the
    group's answer. With `cancel`, the group is aborted."""

    @property
    def streams_lead(self) -> bool:
        """True if the app gets the lead's answer as a stream while the answer is sampled. The app
        then does not wait for the other sampled answers. The lead is the app's own request."""
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

    If a setting is None, the value in the section `[serve]` applies. There is one exception. If the
    route's policy is not "best", the values of `quorum`, `deadline_s` and `random_fraction` in
    `[serve]` do not apply to the route.
    """

    policy: PolicyName | None = None
    quorum: int | None = Field(default=None, ge=1)
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    random_fraction: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    on_disconnect: OnDisconnect | None = None


class ServeSection(ServeRules):
    """The section `[serve]`: the rules for all routes, and the exceptions for single routes."""

    max_siblings_in_flight: int = Field(default=0, ge=0)
    """Maximum number of siblings (additional samples) that are sampled at one time, for all
    requests together. Leads (the apps' own requests) do not count. 0 means no fixed limit."""
    resend_window_s: float = Field(default=600, ge=0, allow_inf_nan=False)
    """Seconds for which a client's retry is answered with the answer to the first attempt. 0 means
    that a retry is treated as a new request."""
    receipts: bool = True
    """Whether answers carry the headers `x-fakevllm-group` and `x-fakevllm-version`."""
    routes: dict[Route, RouteRules] = Field(default_factory=dict[str, RouteRules])
    """Rules for single routes (`chat`, `completions`, `responses`, `messages`). They override the
    rules of this section."""

    def rules(self, route: str) -> ServeRules:
        """Return the rules for one route. If the route does not set a setting, the value in the
        section `[serve]` applies, unless the setting has no meaning for the route's policy.

        >>> ServeSection(quorum=3, routes={"chat": RouteRules(policy="lead")}).rules("chat").policy
        'lead'
        """
        own = self.routes.get(route, RouteRules()).model_dump(exclude_none=True)
        shared = self.model_dump(exclude=_FOR_THE_WHOLE_PROXY)
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
    """Raise ValueError if another serve policy than "best" is set, and a setting that works only
    with `policy = "best"` has a value. `setting` names this setting in the error message."""
    if value and policy != "best":
        raise ValueError(
            f'{setting}is for policy = "best", not for "{policy}": take one of them out'
        )
