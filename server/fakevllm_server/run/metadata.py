"""The file `run.json` in a run directory: engines, model, job and package versions of the run.

The file is for people to read. The server adds entries to it. From earlier entries, it reads only
the names of the model and of the experiment. A restarted server reads its job from the journal (the
server's SQLite file) instead. To make runs on different machines comparable, the file has no
addresses, no machine names and no keys.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

EngineStart = dict[str, Any]
"""Settings and versions of one engine start, as JSON."""

PACKAGES = (
    *("fakevllm", "torch", "transformers", "tokenizers", "peft", "safetensors", "xgrammar"),
    *("vllm", "verl", "ray", "numpy"),
)
HIDDEN = "…"
"""Text that replaces a secret."""
_SECRET = re.compile(r"(key|token|secret|password)$")


def engine_start(
    config: ServerConfig, job: TrainJob, model: str | None, fingerprint: str | None
) -> EngineStart:
    """Return an entry for `run.json` with the settings and package versions of one engine start.

    `model` is the folder or hub name from which the engine loads the model. `fingerprint` is the
    fingerprint of that model.
    """
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
    """Return the installed version of each package in PACKAGES, by package name. No package is
    imported. A package that is not installed is left out."""
    installed: dict[str, str] = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the command-line arguments, with HIDDEN in place of the values of secret flags.

    >>> without_secrets(["--hf-token", "abc", "--api-key=x", "--max-num-batched-tokens", "8192"])
    ['--hf-token', '…', '--api-key=…', '--max-num-batched-tokens', '8192']
    """
    cleaned: list[str] = []
    is_secret_value = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_secret = flag.startswith("--") and _SECRET.search(flag) is not None
        if is_secret_value:
            cleaned.append(HIDDEN)
        else:
            cleaned.append(f"{flag}={HIDDEN}" if is_secret and equals else argument)
        is_secret_value = is_secret and not equals
    return cleaned


def with_engine_start(text: str | None, run_id: str, start: EngineStart, now: float) -> str:
    """Return the text of `run.json` with one more engine start.

    `text` is the current text of the file, or None if there is no file. An unreadable text is
    replaced. `now` is in Unix seconds. If the settings equal those of the previous start, no entry
    is added. Instead, the previous entry gets the time of the new start. The text also has the
    experiment name of the run: the name with which the run was first started. If the file is from
    an older server, the name is the newest name in the file.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    starts = _parse_starts(text)
    name = experiment_of(text) if starts else start["job"].get("experiment_name")
    if starts and {**starts[-1], "started": None} == {"started": None, **start}:
        starts[-1]["started"].append(started)
    else:
        starts.append({"started": [started], **start})
    run = {"run_id": run_id, "experiment_name": name, "lives": starts}
    return json.dumps(run, indent=2, ensure_ascii=False) + "\n"


def read_metadata(run_folder: Path) -> str | None:
    """Return the text of the file `run.json` in a run's folder, or None if it cannot be read."""
    try:
        return (run_folder / "run.json").read_text()
    except (OSError, UnicodeDecodeError):
        return None


def model_of(text: str | None) -> str | None:
    """Return the name of the model that the latest engine start used, from the text of `run.json`.
    Return None if the text names no model."""
    starts = _parse_starts(text)
    model = starts[-1].get("model") if starts else None
    name = cast("dict[str, Any]", model).get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def has_starts(text: str | None) -> bool:
    """Return True if the text of `run.json` has an entry of an engine start."""
    return bool(_parse_starts(text))


def experiment_of(text: str | None) -> str | None:
    """Return the experiment name of a run from the text of its `run.json`. Return None for a run
    without a name.

    The file of an older server does not have the name of the run. It has the job of each engine
    start, and a job may have an experiment name. The newest of these names is then returned.
    """
    starts = _parse_starts(text)
    if not starts:
        return None
    known = json.loads(text or "{}")
    if "experiment_name" in known:
        name = known["experiment_name"]
        return name if isinstance(name, str) else None
    names = [start.get("job", {}).get("experiment_name") for start in starts]
    return next((name for name in reversed(names) if isinstance(name, str)), None)


def _name(model: str | None) -> str | None:
    """Return the name of a model for `run.json`. For a model folder, the name is the last part of
    the path. For the demo model, it is `demo`. For any other model, it is the hub name."""
    if model == str(DEMO_MODEL_DIR):
        return "demo"
    if model is None or not Path(model).is_dir():
        return model
    return Path(model).resolve().name


def _parse_starts(text: str | None) -> list[dict[str, Any]]:
    """Return the list of engine starts in the text of `run.json`. Return [] if the text is
    unreadable."""
    try:
        starts = json.loads(text or "{}")["lives"]
        return [
            start
            for start in starts
            if isinstance(start["started"], list) and isinstance(start.get("job", {}), dict)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
