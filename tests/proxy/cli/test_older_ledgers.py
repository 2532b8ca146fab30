"""Commands that only read a ledger leave the ledger of an older version of fakevllm unchanged, so
that the older version can still use it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakevllm.cli.main import app
from fakevllm.ledger.store import Ledger
from tests.proxy.forgetting.test_retention import put
from tests.proxy.ledger.ledger_cases import make_older

HOOK = """
def on_compute_relative_reward(valid_results, all_answers, question):
    return [0.0, 1.0]
"""


@pytest.mark.parametrize("command", ["sessions", "tokens", "check-hook"])
def test_a_command_that_only_reads_does_not_migrate_an_older_ledger(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs/default/ledger.sqlite"
    ledger = Ledger.open(file)
    put(ledger, "a")
    ledger.close()
    make_older(file)
    before = file.read_bytes()
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/on_compute_relative_reward.py").write_text(HOOK)
    arguments = ["hooks", "--ledger", str(file)] if command == "check-hook" else []
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code == 0, result.output
    assert "has the schema of an older version" in result.output
    assert file.read_bytes() == before
