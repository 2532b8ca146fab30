"""The base class of the sections of fakevllm.toml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of fakevllm.toml: frozen, and it refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
