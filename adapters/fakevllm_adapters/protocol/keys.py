"""API keys and ids: what they look like and what they say.

A key is opaque to its bearer. Two kinds carry a meaning for us: `sk-task-<id>` names the task a
replayed request belongs to, and an episode key opens one claimed episode.

A key file has one key a line, plain or as what `fakevllm keys add` keeps of it:

    sha256:<64 hex digits> NAME <date> [role <role>] [revoked <date>]

A line that names no role is an admin's: such keys were made to start engines, before there were
roles.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

TASK_KEY_PREFIX = "sk-task-"
EPISODE_KEY_PREFIX = "sk-ajet-"
_APP_KEY_PREFIX = "sk-"

_KEPT = re.compile(
    r"sha256:(?P<digest>[0-9a-f]{64}) (?P<name>\S+) (?P<created>\S+)"
    r"( role (?P<role>admin|client))?( revoked (?P<revoked>\S+))?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_EVERY_S = 1.0


class Role(StrEnum):
    """What a key may do."""

    ADMIN = "admin"
    """Everything, also what stops others."""
    CLIENT = "client"
    """Ask the model, and play its own episodes."""


def bearer(authorization: str | None) -> str | None:
    """The key in an Authorization header, or None."""
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def bearer_header(key: str | None) -> dict[str, str]:
    """The request headers that show a key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def task_key(task_id: str) -> str:
    return TASK_KEY_PREFIX + task_id


def task_id_of(key: str | None) -> str | None:
    """The task a key names, or None for any other key."""
    if key is None or not key.startswith(TASK_KEY_PREFIX):
        return None
    return key.removeprefix(TASK_KEY_PREFIX) or None


def new_id() -> str:
    """32 hex digits, random."""
    return secrets.token_hex(16)


def new_episode_key(epoch: int) -> str:
    """Of one claim of an episode: another one has another key."""
    return f"{EPISODE_KEY_PREFIX}{epoch}-{secrets.token_urlsafe(24)}"


def new_app_key() -> str:
    """256 random bits: guessing is hopeless, and a plain SHA-256 is enough to keep it by."""
    return _APP_KEY_PREFIX + secrets.token_urlsafe(32)


def fingerprint(key: str) -> str:
    """Eight hex digits that tell keys apart in logs and the ledger without giving them away."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class AppKey:
    """One line of a key file."""

    digest: bytes
    """SHA-256 of the key."""
    name: str | None = None
    """Whose key it is; None for one that stands there in plain text."""
    created: str | None = None
    revoked: str | None = None
    """Dates as they are shown; None: not known, not revoked."""
    role: Role = Role.ADMIN

    @property
    def fingerprint(self) -> str:
        """The same as `fingerprint` makes of the key."""
        return self.digest.hex()[:8]

    @property
    def owner(self) -> str:
        """What belongs to its bearer is kept under this: another key of the name has it too."""
        return self.name or f"sha256:{self.fingerprint}"

    @property
    def line(self) -> str:
        role = "" if self.role is Role.ADMIN else f" role {self.role}"
        end = f" revoked {self.revoked}" if self.revoked else ""
        return f"sha256:{self.digest.hex()} {self.name} {self.created}{role}{end}"


def named_key(key: str, name: str, created: str, role: Role = Role.ADMIN) -> AppKey:
    """Raises ValueError for a name that a line of the file cannot hold."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("a name is 1 to 64 letters, digits, '.', '_' and '-'")
    return AppKey(_digest(key), name, created, role=role)


