"""Look-up of a request's task by key and by text."""

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.task_index import TaskIndex, TextIndex
from fakevllm_adapters.protocol.keys import task_key
from fakevllm_adapters.protocol.swarm import Task


def index(*texts: str) -> TaskIndex:
    tasks = TaskIndex()
    rows = [Task(task_id=str(i), main_query=text) for i, text in enumerate(texts)]
    tasks.add(rows, by_text=True)
    return tasks


def test_a_task_key_names_its_task_whatever_the_text_says() -> None:
    tasks = index("What is 1 plus 1?", "What is 2 plus 2?")
    task = tasks.find(task_key("1"), "What is 1 plus 1?")
    assert task is not None and task.task_id == "1"


def test_an_ordinary_key_is_looked_up_by_text() -> None:
    task = index("What is 1 plus 1?").find("sk-app", "Please: what is 1  PLUS 1? Thanks")
    assert task is not None and task.task_id == "0"


def test_misses_and_ties_are_counted_and_return_no_task() -> None:
    tasks = index("one apple", "two pears", "two pears")
    assert tasks.find(None, "no fruit") is None
    assert tasks.find(None, "I have two pears") is None
    assert tasks.find(None, "one apple and two pears") is None
    assert tasks.counts == {"miss": 1, "tie": 2}


def test_a_row_inside_a_longer_row_does_not_make_a_tie() -> None:
    task = index("what is 1", "what is 1 plus 2").find(None, "so what is 1 plus 2 then")
    assert task is not None and task.task_id == "1"


def test_without_a_text_index_nothing_is_looked_up_or_counted() -> None:
    tasks = TaskIndex()
    tasks.add([Task(task_id="0", main_query="hello")])
    assert tasks.find("sk-app", "hello") is None
    assert not tasks.counts


LETTERS = st.text("ab ", min_size=1, max_size=40)


@given(st.lists(LETTERS, max_size=20), LETTERS, st.data())
def test_the_index_finds_the_same_rows_as_a_scan_of_all_rows(
    rows: list[str], around: str, data: st.DataObject
) -> None:
    quoted = data.draw(st.sampled_from(rows)) if rows else ""
    text = around + quoted + around
    index = TextIndex()
    for row in rows:
        index.add(row)
    assert index.contained_rows(text) == {row for row in rows if row in text}


def test_rows_of_equal_beginning_are_not_scanned_one_by_one() -> None:
    class Text(str):
        """A text that counts the searches in it."""

        num_searches = 0

        def __contains__(self, key: str) -> bool:
            Text.num_searches += 1
            return super().__contains__(key)

    index = TextIndex()
    for number in range(5_000):
        index.add(f"what is the sum of {number} and one?")
    text = Text("so, what is the sum of 4999 and one? thanks")
    assert index.contained_rows(text) == {"what is the sum of 4999 and one?"}
    assert Text.num_searches == 0


def test_a_key_is_known_if_its_task_is_registered() -> None:
    tasks = index("one")
    assert tasks.key("0") == "sk-task-0"
    assert tasks.knows("sk-task-0")
    assert not any(map(tasks.knows, (None, "", "sk-app", "sk-task-", "sk-task-1")))


def test_with_a_secret_only_signed_keys_name_a_task() -> None:
    tasks, others = TaskIndex(b"ours"), TaskIndex(b"theirs")
    for one in (tasks, others):
        one.add([Task(task_id="rows.v1-7", main_query="hello")])
    key = tasks.key("rows.v1-7")
    assert key.startswith("sk-task-rows.v1-7.") and len(key.rpartition(".")[2]) == 16
    task = tasks.find(key, "")
    assert tasks.knows(key) and task is not None and task.task_id == "rows.v1-7"
    for wrong in (others.key("rows.v1-7"), "sk-task-rows.v1-7", "sk-task-.", "sk-task-é.é"):
        assert not tasks.knows(wrong) and tasks.find(wrong, "hello") is None
