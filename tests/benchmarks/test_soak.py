"""The soak measures real processes, and its checks find a leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import Outcome, Sample, SoakLog, Usage, check


def log_of(files: list[int], kind: str = "whole", calls_left: float = 0.0) -> SoakLog:
    """Return a log with these numbers of open files at the rests. The log has a whole answer in
    each quarter, and one more outcome of the given kind."""
    rests = [Sample(0, Usage(num, 100.0), Usage(30, 100.0), calls_left, 0.0, 0.0) for num in files]
    outcomes = [Outcome(quarter, "whole", 0.1) for quarter in range(4)]
    return SoakLog([*outcomes, Outcome(1, kind, 0.1)], [], rests)


def failed_claims(log: SoakLog) -> list[str]:
    return [finding.claim for finding in check(log) if finding.holds is False]


def test_a_run_without_trouble_passes() -> None:
    assert failed_claims(log_of([40, 60, 70, 60, 65])) == []


@pytest.mark.parametrize(
    ("log", "claim"),
    [
        (log_of([40, 60, 110, 160, 210]), "the proxy's open files at the rests do not grow"),
        (log_of([40] * 5, "503"), "no answer has status 5xx"),
        (log_of([40] * 5, "cut off"), "no answer is cut off or missing"),
        (log_of([40] * 5, "hangs"), "no answer is cut off or missing"),
        (log_of([40] * 5, calls_left=1.0), "no call is open at a rest"),
    ],
)
def test_trouble_fails_one_check(log: SoakLog, claim: str) -> None:
    assert failed_claims(log) == [claim]


@pytest.mark.slow
def test_a_soak_of_some_seconds_finds_nothing_and_writes_its_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path / "RESULTS.md")
    with pytest.raises(SystemExit) as ended:
        soak.main(["--minutes", "0.1", "--clients", "12", "--siblings", "2"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "| last |" in printed and "FAILED" not in printed
