"""The YAML file of `fakevllm train`: its settings, and one-line errors that name the fix."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fakevllm.errors import ConfigError, UserError
from fakevllm.processes import supervisor
from fakevllm.runtime.local_engines import ENGINE_PAIRS
from fakevllm.train.command import run_train
from fakevllm.train.config import ServerSection, TrainSection, load
from fakevllm.train.training_inputs import load_inputs
from fakevllm_server.training import loop

ROOT = Path(__file__).parents[3]
AGENT = """
from fakevllm import Task

def run(task, access):
    return 1.0

def tasks():
    return [Task(task_id=str(number)) for number in range(4)]

def numbers():
    return [1, 2]

def twins():
    return [Task(task_id="a"), Task(task_id="a")]

def broken():
    raise OSError("no network")

answer = 42
"""
VALID: dict[str, dict[str, Any]] = {
    "job": {"batch_size": 2, "num_repeat": 2, "total_training_steps": 3},
    "train": {"workflow": "agent.py:run", "dataset": "rows.jsonl"},
}


def write_file(folder: Path, **sections: Any) -> Path:
    """Write the valid file with some sections replaced, and the files that it names. None removes a
    section."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "bad.py").write_text("import no_such_module\n")
    (folder / "rows.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    (folder / "rows.csv").write_text("question,answer\na,1\n")
    (folder / "empty.jsonl").write_text("")
    file = folder / "night.yaml"
    content = {name: value for name, value in {**VALID, **sections}.items() if value is not None}
    file.write_text(yaml.safe_dump(content))
    return file


def train_section(**changed: Any) -> dict[str, Any]:
    return {**VALID["train"], **changed}


def test_paths_are_relative_to_the_file_and_the_run_directory_to_the_current_folder(
    tmp_path: Path,
) -> None:
    settings = load(write_file(tmp_path))
    inputs = load_inputs(settings)
    assert [task.main_query for task in inputs.tasks] == ["a", "b"]
    assert inputs.workflow(None, None) == 1.0 and inputs.num_steps == 3
    assert settings.run_dir == Path("runs/night")


@pytest.mark.parametrize(("dataset", "num_tasks"), [("rows.csv", 1), ("agent.py:tasks", 4)])
def test_tasks_come_from_a_csv_file_or_a_function(
    tmp_path: Path, dataset: str, num_tasks: int
) -> None:
    settings = load(write_file(tmp_path, train=train_section(dataset=dataset)))
    assert len(load_inputs(settings).tasks) == num_tasks


def test_the_server_gets_the_number_of_steps_and_has_time_to_save_the_last_one(
    tmp_path: Path,
) -> None:
    job = {"batch_size": 1, "num_repeat": 2}
    inputs = load_inputs(load(write_file(tmp_path, job=job, train=train_section(epochs=2))))
    assert inputs.job.total_training_steps == inputs.num_steps == 4
    assert supervisor.STOP_GRACE_S > loop.STEP_GRACE_S + loop.SAVE_GRACE_S


def test_an_agentjet_job_is_accepted_beside_sections_of_other_programs(tmp_path: Path) -> None:
    ajet = {"rollout": {"num_repeat": 6}, "trainer_common": {"total_training_steps": 9}}
    settings = load(write_file(tmp_path, job=None, ajet=ajet, trinity={"any": 1}))
    assert (settings.job.num_repeat, settings.job.total_training_steps) == (6, 9)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": None}, "no section `train`"),
        ({"job": None}, "with the key `job`"),
        ({"jobs": {}}, "Unknown key `jobs`.*the known keys are job, train, server"),
        ({"job": {"lrr": 1}}, "lrr is no setting of a job: take it out"),
        ({"job": {"n_gpu": 3}}, "n_gpu 3 does not divide"),
        ({"job": {"num_repeat": 1}}, "a group needs at least two episodes"),
        ({"job": {"lockstep": True}}, "lockstep works only for requests through a proxy"),
        (
            {
                "job": {
                    "swarm_mode_sample_collection_method": "rollout_until_any_client_agree_"
                    "sync_weight"
                }
            },
            "waits for clients to agree",
        ),
        ({"job": {}}, "The length of the training is not set"),
        ({"train": train_section(epoch=1)}, r"Unknown key `train\.epoch`"),
        ({"train": {"worfklow": "agent.py:run", "dataset": "rows.jsonl"}}, "`train.worfklow`"),
        (
            {"server": {"url": "gpu-box:10086"}},
            r"`server\.url`.*as http://HOST:PORT .got 'gpu-box:10086'",
        ),
        (
            {"train": train_section(max_parallel=0)},
            r"`train\.max_parallel`.*greater than or equal to 1",
        ),
        (
            {"train": train_section(workflow="agent.run")},
            "names no function: write the file and the function",
        ),
        ({"train": train_section(workflow="agnt.py:run")}, "There is no file .*agnt.py"),
        ({"train": train_section(workflow="agent.py:rum")}, "no function 'rum': it has run, tasks"),
        ({"train": train_section(workflow="agent.py:answer")}, "no function 'answer'"),
        (
            {"train": train_section(workflow="agent.py:tasks")},
            r"called as run\(task, access\): too many",
        ),
        (
            {"train": train_section(workflow="agent.py:Task")},
            r"cannot be called as run\(task, access\)",
        ),
        (
            {"train": train_section(workflow="bad.py:run")},
            "ModuleNotFoundError: No module named 'no_such_",
        ),
        ({"train": train_section(dataset="row.jsonl")}, "row.jsonl cannot be read"),
        ({"train": train_section(field="text")}, "no text field 'text'.*`field`"),
        ({"train": train_section(dataset="empty.jsonl")}, "has no rows"),
        ({"train": train_section(dataset="agent.py:numbers")}, "must return tasks"),
        ({"train": train_section(dataset="agent.py:twins")}, "two tasks with the task_id 'a'"),
        ({"train": train_section(dataset="agent.py:broken")}, "raised OSError: no network"),
        ({"server": {"backend": "gpu"}}, r"`server\.backend`.*'embedded', 'vllm'"),
        ({"server": {"url": ""}}, r"`server\.url`.*as http://HOST:PORT"),
        ({"server": [1]}, "`server` in .* must be a section: write `server:` and its keys"),
        ({"ajet": {}}, "or AgentJet's `ajet`, not both"),
        ({"server": {"url": "http://h:1", "model": "demo"}}, "a running server: remove model"),
    ],
)
def test_a_mistake_in_the_file_is_a_one_line_error(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_inputs(load(write_file(tmp_path, **sections)))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_broken_yaml_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_text("job: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load(tmp_path / "odd.yaml")


def test_the_file_in_the_docs_loads_and_has_every_key(tmp_path: Path) -> None:
    text = (ROOT / "docs/agents.md").read_text()
    page = text.partition("## One machine, one command\n")[2]
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    write_file(tmp_path)
    (tmp_path / "shown.yaml").write_text(shown)
    load(tmp_path / "shown.yaml")
    keys = {*TrainSection.model_fields, *ServerSection.model_fields}
    assert [key for key in keys if f" {key}: " not in shown] == []


def test_the_servers_url_may_contain_a_name_and_a_key(tmp_path: Path) -> None:
    settings = load(write_file(tmp_path, server={"url": "http://me:sk@host:1"}))
    assert settings.server.url == "http://me:sk@host:1"


def test_the_file_accepts_every_backend_of_the_server() -> None:
    assert set(get_args(ServerSection.model_fields["backend"].annotation)) == set(ENGINE_PAIRS)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="the engine is installed here")
def test_a_missing_engine_is_reported_before_a_dataset_is_loaded(
    tmp_path: Path,
) -> None:
    slow = train_section(dataset="agent.py:broken")
    with pytest.raises(UserError, match="vllm engine needs vllm, not installed"):
        run_train(write_file(tmp_path, train=slow, server={"backend": "vllm"}))
