"""`fakevllm retrain` on ledgers of real runs."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.fake.engine import START_THETA
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import ledger_file, wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes
from tests.e2e.test_released_run import ARCHIVE

PREFER_LONG = """
def on_compute_relative_reward(valid_results, all_answers):
    return [len(answer["content"] or "") / 100 for answer in all_answers]
"""
PREFER_SHORT = PREFER_LONG.replace("len(", "-len(")
PREFER_NO = PREFER_YES.replace("float(", "-float(")
BATCH_SIZE = 4


def retrain(folder: Path, name: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Retrain into the run directory `name`. Return the exit code, the figures and all output."""
    figures = folder / f"{name}.json"
    command = ["-m", "fakevllm", "retrain", "--json", str(figures), "--run-dir", str(folder / name)]
    done = PRELOADED_PYTHON.run([*command, *arguments], folder)
    content: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else {}
    return done.returncode, content, done.stdout + done.stderr


def query(file: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(file)) as db:
        return db.execute(sql).fetchall()


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder with a run of the fake engine, and with a configuration for it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "fakevllm.toml").write_text(
        f'[proxy]\nrun_dir = "run"\n[job]\nnum_repeat = 4\nbatch_size = {BATCH_SIZE}\nlr = 0.5\n'
    )
    write_hooks(tmp_path / "hooks", PREFER_YES)
    return tmp_path


def test_the_groups_of_an_earlier_run_train_again_without_a_model_request(released: Path) -> None:
    ledger = released / "run" / "ledger.sqlite"
    ids = [row[0] for row in query(ledger, "SELECT group_id FROM groups ORDER BY received_at")]
    with closing(sqlite3.connect(ledger)) as db, db:
        db.execute("UPDATE calls SET logprobs = x'00' WHERE group_id = ?", (ids[0],))
        db.execute("UPDATE siblings SET message_json = '{' WHERE group_id = ?", (ids[1],))
        db.execute("UPDATE groups SET question = 'a held-out row' WHERE group_id = ?", (ids[2],))
    before = ledger.read_bytes()
    (released / "rows.jsonl").write_text('{"question": "a held-out row"}\n')
    with (released / "fakevllm.toml").open("a") as config:
        config.write('[release]\neval_dataset = "rows.jsonl"\n')
    arguments = ("--backend", "fake", "--hooks", "hooks", "--epochs", "2")

    code, figures, output = retrain(released, "new", *arguments)
    assert code == 0, output
    num_trainable = len(ids) - 3
    assert figures["groups_selected"] == len(ids)
    assert figures["groups_skipped"] == {"unreadable": 2, "held_out": 1}
    assert set(figures["unreadable"]) == {ids[0], ids[1]}
    assert figures["steps"] == 2 * num_trainable // BATCH_SIZE
    assert figures["groups_in_steps"] == BATCH_SIZE * figures["steps"]
    assert 0.5 < figures["effective_sample_size"] <= 1
    assert ledger.read_bytes() == before and "was copied to" in output
    journal = released / "new" / "journal.sqlite"
    (newest,) = query(journal, "SELECT MAX(step) FROM checkpoints")
    assert newest == (figures["steps"],)
    trained = {row[0] for row in query(journal, "SELECT group_id FROM groups WHERE step > 0")}
    assert trained <= {f"{one}#{epoch}" for one in ids[3:] for epoch in (1, 2)}
    assert {f"{one}#1" for one in ids[3:]} <= trained

    code, again, output = retrain(released, "again", *arguments)
    assert (code, again | {"run_dir": ""}) == (0, figures | {"run_dir": ""}), output
    digests = "SELECT step, digest FROM checkpoints ORDER BY step"
    assert query(journal, digests) == query(released / "again" / "journal.sqlite", digests)


def test_the_groups_of_a_run_with_another_tokenizer_are_left_out(released: Path) -> None:
    ledger = released / "run" / "ledger.sqlite"
    with closing(sqlite3.connect(ledger)) as db, db:
        (num,) = db.execute("SELECT COUNT(*) FROM groups").fetchone()
        newest = "(SELECT group_id FROM groups ORDER BY received_at DESC LIMIT 10)"
        db.execute(f"UPDATE groups SET run_id = 'other' WHERE group_id IN {newest}")
        q = "x'7100000002000000'"  # the ids of "q" and of the end
        db.execute(f"UPDATE calls SET response_ids = {q} WHERE group_id IN {newest}")
    arguments = ("--backend", "fake", "--hooks", "hooks")
    code, figures, output = retrain(released, "new", *arguments)
    assert code == 0, output
    assert figures["groups_skipped"] == {"other_tokens": 10}
    assert figures["steps"] == (num - 10) // BATCH_SIZE

    code, _, output = retrain(released, "none", *arguments, "--last", "10")
    assert code == 2 and "are not those of the fake engine" in output


