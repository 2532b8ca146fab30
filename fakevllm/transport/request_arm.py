"""The arm of one request. Each session is assigned to an arm, and the arm decides which weights
answer the session.

The weights of an arm may be a policy: weights that the engine holds beside the served weights. A
call to a policy does not name a sibling. Therefore the server does not capture the call for
training.

If the engine does not hold the policy any more, the proxy loads the policy again. If the load
fails, the served weights answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fakevllm.release.arms import Arm

T = TypeVar("T")

LOST = "the engine does not hold the version any more"


class PolicyGone(Exception):
    """Error for a call to a policy (weights beside the served weights) that is not loaded."""


@dataclass(slots=True)
class RequestArm:
    """The arm to which a request is assigned. An arm is a share of the sessions, and decides which
    weights answer them."""

    arm: Arm
    propensity: float
    """Probability with which the request's session gets this arm."""
    root: str
    """Id of the root of the session's tree. All sessions of a tree have the same arm."""
    policy: str | None = None
    """Model name of the policy that samples the request; None for the served weights."""
    reload: Callable[[RequestArm], Awaitable[str | None]] | None = None
    """Function that loads the arm's policy once more. The function sets `policy` to the policy's
    model name. This name is a new one if the arm has got another version. The function returns None
    after a success, and the reason after a failure."""
    trouble: str | None = None
    """Reason why the served weights answer in place of the arm's policy; None if the weights of the
    arm answer."""

    @property
    def is_training(self) -> bool:
        """True if the request belongs to the training arm, which the served weights answer. Only
        groups of this arm may be trained."""
        return self.arm is Arm.TRAINING

    @property
    def answering(self) -> Arm:
        """The arm whose weights answer the request. This is usually the arm to which the request is
        assigned. If the weights of this arm cannot be sampled, the training arm answers with the
        served weights."""
        return self.arm if self.trouble is None else Arm.TRAINING

    def use_served_weights(self, trouble: str) -> None:
        """Let the served weights answer this request, because the arm's policy cannot be
        sampled."""
        self.policy, self.trouble = None, trouble

    async def policy_gone(self, *, may_reload: bool) -> None:
        """Load the arm's policy (its weights) into the engine once more. Call this method if the
        engine does not know the policy. If loading fails, or if `may_reload` is False, the served
        weights answer this request from now on."""
        if self.policy is None:  # another call of the request has given up
            return
        trouble = LOST
        if may_reload and self.reload is not None:
            trouble = await self.reload(self)
        if trouble is not None:
            self.use_served_weights(trouble)


async def with_policy(arm: RequestArm | None, call: Callable[[], Awaitable[T]]) -> T:
    """Make a model call and return its result. If the call raises PolicyGone, load the arm's policy
    (its weights) once more and repeat the call. If loading fails, repeat the call with the served
    weights."""
    if arm is None or arm.policy is None:
        return await call()
    for may_reload in (True, False):
        try:
            return await call()
        except PolicyGone:
            await arm.policy_gone(may_reload=may_reload)
    return await call()


def check_policy(arm: RequestArm | None, status: int) -> None:
    """Raise PolicyGone if the status of an engine's reply means that the engine no longer holds the
    call's policy (weights beside the served weights)."""
    if status == 404 and arm is not None and arm.policy is not None:
        raise PolicyGone
