"""The base class of the sections of fakevllm.toml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of the sections of fakevllm.toml. The values of a section cannot be changed after
    they were read. An unknown key in a section is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
