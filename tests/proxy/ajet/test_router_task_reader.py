"""AgentJet's task reader and its sources."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fakevllm.ajet import (
    AjetTaskReader,
    HuggingfaceDatRepo,
    JsonlDatasetFile,
    JsonlTrainingFp,
    RouterTaskReader,
    Task,
    WorkflowTask,
)
from fakevllm.errors import ConfigError


def write_rows(file: Path, *rows: Any) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def jsonl_reader(training: str = "", validation: str = "") -> RouterTaskReader:
    files = JsonlDatasetFile(JsonlTrainingFp(training), JsonlTrainingFp(validation))
    return RouterTaskReader("jsonl_dataset_file", AjetTaskReader(jsonl_dataset_file=files))


def ids(tasks: Any) -> list[str]:
    return [task.task_id for task in tasks]


def test_the_dummy_tasks_are_numbered_and_have_the_same_order_everywhere() -> None:
    reader = RouterTaskReader("random_dummy", AjetTaskReader())
    tasks = list(reader.generate_training_tasks())
    by_id = {task.task_id: task for task in tasks}
    assert len(tasks) == len(by_id) == 1000
    assert by_id["7"] == Task(
        main_query="[dummy task @ 7]", task_id="7", metadata={"random_number": 7}
    )
    assert ids(tasks) != sorted(ids(tasks), key=int)
    another = RouterTaskReader(reader_type="random_dummy", reader_config=AjetTaskReader())
    assert ids(another.generate_validation_tasks()) == ids(tasks)


def test_the_getters_shuffle_and_the_generators_keep_the_order() -> None:
    reader = RouterTaskReader("random_dummy", AjetTaskReader())
    order = ids(reader.generate_training_tasks())
    random.seed(1)
    first, second = ids(reader.get_training_tasks()), ids(reader.get_validation_tasks())
    assert first != order and first != second
    assert sorted(first) == sorted(second) == sorted(order)
    random.seed(1)
    assert ids(reader.get_training_tasks()) == first
    assert ids(reader.generate_training_tasks()) == order


def test_a_row_of_a_jsonl_file_may_have_all_fields_of_a_task(tmp_path: Path) -> None:
    whole = {
        "main_query": "1+1",
        "task_id": "sum",
        "init_messages": [{"role": "system", "content": "Sums."}],
        "env_type": "math",
        "metadata": {"answer": "2"},
    }
    numbered = {"main_query": "3+3", "task_id": 7, "metadata": None}
    file = write_rows(tmp_path / "tasks.jsonl", whole, numbered)
    first, second = jsonl_reader(file).generate_training_tasks()
    assert first == Task.model_validate(whole)
    assert (second.task_id, second.metadata) == ("7", numbered)


def test_a_row_with_only_a_query_gets_an_id_and_becomes_the_metadata(tmp_path: Path) -> None:
    rows = [{"main_query": "1+1", "answer": "2"}, {"question": "1+1", "answer": "two"}]
    file = write_rows(tmp_path / "tasks.jsonl", *rows)
    reader = jsonl_reader(validation=file)
    tasks = list(reader.generate_validation_tasks())
    assert [(task.main_query, task.metadata) for task in tasks] == [("1+1", row) for row in rows]
    assert len(set(ids(tasks))) == 2 and ids(reader.generate_validation_tasks()) == ids(tasks)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "2+2"}, r"has no field main_query or question \(its fields: text\)"),
        ({"main_query": 4}, "is no task: main_query: Input should be a valid string, got 4"),
        ({"main_query": "2+2", "metadata": "4"}, "is no task: metadata: Input should be a valid"),
        ({"main_query": "2+2", "task_id": "a"}, "the same task_id as line 1 and another query"),
    ],
)
def test_a_row_that_is_no_task_is_reported_with_its_line(
    tmp_path: Path, row: Any, problem: str
) -> None:
    file = write_rows(tmp_path / "tasks.jsonl", {"main_query": "1+1", "task_id": "a"}, row)
    with pytest.raises(ConfigError, match=f"tasks.jsonl, line 2, (has )?{problem}"):
        jsonl_reader(file).generate_training_tasks()


def test_a_row_may_occur_several_times_in_a_file(tmp_path: Path) -> None:
    row = {"main_query": "1+1", "task_id": "a"}
    file = write_rows(tmp_path / "tasks.jsonl", row, row)
    assert ids(jsonl_reader(file).generate_training_tasks()) == ["a", "a"]


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    reader = jsonl_reader(training=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read: No such file"):
        reader.generate_training_tasks()
    with pytest.raises(ConfigError, match="file_path is not set"):
        reader.get_validation_tasks()


def test_the_settings_may_be_changed_after_they_were_made(tmp_path: Path) -> None:
    config = AjetTaskReader()
    config.jsonl_dataset_file.training.file_path = write_rows(
        tmp_path / "tasks.jsonl", {"main_query": "1+1"}
    )
    (task,) = RouterTaskReader("jsonl_dataset_file", config).get_training_tasks()
    assert task.main_query == "1+1"


def test_a_folder_with_one_file_per_split_is_a_hugging_face_dataset(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", {"question": "1+1", "answer": "2"})
    repo = HuggingfaceDatRepo(dataset_path=str(tmp_path), validation_split="test")
    reader = RouterTaskReader("huggingface_dat_repo", AjetTaskReader(huggingface_dat_repo=repo))
    (task,) = reader.get_validation_tasks()
    assert (task.main_query, task.metadata["answer"]) == ("1+1", "2")


@pytest.mark.parametrize("reader_type", ["env_service", "tracing", "data_generation"])
def test_agentjets_other_reader_types_are_refused_by_name(reader_type: str) -> None:
    with pytest.raises(ValueError, match=f"'{reader_type}' is not supported: use huggingface_dat"):
        RouterTaskReader(reader_type, AjetTaskReader())


def test_an_unknown_reader_type_is_refused() -> None:
    with pytest.raises(ValueError, match="'jsonl' is not known: use huggingface_dat_repo, jsonl_d"):
        RouterTaskReader("jsonl", AjetTaskReader())


def test_a_workflow_task_has_agentjets_fields() -> None:
    task = Task(task_id="a", main_query="1+1")
    workflow_task = WorkflowTask(task=task)
    assert workflow_task.task == task
    fields = workflow_task.model_dump(exclude={"task"})
    assert fields == {
        "env_type": "",
        "task_id": "",
        "task_thread_index": 0,
        "task_batch_index": 0,
        "task_tag": "",
        "episode_uuid": "",
        "observation_window": {},
        "llm_inference_fn": None,
        "tokenizer": None,
        "gym_env": None,
    }
    assert workflow_task.observation_window is not WorkflowTask().observation_window
