"""`fakevllm forget` without a running proxy: copies of the ledger, old ledgers, and the server."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.errors import UserError
from fakevllm.forgetting.command import ForgetSettings, run_forget
from fakevllm.forgetting.report import problems
from fakevllm.ledger.forgotten_groups import TargetKind
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.offline_copy import current_schema
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from tests.proxy.forgetting.test_retention import put
from tests.proxy.ledger.ledger_cases import group, make_older, rows

SECRET = b"secret of a"


def settings(ledger: Path, *, proxy_url: str | None = None) -> ForgetSettings:
    return ForgetSettings(
        kind=TargetKind.SESSION,
        value="a",
        ledger=ledger,
        key_file=ledger.with_name("keys"),
        proxy_url=proxy_url,
        proxy_key=None,
        server_url="http://127.0.0.1:9",  # nothing listens there
        server_key=None,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file)
    for name in ("a", "b"):
        put(ledger, name)
    ledger.close()
    return file


def test_copies_of_an_older_ledger_forget_with_it(path: Path) -> None:
    make_older(path)
    copy, note = current_schema(path)
    assert note is not None and copy != path
    part = copy.with_name(f"{copy.name}.part")
    part.write_bytes(SECRET)  # an interrupted command left it
    assert SECRET in path.read_bytes() and SECRET in copy.read_bytes()
    report = run_forget(settings(path))
    assert report.num_forgotten == 1
    for file in path.parent.iterdir():
        assert SECRET not in file.read_bytes(), file
    assert not part.exists()
    for file in (path, copy):
        assert b"secret of b" in file.read_bytes()


def test_a_group_is_found_by_the_id_of_an_answer_that_was_redacted(path: Path) -> None:
    redaction = RedactionInUse(PrivacySettings(redact=("email",)))
    ledger = Ledger.open(path, redaction=redaction)
    for name in ("ann", "bob"):
        ledger.record(replace(group(name, state="dropped"), answer_id=f"{name}@example.org"))
    ledger.close()
    assert b"ann@example.org" not in path.read_bytes()
    report = run_forget(replace(settings(path), kind=TargetKind.ID, value="ann@example.org"))
    assert (report.num_found, report.num_forgotten) == (1, 1)
    assert rows(path, "SELECT group_id FROM forgotten_groups") == [("ann",)]


def test_an_unknown_session_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="No session id begins with 'zoe'"):
        run_forget(replace(settings(path), value="zoe"))


def test_bytes_that_an_older_version_deleted_do_not_stay(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("CREATE TABLE old (data TEXT)")
        db.execute("INSERT INTO old VALUES (?)", ("an older secret " * 500,))
        db.execute("DROP TABLE old")
    assert b"an older secret" in path.read_bytes()
    run_forget(settings(path))
    assert b"an older secret" not in path.read_bytes()


def test_a_server_that_is_out_of_reach_is_named_and_asked_again(path: Path) -> None:
    report = run_forget(settings(path))
    (line,) = problems(report)
    assert "out of reach" in line and "1 group" in line
    again = run_forget(settings(path))
    assert (again.num_found, again.num_forgotten, again.num_unsent) == (1, 0, 1)


def test_a_ledger_that_a_proxy_uses_is_changed_by_the_proxy_only(path: Path) -> None:
    lock = LedgerLock(path)
    with pytest.raises(UserError, match="--url"):
        run_forget(settings(path))
    lock.close()
    assert SECRET in path.read_bytes()
