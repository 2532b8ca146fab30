"""Training code that a client uploads as a zip file: check it, and unpack it into a new folder.

The code is only stored. The server never imports or runs it.
"""

from __future__ import annotations

import io
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

TOP_FOLDER = "ajet"
"""The folder that contains every member of the zip file."""
MAX_ZIP_BYTES = 8 * 2**20
"""Maximum size of the upload. In memory, the list of the zip file's members takes many times the
size of the upload."""
MAX_MEMBERS = 10_000
"""Maximum number of files and folders in the zip file."""
MAX_UNPACKED_BYTES = 128 * 2**20
"""Maximum total size of the unpacked files."""

_COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted methods. With any other method, zipfile may unpack an unlimited amount in one read."""
_FILE_TYPES = (0, stat.S_IFREG, stat.S_IFDIR)
"""Accepted file types. The file type is 0 in zip files from systems without Unix file types."""
_PART = re.compile(r"(?!\.{1,2}$)[^/\\:\x00-\x1f\x7f]{1,200}")
_ENCRYPTED = 0x1
_NOT_A_ZIP = "Uploaded file is not a valid zip file."


class BadArchive(Exception):
    """Error for an uploaded zip file that the server refuses. The message is sent to the client."""


def unpack(raw: bytes, folder: Path, stamp: str) -> Path:
    """Unpack the zip file `raw` into a new folder inside `folder`, and return its subfolder `ajet`.

    The new folder's name begins with `stamp`. If the unpacking fails, the new folder is deleted.
    Raises BadArchive if the zip file is refused. Raises OSError if its files cannot be written.
    """
    if not raw:
        raise BadArchive("Uploaded zip file is empty.")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            check(archive.infolist())
            return _extract(archive, folder, stamp)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError):
        raise BadArchive(_NOT_A_ZIP) from None


def check(members: Sequence[zipfile.ZipInfo]) -> None:
    """Check the paths, types and sizes of the files in the zip file.

    The check relies on the sizes that the zip file declares. Relying on these sizes is safe,
    because Python's zipfile never unpacks more bytes than declared. Raises BadArchive if a check
    fails.
    """
    if len(members) > MAX_MEMBERS:
        raise BadArchive(f"The zip file has more than {MAX_MEMBERS} members.")
    if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
        raise BadArchive(f"The zip file unpacks to more than {MAX_UNPACKED_BYTES} bytes.")
    for member in members:
        _check_member(member)
    names = [member.filename.rstrip("/") for member in members]
    files = {name for name, member in zip(names, members, strict=True) if not member.is_dir()}
    if len(set(names)) < len(names) or any(
        name[:at] in files for name in names for at in _slashes(name)
    ):
        raise BadArchive("Two members of the zip file have the same path.")


def _check_member(member: zipfile.ZipInfo) -> None:
    top, *rest = member.filename.removesuffix("/").split("/")
    is_safe = all(_PART.fullmatch(part) for part in (top, *rest))
    if not is_safe or "\0" in member.orig_filename:
        raise BadArchive(f"Unsafe path in the zip file: {member.orig_filename[:200]!r}.")
    if top != TOP_FOLDER or not (rest or member.is_dir()):
        raise BadArchive(
            f"Only files under `{TOP_FOLDER}/` are allowed, got {member.filename[:200]!r}."
        )
    if stat.S_IFMT(member.external_attr >> 16) not in _FILE_TYPES:
        raise BadArchive(f"{member.filename[:200]!r} is not a regular file or a folder.")
    if member.compress_type not in _COMPRESSION_METHODS or member.flag_bits & _ENCRYPTED:
        raise BadArchive("The zip file must be deflated or stored, and not encrypted.")


def _slashes(name: str) -> list[int]:
    """Return the index of each slash in `name`."""
    return [at for at, char in enumerate(name) if char == "/"]


def _extract(archive: zipfile.ZipFile, folder: Path, stamp: str) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    new_folder = Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=folder))
    try:
        (new_folder / TOP_FOLDER).mkdir()
        for member in archive.infolist():
            path = new_folder / member.filename
            if member.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("xb") as target:
                shutil.copyfileobj(source, target)
    except BaseException:
        shutil.rmtree(new_folder, ignore_errors=True)
        raise
    return new_folder / TOP_FOLDER