def keys_in(text: str) -> list[AppKey]:
    """The keys of a key file; `#` begins a comment line. Raises ValueError with the number of a
    line that is no key."""
    found: list[AppKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        if (kept := _KEPT.fullmatch(line)) is not None:
            digest = bytes.fromhex(kept["digest"])
            role = Role(kept["role"] or Role.ADMIN)
            found.append(AppKey(digest, kept["name"], kept["created"], kept["revoked"], role))
        elif line.startswith("sha256:"):  # taken for a plain key it would look like one and be none
            raise ValueError(
                f"line {number} is not `sha256:<64 hex digits> NAME DATE`, "
                "with `role admin` or `role client` behind it or not"
            )
        else:
            found.append(AppKey(_digest(line)))
    return found


def with_key(text: str, key: AppKey) -> str:
    """The key file with one more line. Raises ValueError where the name has a key already: one key
    an app."""
    if any(known.name == key.name and known.revoked is None for known in keys_in(text)):
        raise ValueError(f"{key.name} has a key already")
    return text + ("\n" if text and not text.endswith("\n") else "") + key.line + "\n"


def with_revoked(text: str, name: str, when: str) -> str:
    """The key file with that app's key marked; everything else stays as it is. Raises LookupError
    where it has none, ValueError as `keys_in`."""
    keys_in(text)
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        for key in keys_in(line):
            if key.name == name and key.revoked is None:
                lines[at] = replace(key, revoked=when).line + "\n"
                return "".join(lines)
    raise LookupError(name)


class KeyRing:
    """The keys a process accepts, held as hashes. Made of no key at all it accepts everybody, and
    everybody is an admin; once its keys are revoked it accepts nobody."""

    def __init__(self, keys: Iterable[str | AppKey] = ()) -> None:
        self._good: dict[bytes, AppKey] = {}
        self._is_asked = False
        self._take([AppKey(_digest(key)) if isinstance(key, str) else key for key in keys])

    def __bool__(self) -> bool:
        """Whether keys are asked for."""
        return self._is_asked

    def accepts(self, key: str | None, name: str | None = None) -> bool:
        """`name`: whose it is said to be, which must be so where the file tells."""
        self._look()
        if not self._is_asked:
            return True
        given = _digest(key or "")
        # every hash is compared, so that the time taken does not tell which one matched
        if not any([hmac.compare_digest(given, known) for known in self._good]):
            return False
        return name is None or self._good[given].name in (None, name)

    def name_of(self, key: str | None) -> str | None:
        """Whose key it is, where the file tells."""
        found = self._find(key)
        return None if found is None else found.name

    def is_admin(self, key: str | None) -> bool:
        """Of a key that is accepted."""
        found = self._find(key)
        return not self._is_asked or (found is not None and found.role is Role.ADMIN)

    def owner_of(self, key: str | None) -> str:
        """Under what the things of a key are kept; "" where none is asked for, and there only: a
        key that was revoked a moment ago owns nothing of anybody's."""
        if not self._is_asked:
            return ""
        return (self._find(key) or AppKey(_digest(key or ""))).owner

    def has_owner(self, owner: str) -> bool:
        """Whether somebody who has things under this still has a good key; things of the time when
        no key was asked for are nobody's, and nobody lost his key to them."""
        self._look()
        return not owner or any(known.owner == owner for known in self._good.values())

    def _find(self, key: str | None) -> AppKey | None:
        self._look()
        return self._good.get(_digest(key or ""))

    def _look(self) -> None:
        """Whether there are other keys now."""

    def _take(self, keys: Iterable[AppKey]) -> None:
        """A ring that has ever asked for keys goes on asking: an emptied file opens nothing. Of
        lines that differ about one key the strictest counts."""
        keys = list(keys)
        good: dict[bytes, AppKey] = {}
        for key in keys:
            known = good.get(key.digest, key)
            role = Role.CLIENT if Role.CLIENT in (key.role, known.role) else Role.ADMIN
            good[key.digest] = replace(known, name=known.name or key.name, role=role)
        for key in keys:
            if key.revoked is not None:
                good.pop(key.digest, None)
        self._good = good
        self._is_asked = self._is_asked or bool(keys)


class FollowedKeyRing(KeyRing):
    """The keys of a file that may change while we run; looked at once a second at most.

    A file that cannot be read, or holds a line that is no key, changes nothing: the keys known
    before stay good.
    """

    def __init__(
        self,
        stamp: Callable[[], object],
        read: Callable[[], str],
        clock: Callable[[], float],
        on_trouble: Callable[[str], None],
    ) -> None:
        """`stamp` changes when the file does, and is None while there is none. Raises what `read`
        raises, and ValueError for what is no key file."""
        self._stamp = stamp
        self._read = read
        self._clock = clock
        self._on_trouble = on_trouble
        self._looked_at = clock()
        self._seen = stamp()
        super().__init__(keys_in(read()) if self._seen is not None else ())

    @property
    def num_good(self) -> int:
        """Keys that are not revoked."""
        return len(self._good)

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        if stamp is None:
            return self._on_trouble("it is gone")
        try:
            self._take(keys_in(self._read()))
        except OSError as error:
            self._on_trouble(error.strerror or type(error).__name__)
        except ValueError as error:  # not UTF-8 is one too, and would quote the file
            is_text = not isinstance(error, UnicodeDecodeError)
            self._on_trouble(str(error) if is_text else "it is not UTF-8 text")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
