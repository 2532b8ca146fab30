"""API keys, key files, and key rings that reload their file."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.keys import (
    AppKey,
    KeyRing,
    ReloadingKeyRing,
    Role,
    add_key,
    bearer_key,
    fingerprint,
    named_key,
    new_app_key,
    parse_key_file,
    revoke_key,
    task_id_of,
    task_key,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)


class FakeKeyFile:
    """A key file in memory with its own clock."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.now = 100.0
        self.num_reads = 0
        self.error: Exception | None = None
        self.errors: list[str] = []

    def stamp(self) -> object:
        return None if self.text is None else hash((self.text, repr(self.error)))

    def read(self) -> str:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        assert self.text is not None
        return self.text

    def ring(self) -> ReloadingKeyRing:
        return ReloadingKeyRing(self.stamp, self.read, lambda: self.now, self.errors.append)


def test_bearer_keys_and_task_keys_are_parsed() -> None:
    assert bearer_key("Bearer sk-1") == bearer_key("bearer sk-1") == "sk-1"
    assert bearer_key("Basic abc") is None and bearer_key(None) is None
    assert task_id_of(task_key("row-1")) == "row-1"
    assert task_id_of("sk-other") is None and task_id_of("sk-task-") is None
    assert new_app_key() != new_app_key() and len(new_app_key()) > 40


def test_a_plain_key_file_has_one_key_per_line_and_comments() -> None:
    keys = parse_key_file("# one\n a \n\nb")
    assert [key.digest for key in keys] == [hashlib.sha256(k).digest() for k in (b"a", b"b")]
    assert [key.fingerprint for key in keys] == [fingerprint("a"), fingerprint("b")]
    assert all(key.name is None for key in keys)


def test_a_key_file_has_the_name_and_fingerprint_of_an_added_key_but_not_the_key() -> None:
    secret = new_app_key()
    text = add_key("", named_key(secret, "app-one", "2026-01-02"))
    assert secret not in text and secret[3:] not in text
    (key,) = parse_key_file(text)
    assert (key.name, key.created, key.revoked) == ("app-one", "2026-01-02", None)
    assert key.fingerprint == fingerprint(secret)
    assert KeyRing(parse_key_file(text)).accepts(secret)


def test_the_line_of_an_added_key_is_not_accepted_as_a_key() -> None:
    text = add_key("", named_key("sk-secret", "app", "today"))
    ring = KeyRing(parse_key_file(text))
    for part in (text, text.strip(), *text.split(), text.split()[0].removeprefix("sha256:")):
        assert not ring.accepts(part)


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "#x", "é", "x" * 65, "-flag"])
def test_a_name_that_a_line_cannot_contain_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a name is 1 to 64 letters"):
        named_key("sk-1", name, "today")


