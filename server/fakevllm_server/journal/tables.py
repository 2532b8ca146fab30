"""The journal's tables, named as their classes. migrations.py makes them; tests compare the two.

episode   claimed -> ended, or open again under its next epoch
sample    waits under its task (no group yet) -> in a group
group     pooled -> planned -> consumed, or dropped with its reason; eval: never pooled
batch     planned -> done; done after the last checkpoint is provisional
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import MetaData, UniqueConstraint, text
from sqlmodel import Field, SQLModel


class EpisodeState(StrEnum):
    OPEN = "open"
    CLAIMED = "claimed"
    ENDED = "ended"


class GroupState(StrEnum):
    POOLED = "pooled"
    PLANNED = "planned"
    CONSUMED = "consumed"
    DROPPED = "dropped"
    EVAL = "eval"


class BatchState(StrEnum):
    PLANNED = "planned"
    DONE = "done"


class _Row(SQLModel):
    metadata = MetaData()


class Episodes(_Row, table=True):
    """An episode of active clients."""

    episode_id: str = Field(primary_key=True)
    epoch: int
    """Of its latest claim; the first is 1."""
    state: str = Field(index=True)
    kind: str
    client_uuid: str
    key: str
    idle_limit_s: float
    owner: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """Whose key claimed it; "": no key was asked for."""
    idempotency_key: str = Field(default="", sa_column_kwargs={"server_default": ""})
    """With which its client would ask for this claim again; "": it would not."""
    body_hash: bytes = Field(default=b"", sa_column_kwargs={"server_default": text("x''")})
    """Of the request that has this key."""


class Calls(_Row, table=True):
    """One captured call, until no checkpoint that is kept can need it again."""

    __table_args__ = (UniqueConstraint("owner", "seq"),)

    id: int | None = Field(default=None, primary_key=True)
    owner: str
    """`<group>/<index>` of a sibling, the uuid of an episode."""
    group_id: str | None = Field(default=None, index=True)
    """Of a sibling."""
    seq: int
    """Its place among its owner's, from 0."""
    prompt_ids: bytes
    """Little-endian int32."""
    response_ids: bytes
    logprobs: bytes | None = None
    """Little-endian float64, as the engine printed them."""
    facts_json: str
    """Versions, temperature, finish reason, why it does not train, what tokens were chosen from."""
    digest: bytes
    """Of all of that: what a disk has changed is not trained on."""


class Samples(_Row, table=True):
    """One scored episode or sibling."""

    owner: str = Field(primary_key=True)
    group_id: str | None = Field(default=None, index=True)
    """NULL while it waits for the others of its task."""
    task_id: str | None = None
    index: int
    """Its place in its group."""
    reward: float | None = None


class Groups(_Row, table=True):
    """Samples that are compared with each other."""

    seq: int | None = Field(default=None, primary_key=True)
    """The order in which they were pooled."""
    group_id: str = Field(unique=True)
    state: str = Field(index=True)
    reason: str | None = None
    """Why it was dropped."""
    step: int | None = Field(default=None, index=True)
    """Of the batch it was planned for."""
    position: int | None = None
    """In that batch."""
    advantage: float | None = None
    """Of a feedback sample."""


class Drops(_Row, table=True):
    """How many groups were ever dropped; a trigger counts them."""

    reason: str = Field(primary_key=True)
    """Its first word."""
    num: int


class Submissions(_Row, table=True):
    """What was acknowledged, and with which words: the same again gets them again."""

    key: str = Field(primary_key=True)
    body_hash: bytes
    reply_json: str
    at: float
    """Unix seconds."""


class Batches(_Row, table=True):
    """What one step trains, decided before it is trained."""

    step: int = Field(primary_key=True)
    version: int
    """Of the weights before it."""
    groups_hash: str
    """Of the ids of its groups in order."""
    state: str = Field(index=True)


class Checkpoints(_Row, table=True):
    """A folder that is whole: one without a row was never finished."""

    step: int = Field(primary_key=True)
    folder: str
    """Below the run directory's `checkpoints`."""
    version: int
    digest: str
    """Of its files."""
    reward_mean: float | None = None
    """Of the steps since the one before it."""
    at: float


class Publications(_Row, table=True):
    """Weights that have been served."""

    version: int = Field(primary_key=True)
    step: int
    at: float


class Entries(_Row, table=True):
    """The run's log, as it is told."""

    seq: int = Field(primary_key=True)
    kind: str
    step: int
    version: int
    entry_json: str


class Meta(_Row, table=True):
    key: str = Field(primary_key=True)
    value: str
