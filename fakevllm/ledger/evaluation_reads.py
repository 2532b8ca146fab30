"""Queries about evaluations: the dataset rows that were sampled for `fakevllm eval` or for the
release gate. The gate decides whether a new version of the weights may answer apps. The methods
block the thread, so do not call them on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Engine

from fakevllm.ledger.records import EVAL_KIND

QUESTION_CHARS = 300
"""Number of characters of a row's text that are returned."""
_NEWEST = f"""
    SELECT group_id FROM group_rows INDEXED BY ix_groups_place WHERE kind = '{EVAL_KIND}'
    ORDER BY received_at DESC, group_id DESC LIMIT ?
"""
_OF_EVALUATION = f"""
    SELECT g.group_id FROM group_rows AS g INDEXED BY ix_groups_place
    WHERE g.kind = '{EVAL_KIND}' AND g.eval_id = ?
    ORDER BY g.received_at DESC, g.group_id DESC LIMIT ?
"""
_ROWS = f"""
    WITH chosen AS MATERIALIZED ({{chosen}})
    SELECT g.group_id, g.eval_id, g.eval_version, g.received_at, g.task_id,
           substr(g.question, 1, {QUESTION_CHARS}), g.hook_hash, g.reason, g.model, g.run_id,
           s."index", s.reward
    FROM chosen CROSS JOIN group_rows AS g ON g.group_id = chosen.group_id
    LEFT JOIN sibling_rows AS s ON s.group_id = g.group_id AND s.reward IS NOT NULL
    ORDER BY g.received_at, g.group_id, s."index"
"""
"""The rows of `chosen`, and one line for each reward. A row without rewards has a single line, in
which the reward is NULL."""


@dataclass(slots=True)
class EvaluatedGroup:
    """The samples of one held-out dataset row. All samples are from one version of the weights."""

    group_id: str
    eval_id: str
    version: int | None
    """None if new weights were published while the row was sampled, or if it is unknown."""
    received_at: float
    row_id: str
    question: str
    """The first characters of the row's text."""
    hook_hash: str | None
    reason: str | None
    """Reason of the ledger. For a row without rewards, it says why there are none."""
    model: str
    run_id: str | None = None
    """Id of the training run whose weights were sampled. None for rows that an older version of
    fakevllm has stored."""
    rewards: list[float] = field(default_factory=list[float])
    """Rewards of the samples at temperature 1. Samples without a reward are left out."""
    greedy: float | None = None
    """Reward of the greedy sample; None if it has none."""


class EvaluationReads:
    """Reads evaluated dataset rows from the ledger (the proxy's database)."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def latest(self, limit: int) -> list[EvaluatedGroup]:
        """Return the latest evaluated dataset rows of all evaluations, oldest first."""
        return self._groups(_NEWEST, (limit,))

    def evaluation(self, eval_id: str, limit: int) -> list[EvaluatedGroup]:
        """Return the latest dataset rows of one evaluation, oldest first."""
        return self._groups(_OF_EVALUATION, (eval_id, limit))

    def _groups(self, chosen: str, values: tuple[object, ...]) -> list[EvaluatedGroup]:
        groups: list[EvaluatedGroup] = []
        with self._read_engine.connect() as db:
            for line in db.exec_driver_sql(_ROWS.format(chosen=chosen), values):
                group_id, eval_id, version, at, row_id, question, *facts = line[:10]
                index, reward = line[10:]
                if not groups or groups[-1].group_id != group_id:
                    row = EvaluatedGroup(
                        *(group_id, eval_id or "", version, at, row_id or "", question, *facts)
                    )
                    groups.append(row)
                if index == 0:
                    groups[-1].greedy = reward
                elif index is not None:
                    groups[-1].rewards.append(reward)
        return groups
