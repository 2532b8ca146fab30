"""The run directory, which only its user can read and only one server at a time can use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from fakevllm_adapters.protocol.keys import new_id
from fakevllm_server.config.model import ConfigError
from fakevllm_server.run.metadata import EngineStart, with_engine_start

log = logging.getLogger("fakevllm.server")

MAX_ID_CHARS = 100
"""Maximum length of a run's id. Each status reply contains the id."""


class RunInUse(ConfigError):
    """Error that another server has locked the run directory."""


class RunFolder:
    """A locked run directory. `close` releases the lock. If the process dies, the kernel releases
    the lock."""

    def __init__(self, path: Path) -> None:
        """Create the directory if it does not exist, and lock it.

        Raises RunInUse if another server has locked the directory, and ConfigError if the directory
        cannot be created or opened.
        """
        self.path = path
        self._model_file = path / "model.json"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be used ({error.strerror}): choose another --run-dir."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RunInUse(f"{path} is used by another server: choose another --run-dir.") from None

    def check_model(self, backend: str, model: str | None) -> None:
        """Raise ConfigError if the run was started with another trainer or model.

        With another trainer or model, the run's checkpoints would be served under the wrong name,
        or could not be loaded.
        """
        recorded = _read_model(self.path)
        if recorded is None:
            return
        if (recorded["backend"], recorded["fingerprint"]) != (backend, fingerprint(model)):
            raise ConfigError(
                f"{self.path} belongs to a run of {recorded['model'] or recorded['backend']}: "
                "choose another --run-dir."
            )

    def record_model(self, backend: str, model: str | None) -> None:
        """Write trainer and model to `model.json`, which `check_model` reads at later starts. An
        existing file is kept.

        Call this method only after the engine has started. Otherwise a model that cannot be loaded
        would make the directory unusable for other models.
        """
        identity = {"backend": backend, "model": model, "fingerprint": fingerprint(model)}
        if not self._model_file.exists():
            write_atomically(self._model_file, json.dumps(identity))

    def run_id(self) -> str:
        """Return the id by which proxies recognize this run. The first call creates the id.

        Raises ConfigError if the file of the id is damaged.
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
        """Add an engine start to `run.json`. If the file cannot be written, log a warning."""
        file = self.path / "run.json"
        try:
            text = file.read_text(errors="replace") if file.exists() else None
            write_atomically(file, with_engine_start(text, self.run_id(), start, time.time()))
        except OSError as error:
            log.warning("%s was not written: %s", file, error.strerror)

    def close(self) -> None:
        os.close(self._lock)


def recorded_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the model that the run in a folder trains. Return None if no engine
    was started there yet, or if the run has no model.

    Raises ConfigError if the file of the model is damaged.
    """
    recorded = _read_model(path)
    return None if recorded is None else recorded["fingerprint"]


def _read_model(path: Path) -> dict[str, Any] | None:
    """Return the content of the `model.json` in a run's folder, or None if there is no such file.

    Raises ConfigError if the file is damaged.
    """
    file = path / "model.json"
    try:
        if not file.exists():
            return None
        recorded = json.loads(file.read_bytes())
        return {name: recorded[name] for name in ("backend", "model", "fingerprint")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{file} is damaged: delete it if the run was started with this model, or choose "
            "another --run-dir."
        ) from None


def write_atomically(file: Path, text: str) -> None:
    """Replace the text of a file in one step. After a crash or on a full disk, the old text
    remains.

    A plain write could leave a partly written file, which a later server would read. Raises OSError
    if the file cannot be written.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def fingerprint(model: str | None) -> str | None:
    """Return a hash of a model folder's config and of its weight files' names and sizes.

    A `model` that is not a folder, such as a hub name or None, is returned unchanged.
    """
    folder = Path(model) if model is not None else None
    if folder is None or not folder.is_dir():
        return model
    config = folder / "config.json"
    parts = [config.read_text() if config.exists() else ""]
    weights = sorted(folder.glob("*.safetensors"))
    parts += [f"{file.name} {file.stat().st_size}" for file in weights]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
