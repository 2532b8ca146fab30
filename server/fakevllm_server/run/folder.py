"""The run directory. Only the user who runs the server can read the directory. Only one server at a
time can use it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path

from fakevllm_adapters.protocol.keys import new_id
from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.path_access import unusable_message
from fakevllm_server.run.metadata import EngineStart, with_engine_start
from fakevllm_server.run.model_identity import ModelIdentity, read_recorded_model

log = logging.getLogger("fakevllm.server")

MAX_ID_CHARS = 100
"""Maximum length of a run's id. Each status reply contains the id."""


class RunInUse(ConfigError):
    """Error that is raised if another server has locked the run directory."""


class RunFolder:
    """A run directory that this process has locked. `close` releases the lock. If the process dies,
    the kernel releases the lock."""

    def __init__(self, path: Path) -> None:
        """Create the directory if it does not exist, and lock it.

        Raises RunInUse if another server has locked the directory. Raises ConfigError if the
        directory cannot be created or opened.
        """
        self.path = path
        self._model_file = path / "model.json"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            message = unusable_message(path, error, "choose another --run-dir")
            raise ConfigError(message) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RunInUse(f"{path} is used by another server: choose another --run-dir.") from None

    def check_model(self, trainer: str, model: ModelIdentity) -> None:
        """Raise ConfigError if the run was started with another trainer or model.

        With another trainer or model, the run's checkpoints might be served under the name of the
        wrong model, or might fail to load.
        """
        recorded = read_recorded_model(self.path)
        if recorded is None or (recorded.trainer == trainer and recorded.is_same_model(model)):
            return
        is_same_folder = recorded.trainer == trainer and recorded.model == model.model
        what = "other weights of " if is_same_folder else ""
        raise ConfigError(
            f"{self.path} belongs to a run of {what}{recorded.model or recorded.trainer}: "
            "choose another --run-dir."
        )

    def record_model(self, trainer: str, model: ModelIdentity) -> None:
        """Write the trainer and the model to `model.json`. `check_model` compares them at later
        starts. An existing file is kept, with one exception. A file from an older server may have a
        fingerprint that does not cover the weights. Such a file is replaced.

        Call this method only after the engine has started. Otherwise a model that cannot be loaded
        would be recorded, and the directory could not be used for another model.
        """
        recorded = read_recorded_model(self.path)
        if recorded is None or model.fingerprint != recorded.fingerprint == model.shape:
            content = {"backend": trainer, "model": model.model, "fingerprint": model.fingerprint}
            write_atomically(self._model_file, json.dumps(content))

    def run_id(self) -> str:
        """Return the id by which proxies recognize this run. If the run has no id yet, create one.

        Raises ConfigError if the file with the id is damaged.
        """
        file = self.path / "run_id"
        try:
            run_id = file.read_text() if file.exists() else ""
            if len(run_id) > MAX_ID_CHARS or not run_id.isprintable():
                raise ValueError
        except (OSError, ValueError):
            raise ConfigError(
                f"{file} is damaged: write the run's id, which run.json contains, into it, or "
                "choose another --run-dir."
            ) from None
        if not run_id:
            run_id = new_id()
            write_atomically(file, run_id)
        return run_id

    def record_engine_start(self, start: EngineStart) -> None:
        """Add an entry for an engine start to `run.json`. If the file cannot be written, log a
        warning."""
        file = self.path / "run.json"
        try:
            text = file.read_text(errors="replace") if file.exists() else None
            write_atomically(file, with_engine_start(text, self.run_id(), start, time.time()))
        except (OSError, ConfigError) as error:  # ConfigError: the file of the run's id is damaged
            log.warning("%s was not written: %s", file, getattr(error, "strerror", error))

    def close(self) -> None:
        os.close(self._lock)


def write_atomically(file: Path, text: str) -> None:
    """Replace the text of a file atomically. The file always has either the old or the new text,
    even after a crash or on a full disk.

    Raises OSError if the file cannot be written.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
