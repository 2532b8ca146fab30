"""Which engine to run and how: what the server tells every engine."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_SOCKET_PATH = 100
"""The kernel's limit for a Unix socket's path is 108 bytes."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    engine: str
    """Its name in the tables of `backends/table.py`."""
    run_dir: Path
    model: str | None
    served_model_name: str
    seed: int = 0
    allow_hub: bool = False
    extra_args: Sequence[str] = ()
    """Command-line arguments of the engine's own, after ours."""
    job_args: Mapping[str, str] = field(default_factory=dict[str, str])
    """Arguments of the engine's own by name, from the job; those above win."""
    train_only: bool = False
    """A trainer beside another rollout engine: it never samples."""
    url: str | None = None
    """A rollout engine that somebody else runs; nothing is started."""
    api_key: str | None = field(default=None, repr=False)
    """Of that engine."""

    @property
    def role(self) -> str:
        return "trainer" if self.train_only else "engine"

    @property
    def log_file(self) -> Path:
        return self.run_dir / f"{self.role}.log"

    @property
    def environment(self) -> dict[str, str]:
        """Of the engine's process."""
        return dict(os.environ) if self.allow_hub else os.environ | {"HF_HUB_OFFLINE": "1"}

    def new_socket(self) -> Path:
        """A path that no process has listened at, in the run directory or, where that is too long,
        in a folder of its own; give it to `remove_socket` afterwards.

        An engine whose server was killed while it started comes up once more, for a moment. At a
        path of both, its successor's weights would be loaded into it, and the successor, which
        listens there last, would answer apps with the weights the run began with.
        """
        run_dir = self.run_dir.resolve()
        for left in run_dir.glob(f"{self.role}-*.sock"):
            left.unlink(missing_ok=True)
        path = run_dir / f"{self.role}-{secrets.token_hex(4)}.sock"
        if len(str(path)) > MAX_SOCKET_PATH:
            return Path(tempfile.mkdtemp(prefix="fakevllm-")) / f"{self.role}.sock"
        return path

    def remove_socket(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if path.parent != self.run_dir.resolve():
            # Somebody may have tidied up there.
            with contextlib.suppress(OSError):
                path.parent.rmdir()
