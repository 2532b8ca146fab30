"""What an agent's author writes out; a mistake in it is a ValueError of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fakevllm_adapters.http.mistakes import one_line
from fakevllm_adapters.protocol import pool as swarm_pool
from fakevllm_adapters.protocol import swarm


class _Given(BaseModel):
    if not TYPE_CHECKING:  # whose word for it is one argument a field

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                problems = one_line(error.errors(include_url=False))
                raise ValueError(f"{type(self).__name__}: {problems}") from None


class WorkflowOutput(_Given, swarm.WorkflowOutput):
    pass


class ThrottlePolicy(_Given, swarm_pool.ThrottlePolicy):
    model_config = ConfigDict(extra="forbid")
