"""Messages in which the server shows the tokens and advantages of a group for inspection."""

from __future__ import annotations

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import CapturedCall


class CallView(CapturedCall):
    """The tokens of one LLM call, with the positions of the tokens that the loss leaves out."""

    forced: list[int] = Field(default_factory=list[int])
    """Positions in the response at which no other token could have been sampled. The loss leaves
    them out."""


class SiblingView(BaseModel):
    """A sibling of a group with its LLM calls. In a group of episodes, a sibling is an episode."""

    index: int
    name: str
    """`<group>/<index>`, or an episode's uuid."""
    reward: float | None = None
    advantage: float | None = None
    """Mean advantage over the sibling's tokens, from the step that trained the sibling."""
    is_trained: bool = False
    calls: list[CallView] = []


class GroupView(BaseModel):
    """A group with its state, its siblings, and the training step that trained the group."""

    group_id: str
    state: str
    """`open` until the group ends; then the state that the journal records."""
    reason: str | None = None
    step: int | None = None
    version: int | None = None
    """Version of the weights that the step produced."""
    siblings: list[SiblingView]