@pytest.mark.parametrize(
    "line",
    ["sha256:", "sha256:abcd app today", f"sha256:{'0' * 64}", f"sha256:{'0' * 64} a b revoked"],
)
def test_a_damaged_line_is_an_error_with_its_number_and_not_a_plain_key(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not"):
        parse_key_file(f"sk-good\n{line}\n")


def test_an_app_has_one_key_at_a_time() -> None:
    first = add_key("sk-plain", named_key("sk-1", "app", "today"))
    with pytest.raises(ValueError, match="app has a key already"):
        add_key(first, named_key("sk-2", "app", "today"))
    revoked = revoke_key(first, "app", "tomorrow")
    ring = KeyRing(parse_key_file(add_key(revoked, named_key("sk-2", "app", "tomorrow"))))
    assert ring.accepts("sk-plain") and ring.accepts("sk-2") and not ring.accepts("sk-1")
    with pytest.raises(LookupError):
        revoke_key(revoked, "app", "later")


@given(st.dictionaries(NAMES, st.booleans(), max_size=5), st.text("# sk-\n", max_size=20))
def test_an_added_key_is_accepted_until_it_is_revoked_whatever_else_the_file_contains(
    apps: dict[str, bool], before: str
) -> None:
    text = before
    for name in apps:
        text = add_key(text, named_key(f"secret-{name}", name, "today"))
    for name, is_revoked in apps.items():
        text = revoke_key(text, name, "later") if is_revoked else text
    ring = KeyRing(parse_key_file(text))
    for name, is_revoked in apps.items():
        assert ring.accepts(f"secret-{name}") is not is_revoked
    assert parse_key_file(text)[: len(parse_key_file(before))] == parse_key_file(before)
    assert [(key.name, key.revoked is not None) for key in parse_key_file(text) if key.name] == [
        *apps.items()
    ]


def test_a_ring_without_keys_accepts_everybody_and_a_ring_of_revoked_keys_nobody() -> None:
    assert not KeyRing() and KeyRing().accepts(None) and KeyRing().accepts("sk-any")
    ring = KeyRing([AppKey(hashlib.sha256(b"sk-1").digest(), "app", "today", "later")])
    assert ring and not ring.accepts("sk-1") and not ring.accepts(None) and not ring.accepts("")


def test_a_revoked_key_is_refused_even_if_the_file_also_has_it_in_plain_text() -> None:
    text = revoke_key(add_key("sk-1\n", named_key("sk-1", "app", "today")), "app", "later")
    assert not KeyRing(parse_key_file(text)).accepts("sk-1")


def test_a_changed_file_takes_effect_after_a_second_and_is_read_once_per_change() -> None:
    file = FakeKeyFile("sk-1\n")
    ring = file.ring()
    file.text = "sk-2\n"
    file.now += 0.9
    assert ring.accepts("sk-1") and not ring.accepts("sk-2")
    file.now += 0.1
    assert ring.accepts("sk-2") and not ring.accepts("sk-1")
    for _ in range(5):
        file.now += 1
        assert ring.accepts("sk-2")
    assert file.num_reads == 2 and not file.errors


def test_an_open_ring_requires_keys_once_the_key_file_appears() -> None:
    file = FakeKeyFile(None)
    ring = file.ring()
    assert not ring and ring.num_valid == 0 and ring.accepts(None)
    file.text = "sk-1\n"
    file.now += 1
    assert not ring.accepts(None)
    assert ring and ring.accepts("sk-1")


def test_a_file_that_loses_all_its_keys_lets_nobody_in() -> None:
    for text in ("", "# sk-1\n", add_key("", named_key("sk-0", "a", "b")).strip() + " revoked c"):
        file = FakeKeyFile("sk-1\n")
        ring = file.ring()
        file.text = text
        file.now += 1
        assert not ring.accepts("sk-1") and not ring.accepts(None) and ring


def test_a_missing_or_damaged_file_changes_nothing_and_is_reported_once() -> None:
    file = FakeKeyFile("sk-1\n")
    ring = file.ring()
    for text, error, message in (
        (None, None, "the file no longer exists"),
        ("sha256:zz\n", None, "line 1 is not"),
        ("sk-3\n", PermissionError(13, "Permission denied"), "Permission denied"),
        (
            "sk-4\n",
            UnicodeDecodeError("utf-8", b"sk-\xff", 3, 4, "bad"),
            "the file is not UTF-8 text",
        ),
    ):
        file.text, file.error = text, error
        for _ in range(3):
            file.now += 1
            assert ring.accepts("sk-1") and not ring.accepts("sk-3") and not ring.accepts(None)
        assert len(file.errors) == 1 and message in file.errors.pop()
    file.text, file.error = "sk-5\n", None
    file.now += 1
    assert ring.accepts("sk-5") and not ring.accepts("sk-1")


def test_a_file_that_is_damaged_at_the_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 is not"):
        FakeKeyFile("sha256:zz\n").ring()


# --- roles and owners


def test_a_line_without_a_role_is_an_admins_key() -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    for end, role in (
        ("", Role.ADMIN),
        (" role admin", Role.ADMIN),
        (" role client", Role.CLIENT),
        (" role client revoked later", Role.CLIENT),
        (" revoked later", Role.ADMIN),
    ):
        (key,) = parse_key_file(f"sha256:{digest} app today{end}\n")
        assert key.role is role
    assert parse_key_file("sk-plain")[0].role is Role.ADMIN


@pytest.mark.parametrize("end", ["role", "role boss", "role Client", "revoked later role client"])
def test_an_unknown_role_is_an_error_and_not_the_role_admin(end: str) -> None:
    with pytest.raises(ValueError, match=r"line 1 is not .*`role admin` or `role client`"):
        parse_key_file(f"sha256:{'0' * 64} app today {end}\n")


def test_the_line_of_an_admin_has_the_form_from_before_roles_existed() -> None:
    assert named_key("sk-1", "app", "today").line == f"sha256:{_sha('sk-1')} app today"
    client = named_key("sk-1", "app", "today", Role.CLIENT)
    assert client.line == f"sha256:{_sha('sk-1')} app today role client"
    assert parse_key_file(revoke_key(client.line, "app", "later")) == [
        AppKey(client.digest, "app", "today", "later", Role.CLIENT)
    ]


def test_only_admin_keys_are_admins_and_a_ring_without_keys_treats_everybody_as_admin() -> None:
    ring = KeyRing([named_key("sk-c", "c", "today", Role.CLIENT), named_key("sk-a", "a", "today")])
    assert ring.is_admin("sk-a") and not ring.is_admin("sk-c")
    assert not ring.is_admin("sk-other") and not ring.is_admin(None)
    assert KeyRing().is_admin(None) and KeyRing().is_admin("sk-any")


@pytest.mark.parametrize("is_plain_first", [True, False])
def test_if_lines_describe_a_key_differently_the_strictest_counts(is_plain_first: bool) -> None:
    lines = ["sk-1", named_key("sk-1", "app", "today", Role.CLIENT).line]
    ring = KeyRing(parse_key_file("\n".join(lines if is_plain_first else lines[::-1])))
    assert ring.accepts("sk-1") and not ring.is_admin("sk-1") and ring.name_of("sk-1") == "app"
    assert not ring.accepts("sk-1", "other")


def test_a_user_name_must_match_the_name_that_the_file_has_for_the_key() -> None:
    ring = KeyRing([*parse_key_file("sk-plain"), named_key("sk-1", "app", "today")])
    assert ring.accepts("sk-1", "app") and ring.accepts("sk-1")
    for name in ("", "App", "other", "sk-1"):
        assert not ring.accepts("sk-1", name)
    assert ring.accepts("sk-plain", "anybody") and ring.accepts("sk-plain", "")
    assert KeyRing().accepts(None, "anybody")


def test_keys_of_one_name_share_an_owner_who_exists_until_the_last_key_is_revoked() -> None:
    old, new = named_key("sk-1", "app", "today"), named_key("sk-2", "app", "later")
    both = KeyRing([old, new, *parse_key_file("sk-plain")])
    assert both.owner_of("sk-1") == both.owner_of("sk-2") == "app"
    assert both.owner_of("sk-plain") == f"sha256:{fingerprint('sk-plain')}"
    rotated = KeyRing(parse_key_file(revoke_key(old.line, "app", "x") + new.line))
    assert rotated.has_owner("app") and rotated.owner_of("sk-2") == "app"
    gone = KeyRing(parse_key_file(revoke_key(old.line, "app", "x") + "sk-plain"))
    assert not gone.has_owner("app") and gone.has_owner(both.owner_of("sk-plain"))


def test_an_invalid_key_is_not_the_owner_of_anything() -> None:
    """The key may have been revoked after the guard checked it and before the route did."""
    ring = KeyRing(parse_key_file(revoke_key(named_key("sk-1", "app", "a").line, "app", "b")))
    assert ring.owner_of("sk-1") not in ("", "app") and ring.owner_of(None) != ""
    assert KeyRing().owner_of("sk-1") == "" and ring.has_owner("")


def test_roles_and_owners_follow_the_file() -> None:
    file = FakeKeyFile(named_key("sk-1", "app", "today").line)
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
