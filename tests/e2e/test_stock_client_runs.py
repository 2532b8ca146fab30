"""A stock client stops the engine, starts another job, model or experiment, and goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import Processes
from tests.e2e.stock_pair import ALL, METHODS, StockPair
from tests.e2e.test_experiments import make_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", METHODS)
def test_a_stock_client_stops_changes_the_experiment_and_the_job_and_goes_back(
    processes: Processes, method: str
) -> None:
    with StockPair(processes, "--backend", "fake") as pair:
        one = {"ajet__experiment_name": "one"}
        two = {"ajet__experiment_name": "two"}
        pair.start(".", method, **one)
        pair.leave_one_waiting()
        pair.stop()
        pair.start(".", method, **one)  # the same job
        pair.complete_batch()
        pair.leave_one_waiting()
        pair.stop()
        pair.start("runs/two", method, **two)
        pair.leave_one_waiting()
        pair.complete_batch()
        pair.leave_one_waiting()
        pair.stop()
        pair.start(".", method, **one)
        pair.complete_batch()
        pair.stop()
        pair.start_other_job("runs/two", method, **two, ajet__trainer_common__use_kl_in_reward=True)
        pair.leave_one_waiting()
        pair.complete_batch()
        pair.leave_one_waiting()
        pair.stop()
        pair.check_journals()
        names = {run["folder"]: run["experiment_name"] for run in pair.listed_runs}
        assert names == {".": "one", "runs/two": "two"}


def test_a_job_with_another_collection_method_goes_on_with_what_waits(processes: Processes) -> None:
    with StockPair(processes, "--backend", "fake") as pair:
        pair.start(".", METHODS[-1])
        for method in METHODS:
            pair.leave_one_waiting()
            pair.stop()
            pair.start(".", method)
            pair.complete_batch()
        pair.stop()
        pair.check_journals()


def test_a_stock_client_may_agree_after_a_stop_to_what_waits(processes: Processes) -> None:
    with StockPair(processes, "--backend", "fake") as pair:
        pair.start(".", ALL)
        pair.leave_one_waiting()
        pair.end_others()
        pair.stop()
        pair.start(".", ALL)
        # A step waits only for clients that ended or agreed since the engine was started.
        pair.make_step(is_one_enough=True)
        pair.stop()
        pair.check_journals()


def test_a_stock_client_changes_the_model_and_goes_back(
    processes: Processes, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        make_model(tmp_path / "models" / name)
    flags = ("--backend", "embedded", "--models-dir", str(tmp_path / "models"))
    named = {"ajet__experiment_name": "a"}
    with StockPair(processes, *flags) as pair:
        pair.start(".", "finish_enough_tasks", **named, ajet__model__path="one")
        pair.leave_one_waiting()
        pair.complete_batch()
        pair.leave_one_waiting()
        pair.stop()
        pair.start("runs/a@*", "finish_enough_tasks", **named, ajet__model__path="two")
        pair.leave_one_waiting()
        pair.complete_batch()
        pair.leave_one_waiting()
        pair.stop()
        # Another form of the same name is the same model.
        path = str(tmp_path / "models" / "one")
        pair.start(".", "finish_enough_tasks", **named, ajet__model__path=path)
        pair.complete_batch()
        pair.stop()
        pair.check_journals()
        assert {run["model"] for run in pair.listed_runs} == {"one", "two"}
