import asyncio
from pathlib import Path

import pytest

from fakevllm.errors import ConfigError
from fakevllm.replay.play import Played, play
from fakevllm.replay.players import AppPlayer, RowFailed, RowInterrupted
from fakevllm.replay.progress import Progress
from fakevllm_adapters.swarm import Task

TASKS = [Task(task_id=name, main_query=f"say {name}") for name in "abc"]
URL = "http://127.0.0.1:9/v1"


def test_done_rows_are_not_played_again_after_a_restart(tmp_path: Path) -> None:
    first = Progress(tmp_path / "state", fresh=False)
    first.note(0, TASKS[0], failed=None)
    first.note(0, TASKS[2], failed="no answer")
    first.close()
    again = Progress(tmp_path / "state", fresh=False)
    assert [(e, t.task_id) for e, t in again.remaining(TASKS, epochs=2)] == [
        (0, "b"),
        (1, "a"),
        (1, "b"),
        (1, "c"),
    ]
    again.close()


def test_a_torn_note_is_a_row_to_be_played(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(b'{"epoch": 0, "task_id": "a"}\n{"epoch": 0, "ta')
    progress = Progress(state, fresh=False)
    assert progress.num_done == 1
    progress.close()


def test_fresh_forgets(tmp_path: Path) -> None:
    for fresh in (False, True):
        progress = Progress(tmp_path / "state", fresh=fresh)
        assert len(progress.remaining(TASKS, 1)) == 3
        progress.note(0, TASKS[0], failed=None)
        progress.close()


class Flaky:
    """Cuts the first two tries of each row, then answers."""

    def __init__(self) -> None:
        self.tries: dict[str, int] = {}

    async def play(self, question: str, key: str) -> str:
        self.tries[question] = self.tries.get(question, 0) + 1
        if self.tries[question] < 3:
            raise RowInterrupted("connection refused")
        return f"{question} with {key}"


async def collected(player: Flaky) -> list[Played]:
    rows = [(0, task) for task in TASKS]
    return [end async for end in play(rows, player, lambda task: task.task_id, concurrency=2)]


async def test_a_cut_connection_is_tried_again_and_every_row_ends_once() -> None:
    ends = await collected(Flaky())
    assert sorted(end.answer or "" for end in ends) == [
        "say a with a",
        "say b with b",
        "say c with c",
    ]


async def test_no_more_rows_run_at_once_than_asked() -> None:
    running, most = 0, 0
    gate = asyncio.Event()

    class Counting:
        async def play(self, question: str, key: str) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 2:
                gate.set()
            await gate.wait()
            running -= 1
            return ""

    async for _ in play([(0, task) for task in TASKS], Counting(), lambda _: "", concurrency=2):
        pass
    assert most == 2


async def test_the_question_goes_into_the_arguments_where_they_ask_for_it() -> None:
    player = AppPlayer.of("printf %s 'Q: {question}'", URL)
    assert await player.play("what; rm -rf", "key") == "Q: what; rm -rf"


async def test_the_question_goes_to_standard_input_otherwise() -> None:
    assert await AppPlayer.of("cat", URL).play("hello", "key") == "hello"


async def test_the_app_is_told_where_to_go_and_with_which_key() -> None:
    player = AppPlayer.of("sh -c 'echo $OPENAI_BASE_URL $OPENAI_API_KEY'", URL)
    assert await player.play("", "sk-task-7") == f"{URL} sk-task-7\n"


async def test_an_app_that_fails_fails_its_row_with_its_last_words() -> None:
    player = AppPlayer.of("sh -c 'echo first >&2; echo last words >&2; exit 3'", URL)
    with pytest.raises(RowFailed, match="exited with 3: last words"):
        await player.play("", "key")


async def test_an_app_that_does_not_exist_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match="'no-such-app' cannot be run"):
        await AppPlayer.of("no-such-app", URL).play("", "key")
