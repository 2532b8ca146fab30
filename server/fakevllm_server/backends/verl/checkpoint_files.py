"""Check that the folder of a distributed checkpoint has all files of all workers.

Each worker writes its own files. If the run directory is not shared, the workers of another machine
write to that machine's disk, and nothing else notices.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from fakevllm_server.backends.verl.trainer_arguments import STATE_FOLDER
from fakevllm_server.types.backend import BackendError


def check_files(checkpoint: Path) -> None:
    """Raise BackendError if a file of the checkpoint is missing, or if the list of its files cannot
    be read."""
    folder = checkpoint / STATE_FOLDER
    try:
        entries = FileSystemReader(folder).read_metadata().storage_data
        names = {entry.relative_path for entry in (entries or {}).values()}
    # Translated: the list is pickled, and a damaged one raises many kinds of errors.
    except Exception as error:
        raise BackendError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise BackendError(
            f"checkpoint {checkpoint} lacks {len(missing)} of {len(names)} files, such as "
            f"{missing[0]}: if several machines train, put --run-dir on a file system that all of "
            "them share"
        )
