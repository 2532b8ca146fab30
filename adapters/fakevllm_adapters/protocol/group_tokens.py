"""Messages in which the server shows the tokens and advantages of a group, for inspection by a
user."""

from __future__ import annotations

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import CapturedCall


class CallView(CapturedCall):
    """The tokens of one LLM call, and which of these tokens were forced. A forced token was the
    only token that could be sampled at its position."""

    forced: list[int] = Field(default_factory=list[int])
    """Positions of forced tokens in the response. The loss leaves these tokens out."""


class SiblingView(BaseModel):
    """One sample of a group with its LLM calls. The sample is an answer to an app's request, or an
    episode."""

    index: int
    name: str
    """Name of the sample: `<group>/<index>` for a sibling, the uuid for an episode."""
    reward: float | None = None
    advantage: float | None = None
    """Mean advantage over the sibling's tokens, from the step that trained the sibling."""
    is_trained: bool = False
    calls: list[CallView] = []


class GroupView(BaseModel):
    """A group with its state, and the training step that trained the group. A group has the
    samples of one request or task."""

    group_id: str
    state: str
    """`open` until the group ends. After the end, the state in the server's journal."""
    reason: str | None = None
    step: int | None = None
    version: int | None = None
    """Version of the weights that the step produced."""
    siblings: list[SiblingView]
