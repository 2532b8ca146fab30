"""Read a run's learning curve from the ledger, the proxy's database. The functions return the whole
curve, or only its two ends (the first and the last steps).

A curve has one row for each training step, so the curve of a long run is large. Usually, only the
two ends of a curve are compared. The time to read the ends does not depend on the length of the
curve. There is one exception. If the reward hooks or the job changed during the run, the last
change must be found, and this requires reading the digests of all steps.

For a chart, SQLite reduces a curve to some hundred points. This is much faster than reading all
steps.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from fakevllm.ledger import reads
from fakevllm.ledger.learning_costs import StepSeconds, TokenCosts
from fakevllm.ledger.records import StepRow
from fakevllm_adapters.protocol.reward_changes import RewardChanges

MIN_END_GROUPS = 40
"""Minimum number of groups in each end of a curve. A single step would not be enough for a
meaningful mean, because a step may have only one group."""
MAX_END_STEPS = 500
"""Maximum number of steps in each end of a curve. An end becomes so long only if most of the end's
steps have no group that counts towards MIN_END_GROUPS."""

_Digests = defaultdict[int, dict[str, list[str]]]


@dataclass(frozen=True, slots=True)
class CurveEnds:
    """The first and the last steps of a learning curve. Steps before the last change of the reward
    hooks or the job are left out."""

    steps: list[StepRow]
    num_before: int = 0
    """Number of earlier steps that are left out, because the hooks or the job changed after
    them."""
    num_between: int = 0
    """Number of steps that are left out between the two ends."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The means of one or several consecutive steps. A mean is None if no answer of these steps
    counts for it."""

    first_step: int
    last_step: int
    groups: int
    policy_mean: float | None
    """Mean reward of all sampled answers, which shows how good the policy is."""
    returned_best: float | None
    """Mean reward of the answers that apps got, without those that were chosen at random."""
    returned_random: float | None
    """Mean reward of the answers that apps got and that were chosen at random."""
    without_signal: int
    """Number of groups whose rewards are all equal."""
    changed: str = ""
    """What changed before the first step. The means before and after it cannot be compared."""
    tokens: TokenCosts = field(default_factory=TokenCosts)
    seconds: StepSeconds = field(default_factory=StepSeconds)


def curve_points(db: Connection, run_id: str, max_points: int) -> list[CurvePoint]:
    """Return the points of a run's learning curve, in the order of the steps. There are at most
    `max_points` points, plus at most one for each change of the hooks or the job. No point has
    steps from before and after such a change. In the mean of a point, each step is weighted by its
    number of groups."""
    num_steps = db.exec_driver_sql(reads.NUM_STEPS, (run_id,)).scalar() or 0
    changes = dict(_changes(db, run_id))
    size = max(1, -(-num_steps // max_points))
    rows = db.exec_driver_sql(reads.CURVE_POINTS, (run_id, json.dumps(list(changes)), size))
    return [_point(row, changes) for row in rows]


def whole_curve(db: Connection, run_id: str) -> list[StepRow]:
    """Return the whole learning curve of a run: one row for each training step, in order."""
    digests = _digests(db.exec_driver_sql(reads.DIGESTS, (run_id, 0)))
    rows = [_with_digests(row, digests) for row in _rows(db, reads.WHOLE_CURVE, run_id)]
    changes = RewardChanges()
    return [replace(row, changed=changes.observe(row.hooks, row.jobs)) for row in rows]


def curve_ends(db: Connection, run_id: str) -> CurveEnds:
    """Return the two ends of a run's learning curve: the first and the last steps. Steps before the
    last change of the reward hooks or the job are left out.

    Each end has as many steps as these two conditions need, but at most MAX_END_STEPS:

    * The steps of the end that have a `policy_mean` (mean reward of the policy's answers) have at
      least MIN_END_GROUPS groups in total.
    * The steps of the end that have a `returned_best` (mean reward of the answers that apps got)
      have at least MIN_END_GROUPS groups in total.

    In a short run, the two ends may overlap, and may have fewer groups.
    """
    num_steps = db.exec_driver_sql(reads.NUM_STEPS, (run_id,)).scalar() or 0
    start, changed = _last_change(db, run_id)
    num_before = 0
    if changed:
        num_before = db.exec_driver_sql(reads.NUM_STEPS_BEFORE, (run_id, start)).scalar_one()
    first = _end(_rows(db, reads.WHOLE_CURVE, run_id, start))
    last = _end(_rows(db, reads.CURVE_BACKWARDS, run_id, start))[::-1]
    known = {row.step for row in first}
    steps = [*first, *(row for row in last if row.step not in known)]
    for at, row in enumerate(steps):
        found = db.exec_driver_sql(reads.STEP_DIGESTS, (run_id, row.step))
        steps[at] = _with_digests(row, _digests(found))
    if changed:
        steps[0] = replace(steps[0], changed=changed)
    return CurveEnds(steps, num_before, num_steps - num_before - len(steps))


def _last_change(db: Connection, run_id: str) -> tuple[int, str]:
    """Return the last step at which the reward hooks or the job changed, and a text that names the
    change. Without a change, the step is 0 and the text is empty."""
    last = (0, "")
    for change in _changes(db, run_id):
        last = change
    return last


def _changes(db: Connection, run_id: str) -> Iterator[tuple[int, str]]:
    """Yield the steps at which the reward hooks or the job changed, with a text that names the
    change."""
    if db.exec_driver_sql(reads.IS_CHANGED, (run_id,)).first() is None:
        return
    changes = RewardChanges()
    digests = _digests(db.exec_driver_sql(reads.DIGESTS, (run_id, 0)))
    for step, kinds in digests.items():
        if changed := changes.observe(kinds.get("hook", ()), kinds.get("job", ())):
            yield step, changed


def _point(row: Sequence[Any], changes: Mapping[int, str]) -> CurvePoint:
    first_step, last_step, groups, *means, without_signal = row[:7]
    policy_mean, best, random = (
        # The sum of huge rewards may be infinite, which no chart and no JSON can show.
        mean if mean is not None and math.isfinite(mean) else None
        for mean in means
    )
    changed = changes.get(first_step, "")
    return CurvePoint(
        *(first_step, last_step, groups, policy_mean, best, random, without_signal, changed),
        TokenCosts(*row[7:10]),
        StepSeconds(*row[10:]),
    )


def _rows(db: Connection, query: str, run_id: str, start: int = 0) -> Iterable[StepRow]:
    for row in db.exec_driver_sql(query, (run_id, start)):
        yield StepRow(*row)


def _end(rows: Iterable[StepRow]) -> list[StepRow]:
    """Return the rows of one end of the learning curve. These are the first of `rows` (training
    steps) that together have the number of groups that `curve_ends` asks for. Return at most
    MAX_END_STEPS rows."""
    end: list[StepRow] = []
    num_policy = num_best = 0
    for row in rows:
        end.append(row)
        num_policy += row.groups if row.policy_mean is not None else 0
        num_best += row.groups if row.returned_best is not None else 0
        if min(num_policy, num_best) >= MIN_END_GROUPS or len(end) == MAX_END_STEPS:
            break
    return end


def _digests(rows: Iterable[tuple[int, str, str]]) -> _Digests:
    digests: _Digests = defaultdict(dict)
    for step, kind, digest in rows:
        digests[step].setdefault(kind, []).append(digest)
    return digests


def _with_digests(row: StepRow, digests: _Digests) -> StepRow:
    kinds = digests[row.step]
    hooks, jobs = (tuple(sorted(kinds.get(kind, ()))) for kind in ("hook", "job"))
    return replace(row, hooks=hooks, jobs=jobs)
