"""Decide which model the engine loads for a job. The job may name a model, and the server's flag
`--model` may name one too.

* With `--models-dir`, a job may name a folder below `--models-dir`, or the model of `--model`.
* With only `--model`, this model is loaded. The model that the job names is ignored.
* With neither flag and without API keys, a job may name any model.
* With neither flag and with API keys, a job that names a model is refused, because a server with
  API keys may get jobs from clients on other machines.
"""

from __future__ import annotations

from pathlib import Path

from fakevllm_runtime.errors import ConfigError


def choose_model(
    job_model: str | None, model: str | None, models_dir: Path | None, *, has_keys: bool
) -> str | None:
    """Return the folder or name of the model for a job. Return None if neither the job nor the
    server names a model.

    `job_model` is the job's setting `model`. `model` and `models_dir` are the server's flags.
    `has_keys` is True if the server requires API keys. Raises ConfigError if the job may not use
    the model that it names.
    """
    if models_dir is None:
        if model is None and job_model is not None and has_keys:
            raise ConfigError(
                f"The job names the model {job_model!r}, and this server has no models for jobs: "
                "start the server with --models-dir DIR or with --model."
            )
        return model or job_model
    if job_model is None or (model is not None and _is_same(job_model, model)):
        return model
    folder = _find_below(models_dir, job_model)
    if folder is None:
        or_default = "" if model is None else ", or leave it out for the server's --model"
        raise ConfigError(
            f"The job's model {job_model!r} is not a folder below the server's --models-dir: name "
            f"a folder relative to --models-dir{or_default}."
        )
    return str(folder)


def _is_same(one: str, other: str) -> bool:
    folders = _resolve(Path(one)), _resolve(Path(other))
    return one == other or (folders[0] is not None and folders[0] == folders[1])


def _find_below(models_dir: Path, name: str) -> Path | None:
    """Return the resolved model folder that a job names. Return None if `models_dir` has no such
    folder. Symbolic links that lead out of `models_dir` are not followed."""
    root = models_dir.resolve()
    for path in (root / name, Path(name)):
        folder = _resolve(path)
        if folder is not None and folder != root and folder.is_relative_to(root):
            return folder
    return None


def _resolve(path: Path) -> Path | None:
    """Return the absolute path of an existing folder, with symbolic links resolved. Return None if
    there is no such folder."""
    try:
        folder = path.resolve()
        return folder if folder.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # a loop of links, or a NUL in the name
        return None
