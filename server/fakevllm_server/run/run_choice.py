"""Decide in which folder of the server's run directory a job's run is. This module does no I/O.

The run directory itself is the folder of one run, called the run at the top. Each other run has a
folder of its own below `runs`. An older server had only one run, whose folder is the run directory
itself. Its run directory therefore stays valid.

A job without an experiment name belongs to the run at the top. A job with an experiment name
belongs to the run with that name and with the job's model. If there is no such run, a new run
begins.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

TOP = "."
"""Relative path of the run at the top of the run directory."""
RUNS = "runs"
"""Name of the folder with all other runs."""
MAX_SLUG_CHARS = 60
"""Maximum number of characters of an experiment name that are used in the name of a folder. File
systems allow 255 bytes. A hash of the name and a hash of the model may follow."""
_NAMELESS = "unnamed"
_HASH_CHARS = 8
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~@-]*")


@dataclass(frozen=True, slots=True)
class TopRun:
    """The run at the top: the run whose folder is the run directory itself."""

    experiment_name: str | None
    """Experiment name of the jobs with which the run was started; None if they had no name."""


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """The run to which a job belongs."""

    folder: str
    """Folder of the run, relative to the server's run directory."""
    experiment_name: str | None
    """Experiment name of the run; None for a run without a name."""


def choose_run(
    experiment_name: str | None,
    fingerprint: str | None,
    top: TopRun | None,
    trains_other_model: Callable[[str], bool],
) -> ChosenRun:
    """Return the run to which a job belongs.

    `fingerprint` is the fingerprint of the job's model. `top` is the run whose folder is the run
    directory itself, or None if no run was started there yet. `trains_other_model` is a function
    that gets the relative folder of a run. It returns True if the run trains another model than the
    job. It returns False if no run was started in the folder, or if the model of the run is
    unknown.

    >>> choose_run("a", None, None, lambda folder: False).folder
    '.'
    >>> choose_run("b", None, TopRun("a"), lambda folder: False).folder
    'runs/b'
    >>> choose_run(None, None, TopRun("a"), lambda folder: False)
    ChosenRun(folder='.', experiment_name='a')
    """
    name = experiment_name or None
    named = f"{RUNS}/{slug(name) if name else _NAMELESS}"
    is_at_top = top is None or name is None or name == top.experiment_name
    folder = TOP if is_at_top else named
    if fingerprint is not None and trains_other_model(folder):
        return ChosenRun(f"{named}@{_short_hash(fingerprint)}", name)
    return ChosenRun(folder, top.experiment_name if top is not None and is_at_top else name)


def slug(experiment_name: str) -> str:
    """Return a folder name for an experiment name. Different experiment names get different folder
    names.

    >>> slug("grpo_lr-1e-6")
    'grpo_lr-1e-6'
    >>> slug("../my run")
    'my-run~8700333a'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment_name).strip(".-")[:MAX_SLUG_CHARS]
    # Some file systems do not tell upper case from lower case.
    is_unchanged = name == experiment_name == name.lower() and name not in ("", _NAMELESS)
    return name if is_unchanged else f"{name or 'run'}~{_short_hash(experiment_name)}"


def is_run_folder(relative: str) -> bool:
    """Return True if `relative` has the form of the relative paths that `choose_run` returns."""
    parent, _, name = relative.partition("/")
    return relative == TOP or (parent == RUNS and _FOLDER_NAME.fullmatch(name) is not None)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]
