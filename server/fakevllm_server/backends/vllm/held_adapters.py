"""A file in the run directory, which records that vLLM has held the adapters of a job.

vLLM may refuse the first adapter after a start for two reasons. Either vLLM cannot hold adapters of
this kind at all, or vLLM had a temporary failure. If the record shows that vLLM has held adapters
of this kind before, the failure is temporary. The record outlives the server process that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from fakevllm_server.types.engine_spec import EngineSpec

FILE_NAME = "engine_adapters_held"


class HeldAdapters:
    """The record that vLLM has held the adapters of a job. It is made for one combination of vLLM's
    version, vLLM's arguments, and the job's kind of adapters."""

    def __init__(self, spec: EngineSpec, version: str, arguments: Sequence[str]) -> None:
        """Create the object, without writing the record. `version` is the version of vLLM.
        `arguments` are the arguments of vLLM's command, without those that differ between starts.
        """
        self._file = spec.run_dir / FILE_NAME
        kind = [version, *arguments, str(spec.lora_rank), spec.target_modules]
        # An argument may be a secret, such as the key of a hub.
        self._digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()

    def is_recorded(self) -> bool:
        """Return True if the record's file says that vLLM has held adapters of this kind, with the
        same version and arguments of vLLM."""
        try:
            return self._file.read_text().strip() == self._digest
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        """Write the record to its file, in place of an earlier record. If a power cut damages the
        file, `is_recorded` returns False. Raises OSError if the disk is full."""
        self._file.write_text(f"{self._digest}\n")
