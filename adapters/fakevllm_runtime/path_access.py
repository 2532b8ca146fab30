"""Say why this process may not read or write a file or folder, and what the user can do about it.

In containers, folders often belong to another user, or are mounted read-only.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
from pathlib import Path

ROOT = 0
NO_ACCESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def is_refused_access(error: OSError) -> bool:
    """Return True if the error means that this process may not use the path that the error
    names."""
    return error.errno in NO_ACCESS and isinstance(error.filename, str)


def unusable_message(path: Path, error: OSError, alternative: str) -> str:
    """Return a message of one line for the error `error` about the file or folder `path`. It ends
    with what the user can do. `alternative` is what always helps, such as `choose another
    --run-dir`."""
    remedy = access_remedy(path, error)
    advice = alternative if remedy is None else f"{remedy}, or {alternative}"
    return f"{path} cannot be used ({error.strerror}): {advice}."


def access_remedy(path: Path, error: OSError) -> str | None:
    """Return what gives this process the missing access to `path`. Return None if the error has
    another cause."""
    if error.errno == errno.EROFS:
        return "mount its file system so that it can be written"
    if error.errno not in NO_ACCESS:
        return None
    wanted = Path(error.filename if isinstance(error.filename, str) else path).absolute()
    refused = _nearest_visible(wanted)
    owner, user = refused.stat().st_uid, os.geteuid()
    if owner == user:
        return f"allow its owner to use it with `chmod u+rwX {shlex.quote(str(refused))}`"
    # A folder of root above the wanted one may be / or /etc, so no command is given for it.
    remedy = (
        f"change the owner with `chown -R {user} {shlex.quote(str(refused))}`"
        if refused == wanted or owner != ROOT
        else "let this user use it"
    )
    return (
        f"{refused} belongs to {_user_name(owner)}, and this process runs as {_user_name(user)}: "
        f"{remedy}"
    )


def _nearest_visible(path: Path) -> Path:
    """Return the path, or the nearest folder above it, whose owner this process can see."""
    for candidate in (path, *path.parents):
        try:
            candidate.stat()
        except OSError:  # isolates: it does not exist, or a folder above it is closed
            continue
        return candidate
    return Path("/")


def _user_name(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # translates: containers know few users
        return f"the user {number}"
