"""API keys: their forms, the key file, and the set of keys that a process accepts.

Most keys may be any text. Two kinds of keys have a fixed form. `sk-task-<id>` names the task of a
replayed request. An episode key gives access to one claimed episode.

A key file has one key per line. A line has either the key in plain text, or the key's hash as
`fakevllm keys add` writes it:

    sha256:<64 hex digits> NAME <date> [role <role>] [store none] [revoked <date>]

A key whose line has no role is an admin's key. Before roles existed, every key had all permissions,
so old key files keep their effect. This module does no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

TASK_KEY_PREFIX = "sk-task-"
EPISODE_KEY_PREFIX = "sk-ajet-"
_APP_KEY_PREFIX = "sk-"

_HASHED_LINE = re.compile(
    r"sha256:(?P<digest>[0-9a-f]{64}) (?P<name>\S+) (?P<created>\S+)"
    r"( role (?P<role>admin|client))?(?P<unstored> store none)?( revoked (?P<revoked>\S+))?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RELOAD_INTERVAL_S = 1.0


class Role(StrEnum):
    """The role of an API key, which decides its permissions."""

    ADMIN = "admin"
    """Permission for every route, including those that affect other clients."""
    CLIENT = "client"
    """Permission to call the model, and to claim and end the client's own episodes."""


def bearer_key(authorization: str | None) -> str | None:
    """Return the API key in an `Authorization` header of the scheme Bearer. Return None if the
    header has another scheme or no key."""
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def bearer_header(key: str | None) -> dict[str, str]:
    """Return the request headers that send an API key, or {} if the key is None or empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def task_key(task_id: str) -> str:
    """Return the API key with which a replay sends the requests of a dataset task."""
    return TASK_KEY_PREFIX + task_id


def task_id_of(key: str | None) -> str | None:
    """Return the id of the task that an API key names, or None if the key names no task."""
    if key is None or not key.startswith(TASK_KEY_PREFIX):
        return None
    return key.removeprefix(TASK_KEY_PREFIX) or None


def new_id() -> str:
    """Return 32 random hex digits."""
    return os.urandom(16).hex()


def new_episode_key(epoch: int) -> str:
    """Return a new API key for one claim of an episode.

    A claim reserves the episode for one client. `epoch` is the number of the claim, counted from 1
    for each episode. The key contains this number.
    """
    return f"{EPISODE_KEY_PREFIX}{epoch}-{secrets.token_urlsafe(24)}"


def new_app_key() -> str:
    """Return a new API key with 256 random bits.

    The key file may contain the plain SHA-256 of such a key. Nobody can guess the key from this
    hash.
    """
    return _APP_KEY_PREFIX + secrets.token_urlsafe(32)


def fingerprint(key: str) -> str:
    """Return the first eight hex digits of the key's SHA-256. These digits identify the key in logs
    and in the proxy's database, but do not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class AppKey:
    """An API key with the properties that a line of a key file describes."""

    digest: bytes
    """SHA-256 of the key."""
    name: str | None = None
    """Name of the app that the key belongs to; None for a key in plain text."""
    created: str | None = None
    """Date of creation as text; None if unknown."""
    revoked: str | None = None
    """Date of revocation as text; None if the key is not revoked."""
    role: Role = Role.ADMIN
    stores_nothing: bool = False
    """Whether nothing is stored of the requests with this key."""

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that identify the key.

        The function `fingerprint` returns the same digits for the key's text.
        """
        return self.digest.hex()[:8]

    @property
    def owner(self) -> str:
        """The owner id of the key. Episodes and answers are stored under the owner id of the key
        that made them.

        All keys with the same name have the same owner id. A key without a name has an owner id of
        its own.
        """
        return self.name or f"sha256:{self.fingerprint}"

    @property
    def line(self) -> str:
        """The line for a key file that describes the key, without a line break at the end."""
        role = "" if self.role is Role.ADMIN else f" role {self.role}"
        end = f" revoked {self.revoked}" if self.revoked else ""
        store = " store none" if self.stores_nothing else ""
        return f"sha256:{self.digest.hex()} {self.name} {self.created}{role}{store}{end}"


def named_key(
    key: str,
    name: str,
    created: str,
    role: Role = Role.ADMIN,
    *,
    stores_nothing: bool = False,
) -> AppKey:
    """Return the entry for a new key in a key file.

    Raises ValueError unless the name has 1 to 64 letters, digits, dots, underscores and hyphens.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError("a name is 1 to 64 letters, digits, '.', '_' and '-'")
    return AppKey(_digest(key), name, created, role=role, stores_nothing=stores_nothing)


