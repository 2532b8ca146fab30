"""Write the folder of a new project as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fakevllm.errors import ConfigError

STAGING_PREFIX = ".fakevllm-init-"


def check_new(folder: Path) -> None:
    """Raise ConfigError unless `folder` is an empty folder or does not exist."""
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: choose another name for the project.")
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: choose a new folder. Nothing was written.")
    except OSError as error:
        raise _unwritable(folder, error) from None


def has_files(folder: Path) -> bool:
    """Return whether `folder` is a folder that is not empty."""
    try:
        return folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None


def write_folder(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all files into `folder`, which does not exist or is empty. `texts` has the text of each
    file by its path in the folder.

    The files are first written into a temporary folder on the same file system, and then moved. If
    anything fails, `folder` stays as it was, and ConfigError is raised.
    """
    check_new(folder)
    is_there = folder.exists()
    # A mount point cannot be replaced, and its parent may be another file system.
    parent = folder if is_there else _nearest_existing_parent(folder)
    try:
        with contextlib.ExitStack() as undo:
            staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=parent))
            undo.callback(shutil.rmtree, staging, ignore_errors=True)
            for path, text in texts.items():
                file = staging / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            if is_there:
                _move_content(staging, folder)
            else:
                staging.chmod(0o777 & ~_umask())  # mkdtemp lets only the owner in
                folder.parent.mkdir(parents=True, exist_ok=True)
                staging.rename(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    except UnicodeEncodeError:
        raise ConfigError(
            "The name of the folder or of the model folder is not UTF-8: rename it."
        ) from None


def _move_content(staging: Path, folder: Path) -> None:
    with contextlib.ExitStack() as undo:
        for child in sorted(staging.iterdir()):
            target = folder / child.name
            child.rename(target)
            undo.callback(target.rename, child)
        undo.pop_all()


def _nearest_existing_parent(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.exists())


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"The folder {folder} cannot be written: {error.strerror}.")
