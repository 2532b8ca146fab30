"""A file in the run directory, which records that vLLM has loaded the LoRA adapters of a job.

vLLM may refuse the first adapter after a start for two reasons. Either vLLM cannot load this kind
of adapter at all, or vLLM had a temporary failure. If the file shows that vLLM has loaded this kind
of adapter before, the failure is temporary. The file outlives the server process that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from fakevllm_server.types.engine_spec import EngineSpec

FILE_NAME = "engine_adapters_held"


class HeldAdapters:
    """The record that vLLM has loaded the LoRA adapters of a job. The record is valid for one
    version of vLLM, one list of vLLM's arguments, and one kind of adapter (LoRA rank and target
    modules)."""

    def __init__(self, spec: EngineSpec, version: str, arguments: Sequence[str]) -> None:
        """Create the object, without writing the record. `version` is the version of vLLM.
        `arguments` are the arguments of vLLM's command, without those that differ between starts.
        """
        self._file = spec.run_dir / FILE_NAME
        kind = [version, *arguments, str(spec.lora_rank), spec.target_modules]
        # An argument may be a secret, such as the key of a hub.
        self._digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()

    def is_recorded(self) -> bool:
        """Return True if the file records that vLLM has loaded this kind of LoRA adapter before.
        The recorded version of vLLM and its recorded arguments must be the same as now."""
        try:
            return self._file.read_text().strip() == self._digest
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        """Write the record to its file, and replace an earlier record. If a power cut damages the
        file, `is_recorded` returns False. Raises OSError if the disk is full."""
        self._file.write_text(f"{self._digest}\n")
