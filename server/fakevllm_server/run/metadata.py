"""What a run was made with, for people: `run.json` in its directory. Nothing reads it again: the
job that counts is the journal's.

It says what ran and not where, so that two runs can be compared: no addresses, no machine, no keys.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.config.model import ServerConfig

EngineStart = dict[str, Any]
"""What an engine was started with; as JSON."""

PACKAGES = (
    *("fakevllm", "torch", "transformers", "tokenizers", "peft", "safetensors", "xgrammar"),
    *("vllm", "verl", "ray", "numpy"),
)
HIDDEN = "…"
_SECRET = re.compile(r"(key|token|secret|password)$")


def engine_start(
    config: ServerConfig, job: TrainJob, model: str | None, fingerprint: str | None
) -> EngineStart:
    """`model`: as the engine loads it."""
    return {
        "engines": {
            "rollout": config.rollout_name,
            "trainer": config.trainer_name,
            "elsewhere": config.rollout_url is not None,
            "engine_args": without_secrets(config.engine_args),
            "trainer_args": without_secrets(config.trainer_args),
            "seed": config.seed,
        },
        "model": {"name": _name(model), "fingerprint": fingerprint},
        "job": job.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Of what is installed, without loading it."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """
    >>> without_secrets(["--hf-token", "abc", "--api-key=x", "--max-num-batched-tokens", "8192"])
    ['--hf-token', '…', '--api-key=…', '--max-num-batched-tokens', '8192']
    """
    told: list[str] = []
    is_value = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_secret = flag.startswith("--") and _SECRET.search(flag) is not None
        if is_value:
            told.append(HIDDEN)
        else:
            told.append(f"{flag}={HIDDEN}" if is_secret and equals else argument)
        is_value = is_secret and not equals
    return told


def with_engine_start(known: str | None, run_id: str, life: EngineStart, now: float) -> str:
    """The file with one life more. What was started again just as it was is one entry with one
    time more. A file that is none is begun anew."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    lives = _lives(known)
    if lives and {**lives[-1], "started": None} == {"started": None, **life}:
        lives[-1]["started"].append(started)
    else:
        lives.append({"started": [started], **life})
    return json.dumps({"run_id": run_id, "lives": lives}, indent=2, ensure_ascii=False) + "\n"


def _name(model: str | None) -> str | None:
    """A folder's own, wherever it lies; a hub's as it is. `demo` is what `--model` calls it."""
    if model == str(DEMO_MODEL_DIR):
        return "demo"
    if model is None or not Path(model).is_dir():
        return model
    return Path(model).resolve().name


def _lives(known: str | None) -> list[dict[str, Any]]:
    try:
        lives = json.loads(known or "{}")["lives"]
        return [one for one in lives if isinstance(one["started"], list)]
    except (ValueError, KeyError, TypeError):
        return []
