"""Garbled files of the user: each file is read, or refused with a one-line message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from swarm_server.samples import call

from fakevllm.admission.dataset import read_tasks
from fakevllm.config.key_file import KeyFile
from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.replay.progress import Progress
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import named_key, new_app_key
from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.config import config_file, model
from fakevllm_server.journal import reads, row_changes, rows
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.run.log import RunLog
from tests.fuzz.garble import DEEP, SOME_CHANGES, apply_changes, garbled

SOME = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])

TOML = b"""
[proxy]
port = 0
run_dir = "runs/x"
allowed_hosts = ["a.example"]
[swarm]
url = "http://127.0.0.1:1"
[limits]
num_open = 5
allowed_fields = ["vllm_xargs"]
[job]
lr = 1e-6
seed = 5
"""
ODD_TOML = [
    *(b"a = " + b"[" * DEEP, b"[[[[a]]]]", b"[proxy]\nport = 1e999", b"[job]\nlr = nan"),
    *(b"[job]\nseed = " + b"7" * 5000, b"[job]\nlr = inf", b"[proxy]\nport = 07:61:99"),
    *(b"a = 2001-99-99", b"\xef\xbb\xbf[proxy]", b"[proxy]\x00", b'[hooks]\npath = "\\u0000"'),
    *(b'[proxy]\nrun_dir = "\\ud800"', b"proxy = 5", b"[proxy.x]\ny = 1", b"[job]\n1 = 1"),
]


def check_message(read: Callable[[], Any], error: type[Exception] = ConfigError) -> None:
    """Call `read`, and check the message if it raises `error`. Other exceptions are raised."""
    try:
        read()
    except error as refusal:
        assert str(refusal).strip() and len(str(refusal)) < 2000


def garbled_texts(valid: bytes, odd: list[bytes]) -> st.SearchStrategy[bytes]:
    mangled = st.builds(apply_changes, st.just(valid), SOME_CHANGES)
    lines = st.permutations(valid.splitlines()).map(b"\n".join)
    return st.one_of(mangled, lines, st.sampled_from(odd), st.binary(max_size=60))


@SOME
@given(raw=garbled_texts(TOML, ODD_TOML))
def test_a_configuration_is_read_or_refused_in_check_message(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_bytes(raw)
    flags = {"proxy": {"run_dir": tmp_path / "run"}}
    check_message(lambda: load(file, flags).keys())


@pytest.mark.parametrize("raw", ODD_TOML)
def test_an_odd_configuration_is_refused_in_check_message(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_bytes(raw)
    check_message(lambda: load(file, {}))


KEYS = b"# ours\nsk-plain\n" + named_key("sk-x", "app", "2026-01-01").line.encode() + b"\n"
ODD_KEYS = [
    b"sha256:",
    b"sha256:" + b"0" * 64,
    b"\xff\n",
    b"a\x00b",
    b"\xe2\x80\xa8",
    b"\r\r",
    b"#",
]


@SOME
@given(raw=garbled_texts(KEYS, ODD_KEYS))
def test_a_key_file_is_read_and_written_or_refused_in_check_message(
    tmp_path: Path, raw: bytes
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(raw)
    keys = KeyFile(file)
    check_message(keys.entries)
    check_message(lambda: keys.add(named_key(new_app_key(), "other", "2026-01-01")))
    check_message(lambda: keys.revoke("app", "2026-01-02"))
    check_message(lambda: model.read_keys(file), model.ConfigError)


@pytest.fixture(scope="module")
def used_journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder / "journal.sqlite")
    sample = rows.ScoredSample("g/0", 0, 1.0)
    journal.put(
        row_changes.call_recorded("g/0", 0, call(), "g"),
        row_changes.group_ended(
            rows.PooledGroup("g", GroupState.POOLED),
            [sample],
            rows.Submission("group:g", b"x", "{}"),
        ),
        row_changes.planned(1, 0, ["g"]),
        row_changes.trained(LogEntry(seq=1, kind="step", step=1, version=1), None),
    )
    journal.close()
    return (folder / "journal.sqlite").read_bytes()


@settings(SOME, max_examples=60)
@given(data=st.data())
def test_a_damaged_journal_is_read_or_refused_in_check_message(
    used_journal: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    whole = used_journal
    start = data.draw(st.integers(0, len(whole)))
    noise = data.draw(st.binary(max_size=200))
    (tmp_path / "journal.sqlite").write_bytes(whole[:start] + noise + whole[start + len(noise) :])

    def read() -> None:
        journal = Journal(tmp_path / "journal.sqlite")
        with journal.opening():
            RunLog(journal)
            journal.read(reads.pending_work, 0.0)
            journal.read(reads.planned_batches, [])
        journal.close()

    check_message(read, model.ConfigError)
    for file in tmp_path.glob("journal.sqlite*"):
        file.unlink()


def yaml_bomb(levels: int) -> str:
    """Return YAML with nested aliases, a kilobyte that expands to a gigabyte with 12 levels."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join([*lines, f"job: *a{levels - 1}"])


