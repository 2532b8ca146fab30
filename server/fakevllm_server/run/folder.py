"""A run's directory: private to its user, and one server's at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from pathlib import Path

from fakevllm_adapters.protocol.keys import new_id
from fakevllm_server.config.model import ConfigError
from fakevllm_server.run.metadata import EngineStart, with_engine_start

log = logging.getLogger("fakevllm.server")


class RunInUse(ConfigError):
    """Another server holds the directory."""


class RunFolder:
    """Holds the directory's lock until closed. The kernel lets go of it when the process dies."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the directory cannot be used."""
        self._path = path
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
        """Raises ConfigError where this run was begun with another model: its checkpoints would
        be served under the wrong name, or not load at all."""
        if not self._model_file.exists():
            return
        known = json.loads(self._model_file.read_bytes())
        if known["backend"] != backend or known["fingerprint"] != fingerprint(model):
            raise ConfigError(
                f"{self._path} belongs to a run of {known['model'] or known['backend']}: "
                "choose another --run-dir."
            )

    def record_model(self, backend: str, model: str | None) -> None:
        """Once the engine is up: a model that cannot be loaded must not take the directory."""
        identity = {"backend": backend, "model": model, "fingerprint": fingerprint(model)}
        if not self._model_file.exists():
            write_atomically(self._model_file, json.dumps(identity))

    def run_id(self) -> str:
        """By which proxies know this run: made once, and kept."""
        file = self._path / "run_id"
        if not (file.exists() and file.read_text()):
            write_atomically(file, new_id())
        return file.read_text()

    def record_engine_start(self, life: EngineStart) -> None:
        """In `run.json`, which is for people. A disk that does not take it stops no engine."""
        file = self._path / "run.json"
        try:
            known = file.read_text() if file.exists() else None
            write_atomically(file, with_engine_start(known, self.run_id(), life, time.time()))
        except OSError as error:
            log.warning("%s was not written: %s", file, error.strerror)

    def close(self) -> None:
        os.close(self._lock)


def write_atomically(file: Path, text: str) -> None:
    """All of it or nothing, whatever dies and however full the disk is: half of it would be taken
    for what was meant by every later life. Raises OSError."""
    aside = file.with_name(f"{file.name}.tmp")
    with aside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)


def fingerprint(model: str | None) -> str | None:
    """Of a model folder: its config, and names and sizes of its weights. None for what is none."""
    folder = Path(model) if model is not None else None
    if folder is None or not folder.is_dir():
        return model
    config = folder / "config.json"
    parts = [config.read_text() if config.exists() else ""]
    weights = sorted(folder.glob("*.safetensors"))
    parts += [f"{file.name} {file.stat().st_size}" for file in weights]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
