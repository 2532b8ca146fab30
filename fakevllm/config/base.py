"""The base class of the sections of fakevllm.toml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of the sections of fakevllm.toml. A section cannot be changed after it was read,
    and an unknown key in it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
