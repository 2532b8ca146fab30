"""Tokens to be looked at, as the server tells them."""

from __future__ import annotations

from pydantic import BaseModel, Field

from fakevllm_adapters.protocol.swarm import CapturedCall


class ShownCall(CapturedCall):
    forced: list[int] = Field(default_factory=list[int])
    """Places in the response where nothing else could have been sampled: not in the loss."""


class ShownSibling(BaseModel):
    """One sibling of a group, or one episode."""

    index: int
    name: str
    """`<group>/<index>`, or an episode's uuid."""
    reward: float | None = None
    advantage: float | None = None
    """Of the step that trained it, the mean over its tokens."""
    is_trained: bool = False
    calls: list[ShownCall] = []


class ShownGroup(BaseModel):
    group_id: str
    state: str
    """open: not ended yet; else as the journal has it."""
    reason: str | None = None
    step: int | None = None
    version: int | None = None
    """Of the weights that step made."""
    siblings: list[ShownSibling]
