import json
from pathlib import Path

import pytest

from fakevllm.errors import ConfigError
from fakevllm.tasks import TaskIndex, read_tasks
from fakevllm_adapters.keys import task_key
from fakevllm_adapters.swarm import Task


def index(*texts: str) -> TaskIndex:
    tasks = TaskIndex()
    rows = [Task(task_id=str(i), main_query=text) for i, text in enumerate(texts)]
    tasks.add(rows, by_text=True)
    return tasks


def test_a_task_key_names_its_task_whatever_the_text_says() -> None:
    tasks = index("What is 1 plus 1?", "What is 2 plus 2?")
    found = tasks.find(task_key("1"), "What is 1 plus 1?")
    assert found is not None and found.task_id == "1"


def test_an_ordinary_key_is_looked_up_by_text() -> None:
    found = index("What is 1 plus 1?").find("sk-app", "Please: what is 1  PLUS 1? Thanks")
    assert found is not None and found.task_id == "0"


def test_misses_and_ties_are_counted_and_give_no_task() -> None:
    tasks = index("one apple", "two pears", "two pears")
    assert tasks.find(None, "no fruit") is None
    assert tasks.find(None, "I have two pears") is None
    assert tasks.find(None, "one apple and two pears") is None
    assert tasks.counts == {"miss": 1, "tie": 2}


def test_a_row_inside_a_longer_row_does_not_make_a_tie() -> None:
    found = index("what is 1", "what is 1 plus 2").find(None, "so what is 1 plus 2 then")
    assert found is not None and found.task_id == "1"


def test_without_a_text_index_nothing_is_looked_up_or_counted() -> None:
    tasks = TaskIndex()
    tasks.add([Task(task_id="0", main_query="hello")])
    assert tasks.find("sk-app", "hello") is None
    assert not tasks.counts


def test_rows_become_tasks_with_the_whole_row_as_metadata(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "q1", "answer": "a1"}, {"question": "q2", "answer": "a2"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tasks = read_tasks(file, "question")
    assert [task.main_query for task in tasks] == ["q1", "q2"]
    assert tasks[1].metadata["answer"] == "a2"
    assert [task.task_id for task in read_tasks(file, "question")] == [t.task_id for t in tasks]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1, is not JSON"),
        ('{"q": 1}', "no text field 'question' .its fields: q.: set --field"),
        ("[1]", "no text field 'question'"),
    ],
)
def test_a_bad_dataset_names_the_line_and_the_mend(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_tasks(file, "question")


def test_a_missing_dataset_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tasks(tmp_path / "none.jsonl", "question")
