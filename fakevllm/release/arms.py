"""Assign each session to an arm. The arm decides which version of the weights answers the session.

A session may be started by another session, so sessions form trees. The root is the first session
of a tree. The arm is computed from a salt and the root's id, so no assignment is stored. A session
therefore has the same arm in each process, also after a restart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

_NUM_BITS = 53
"""Number of bits of the hash that are used. A float can represent each fraction with this many bits
exactly."""
_SUM_TOLERANCE = 1e-9


class Arm(StrEnum):
    """The arm of a session. It decides which version of the weights answers the session.

    training  The newest version answers. The session's groups are trained.
    released  The version that passed its evaluation answers. Nothing is trained.
    baseline  One fixed version answers. Nothing is trained.
    """

    TRAINING = "training"
    RELEASED = "released"
    BASELINE = "baseline"


OTHER_ARM = "other_arm"
"""Reason for not training groups and feedback of a session that is not in the training arm."""
ARM_UNAVAILABLE = "arm_unavailable"
"""Reason for not training a group of another arm that the newest version answered, because the
version of its arm could not be sampled."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of sessions that each arm gets. An arm is a set of sessions that one version of the
    weights answers. The shares add up to 1.

    >>> Shares.continuous(baseline=0.25)
    Shares(training=0.75, released=0.0, baseline=0.25)
    """

    training: float
    released: float
    baseline: float

    def __post_init__(self) -> None:
        shares = (self.training, self.released, self.baseline)
        assert all(0 <= share <= 1 for share in shares), "a share is from 0 to 1"
        assert abs(sum(shares) - 1) < _SUM_TOLERANCE, "shares add up to 1"

    @staticmethod
    def continuous(baseline: float) -> Shares:
        """Return the shares for the mode in which apps get the weights of each training step. The
        baseline arm gets the share `baseline`, and the training arm gets all other sessions."""
        return Shares(1 - baseline, 0.0, baseline)

    def of(self, arm: Arm) -> float:
        """Return the share of sessions, from 0 to 1, that the given arm gets. An arm is a set of
        sessions that one version of the weights answers."""
        match arm:
            case Arm.TRAINING:
                return self.training
            case Arm.RELEASED:
                return self.released
            case Arm.BASELINE:
                return self.baseline


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm that a session gets, and the probability with which it gets this arm. An arm decides
    which version of the weights answers."""

    arm: Arm
    propensity: float
    """Probability with which a session gets this arm."""


@dataclass(frozen=True, slots=True)
class ArmAssigner:
    """Assigns sessions to arms, with one salt and one set of shares. An arm decides which version
    of the weights answers a session.

    The interval from 0 to 1 is divided among the arms. The baseline arm begins at 0, the training
    arm ends at 1, and the released arm is between the two. A hash makes each session a point of the
    interval, and the session gets the arm at this point.

    Suppose that one share is changed, and that the released arm takes the difference. Only few
    sessions then move to another arm. A change of `baseline` moves no session into or out of the
    training arm. A change of `training` moves no session into or out of the baseline arm.

    >>> assigner = ArmAssigner(b"salt", Shares.continuous(baseline=0.5))
    >>> [assigner.assign(root).arm.value for root in ("a", "b", "c", "a")]
    ['baseline', 'baseline', 'training', 'baseline']
    """

    salt: bytes
    shares: Shares

    def assign(self, root: str) -> Assignment:
        """Return the arm of a session, and the probability of this arm. The arm decides which
        version of the weights answers the session. A session may be started by another session, so
        sessions form trees. `root` is the id of the first session in the tree."""
        point = position(self.salt, root)
        if point < self.shares.baseline:
            arm = Arm.BASELINE
        elif point < 1 - self.shares.training:
            arm = Arm.RELEASED
        else:
            arm = Arm.TRAINING
        if self.shares.of(arm) == 0:  # 1 - training is not exact
            arm = Arm.TRAINING
        return Assignment(arm, self.shares.of(arm))


def position(salt: bytes, root: str) -> float:
    """Return a hash as a number from 0 (included) to 1 (excluded). The hash is computed from
    `root`, the id of the first session of a tree, with `salt` as its key."""
    digest = hashlib.blake2b(root.encode(errors="surrogatepass"), digest_size=8, key=salt[:64])
    return (int.from_bytes(digest.digest()) >> (64 - _NUM_BITS)) / 2**_NUM_BITS
