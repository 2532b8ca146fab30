"""The settings with which the server starts an engine's process."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_SOCKET_PATH = 100
"""Maximum length of a socket path in characters. The kernel's limit for a Unix socket is 108 bytes,
the final zero included."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine to start, with its model and its arguments."""

    engine: str
    """Name of the engine in the tables of `backends/process/engine_registry.py`."""
    run_dir: Path
    model: str | None
    served_model_name: str
    seed: int = 0
    allow_hub: bool = False
    """Whether the engine may load a model from the Hugging Face hub."""
    extra_args: Sequence[str] = ()
    """The engine's own command-line arguments from the user. They follow the arguments that the
    server passes."""
    job_args: Mapping[str, str] = field(default_factory=dict[str, str])
    """The engine's own arguments that the job sets, by name. Arguments in `extra_args` override
    arguments of the job."""
    lora_rank: int = 0
    """Rank of the LoRA adapters that the job trains and the trainer can export; 0 if there are
    none."""
    target_modules: str = ""
    """The layers with an adapter, as the job's setting `target_modules` names them."""
    train_only: bool = False
    """Whether the engine is only a trainer and another engine samples."""
    url: str | None = None
    """URL of a rollout engine that the user runs. The server then starts no rollout engine."""
    api_key: str | None = field(default=None, repr=False)
    """API key for the engine at `url`."""
    drain_bound_s: float | None = None
    """Maximum seconds that new weights wait for running calls, during which new calls wait. None
    leaves the wait to the engine. A call that runs longer may get tokens of two versions."""
    visible_gpus: str | None = None
    """GPUs that the engine's process may use, as a value of CUDA_VISIBLE_DEVICES. None leaves the
    server's own value."""
    media_domains: Sequence[str] = ()
    """Hosts from which the engine may fetch the media URLs of requests."""
    weight_transport: str = "folder"
    """Name of the way in which new weights get into the engine, in the table of
    `backends/process/weight_transports.py`."""
    shares_gpu: bool = True
    """Whether the trainer, or one of its workers, uses the GPU of the rollout engine, if there is a
    GPU."""
    sleeps: bool = False
    """Whether the rollout engine frees its memory during each training step."""

    @property
    def role(self) -> str:
        """Role of the engine: `trainer` or `engine`. The names of the engine's log file and of its
        socket begin with this word."""
        return "trainer" if self.train_only else "engine"

    @property
    def log_file(self) -> Path:
        return self.run_dir / f"{self.role}.log"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the engine's process gets."""
        own = {} if self.allow_hub else {"HF_HUB_OFFLINE": "1"}
        if self.visible_gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        return os.environ | own

    def new_socket(self) -> Path:
        """Return a path for a Unix socket that no process has used before.

        The path is in the run directory or, if it would be too long there, in a new temporary
        folder. Sockets that earlier engines of this role left in the run directory are deleted.
        Pass the path to `remove_socket` when the engine has ended.

        Each start needs a new path, because a server may be killed while its engine starts. The old
        engine may open its socket when the next server already runs. With a fixed path, the next
        server could mistake the old engine for its own engine, and load the trained weights into
        the old engine. After that, the new engine would open the path and answer apps with the
        initial weights.
        """
        run_dir = self.run_dir.resolve()
        for old_socket in run_dir.glob(f"{self.role}-*.sock"):
            old_socket.unlink(missing_ok=True)
        path = run_dir / f"{self.role}-{secrets.token_hex(4)}.sock"
        if len(str(path)) > MAX_SOCKET_PATH:
            return Path(tempfile.mkdtemp(prefix="fakevllm-")) / f"{self.role}.sock"
        return path

    def remove_socket(self, path: Path) -> None:
        """Delete the socket at a path that `new_socket` returned. If the path is in a temporary
        folder, delete this folder too."""
        path.unlink(missing_ok=True)
        if path.parent != self.run_dir.resolve():
            # The user may have deleted the temporary folder already.
            with contextlib.suppress(OSError):
                path.parent.rmdir()