ODD_YAML = [
    *("job: " + tag for tag in ("!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!set x")),
    *("job: {lr: .inf}", "job: {lr: .nan}", "job: {kl_loss_coef: .inf}", "job: 2001-99-99"),
    *("job: " + "[" * 2000, "job: &a {x: *a}", "? [a]\n: b", "job: {1: 2}", "%YAML 9", "\x00"),
    *('job: {model: "\\ud800"}', "job: {seed: " + "7" * 5000 + "}", "job: {<<: 1}", "- job"),
    *("job: !!python/object:os.system x", yaml_bomb(12), "", "job", "job:", "\ud800"),
]
JOB = TrainJob(model="m").as_yaml()


def parse_job(text: str) -> None:
    assert json.loads(TrainJob.from_yaml(text).model_dump_json())


@pytest.mark.parametrize("text", ODD_YAML)
def test_an_odd_job_is_refused_or_can_be_serialized(text: str) -> None:
    check_message(lambda: parse_job(text), ValueError)


@SOME
@given(raw=garbled_texts(JOB.encode(), [b"{}"]))
def test_a_garbled_job_is_refused_or_can_be_serialized(raw: bytes) -> None:
    check_message(lambda: parse_job(raw.decode("utf-8", "surrogateescape")), ValueError)


FLAGS = {"backend": config_file.FlagType.TEXT, "port": config_file.FlagType.NUMBER}


@SOME
@given(
    raw=garbled_texts(
        b"backend: fake\nport: 5\n", [text.encode("utf-8", "replace") for text in ODD_YAML]
    )
)
def test_a_servers_flags_are_read_from_a_file_or_refused_in_check_message(
    tmp_path: Path, raw: bytes
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_bytes(raw)
    check_message(lambda: config_file.read_config_file(file, FLAGS), model.ConfigError)


ROW = {"question": "1 + 1?", "answer": {"value": [2]}}


@SOME
@given(raw=garbled(ROW))
@example(raw=b'{"question": "a", "x": NaN}')
@example(raw=b'{"question": "a", "x": 1e999}')
@example(raw=b'{"question": "a", "\\ud800": 1}')
def test_a_dataset_is_read_and_can_be_sent_or_is_refused_in_check_message(
    tmp_path: Path, raw: bytes
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROW).encode() + b"\n" + raw + b"\n")

    def read() -> None:
        for task in read_tasks(file, "question"):
            json.dumps(task.model_dump(), allow_nan=False, ensure_ascii=False).encode()

    check_message(read)


@SOME
@given(raw=garbled({"epoch": 0, "task_id": "t"}))
def test_the_state_of_a_replay_is_read_or_refused_in_check_message(
    tmp_path: Path, raw: bytes
) -> None:
    file = tmp_path / "state.jsonl"
    file.write_bytes(b'{"epoch":0,"task_id":"a"}\n' + raw + b"\n")
    check_message(lambda: Progress(file, fresh=False).close())


def test_a_job_with_many_aliases_is_refused_before_they_are_expanded() -> None:
    with pytest.raises(ValueError, match="aliases"):
        TrainJob.from_yaml(yaml_bomb(40))
    assert yaml.safe_load(yaml_bomb(3))["job"]
