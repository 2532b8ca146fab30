"""What a learning curve says: averages over several steps, and a sentence about both ends. The
functions do no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fakevllm.ledger.curve_reads import CurvePoint
from fakevllm.runtime.admin_client import Json

NUM_AVERAGED = 10
"""Number of points in an average. The mean of one step depends on few groups, and jumps."""
NUM_END_POINTS = 20
"""Maximum number of points at each end of the curve that the sentence compares."""


def finished_points(
    points: Sequence[CurvePoint], run_id: str, engine: Json | None
) -> Sequence[CurvePoint]:
    """Return the points of a run without the step for which groups are still collected. `engine` is
    the server's status, or None if it is unknown."""
    if not points or engine is None or engine.get("run_id") != run_id:
        return points
    last, collected = points[-1], engine.get("global_step")
    is_unfinished = isinstance(collected, int) and last.first_step == last.last_step >= collected
    return points[:-1] if is_unfinished else points


def averages(points: Sequence[CurvePoint]) -> list[float | None]:
    """Return for each point the mean reward of the policy over this point and up to
    NUM_AVERAGED - 1 points before it. No average has points from before and after a change of the
    hooks or the job."""
    found: list[float | None] = []
    start = 0
    for at, point in enumerate(points):
        if point.changed:
            start = at
        found.append(_mean(points[max(start, at + 1 - NUM_AVERAGED) : at + 1]))
    return found


def both_ends(points: Sequence[CurvePoint]) -> str | None:
    """Return a sentence with the mean reward of the policy at both ends of the curve, after the
    last change of the hooks or the job. Return None if there are fewer than two points."""
    start = max((at for at, point in enumerate(points) if point.changed), default=0)
    rest = points[start:]
    num = min(NUM_END_POINTS, len(rest) // 2)
    first, last = rest[:num], rest[len(rest) - num :]
    before, after = _mean(first), _mean(last)
    if before is None or after is None:
        return None
    return (
        f"The mean reward of all sampled answers was {before:.3f} in {_steps(first)}, "
        f"and {after:.3f} in {_steps(last)}."
    )


def _mean(points: Iterable[CurvePoint]) -> float | None:
    """Return the mean of the policy's rewards, weighted by the numbers of groups."""
    weighted = [
        (point.policy_mean, point.groups) for point in points if point.policy_mean is not None
    ]
    num_groups = sum(num for _, num in weighted)
    return sum(mean * num for mean, num in weighted) / num_groups if num_groups else None


def _steps(points: Sequence[CurvePoint]) -> str:
    first, last = points[0].first_step, points[-1].last_step
    return f"step {first}" if first == last else f"steps {first} to {last}"
