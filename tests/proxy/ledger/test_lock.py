"""The lock of a ledger, which only one proxy process can hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakevllm.errors import LedgerError
from fakevllm.ledger.lock import LedgerLock
from fakevllm.ledger.store import Ledger

HOLDER = """
import sys
from pathlib import Path
from fakevllm.ledger.lock import LedgerLock

lock = LedgerLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_lock_is_refused_until_the_first_is_closed(path: Path) -> None:
    first = LedgerLock(path)
    with pytest.raises(LedgerError) as refusal:
        LedgerLock(path)
    message = f"{path.parent} is used by another proxy: choose another --run-dir."
    assert str(refusal.value) == message
    first.close()
    LedgerLock(path).close()


def test_a_killed_process_releases_its_lock(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(LedgerError, match="another proxy"):
            LedgerLock(path)
        holder.kill()
        holder.wait()
        LedgerLock(path).close()


def test_readers_can_open_a_locked_ledger(path: Path) -> None:
    lock = LedgerLock(path)
    ledger = Ledger.open(path)
    assert ledger.counts() == {}
    ledger.close()
    lock.close()


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(LedgerError, match=r"taken cannot be used \(.*another --run-dir"):
        LedgerLock(tmp_path / "taken" / "ledger.sqlite")
