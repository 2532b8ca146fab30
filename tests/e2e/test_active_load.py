"""Load tests with many active clients, while clients and server are killed."""

from __future__ import annotations

import pytest

from tests.e2e.active_load import Load, play
from tests.e2e.journal_checks import check
from tests.e2e.processes import Processes

SMALL = Load(
    num_clients=2, at_once=100, num_ends=400, num_kills=3, idle_limit_s=4.0, limit_s=100.0, seed=1
)
LARGE = Load(
    num_clients=4,
    at_once=1000,
    num_ends=12_000,
    num_kills=12,
    idle_limit_s=20.0,
    limit_s=600.0,
    seed=2,
)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(SMALL, id="100 at once", marks=[pytest.mark.slow]),
        pytest.param(LARGE, id="1000 at once", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_no_acknowledged_end_is_lost_or_counted_twice(processes: Processes, load: Load) -> None:
    run_dir, notes = play(processes, load)
    assert sum(len(client.ended) for client in notes) >= load.num_ends
    check(run_dir, notes)
