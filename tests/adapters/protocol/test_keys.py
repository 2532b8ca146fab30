"""Keys, key files, and rings of keys that follow a file."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.keys import (
    AppKey,
    FollowedKeyRing,
    KeyRing,
    Role,
    bearer,
    fingerprint,
    keys_in,
    named_key,
    new_app_key,
    task_id_of,
    task_key,
    with_key,
    with_revoked,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)


class File:
    """A key file in memory, with a clock beside it."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.now = 100.0
        self.num_reads = 0
        self.error: Exception | None = None
        self.troubles: list[str] = []

    def stamp(self) -> object:
        return None if self.text is None else hash((self.text, repr(self.error)))

    def read(self) -> str:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        assert self.text is not None
        return self.text

    def ring(self) -> FollowedKeyRing:
        return FollowedKeyRing(self.stamp, self.read, lambda: self.now, self.troubles.append)


def test_keys_and_their_meanings() -> None:
    assert bearer("Bearer sk-1") == bearer("bearer sk-1") == "sk-1"
    assert bearer("Basic abc") is None and bearer(None) is None
    assert task_id_of(task_key("row-1")) == "row-1"
    assert task_id_of("sk-other") is None and task_id_of("sk-task-") is None
    assert new_app_key() != new_app_key() and len(new_app_key()) > 40


def test_a_file_of_plain_keys_is_one_key_a_line_without_comments() -> None:
    keys = keys_in("# one\n a \n\nb")
    assert [key.digest for key in keys] == [hashlib.sha256(k).digest() for k in (b"a", b"b")]
    assert [key.fingerprint for key in keys] == [fingerprint("a"), fingerprint("b")]
    assert all(key.name is None for key in keys)


def test_a_kept_key_is_told_by_its_name_and_the_ledgers_fingerprint_and_not_by_itself() -> None:
    secret = new_app_key()
    text = with_key("", named_key(secret, "app-one", "2026-01-02"))
    assert secret not in text and secret[3:] not in text
    (key,) = keys_in(text)
    assert (key.name, key.created, key.revoked) == ("app-one", "2026-01-02", None)
    assert key.fingerprint == fingerprint(secret)
    assert KeyRing(keys_in(text)).accepts(secret)


def test_the_line_of_a_kept_key_is_no_key_itself() -> None:
    text = with_key("", named_key("sk-secret", "app", "today"))
    ring = KeyRing(keys_in(text))
    for part in (text, text.strip(), *text.split(), text.split()[0].removeprefix("sha256:")):
        assert not ring.accepts(part)


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "#x", "é", "x" * 65, "-flag"])
def test_a_name_that_a_line_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a name is 1 to 64 letters"):
        named_key("sk-1", name, "today")