def test_training_goes_in_the_direction_that_the_hooks_reward(released: Path) -> None:
    write_hooks(released / "no", PREFER_NO)
    thetas: list[float] = []
    for name in ("hooks", "no"):
        flags = ("--backend", "fake", "--hooks", name, "--min-ess", "0")
        code, _, output = retrain(released, f"of-{name}", *flags)
        assert code == 0, output
        (newest,) = (released / f"of-{name}").rglob("theta.json")
        thetas.append(json.loads(newest.read_text())["theta"])
    # theta is the fake engine's logit of the answer "yes".
    assert thetas[1] < START_THETA < thetas[0]


def test_nothing_is_trained_below_the_limit_and_no_folder_stays(released: Path) -> None:
    arguments = ("--backend", "fake", "--hooks", "hooks", "--min-ess", "1", "--where", "step > 4")
    code, figures, output = retrain(released, "new", *arguments)
    assert (code, figures) == (2, {}), output
    assert "Nothing was trained: the effective sample size" in output
    assert not (released / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "2", "--backend", "fake"), "--from is for engines with a model"),
        (("--last", "3", "--backend", "fake"), "A training step needs 4 groups"),
        (("--run-dir", "run", "--backend", "fake"), "The folder run is not empty"),
        (("--ledger", "none.sqlite", "--backend", "fake"), "There is no ledger none.sqlite"),
        (("--where", "step >", "--backend", "fake"), "is not an SQL expression"),
        (("--model", "demo"), "choose its engines with --backend"),
        ((), "The model that sampled the groups is unknown"),
    ],
)
def test_a_mistake_gets_one_line(released: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, output = retrain(released, "new", "--hooks", "hooks", *arguments)
    (line,) = [line for line in output.splitlines() if line.startswith("fakevllm: ")]
    assert code == 2 and message in line, output


def test_two_retrains_in_lockstep_are_equal_to_the_bit_and_from_starts_with_a_version(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--model", "demo", folder="run")
    hooks = write_hooks(tmp_path / "hooks", PREFER_LONG)
    config = tmp_path / "run" / "fakevllm.toml"
    config.write_text("[job]\nbatch_size = 2\nnum_repeat = 4\nlr = 1e-4\nsave_freq = 1\n")
    proxy = processes.proxy(server, "--hooks", str(hooks), "--config", str(config))
    for number in range(4):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"What is {number} plus 3?"}],
            "max_tokens": 24,
        }
        url = f"{proxy.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200
    wait_for_groups(proxy, 4, states="pooled trained dropped")
    short = write_hooks(tmp_path / "short", PREFER_SHORT)
    flags = ["--ledger", str(ledger_file(proxy)), "--lockstep", "--config", str(config)]
    flags += ["--server-run-dir", str(server.folder)]

    def weights(name: str, *arguments: str) -> tuple[Any, ...]:
        """Retrain, and return the digest of the weights after the last step."""
        code, figures, output = retrain(tmp_path, name, *flags, *arguments)
        assert (code, figures["steps"], figures["steps_without_update"]) == (0, 2, 0), output
        journal = tmp_path / name / "journal.sqlite"
        (newest,) = query(journal, "SELECT digest FROM checkpoints ORDER BY step DESC LIMIT 1")
        return newest

    one = weights("one", "--hooks", str(hooks))
    assert weights("two", "--hooks", str(hooks)) == one
    assert weights("other", "--hooks", str(short)) != one

    # Two steps from the logged run's own second version, and not from the model.
    server.stop()
    assert weights("later", "--hooks", str(hooks), "--from", "2") != one
    exported = tmp_path / "later" / "start-model" / "model.safetensors"
    assert exported.read_bytes() != (DEMO_MODEL_DIR / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "later.json").read_text())["staleness_max"] == 2
    code, _, output = retrain(tmp_path, "none", *flags, "--hooks", str(hooks), "--from", "9")
    (line,) = [line for line in output.splitlines() if line.startswith("fakevllm: ")]
    assert code == 2 and "9" in line and "1, 2" in line, output
    assert not (tmp_path / "none").exists()
