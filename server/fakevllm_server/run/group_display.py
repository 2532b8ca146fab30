"""Read a group with its tokens for display. The group is in the journal, which is the server's
SQLite file.

The captured calls of a group stay in the journal while the group may have to be trained again. This
time ends when a few newer checkpoints exist. The calls of evaluations and of dropped groups are not
kept.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_adapters.protocol.group_tokens import CallView, GroupView, SiblingView
from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.journal.call_reads import CallReader
from fakevllm_server.types.calls import RecordedCall

OPEN = "open"
"""State of a group that has not ended."""
_SAMPLES_OF_GROUP = (
    'SELECT owner, "index", reward, group_id FROM samples WHERE group_id = ? ORDER BY "index"'
)
_SAMPLES_OF_OWNER = 'SELECT owner, "index", reward, group_id FROM samples WHERE owner = ?'
_STEP_ENTRY = (
    "SELECT entry_json FROM entries WHERE kind = 'step' AND step = ? ORDER BY seq DESC LIMIT 1"
)


def read_group_view(db: Connection, name: str) -> GroupView | None:
    """Return the group with this name, for display. Return None if the journal has no such group.

    `name` is the id of a group, of an episode, or of a sibling (one answer of a group). For a
    sibling or an episode, the returned view contains only this sibling or episode. Raises
    CorruptCall if a call cannot be read.
    """
    reader = CallReader(db)
    rows = db.exec_driver_sql(_SAMPLES_OF_GROUP, (name,)).all()
    rows = rows or db.exec_driver_sql(_SAMPLES_OF_OWNER, (name,)).all()
    if not rows:
        calls = _read_calls(reader, name)
        siblings = [SiblingView(index=0, name=name, calls=calls)]
        return GroupView(group_id=name, state=OPEN, siblings=siblings) if calls else None
    view = GroupView(
        group_id=rows[0][3] or name,
        state=OPEN,
        siblings=[
            SiblingView(index=index, name=owner, reward=reward, calls=_read_calls(reader, owner))
            for owner, index, reward, _ in rows
        ],
    )
    _add_outcome(db, view)
    return view


def _add_outcome(db: Connection, view: GroupView) -> None:
    """Add the state of a group to its view. If a training step used the group, also add the
    advantages, and the version of the weights that the step made."""
    query = "SELECT state, reason, step FROM groups WHERE group_id = ?"
    row = db.exec_driver_sql(query, (view.group_id,)).one_or_none()
    if row is None:
        return
    view.state, view.reason, view.step = row
    entry_json = db.exec_driver_sql(_STEP_ENTRY, (view.step,)).scalar()
    if entry_json is None:
        return
    entry = LogEntry.model_validate_json(entry_json)
    for group in entry.groups:
        if group.group_id == view.group_id:
            view.version = entry.version
            advantages = dict(zip(group.siblings, group.advantages, strict=False))
            for sibling in view.siblings:
                sibling.is_trained = sibling.index in group.siblings
                sibling.advantage = advantages.get(sibling.index)


def _read_calls(calls: CallReader, owner: str) -> list[CallView]:
    """Return the captured calls of a sibling or an episode, oldest first, for display."""
    return [_call_view(call) for call in calls.of_owner(owner)]


def _call_view(call: RecordedCall) -> CallView:
    is_forced = [] if call.allowed is None else call.allowed.is_forced
    positions = [position for position, forced in enumerate(is_forced) if forced]
    return CallView(**call.to_wire().model_dump(), forced=positions)
