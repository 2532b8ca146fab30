"""`fakevllm rescore` scores logged groups with other hooks and keeps the results."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from fakevllm.errors import ConfigError, LedgerError, UserError
from fakevllm.hooks.results import Json
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.command import RescoreSettings, run_rescore
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.ledger.ledger_cases import group, make_older, rows, sibling

PREFER_LAST = """
def on_compute_relative_reward(valid_results, all_answers):
    all_answers[0]["note"] = "first"
    return [float(sibling.index) for sibling in valid_results]
"""
FAIL_SOMETIMES = """
def on_compute_relative_reward(valid_results, all_answers):
    if valid_results[0].task.metadata.get("is_old"):
        raise KeyError("answer")
    return [0.5 for _ in valid_results]
"""
NOTE_ADDRESS = """
def on_compute_relative_reward(valid_results, all_answers):
    print("printed to ann@example.org")
    all_answers[0]["note"] = "written by ann@example.org"
    return [0.5 for _ in valid_results]
"""
NAME_ADDRESS = """
def on_compute_relative_reward(valid_results, all_answers):
    raise ValueError("no answer for ann@example.org")
"""
NO_ROOM = "SELECT RAISE(ABORT, 'no room')"
NUM_GROUPS = 5


@pytest.fixture
def settings(tmp_path: Path) -> RescoreSettings:
    """Settings for a ledger in which the first sibling has the higher reward and was served."""
    path = tmp_path / "ledger.sqlite"
    store = Ledger.open(path)
    for number in range(NUM_GROUPS):
        one = group(f"g{number}", [1.0, 0.0], received_at=1000.0 + number)
        store.record(replace(one, served_by="best"))
    store.close()
    return RescoreSettings(path, hooks(tmp_path, PREFER_LAST), timeout_s=20.0)


def hooks(tmp_path: Path, code: str) -> Path:
    file = tmp_path / "hooks.py"
    file.write_text(code)
    return file


def rescore(settings: RescoreSettings) -> tuple[bool, Json, str]:
    """Run the command. Return its result, its figures and its output."""
    file = settings.ledger.with_name("figures.json")
    console = Console(record=True, width=120)
    is_ok = run_rescore(replace(settings, json_file=file), console)
    return is_ok, orjson.loads(file.read_bytes()), console.export_text()


def stored(settings: RescoreSettings, columns: str = 'group_id, "index", reward') -> Sequence[Any]:
    return rows(settings.ledger, f'SELECT {columns} FROM rescored ORDER BY group_id, "index"')


def test_the_new_rewards_stand_beside_the_old_ones(settings: RescoreSettings) -> None:
    is_ok, figures, output = rescore(settings)
    assert is_ok
    assert figures["num_compared"] == figures["num_reordered"] == NUM_GROUPS
    assert figures["num_served_otherwise"] == NUM_GROUPS
    assert figures["correlation"] == pytest.approx(-1.0)
    assert "another sibling would have been served in 5 of 5 (100 %) groups" in output
    expected = [(f"g{number}", i, float(i)) for number in range(NUM_GROUPS) for i in (0, 1)]
    assert stored(settings) == expected
    notes = stored(settings, "annotations_json, hook_hash")
    assert notes[:2] == [('{"note":"first"}', figures["hook_hash"]), (None, figures["hook_hash"])]
    old = rows(settings.ledger, 'SELECT reward FROM siblings ORDER BY group_id, "index"')
    assert old == [(1.0,), (0.0,)] * NUM_GROUPS


def test_what_the_hooks_write_and_print_is_redacted(
    settings: RescoreSettings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    privacy = PrivacySettings(redact=("email",))
    for code in (NOTE_ADDRESS, NAME_ADDRESS):
        rescore(replace(settings, hooks=hooks(tmp_path, code), privacy=privacy, last=1))
    noted, _, failed, _ = rows(
        settings.ledger, "SELECT annotations_json, reason FROM rescored ORDER BY rowid"
    )
    assert noted == ('{"note":"written by [redacted: email]"}', None)
    assert "no answer for [redacted: email]" in str(failed[1])
    assert "printed to [redacted: email]" in capfd.readouterr().err
    assert b"ann@example.org" not in settings.ledger.read_bytes()


def test_a_repeated_command_scores_only_what_is_new(settings: RescoreSettings) -> None:
    part = replace(settings, where="group_id < 'g2'")
    assert rescore(part)[1]["num_known"] == 0
    _, figures, output = rescore(settings)
    assert (figures["num_known"], figures["num_compared"]) == (2, NUM_GROUPS)
    assert "2 groups were scored by an earlier command (--again" in output
    assert rescore(settings)[1]["num_known"] == NUM_GROUPS
    assert rescore(replace(settings, again=True))[1]["num_known"] == 0
    assert len(stored(settings)) == 2 * NUM_GROUPS


def test_results_of_several_hooks_are_kept(settings: RescoreSettings) -> None:
    rescore(settings)
    changed = PREFER_LAST.replace("float(", "-float(")
    rescore(replace(settings, hooks=hooks(settings.ledger.parent, changed)))
    assert len(stored(settings)) == 4 * NUM_GROUPS
    assert len({row[0] for row in stored(settings, "hook_hash")}) == 2


def test_hooks_that_fail_for_old_groups_are_counted(settings: RescoreSettings) -> None:
    store = Ledger.open(settings.ledger)
    store.put_tasks([Task(task_id="old", main_query="1+1?", metadata={"is_old": True})])
    store.record(group("g0", [1.0, 0.0], task_id="old"))
    store.close()
    failing = replace(settings, hooks=hooks(settings.ledger.parent, FAIL_SOMETIMES))
    is_ok, figures, output = rescore(failing)
    assert is_ok
    assert figures["failures"] == {"hook_raised": 1}
    assert figures["num_lost"] == NUM_GROUPS - 1
    assert "the new hooks failed for 1 group: hook_raised" in output
    reasons = stored(settings, "group_id, reward, reason")
    assert reasons[0][:2] == ("g0", None)
    assert reasons[0][2].startswith("hook_raised: KeyError")
    assert "first: hook_raised: KeyError: 'answer'" in output
    _, again, _ = rescore(failing)
    assert (again["num_known"], again["failures"]) == (NUM_GROUPS - 1, {"hook_raised": 1})


def test_the_command_fails_if_the_hooks_score_nothing(settings: RescoreSettings) -> None:
    code = "def on_compute_relative_reward(valid_results, all_answers):\n    return []\n"
    is_ok, figures, _ = rescore(replace(settings, hooks=hooks(settings.ledger.parent, code)))
    assert not is_ok
    assert figures["failures"] == {"hook_length": NUM_GROUPS}


def test_unusable_answers_get_the_failure_floor(settings: RescoreSettings) -> None:
    store = Ledger.open(settings.ledger)
    cut_off = replace(sibling(1, 0.0), failure="cut_off")
    store.record(replace(group("g0"), siblings=[sibling(0, 1.0), cut_off]))
    store.close()
    part = replace(settings, where="group_id = 'g0'")
    assert rescore(replace(part, failure_floor=-2.0))[1]["new"]["mean"] == -1.0
    assert rescore(replace(part, failure_floor=-4.0))[1]["new"]["mean"] == -2.0
    assert rescore(part)[1]["new"]["mean"] == 0.5
    assert stored(settings) == [("g0", 0, 0.0), ("g0", 1, 1.0)]


def test_hooks_see_the_indices_of_the_siblings_when_one_has_no_answer(
    settings: RescoreSettings,
) -> None:
    store = Ledger.open(settings.ledger)
    store.record(replace(group("g0"), siblings=[sibling(0), sibling(2, 1.0)]))
    store.close()
    rescore(replace(settings, where="group_id = 'g0'"))
    assert stored(settings) == [("g0", 0, 0.0), ("g0", 2, 2.0)]


def test_groups_with_broken_rows_are_skipped_and_listed(settings: RescoreSettings) -> None:
    with sqlite3.connect(settings.ledger) as db:
        db.execute("UPDATE group_rows SET request_json = '{' WHERE group_id = 'g1'")
    db.close()
    is_ok, figures, output = rescore(settings)
    assert is_ok
    assert list(figures["unreadable"]) == ["g1"]
    assert figures["num_compared"] == NUM_GROUPS - 1
    assert "1 group cannot be read, and not scored:\n  g1: JSONDecodeError" in output


def test_a_ledger_of_an_older_schema_is_migrated_on_a_copy(settings: RescoreSettings) -> None:
    make_older(settings.ledger)
    before = settings.ledger.read_bytes()
    assert rescore(settings)[1]["num_known"] == 0
    assert rescore(settings)[1]["num_known"] == NUM_GROUPS
    assert settings.ledger.read_bytes() == before
    copy = settings.ledger.with_name(f"ledger.{MIGRATIONS[-1].__name__}.sqlite")
    assert len(rows(copy, "SELECT 1 FROM rescored")) == 2 * NUM_GROUPS
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_copy_of_an_older_ledger_gets_new_groups_and_keeps_its_results(
    settings: RescoreSettings,
) -> None:
    make_older(settings.ledger)
    rescore(settings)
    # The new group stands only in the write-ahead log, as while a proxy runs.
    with sqlite3.connect(settings.ledger) as db:
        db.execute("PRAGMA wal_autocheckpoint = 0")
        for table in ("group_rows", "sibling_rows"):
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")][1:]
            columns = ", ".join(f'"{name}"' for name in names)
            db.execute(
                f"INSERT INTO {table} SELECT 'new', {columns} FROM {table} WHERE group_id = 'g4'"
            )
        db.commit()
        figures = rescore(settings)[1]
    db.close()
    assert (figures["num_known"], figures["num_compared"]) == (NUM_GROUPS, NUM_GROUPS + 1)


@pytest.mark.parametrize("remnant", ["part", "unmigrated"])
def test_an_interrupted_copy_is_made_again(settings: RescoreSettings, remnant: str) -> None:
    make_older(settings.ledger)
    copy = settings.ledger.with_name(f"ledger.{MIGRATIONS[-1].__name__}.sqlite")
    if remnant == "part":
        copy.with_name(f"{copy.name}.part").write_bytes(b"a part of a database")
    else:
        copy.write_bytes(settings.ledger.read_bytes())
    assert rescore(settings)[1]["num_compared"] == NUM_GROUPS


def test_hooks_get_the_rows_of_the_dataset_file(settings: RescoreSettings) -> None:
    store = Ledger.open(settings.ledger)
    store.record(group("g0", [1.0, 0.0], task_id="row-1"))
    store.close()
    by_metadata = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(len(valid_results[0].task.metadata)) + s.index for s in valid_results]
"""
    part = replace(
        settings, where="group_id = 'g0'", hooks=hooks(settings.ledger.parent, by_metadata)
    )
    figures, output = rescore(part)[1:]
    assert (figures["num_without_task"], figures["new"]["mean"]) == (1, 0.5)
    assert "1 group belongs to a dataset row that is unknown here" in output
    tasks = {"row-1": Task(task_id="row-1", main_query="1+1?", metadata={"answer": 2})}
    figures = rescore(replace(part, tasks=tasks, again=True))[1]
    assert (figures["num_without_task"], figures["new"]["mean"]) == (0, 1.5)