def parse_key_file(text: str) -> list[AppKey]:
    """Return the keys in the text of a key file. A line that begins with `#` is a comment.

    Raises ValueError for a malformed line with a hash. The message has the line's number.
    """
    keys: list[AppKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        if (match := _HASHED_LINE.fullmatch(line)) is not None:
            digest = bytes.fromhex(match["digest"])
            role = Role(match["role"] or Role.ADMIN)
            keys.append(
                AppKey(
                    digest,
                    match["name"],
                    match["created"],
                    match["revoked"],
                    role,
                    stores_nothing=match["unstored"] is not None,
                )
            )
        elif line.startswith("sha256:"):  # a damaged hash must not become a key in plain text
            raise ValueError(
                f"line {number} is not `sha256:<64 hex digits> NAME DATE`, "
                "optionally followed by `role admin` or `role client`, and by `store none`"
            )
        else:
            keys.append(AppKey(_digest(line)))
    return keys


def add_key(text: str, key: AppKey) -> str:
    """Return the text of a key file with an additional line for a new key.

    Raises ValueError if the name of the new key already has a key that is not revoked. An app has
    only one valid key at a time.
    """
    if any(known.name == key.name and known.revoked is None for known in parse_key_file(text)):
        raise ValueError(f"{key.name} has a key already")
    return text + ("\n" if text and not text.endswith("\n") else "") + key.line + "\n"


def revoke_key(text: str, name: str, when: str) -> str:
    """Return the text of a key file in which the key of `name` is marked as revoked.

    `when` is the date of revocation. All other lines stay unchanged. Raises LookupError if `name`
    has no key, or only revoked keys. Raises ValueError if the text has a malformed line.
    """
    parse_key_file(text)
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        for key in parse_key_file(line):
            if key.name == name and key.revoked is None:
                lines[at] = replace(key, revoked=when).line + "\n"
                return "".join(lines)
    raise LookupError(name)


class KeyRing:
    """The set of API keys that a process accepts, stored as hashes.

    A key ring that was made without keys accepts every request, and treats every client as an
    admin. A key ring whose keys were all revoked accepts no request.
    """

    def __init__(self, keys: Iterable[str | AppKey] = ()) -> None:
        self._valid: dict[bytes, AppKey] = {}
        self._requires_key = False
        self._replace_keys([AppKey(_digest(key)) if isinstance(key, str) else key for key in keys])

    def __bool__(self) -> bool:
        """Return True if requests need an API key."""
        return self._requires_key

    def accepts(self, key: str | None, name: str | None = None) -> bool:
        """Return True if a request with this API key may proceed.

        `name` is the user name that the client sent with the key, if any. This name must be equal
        to the key's name in the key file. A key without a name in the file accepts any user name.
        """
        self._reload()
        if not self._requires_key:
            return True
        digest = _digest(key or "")
        # every hash is compared, so that the time taken does not reveal which one matched
        if not any([hmac.compare_digest(digest, known) for known in self._valid]):
            return False
        return name is None or self._valid[digest].name in (None, name)

    def name_of(self, key: str | None) -> str | None:
        """Return the name of an API key in the key file. Return None if the key has no name."""
        entry = self._find(key)
        return None if entry is None else entry.name

    def with_fingerprint(self, wanted: str) -> AppKey | None:
        """Return the valid key with this fingerprint (the first hex digits of a key's hash), or
        None."""
        self._reload()
        return next((key for key in self._valid.values() if key.fingerprint == wanted), None)

    def is_admin(self, key: str | None) -> bool:
        """Return True if an API key has the role admin, or if requests need no key."""
        entry = self._find(key)
        return not self._requires_key or (entry is not None and entry.role is Role.ADMIN)

    def stores_nothing(self, key: str | None) -> bool:
        """Return True if nothing is stored of the requests with this API key."""
        self._reload()
        if not self._has_unstored:
            return False
        entry = self._find(key)
        return entry is not None and entry.stores_nothing

    def owner_of(self, key: str | None) -> str:
        """Return the owner id of a key. Keys with the same name in the key file have the same owner
        id.

        If requests need no key, the owner id is "". An invalid key, such as a key that was revoked
        a moment ago, has an owner id of its own. The client with such a key therefore has no access
        to the data of other clients.
        """
        if not self._requires_key:
            return ""
        return (self._find(key) or AppKey(_digest(key or ""))).owner

    def has_owner(self, owner: str) -> bool:
        """Return True if at least one valid key has this owner id.

        Data that was stored while requests needed no key has the owner id "". For this owner id,
        the result is always True.
        """
        self._reload()
        return not owner or any(known.owner == owner for known in self._valid.values())

    def _find(self, key: str | None) -> AppKey | None:
        self._reload()
        return self._valid.get(_digest(key or ""))

    def _reload(self) -> None:
        """Reload the keys if they have changed.

        In this base class the method does nothing, because the keys never change.
        """

    def _replace_keys(self, keys: Iterable[AppKey]) -> None:
        """Replace the accepted keys by `keys`.

        After a key ring has had keys, it always requires a key. Therefore a server whose key file
        is emptied does not become open to everybody. If several entries describe the same key, the
        strictest entry counts.
        """
        keys = list(keys)
        valid: dict[bytes, AppKey] = {}
        for key in keys:
            known = valid.get(key.digest, key)
            role = Role.CLIENT if Role.CLIENT in (key.role, known.role) else Role.ADMIN
            valid[key.digest] = replace(
                known,
                name=known.name or key.name,
                role=role,
                stores_nothing=known.stores_nothing or key.stores_nothing,
            )
        for key in keys:
            if key.revoked is not None:
                valid.pop(key.digest, None)
        self._valid = valid
        self._has_unstored = any(key.stores_nothing for key in valid.values())
        self._requires_key = self._requires_key or bool(keys)


class ReloadingKeyRing(KeyRing):
    """A set of API keys that is reloaded when its key file changes. The set is reloaded at most
    once per second.

    If the changed file cannot be read or has a malformed line, the previous keys stay valid.
    """

    def __init__(
        self,
        stamp: Callable[[], object],
        read: Callable[[], str],
        clock: Callable[[], float],
        on_error: Callable[[str], None],
    ) -> None:
        """Load the keys from the text of the key file. The function `read` returns this text.

        `stamp` is a function whose result changes whenever the file changes. Its result is None if
        the file does not exist. `clock` returns the time in seconds. `on_error` is called with a
        message when a reload fails. Raises every exception that `read` raises, and ValueError if a
        line is malformed.
        """
        self._stamp = stamp
        self._read = read
        self._clock = clock
        self._on_error = on_error
        self._checked_at = clock()
        self._last_stamp = stamp()
        super().__init__(parse_key_file(read()) if self._last_stamp is not None else ())

    @property
    def num_valid(self) -> int:
        """Number of valid keys. Revoked keys are not counted."""
        return len(self._valid)

    def _reload(self) -> None:
        now = self._clock()
        if now - self._checked_at < _RELOAD_INTERVAL_S:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._last_stamp:
            return
        self._last_stamp = stamp
        if stamp is None:
            return self._on_error("the file no longer exists")
        try:
            self._replace_keys(parse_key_file(self._read()))
        except OSError as error:
            self._on_error(error.strerror or type(error).__name__)
        except ValueError as error:
            # a UnicodeDecodeError is a ValueError too, but its text would quote the file's keys
            is_text = not isinstance(error, UnicodeDecodeError)
            self._on_error(str(error) if is_text else "the file is not UTF-8 text")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