@pytest.mark.parametrize(
    "line",
    ["sha256:", "sha256:abcd app today", f"sha256:{'0' * 64}", f"sha256:{'0' * 64} a b revoked"],
)
def test_a_damaged_line_is_an_error_that_names_it_and_never_a_plain_key(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not"):
        keys_in(f"sk-good\n{line}\n")


def test_an_app_has_one_key_at_a_time() -> None:
    first = with_key("sk-plain", named_key("sk-1", "app", "today"))
    with pytest.raises(ValueError, match="app has a key already"):
        with_key(first, named_key("sk-2", "app", "today"))
    revoked = with_revoked(first, "app", "tomorrow")
    ring = KeyRing(keys_in(with_key(revoked, named_key("sk-2", "app", "tomorrow"))))
    assert ring.accepts("sk-plain") and ring.accepts("sk-2") and not ring.accepts("sk-1")
    with pytest.raises(LookupError):
        with_revoked(revoked, "app", "later")


@given(st.dictionaries(NAMES, st.booleans(), max_size=5), st.text("# sk-\n", max_size=20))
def test_what_is_added_counts_until_it_is_revoked_whatever_else_stands_there(
    apps: dict[str, bool], before: str
) -> None:
    text = before
    for name in apps:
        text = with_key(text, named_key(f"secret-{name}", name, "today"))
    for name, is_revoked in apps.items():
        text = with_revoked(text, name, "later") if is_revoked else text
    ring = KeyRing(keys_in(text))
    for name, is_revoked in apps.items():
        assert ring.accepts(f"secret-{name}") is not is_revoked
    assert keys_in(text)[: len(keys_in(before))] == keys_in(before)
    assert [(key.name, key.revoked is not None) for key in keys_in(text) if key.name] == [
        *apps.items()
    ]


def test_a_ring_of_no_key_accepts_everybody_and_one_of_revoked_keys_nobody() -> None:
    assert not KeyRing() and KeyRing().accepts(None) and KeyRing().accepts("sk-any")
    ring = KeyRing([AppKey(hashlib.sha256(b"sk-1").digest(), "app", "today", "later")])
    assert ring and not ring.accepts("sk-1") and not ring.accepts(None) and not ring.accepts("")


def test_a_revoked_key_stays_so_where_it_stands_in_plain_text_too() -> None:
    text = with_revoked(with_key("sk-1\n", named_key("sk-1", "app", "today")), "app", "later")
    assert not KeyRing(keys_in(text)).accepts("sk-1")


def test_a_changed_file_counts_a_second_later_and_is_read_once_a_change() -> None:
    file = File("sk-1\n")
    ring = file.ring()
    file.text = "sk-2\n"
    file.now += 0.9
    assert ring.accepts("sk-1") and not ring.accepts("sk-2")
    file.now += 0.1
    assert ring.accepts("sk-2") and not ring.accepts("sk-1")
    for _ in range(5):
        file.now += 1
        assert ring.accepts("sk-2")
    assert file.num_reads == 2 and not file.troubles


def test_a_key_file_that_appears_closes_an_open_ring() -> None:
    file = File(None)
    ring = file.ring()
    assert not ring and ring.num_good == 0 and ring.accepts(None)
    file.text = "sk-1\n"
    file.now += 1
    assert not ring.accepts(None)
    assert ring and ring.accepts("sk-1")


def test_a_file_whose_keys_are_all_gone_lets_nobody_in() -> None:
    for text in ("", "# sk-1\n", with_key("", named_key("sk-0", "a", "b")).strip() + " revoked c"):
        file = File("sk-1\n")
        ring = file.ring()
        file.text = text
        file.now += 1
        assert not ring.accepts("sk-1") and not ring.accepts(None) and ring


def test_a_file_that_is_gone_or_damaged_changes_nothing_and_is_told_of_once() -> None:
    file = File("sk-1\n")
    ring = file.ring()
    for text, error, told in (
        (None, None, "it is gone"),
        ("sha256:zz\n", None, "line 1 is not"),
        ("sk-3\n", PermissionError(13, "Permission denied"), "Permission denied"),
        ("sk-4\n", UnicodeDecodeError("utf-8", b"sk-\xff", 3, 4, "bad"), "it is not UTF-8 text"),
    ):
        file.text, file.error = text, error
        for _ in range(3):
            file.now += 1
            assert ring.accepts("sk-1") and not ring.accepts("sk-3") and not ring.accepts(None)
        assert len(file.troubles) == 1 and told in file.troubles.pop()
    file.text, file.error = "sk-5\n", None
    file.now += 1
    assert ring.accepts("sk-5") and not ring.accepts("sk-1")


def test_a_file_that_is_none_at_the_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 is not"):
        File("sha256:zz\n").ring()


# --- roles and owners


def test_a_line_says_its_role_and_one_that_says_none_is_an_admins() -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    for end, role in (
        ("", Role.ADMIN),
        (" role admin", Role.ADMIN),
        (" role client", Role.CLIENT),
        (" role client revoked later", Role.CLIENT),
        (" revoked later", Role.ADMIN),
    ):
        (key,) = keys_in(f"sha256:{digest} app today{end}\n")
        assert key.role is role
    assert keys_in("sk-plain")[0].role is Role.ADMIN


@pytest.mark.parametrize("end", ["role", "role boss", "role Client", "revoked later role client"])
def test_a_role_that_is_none_is_an_error_and_never_an_admins(end: str) -> None:
    with pytest.raises(ValueError, match=r"line 1 is not .*`role admin` or `role client`"):
        keys_in(f"sha256:{'0' * 64} app today {end}\n")


def test_an_admins_line_reads_as_it_did_before_there_were_roles() -> None:
    assert named_key("sk-1", "app", "today").line == f"sha256:{_sha('sk-1')} app today"
    client = named_key("sk-1", "app", "today", Role.CLIENT)
    assert client.line == f"sha256:{_sha('sk-1')} app today role client"
    assert keys_in(with_revoked(client.line, "app", "later")) == [
        AppKey(client.digest, "app", "today", "later", Role.CLIENT)
    ]


def test_only_admins_are_admins_and_without_keys_everybody_is() -> None:
    ring = KeyRing([named_key("sk-c", "c", "today", Role.CLIENT), named_key("sk-a", "a", "today")])
    assert ring.is_admin("sk-a") and not ring.is_admin("sk-c")
    assert not ring.is_admin("sk-other") and not ring.is_admin(None)
    assert KeyRing().is_admin(None) and KeyRing().is_admin("sk-any")


@pytest.mark.parametrize("is_plain_first", [True, False])
def test_of_lines_that_differ_about_a_key_the_strictest_counts(is_plain_first: bool) -> None:
    lines = ["sk-1", named_key("sk-1", "app", "today", Role.CLIENT).line]
    ring = KeyRing(keys_in("\n".join(lines if is_plain_first else lines[::-1])))
    assert ring.accepts("sk-1") and not ring.is_admin("sk-1") and ring.name_of("sk-1") == "app"
    assert not ring.accepts("sk-1", "other")


def test_a_name_must_be_the_keys_where_the_file_tells_it() -> None:
    ring = KeyRing([*keys_in("sk-plain"), named_key("sk-1", "app", "today")])
    assert ring.accepts("sk-1", "app") and ring.accepts("sk-1")
    for name in ("", "App", "other", "sk-1"):
        assert not ring.accepts("sk-1", name)
    assert ring.accepts("sk-plain", "anybody") and ring.accepts("sk-plain", "")
    assert KeyRing().accepts(None, "anybody")


def test_what_is_owned_is_a_names_through_its_keys_and_ends_with_the_last() -> None:
    old, new = named_key("sk-1", "app", "today"), named_key("sk-2", "app", "later")
    both = KeyRing([old, new, *keys_in("sk-plain")])
    assert both.owner_of("sk-1") == both.owner_of("sk-2") == "app"
    assert both.owner_of("sk-plain") == f"sha256:{fingerprint('sk-plain')}"
    rotated = KeyRing(keys_in(with_revoked(old.line, "app", "x") + new.line))
    assert rotated.has_owner("app") and rotated.owner_of("sk-2") == "app"
    gone = KeyRing(keys_in(with_revoked(old.line, "app", "x") + "sk-plain"))
    assert not gone.has_owner("app") and gone.has_owner(both.owner_of("sk-plain"))


def test_a_key_that_is_not_good_owns_nothing_of_anybodys() -> None:
    """Also where it was revoked between the guard's look and the route's."""
    ring = KeyRing(keys_in(with_revoked(named_key("sk-1", "app", "a").line, "app", "b")))
    assert ring.owner_of("sk-1") not in ("", "app") and ring.owner_of(None) != ""
    assert KeyRing().owner_of("sk-1") == "" and ring.has_owner("")


def test_roles_and_owners_follow_the_file() -> None:
    file = File(named_key("sk-1", "app", "today").line)
    ring = file.ring()
    assert ring.is_admin("sk-1")
    file.text = named_key("sk-1", "app", "today", Role.CLIENT).line
    file.now += 1
    assert not ring.is_admin("sk-1")
    file.text = named_key("sk-2", "other", "today").line
    file.now += 1
    assert not ring.has_owner("app")


def _sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
