"""The printed result of the demo."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.demo import report
from fakevllm.demo.accuracy_probe import Probe
from fakevllm.demo.run_summary import Outcome
from fakevllm.sdk.console import print_pool
from fakevllm_adapters.protocol.batch_status import PoolInformation

PROBE = Probe(0.5, [("How much is [b]?", "[/b] 8", True)])


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_demos_result_keeps_square_brackets(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "[mine]"
    folder.mkdir()
    outcome = Outcome(
        before=0.5,
        after=0.5,
        policy_mean=[0.5, 0.5],
        returned_best=[0.5, 0.5],
        steps=2,
        requests=1,
        wall_s=1.0,
        seed=0,
        control="none",
        lockstep=False,
        async_steps=0,
        rollout="fake",
        trainer="fake",
        groups={},
        groups_in_steps=1,
        groups_without_signal=0,
        restarts=0,
        run_dir=str(folder),
    )
    report.show(console, outcome, PROBE, PROBE, folder / "ledger.db")
    text = printed(console)
    assert "gated" not in outcome.as_json() and "--gated" not in text
    assert "lr = 1e-6 under [job] in fakevllm.toml" in text
    assert f"tokens: {folder / 'ledger.db'}" in text and f"--run-dir {folder} " in text
    assert "How much is [b]?" in text and text.count("[/b] 8") == 2


def test_the_clients_table_of_tasks_keeps_square_brackets(console: Console) -> None:
    print_pool(PoolInformation(completed_tasks_rewards={"[/sums] 1": [1.0]}), console)
    assert "[/sums] 1" in printed(console)