def test_the_comparison_is_printed_although_results_cannot_be_written(
    settings: RescoreSettings,
) -> None:
    console = Console(record=True, width=120)
    with closing(sqlite3.connect(settings.ledger, isolation_level=None)) as db:
        db.execute(f"CREATE TRIGGER full BEFORE INSERT ON rescored BEGIN {NO_ROOM}; END")
        with pytest.raises(
            LedgerError, match=r"cannot be written .*no room.* run the command again"
        ):
            run_rescore(settings, console)
    assert "correlation of old and new rewards" in console.export_text()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ledger": Path("missing.sqlite")}, UserError, "There is no ledger missing.sqlite: name"),
        ({"where": "step = 99"}, UserError, "No group in .* can be scored: a group needs 2"),
        ({"json_file": Path("missing/f.json")}, ConfigError, "folder of missing/f.json does not"),
        ({"hooks": Path("missing")}, UserError, "missing"),
    ],
)
def test_mistakes_are_named(
    settings: RescoreSettings, changes: Json, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_rescore(replace(settings, **changes))


def test_a_file_that_is_no_ledger_is_named(settings: RescoreSettings) -> None:
    text = settings.ledger.with_name("text")
    text.write_text("no database, but long enough to be read as one" * 100)
    with pytest.raises(LedgerError, match="text cannot be read or copied"):
        run_rescore(replace(settings, ledger=text))
