"""A client's training code, as the swarm protocol uploads it: checked, unpacked into a folder of
its own, and left there. Nothing of ours imports it."""

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

TOP = "ajet"
"""The folder that every member is in."""
MAX_ZIP_BYTES = 8 * 2**20
"""The list of its members is read at many times its size in memory."""
MAX_MEMBERS = 10_000
MAX_UNPACKED_BYTES = 128 * 2**20

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Of the others zipfile unpacks without a bound on what comes at once."""
_KINDS = (0, stat.S_IFREG, stat.S_IFDIR)
"""0: made where files have no kind."""
_PART = re.compile(r"(?!\.{1,2}$)[^/\\:\x00-\x1f\x7f]{1,200}")
_ENCRYPTED = 0x1
_NO_ZIP = "Uploaded file is not a valid zip file."


class BadArchive(Exception):
    """Words for whoever sent it."""


def unpack(raw: bytes, folder: Path, stamp: str) -> Path:
    """A new folder's `ajet`, all of it or nothing. Raises BadArchive, OSError."""
    if not raw:
        raise BadArchive("Uploaded zip file is empty.")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            check(archive.infolist())
            return _extracted(archive, folder, stamp)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError):
        raise BadArchive(_NO_ZIP) from None


def check(members: Sequence[zipfile.ZipInfo]) -> None:
    """Raises BadArchive. What a member claims to unpack to is a bound: zipfile reads no more."""
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
        raise BadArchive("Two members of the zip file are in one place.")


def _check_member(member: zipfile.ZipInfo) -> None:
    top, *rest = member.filename.removesuffix("/").split("/")
    is_safe = all(_PART.fullmatch(part) for part in (top, *rest))
    if not is_safe or "\0" in member.orig_filename:
        raise BadArchive(f"Unsafe path in the zip file: {member.orig_filename[:200]!r}.")
    if top != TOP or not (rest or member.is_dir()):
        raise BadArchive(f"Only files under `{TOP}/` are taken, got {member.filename[:200]!r}.")
    if stat.S_IFMT(member.external_attr >> 16) not in _KINDS:
        raise BadArchive(f"{member.filename[:200]!r} is a link, or no file at all.")
    if member.compress_type not in _METHODS or member.flag_bits & _ENCRYPTED:
        raise BadArchive("The zip file must be deflated or stored, and not encrypted.")


def _slashes(name: str) -> list[int]:
    return [at for at, char in enumerate(name) if char == "/"]


def _extracted(archive: zipfile.ZipFile, folder: Path, stamp: str) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=folder))
    try:
        (own / TOP).mkdir()
        for member in archive.infolist():
            place = own / member.filename
            if member.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, place.open("xb") as target:
                shutil.copyfileobj(source, target)
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    return own / TOP
