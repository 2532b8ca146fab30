"""The report about forgotten (deleted) groups, and its lines for the terminal."""

from __future__ import annotations

import asyncio

from fakevllm.forgetting.forgetter import Forgotten
from fakevllm.forgetting.messages import ForgetReport, TrainedVersion
from fakevllm.forgetting.server_requests import Deleted
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.plurals import counted

RUN_ID_CHARS = 8
"""Number of characters of a run's id to print, as in `fakevllm status`."""


async def report_of(ledger: Ledger, forgotten: Forgotten, deleted: Deleted) -> ForgetReport:
    """Return the report about groups that were deleted from the ledger and from the server."""
    versions = set(await asyncio.to_thread(ledger.forgotten.versions, forgotten.found))
    versions |= deleted.versions  # the run log may not have reported the newest step yet
    return ForgetReport(
        num_found=len(forgotten.found),
        num_forgotten=len(forgotten.group_ids),
        num_in_flight=forgotten.num_in_flight,
        num_open=forgotten.num_open,
        versions=[
            TrainedVersion(run_id=run_id, version=version)
            for run_id, version in sorted(versions, key=lambda one: (one[0] or "", one[1]))
        ],
        num_calls=deleted.num_calls,
        sample_folders=sorted(deleted.sample_folders),
        num_dropped=deleted.num_dropped,
        checkpoint_steps=deleted.checkpoint_steps,
        server_problem=deleted.problem,
        num_unsent=deleted.num_left,
        is_log_truncated=forgotten.is_log_truncated,
    )


def lines(report: ForgetReport) -> list[str]:
    """Return the lines for the terminal that say which data was forgotten (deleted).

    >>> lines(ForgetReport(num_found=2, num_forgotten=2, num_calls=8))
    ['2 groups were forgotten, and 8 calls in the journal.', 'No version was trained on them.']
    """
    found = [f"{counted(report.num_forgotten, 'group')} were forgotten"]
    if report.num_forgotten == 1:
        found = ["1 group was forgotten"]
    if report.num_found > report.num_forgotten + report.num_in_flight:
        before = report.num_found - report.num_forgotten - report.num_in_flight
        found.append(f", {before} had been forgotten before")
    text = "".join(found) + f", and {counted(report.num_calls, 'call')} in the journal."
    more = [text]
    if report.num_dropped:
        more.append(
            f"{counted(report.num_dropped, 'group')} waited to be trained, and will not be."
        )
    if report.checkpoint_steps:
        steps = ", ".join(map(str, report.checkpoint_steps))
        more.append(f"The server saved a checkpoint first (step {steps}).")
    return [*more, *_version_lines(report), *_open_lines(report)]


def problems(report: ForgetReport) -> list[str]:
    """Return one line for each problem that prevents the groups from being forgotten completely. If
    there is a problem, the command fails."""
    found: list[str] = []
    if report.num_in_flight:
        found.append(
            f"{counted(report.num_in_flight, 'group')} in flight: the server has not acknowledged "
            "the rewards yet. Run the command again when the proxy has sent them."
        )
    if report.server_problem:
        found.append(
            f"The server {report.server_problem}: the calls of "
            f"{counted(report.num_unsent, 'group')} are still in its journal. The request is noted "
            "in the ledger, and the proxy sends it as soon as the server can carry it out."
        )
    if report.sample_folders:
        found.append(
            "Tables of samples may still show the texts, in these folders on the server's machine: "
            f"{', '.join(report.sample_folders)}. Stop the server and delete the folders. If wandb "
            "has uploaded a run, delete it there, too."
        )
    if not report.is_log_truncated:
        found.append(
            "Another process reads the ledger, so deleted bytes are still in its write-ahead log: "
            "close the process, and run the command again."
        )
    return found


def _version_lines(report: ForgetReport) -> list[str]:
    if not report.versions:
        return ["No version was trained on them."]
    by_run: dict[str | None, list[int]] = {}
    for one in report.versions:
        by_run.setdefault(one.run_id, []).append(one.version)
    return [
        f"Versions trained on them{'' if run_id is None else f' (run {run_id[:RUN_ID_CHARS]})'}: "
        f"{', '.join(map(str, versions))}. Later versions descend from version {versions[0]}."
        for run_id, versions in by_run.items()
    ]


def _open_lines(report: ForgetReport) -> list[str]:
    if not report.num_open:
        return []
    return [
        f"{counted(report.num_open, 'request')} of any app were still being answered. If one of "
        "them belongs to what you forget, run the command again later."
    ]
