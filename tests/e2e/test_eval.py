"""`fakevllm eval` in front of the fake engine, as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_commands import PROXY, assert_mistake, run

pytestmark = pytest.mark.slow

HOOK = """
def on_compute_relative_reward(siblings, answers):
    expected = siblings[0].task.metadata.get("answer")
    if expected is None:
        return [None for _ in answers]
    return [float(answer["content"] == expected) for answer in answers]
"""
SAYS = [{"question": f"Row {n}: [[say {n}]]", "answer": str(n % 3)} for n in range(6)]


@pytest.fixture
def proxy(tmp_path: Path) -> Generator[Process]:
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    job = "[job]\nbatch_size = 1\nlr = 2.0\nsave_freq = 4\n"
    (tmp_path / "job.toml").write_text(job)
    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        flags = ["--config", str(tmp_path / "job.toml"), "--hooks", str(hooks), "--n", "2"]
        yield started.proxy(server, *flags)


def write_rows(folder: Path, rows: list[dict[str, str]], name: str = "held_out.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_a_table_a_json_file_and_an_exit_code_tell_how_good_the_model_is(
    proxy: Process, tmp_path: Path
) -> None:
    file = write_rows(tmp_path, SAYS)
    command = (*PROXY, "eval", "--dataset", str(file), "--url", proxy.url, "--samples", "2")
    done = run(tmp_path, *command, "--json", "out/eval.json", "--fail-below", "0.5")
    assert done.returncode == 0, done.stderr
    assert "held_out.jsonl: 6 rows, 2 samples each" in done.stdout
    assert "0.500" in done.stdout
    assert "3 rows have no sample with a reward of 1 or more" in done.stdout
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    (version,) = report["versions"]
    assert (version["version"], version["rows"], version["mean"]) == ("0", 6, 0.5)
    assert version["low"] < 0.5 < version["high"]
    assert [row["is_unsolved"] for row in report["rows"]] == [False] * 3 + [True] * 3
    assert [row["question"] for row in report["rows"]] == [row["question"] for row in SAYS]
    wait_for_groups(proxy, 6)
    query = "SELECT DISTINCT state, kind, eval_id, num_siblings FROM groups"
    (row,) = rows(proxy, query)
    assert tuple(row) == ("served", "eval", report["eval_id"], 3)
    failed = run(tmp_path, *command, "--fail-below", "0.51")
    assert failed.returncode == 1, failed.stderr


def test_versions_are_compared_row_by_row(proxy: Process, tmp_path: Path) -> None:
    task = {"task_id": "t", "main_query": "Say yes.", "metadata": {"answer": "yes."}}
    registered = httpx.post(f"{proxy.url}/fakevllm/tasks", json={"tasks": [task]})
    headers = {"Authorization": f"Bearer {registered.json()['keys'][0]}"}

    def train() -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "Say yes."}]}
        httpx.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers, timeout=20)

    def versions() -> list[int]:
        query = "SELECT DISTINCT trained_version FROM groups WHERE trained_version IS NOT NULL"
        return sorted(row[0] for row in rows(proxy, query))

    def trained_enough() -> bool:
        train()
        return len(versions()) >= 8

    wait_until(trained_enough, 60.0, "eight trained groups")
    file = write_rows(tmp_path, [{"question": f"Row {n}?", "answer": "yes."} for n in range(8)])
    command = (*PROXY, "eval", "--dataset", str(file), "--url", proxy.url)
    unknown = run(tmp_path, *command, "--version", "999")
    assert_mistake(unknown, "Version 999 does not exist")
    *_, newest = (int(one) for one in unknown.stderr.rpartition("sampled: ")[2][:-2].split(", "))
    assert newest > 1
    done = run(
        tmp_path, *command, "--version", "0", "--version", str(newest), "--json", "eval.json"
    )
    assert done.returncode == 0, done.stderr
    first, last = json.loads((tmp_path / "eval.json").read_text())["versions"]
    assert (first["version"], last["version"]) == ("0", str(newest))
    assert (first["greedy"], last["greedy"]) == (0.0, 1.0)
    assert first["mean"] < last["mean"]
    compared = last["compared_with_first"]
    assert compared["wins"] + compared["losses"] + compared["ties"] == 8
    assert compared["mean"] == pytest.approx(last["mean"] - first["mean"])
    assert "compared with version 0" in done.stdout
    evaluated = rows(proxy, "SELECT DISTINCT eval_version FROM groups WHERE kind = 'eval'")
    assert {row[0] for row in evaluated} == {0, newest}
    too_many = [part for n in range(5) for part in ("--version", str(n))]
    assert_mistake(run(tmp_path, *command, *too_many), "up to 4 different versions")
    for checkpoint in (tmp_path / "server" / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    assert_mistake(run(tmp_path, *command, "--version", str(newest)), "is gone")
    assert_mistake(run(tmp_path, *command, "--version", "1"), "has no checkpoint")


def test_rows_without_a_reward_do_not_count_and_are_shown(proxy: Process, tmp_path: Path) -> None:
    file = write_rows(tmp_path, [*SAYS[:2], {"question": "What?"}])
    done = run(tmp_path, *PROXY, "eval", "--dataset", str(file), "--url", proxy.url)
    assert done.returncode == 0, done.stderr
    assert "1.000" in done.stdout and "1 row has no reward and does not count" in done.stdout


def test_rows_that_cannot_be_evaluated_are_refused_in_one_line(
    proxy: Process, tmp_path: Path
) -> None:
    command = (*PROXY, "eval", "--url", proxy.url, "--dataset")
    assert_mistake(run(tmp_path, *PROXY, "eval", "--url", proxy.url), "pass --dataset FILE")
    empty = write_rows(tmp_path, [], "empty.jsonl")
    assert_mistake(run(tmp_path, *command, str(empty)), "has no rows")
    unscored = write_rows(tmp_path, [{"question": f"[[say {n}]]"} for n in range(12)], "no.jsonl")
    assert_mistake(run(tmp_path, *command, str(unscored)), "hook scored none of 1")
    file = write_rows(tmp_path, SAYS)
    wrong_range = ("--reward-range", "1", "0")
    assert_mistake(run(tmp_path, *command, str(file), *wrong_range), "smaller number first")
    body = {"model": "fake", "messages": [{"role": "user", "content": SAYS[1]["question"]}]}
    key = httpx.post(
        f"{proxy.url}/fakevllm/tasks",
        json={"tasks": [{"task_id": "t", "main_query": "x", "metadata": {"answer": "1"}}]},
    ).json()["keys"][0]
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers, timeout=20)
    assert reply.status_code == 200
    wait_for_groups(proxy, 1, states="pooled trained")
    assert_mistake(run(tmp_path, *command, str(file)), "1 row of")


def test_an_unreachable_proxy_is_named(tmp_path: Path) -> None:
    file = write_rows(tmp_path, SAYS)
    command = (*PROXY, "eval", "--dataset", str(file), "--url", "http://127.0.0.1:9")
    assert_mistake(run(tmp_path, *command), "http://127.0.0.1:9")
