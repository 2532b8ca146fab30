"""Look-up of a request's task by key and by text."""

import re

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.admission.task_index import TaskIndex, TextIndex, normalised
from fakevllm_adapters.protocol.keys import KeyRing, fingerprint, named_key, task_key
from fakevllm_adapters.protocol.swarm import Task


def index(*texts: str) -> TaskIndex:
    tasks = TaskIndex()
    rows = [Task(task_id=str(i), main_query=text) for i, text in enumerate(texts)]
    tasks.add_dataset(rows)
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


@given(st.text(st.characters() | st.sampled_from(" \t\n\x1c\x85\u2003")))
def test_normalising_replaces_each_run_of_white_space_by_a_space(text: str) -> None:
    assert normalised(text) == re.sub(r"\s+", " ", text).strip().lower()


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


def test_a_proxy_without_keys_accepts_signed_and_unsigned_task_keys() -> None:
    tasks, others = TaskIndex(b"ours"), TaskIndex(b"theirs")
    for one in (tasks, others):
        one.add([Task(task_id="rows.v1-7", main_query="hello")])
    key = tasks.key("rows.v1-7")
    assert key.startswith("sk-task-rows.v1-7.") and len(key.rpartition(".")[2]) == 16
    for valid in (key, tasks.key("rows.v1-7", fingerprint("sk-a")), "sk-task-rows.v1-7"):
        task = tasks.find(valid, "")
        assert tasks.knows(valid) and task is not None and task.task_id == "rows.v1-7"
    for wrong in (others.key("rows.v1-7"), "sk-task-.", "sk-task-é.é"):
        assert not tasks.knows(wrong) and tasks.find(wrong, "hello") is None


ALICE, BOB = fingerprint("sk-alice"), fingerprint("sk-bob")


class TeamKeys(KeyRing):
    """A key ring in which each key has a name. A test can replace the keys."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.set(*keys)

    def set(self, *keys: str) -> None:
        self._replace_keys([named_key(key, key.removeprefix("sk-"), "2026-01-01") for key in keys])


def team_tasks() -> tuple[TaskIndex, TeamKeys]:
    keys = TeamKeys("sk-alice", "sk-bob")
    return TaskIndex(b"secret", keys), keys


def test_a_task_key_is_valid_as_long_as_the_key_that_registered_it() -> None:
    tasks, keys = team_tasks()
    assert (tasks.owner_of("sk-alice"), tasks.owner_of(None)) == (ALICE, None)
    tasks.add([Task(task_id="t.1")], ALICE)
    key = tasks.key("t.1", ALICE)
    assert tasks.knows(key) and tasks.find(key, "") == Task(task_id="t.1")
    keys.set("sk-bob")
    assert not tasks.knows(key) and tasks.find(key, "") is None
    keys.set("sk-alice")
    assert tasks.knows(key)


def test_with_required_keys_no_task_key_without_a_registering_key_is_valid() -> None:
    tasks, _ = team_tasks()
    tasks.add([Task(task_id="t")])
    tasks.add([Task(task_id="bobs")], BOB)
    imitations = ("sk-task-t", f"sk-task-t.{ALICE}", tasks.key(f"t.{ALICE}"))
    for key in (tasks.key("t"), tasks.key("t", ALICE), tasks.key("bobs", ALICE), *imitations):
        assert not tasks.knows(key)
    assert tasks.knows(tasks.key("bobs", BOB))


def test_a_task_key_has_the_names_of_the_key_that_registered_it() -> None:
    tasks, keys = team_tasks()
    key = tasks.key("t", ALICE)
    assert tasks.registering_key(key) == ALICE
    assert tasks.key_names(key) == ("alice", ALICE, fingerprint(key))
    assert tasks.key_names("sk-bob") == ("bob", BOB)
    assert tasks.key_names(None) == ()
    for other in ("sk-alice", "sk-task-t", tasks.key("t"), None):
        assert tasks.registering_key(other) is None
    keys.set("sk-bob")
    assert tasks.registering_key(key) == ALICE  # open calls keep the name that they are counted by


def test_only_the_key_that_registered_a_task_may_replace_it() -> None:
    tasks, keys = team_tasks()
    mine, poison = Task(task_id="t"), Task(task_id="t", metadata={"answer": "wrong"})
    tasks.add([mine], ALICE)
    assert tasks.ids_of_others([poison, Task(task_id="new")], BOB) == ["t"]
    assert tasks.ids_of_others([mine], BOB) == ["t"]
    assert tasks.ids_of_others([poison], ALICE) == []
    keys.set("sk-bob")  # the id of a revoked key is free again
    assert tasks.ids_of_others([poison], BOB) == []
    tasks.add([poison], BOB)
    keys.set("sk-alice", "sk-bob")
    assert not tasks.knows(tasks.key("t", ALICE)) and tasks.knows(tasks.key("t", BOB))


def test_every_key_may_register_rows_of_the_dataset_and_no_key_may_change_them() -> None:
    tasks, _ = team_tasks()
    row, poison = Task(task_id="t", main_query="one"), Task(task_id="t", main_query="two")
    tasks.add_dataset([row])
    for owner in (ALICE, BOB):
        assert tasks.ids_of_others([row], owner) == []
        tasks.add([row], owner)
        assert tasks.ids_of_others([poison], owner) == ["t"]
    assert tasks.knows(tasks.key("t", ALICE)) and tasks.knows(tasks.key("t", BOB))


def test_without_required_keys_tasks_belong_to_nobody() -> None:
    tasks = TaskIndex(b"secret", KeyRing())
    assert tasks.owner_of("sk-any") is None
    tasks.add([Task(task_id="t")], tasks.owner_of("sk-any"))
    assert tasks.ids_of_others([Task(task_id="t", main_query="new")], None) == []
