"""Sessions are assigned to arms by a hash."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.release.arms import Arm, ArmAssigner, Shares, position

SALT = b"a salt of thirty-two bytes, fixed"
ROOTS = [f"root {n}" for n in range(20_000)]


@st.composite
def all_shares(draw: st.DrawFn) -> Shares:
    baseline = draw(st.floats(0, 1))
    training = draw(st.floats(0, 1 - baseline))
    return Shares(training, 1 - baseline - training, baseline)


@given(st.binary(min_size=1, max_size=80), all_shares(), st.text())
def test_the_same_root_has_the_same_arm_with_the_arms_share_as_its_propensity(
    salt: bytes, shares: Shares, root: str
) -> None:
    first = ArmAssigner(salt, shares).assign(root)
    assert ArmAssigner(salt, shares).assign(root) == first
    assert first.propensity == shares.of(first.arm)


def test_the_arm_does_not_depend_on_the_process() -> None:
    code = (
        "from fakevllm.release.arms import position; "
        f"print([position({SALT!r}, name) for name in ('a', 'ä', '')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert done.stdout.strip() == str([position(SALT, name) for name in ("a", "ä", "")])


@pytest.mark.parametrize(
    "shares",
    [Shares.continuous(0.05), Shares.continuous(0.5), Shares(0.2, 0.75, 0.05), Shares(0, 1, 0)],
)
def test_the_frequencies_of_the_arms_match_the_shares(shares: Shares) -> None:
    assigner = ArmAssigner(SALT, shares)
    arms = [assigner.assign(root).arm for root in ROOTS]
    for arm in Arm:
        share = shares.of(arm)
        deviation = (share * (1 - share) / len(ROOTS)) ** 0.5
        assert abs(arms.count(arm) / len(ROOTS) - share) <= 4 * deviation


@given(st.text(), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_changed_share_moves_no_session_between_two_arms_that_keep_theirs(
    root: str, kept: float, before: float, after: float
) -> None:
    def arm(shares: Shares) -> Arm:
        return ArmAssigner(SALT, shares).assign(root).arm

    canaries = [arm(Shares(share, 1 - share - kept, kept)) for share in (before, after)]
    assert (canaries[0] is Arm.BASELINE) == (canaries[1] is Arm.BASELINE)
    baselines = [arm(Shares(kept, 1 - share - kept, share)) for share in (before, after)]
    assert (baselines[0] is Arm.TRAINING) == (baselines[1] is Arm.TRAINING)


def test_an_arm_without_a_share_gets_no_session() -> None:
    assigner = ArmAssigner(SALT, Shares.continuous(0.1))
    assert {assigner.assign(root).arm for root in ROOTS} == {Arm.TRAINING, Arm.BASELINE}
    nobody = ArmAssigner(SALT, Shares.continuous(0.0))
    assert {nobody.assign(root).arm for root in ROOTS} == {Arm.TRAINING}
    assert nobody.assign("a").propensity == 1.0


def test_another_salt_draws_other_sessions() -> None:
    shares = Shares.continuous(0.5)
    arms = [
        [ArmAssigner(salt, shares).assign(root).arm for root in ROOTS[:64]]
        for salt in (SALT, b"other")
    ]
    assert arms[0] != arms[1]
