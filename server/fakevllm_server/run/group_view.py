"""A group with its tokens, to be looked at: what the journal holds of it. Calls are kept until no
checkpoint needs them; of evaluations and of what was dropped, none are.
"""

from __future__ import annotations

from sqlalchemy import Connection

from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_adapters.protocol.token_view import CallView, GroupView, SiblingView
from fakevllm_server.journal.rows import CALL_COLUMNS, parse_call_row
from fakevllm_server.types.calls import RecordedCall

OPEN = "open"
_OF_GROUP = (
    'SELECT owner, "index", reward, group_id FROM samples WHERE group_id = ? ORDER BY "index"'
)
_OF_OWNER = 'SELECT owner, "index", reward, group_id FROM samples WHERE owner = ?'
_STEP = "SELECT entry_json FROM entries WHERE kind = 'step' AND step = ? ORDER BY seq DESC LIMIT 1"


def shown(db: Connection, name: str) -> GroupView | None:
    """`name`: of a group, or of one sibling or episode of it. Raises CorruptCall."""
    rows = db.exec_driver_sql(_OF_GROUP, (name,)).all()
    rows = rows or db.exec_driver_sql(_OF_OWNER, (name,)).all()
    if not rows:
        calls = _calls(db, name)
        siblings = [SiblingView(index=0, name=name, calls=calls)]
        return GroupView(group_id=name, state=OPEN, siblings=siblings) if calls else None
    found = GroupView(
        group_id=rows[0][3] or name,
        state=OPEN,
        siblings=[
            SiblingView(index=index, name=owner, reward=reward, calls=_calls(db, owner))
            for owner, index, reward, _ in rows
        ],
    )
    _tell_outcome(db, found)
    return found


def _tell_outcome(db: Connection, found: GroupView) -> None:
    query = "SELECT state, reason, step FROM groups WHERE group_id = ?"
    row = db.exec_driver_sql(query, (found.group_id,)).one_or_none()
    if row is None:
        return
    found.state, found.reason, found.step = row
    entry_json = db.exec_driver_sql(_STEP, (found.step,)).scalar()
    if entry_json is None:
        return
    entry = LogEntry.model_validate_json(entry_json)
    for group in entry.groups:
        if group.group_id == found.group_id:
            found.version = entry.version
            of_index = dict(zip(group.siblings, group.advantages, strict=False))
            for sibling in found.siblings:
                sibling.is_trained = sibling.index in group.siblings
                sibling.advantage = of_index.get(sibling.index)


def _calls(db: Connection, owner: str) -> list[CallView]:
    query = f"SELECT {CALL_COLUMNS} FROM calls WHERE owner = ? ORDER BY seq"
    return [_shown(parse_call_row(tuple(row))) for row in db.exec_driver_sql(query, (owner,))]


def _shown(call: RecordedCall) -> CallView:
    forced = [] if call.allowed is None else call.allowed.is_forced
    places = [place for place, is_forced in enumerate(forced) if is_forced]
    return CallView(**call.to_wire().model_dump(), forced=places)
