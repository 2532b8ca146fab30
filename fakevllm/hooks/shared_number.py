"""A number that the proxy and its hook process share in memory.

`multiprocessing.RawValue` would need /dev/shm, which some containers do not have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from typing import IO, Any

NUM_BYTES = mmap.PAGESIZE


class SharedNumber:
    """A number of 64 bits without a sign, in memory that this process shares with a spawned
    process. Pass the object as an argument of the process, and close `file` after its start."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        """The file behind the memory. Only the start of a process needs it."""
        self._memory = mmap.mmap(file.fileno(), NUM_BYTES)
        self._number = ctypes.c_uint64.from_buffer(self._memory)

    @staticmethod
    def zero() -> SharedNumber:
        """Return a new number, which is 0."""
        if sys.platform == "linux":
            file: IO[bytes] = os.fdopen(os.memfd_create("fakevllm-number"), "r+b", buffering=0)
        else:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the caller closes it)
        file.truncate(NUM_BYTES)
        return SharedNumber(file)

    @property
    def value(self) -> int:
        return self._number.value

    @value.setter
    def value(self, value: int) -> None:
        self._number.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a process that starts get the file, and so the memory."""
        from multiprocessing import reduction  # only the process that starts another one needs it

        return _attached, (reduction.DupFd(self.file.fileno()),)


def _attached(duplicate: Any) -> SharedNumber:
    """Return the number in the spawned process. `duplicate` has the descriptor of the file."""
    with os.fdopen(duplicate.detach(), "r+b", buffering=0) as file:
        return SharedNumber(file)
