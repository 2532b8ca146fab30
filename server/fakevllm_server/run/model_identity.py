"""Identify models by fingerprints. The file `model.json` names the model of a run.

A run continues only with the model with which it began. A copy of the model in another folder
counts as the same model. A model with other weights counts as another model, even if it has the
same size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fakevllm_runtime.errors import ConfigError

SAMPLE_BYTES = 4096
"""Number of bytes from the middle of each tensor that the fingerprint of a model covers. Reading
all weights of a large model would take minutes at each start. Few bytes are enough, because
training changes values all over a tensor."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of the header of a safetensors file. The format sets this limit."""
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model, with the fingerprints by which the server recognises the model of a run."""

    model: str | None
    """Model folder or hub name; None for the fake engine without a model."""
    fingerprint: str | None
    """Hash of a model folder's config and of samples of its weights. If `model` is a hub name or
    None, the fingerprint is equal to `model`."""
    shape: str | None
    """Fingerprint as servers up to version 0.3 computed it. It does not cover the values of the
    weights."""


NO_MODEL = ModelIdentity(None, None, None)
"""Identity of the fake engine, which has no model."""


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """The trainer and the model of a run, as recorded in the run's file `model.json`."""

    trainer: str
    model: str | None
    fingerprint: str | None

    def is_same_model(self, other: ModelIdentity) -> bool:
        """Return True if `other` is the model of this run. Raises ConfigError if a model folder
        cannot be read.

        A fingerprint from an old version of the server does not cover the values of the weights. If
        the run has such a fingerprint, the weights in the recorded folder are compared. If this
        folder does not exist any more, the model was probably moved, and the result is True.
        """
        if self.fingerprint == other.fingerprint:
            return True
        if self.fingerprint != other.shape:
            return False
        if self.model is None or not Path(self.model).is_dir():
            return True
        return identify(self.model).fingerprint == other.fingerprint


def identify(model: str | None) -> ModelIdentity:
    """Return a ModelIdentity with the fingerprints of a model. `model` is a folder, a hub name or
    None.

    Raises ConfigError if the model folder cannot be read.
    """
    folder = None if model is None else Path(model)
    try:
        if folder is None or not folder.is_dir():
            return ModelIdentity(model, model, model)
        shape = _describe_shape(folder)
        digest = hashlib.sha256(shape)
        for file in sorted(folder.glob("*.safetensors")):
            for sample in _samples(file):
                digest.update(sample)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"The model {model} cannot be read ({cause}): name another model folder."
        ) from None
    return ModelIdentity(
        model, _short(digest.hexdigest()), _short(hashlib.sha256(shape).hexdigest())
    )


def read_recorded_model(run_dir: Path) -> RecordedModel | None:
    """Return the content of the `model.json` in a run's folder, or None if there is no such file.

    Raises ConfigError if the file is damaged.
    """
    file = run_dir / "model.json"
    try:
        if not file.exists():
            return None
        recorded = json.loads(file.read_bytes())
        return RecordedModel(recorded["backend"], recorded["model"], recorded["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{file} is damaged: delete it if the run was started with this model, or choose "
            "another --run-dir."
        ) from None


def _describe_shape(folder: Path) -> bytes:
    """Return the text of a model folder's config, and the names and sizes of its weight files."""
    config = folder / "config.json"
    parts = [config.read_text() if config.exists() else ""]
    weights = sorted(folder.glob("*.safetensors"))
    parts += [f"{file.name} {file.stat().st_size}" for file in weights]
    return "\n".join(parts).encode()


def _samples(file: Path) -> Iterator[bytes]:
    """Yield SAMPLE_BYTES from the middle of each tensor in a safetensors file. If the file is not
    in this format, yield its first and its last bytes."""
    with file.open("rb") as weights:
        num_bytes = file.stat().st_size
        spans = sorted(_tensor_spans(weights, num_bytes)) or [
            (0, min(SAMPLE_BYTES, num_bytes)),
            (max(0, num_bytes - SAMPLE_BYTES), num_bytes),
        ]
        for start, end in spans:
            weights.seek(max(start, (start + end - SAMPLE_BYTES) // 2))
            yield weights.read(min(SAMPLE_BYTES, end - start))


def _tensor_spans(weights: BinaryIO, num_bytes: int) -> list[tuple[int, int]]:
    """Return the start and the end of each tensor in a safetensors file, as byte offsets. Return []
    if the file is not in this format."""
    length = int.from_bytes(weights.read(8), "little")
    if length > min(MAX_HEADER_BYTES, num_bytes):
        return []
    try:
        header = cast("dict[str, dict[str, Any]]", json.loads(weights.read(length)))
        offsets = [value["data_offsets"] for name, value in header.items() if name[:2] != "__"]
        spans = [(8 + length + int(start), 8 + length + int(end)) for start, end in offsets]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [(start, end) for start, end in spans if 0 <= start < end <= num_bytes]


def _short(digest: str) -> str:
    return digest[:_DIGEST_CHARS]
