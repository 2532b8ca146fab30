"""The file of `fakevllm train`: a mistake in it is one line that names the mend."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fakevllm.errors import ConfigError, UserError
from fakevllm.runtime import supervisor
from fakevllm.runtime.engine_choice import ENGINE_PAIRS
from fakevllm.train.command import material_of, run_train
from fakevllm.train.config import ServerSection, TrainSection, load
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
GOOD: dict[str, dict[str, Any]] = {
    "job": {"batch_size": 2, "num_repeat": 2, "total_training_steps": 3},
    "train": {"workflow": "agent.py:run", "dataset": "rows.jsonl"},
}


def written(folder: Path, **sections: Any) -> Path:
    """The good file, with some sections in the place of its own."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "bad.py").write_text("import no_such_module\n")
    (folder / "rows.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    (folder / "rows.csv").write_text("question,answer\na,1\n")
    (folder / "empty.jsonl").write_text("")
    file = folder / "night.yaml"
    whole = {**GOOD, **sections}
    file.write_text(yaml.safe_dump({name: one for name, one in whole.items() if one is not None}))
    return file


def train(**changed: Any) -> dict[str, Any]:
    return {**GOOD["train"], **changed}


def test_files_lie_beside_the_yaml_and_the_run_below_where_the_command_runs(tmp_path: Path) -> None:
    settings = load(written(tmp_path))
    material = material_of(settings)
    assert [task.main_query for task in material.tasks] == ["a", "b"]
    assert material.workflow(None, None) == 1.0 and material.num_steps == 3
    assert settings.run_dir == Path("runs/night")


@pytest.mark.parametrize(("dataset", "num_tasks"), [("rows.csv", 1), ("agent.py:tasks", 4)])
def test_tasks_come_from_a_table_or_a_function(
    tmp_path: Path, dataset: str, num_tasks: int
) -> None:
    settings = load(written(tmp_path, train=train(dataset=dataset)))
    assert len(material_of(settings).tasks) == num_tasks


def test_the_server_knows_which_step_is_the_last_and_so_saves_it(tmp_path: Path) -> None:
    job = {"batch_size": 1, "num_repeat": 2}
    material = material_of(load(written(tmp_path, job=job, train=train(epochs=2))))
    assert material.job.total_training_steps == material.num_steps == 4
    assert supervisor.STOP_GRACE_S > loop.STEP_GRACE_S + loop.SAVE_GRACE_S


def test_a_job_may_be_agentjets_beside_sections_of_other_programs(tmp_path: Path) -> None:
    ajet = {"rollout": {"num_repeat": 6}, "trainer_common": {"total_training_steps": 9}}
    settings = load(written(tmp_path, job=None, ajet=ajet, trinity={"any": 1}))
    assert (settings.job.num_repeat, settings.job.total_training_steps) == (6, 9)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": None}, "no section `train`"),
        ({"job": None}, "with the key `job`"),
        ({"jobs": {}}, "Unknown key `jobs`.*known here are job, train, server"),
        ({"job": {"lrr": 1}}, "lrr is no setting of a job: take it out"),
        ({"job": {"n_gpu": 3}}, "n_gpu 3 does not divide"),
        ({"job": {"num_repeat": 1}}, "a single episode is compared with nothing"),
        ({"job": {"lockstep": True}}, "lockstep trains what a proxy asks"),
        (
            {
                "job": {
                    "swarm_mode_sample_collection_method": "rollout_until_any_client_agree_"
                    "sync_weight"
                }
            },
            "waits for clients to agree",
        ),
        ({"job": {}}, "Nothing says when training ends"),
        ({"train": train(epoch=1)}, r"Unknown key `train\.epoch`"),
        ({"train": {"worfklow": "agent.py:run", "dataset": "rows.jsonl"}}, "`train.worfklow`"),
        (
            {"server": {"url": "gpu-box:10086"}},
            r"`server\.url`.*as http://HOST:PORT .got 'gpu-box:10086'",
        ),
        ({"train": train(max_parallel=0)}, r"`train\.max_parallel`.*greater than or equal to 1"),
        ({"train": train(workflow="agent.run")}, "names no function: write a file and its name"),
        ({"train": train(workflow="agnt.py:run")}, "There is no file .*agnt.py"),
        ({"train": train(workflow="agent.py:rum")}, "no function 'rum': it has run, tasks"),
        ({"train": train(workflow="agent.py:answer")}, "no function 'answer'"),
        ({"train": train(workflow="agent.py:tasks")}, r"called as run\(task, access\): too many"),
        ({"train": train(workflow="agent.py:Task")}, r"cannot be called as run\(task, access\)"),
        ({"train": train(workflow="bad.py:run")}, "ModuleNotFoundError: No module named 'no_such_"),
        ({"train": train(dataset="row.jsonl")}, "row.jsonl cannot be read"),
        ({"train": train(field="text")}, "no text field 'text'.*`field`"),
        ({"train": train(dataset="empty.jsonl")}, "has no row"),
        ({"train": train(dataset="agent.py:numbers")}, "must make tasks"),
        ({"train": train(dataset="agent.py:twins")}, "two tasks with the task_id 'a'"),
        ({"train": train(dataset="agent.py:broken")}, "raised OSError: no network"),
        ({"server": {"backend": "gpu"}}, r"`server\.backend`.*'embedded', 'vllm'"),
        ({"server": {"url": ""}}, r"`server\.url`.*as http://HOST:PORT"),
        ({"server": [1]}, "`server` in .* is a section: write `server:` and its keys"),
        ({"ajet": {}}, "or AgentJet's `ajet`, not both"),
        ({"server": {"url": "http://h:1", "model": "demo"}}, "runs already: take out model"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        material_of(load(written(tmp_path, **sections)))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_yaml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_text("job: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load(tmp_path / "odd.yaml")


def test_the_shown_file_loads_and_has_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs/agents.md").read_text()
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    written(tmp_path)
    (tmp_path / "shown.yaml").write_text(shown)
    load(tmp_path / "shown.yaml")
    keys = {*TrainSection.model_fields, *ServerSection.model_fields}
    assert [key for key in keys if f" {key}: " not in shown] == []


def test_a_servers_address_may_hold_a_name_and_a_key(tmp_path: Path) -> None:
    settings = load(written(tmp_path, server={"url": "http://me:sk@host:1"}))
    assert settings.server.url == "http://me:sk@host:1"


def test_the_file_knows_the_servers_pairs_of_engines() -> None:
    assert set(get_args(ServerSection.model_fields["backend"].annotation)) == set(ENGINE_PAIRS)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="here the engine is installed")
def test_an_engine_that_is_not_installed_is_told_before_a_dataset_is_fetched(
    tmp_path: Path,
) -> None:
    far = train(dataset="agent.py:broken")
    with pytest.raises(UserError, match="vllm engine needs vllm, not installed"):
        run_train(written(tmp_path, train=far, server={"backend": "vllm"}))
