"""vLLM as a Rollout."""

from __future__ import annotations

from pathlib import Path

from fakevllm_server.backends.base import BackendRefused, Endpoint
from fakevllm_server.backends.spec import EngineSpec


class VllmRollout:
    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    async def launch(self) -> Endpoint:
        raise BackendRefused("not yet")

    async def load_weights(self, folder: Path, version: int) -> None: ...
    async def health(self) -> bool:
        return False

    async def lost(self) -> str:
        return ""

    async def close(self) -> None: ...
