"""The folder of a run."""

from __future__ import annotations

from pathlib import Path

from fakevllm.errors import UserError
from fakevllm_runtime.path_access import unusable_message


def make_run_folder(folder: Path, setting: str) -> None:
    """Create the run folder. Only its owner can read the folder, because it contains requests and
    answers.

    Raises UserError if the folder cannot be created. The message contains `setting`, the name of
    the flag or configuration key that the user must change.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"The run folder {unusable_message(folder, error, f'name another {setting}')}"
        ) from None
