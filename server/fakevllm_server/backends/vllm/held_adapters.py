"""The record in the run directory that a vLLM has held the adapters of a job.

vLLM may refuse the first adapter after a start for two reasons: it cannot hold such adapters at
all, or something failed that may work later. If the record shows that it has held such adapters
before, the reason is the second one. The record also helps a new server process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from fakevllm_server.types.engine_spec import EngineSpec

FILE_NAME = "engine_adapters_held"


class HeldAdapters:
    """The record of one kind of adapters, for one vLLM with its arguments."""

    def __init__(self, spec: EngineSpec, version: str, arguments: Sequence[str]) -> None:
        """Create the object. The record is not changed. `version` is the version of vLLM.
        `arguments` are the arguments of vLLM's command that are equal in each start."""
        self._file = spec.run_dir / FILE_NAME
        kind = [version, *arguments, str(spec.lora_rank), spec.target_modules]
        # An argument may be a secret, such as the key of a hub.
        self._digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()

    def is_recorded(self) -> bool:
        """Return True if the latest record was made for these adapters and this vLLM."""
        try:
            return self._file.read_text().strip() == self._digest
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        """Replace the record. A file that a power cut damages is no record. Raises OSError if the
        disk is full."""
        self._file.write_text(f"{self._digest}\n")
