"""What every section of fakevllm.toml is: frozen, and without keys that nobody reads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
