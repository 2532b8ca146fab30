import asyncio
from pathlib import Path

import pytest

from fakevllm.errors import ConfigError
from fakevllm.replay.pace import has_room, room_at
from fakevllm.replay.patience import Patience
from fakevllm.replay.play import Played, play
from fakevllm.replay.players import AppPlayer, RowFailed, RowInterrupted
from fakevllm.replay.progress import Progress
from fakevllm.replay.proxy import first_model, register
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task
from tests.proxy.odd_swarm import OddSwarm, until

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
    for num_done in (1, 2, 3):  # each start finds what the one before noted
        progress = Progress(state, fresh=False)
        assert progress.num_done == num_done
        progress.note(num_done, TASKS[1], failed=None)
        progress.close()


def test_a_file_that_is_no_state_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("my novel\nchapter one")
    with pytest.raises(ConfigError, match="is not the state of a replay: set --state"):
        Progress(state, fresh=False)
    assert state.read_text() == "my novel\nchapter one"
    with pytest.raises(ConfigError, match="cannot be used"):
        Progress(tmp_path, fresh=False)


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


async def test_a_row_whose_way_stays_cut_is_not_done() -> None:
    rows = [(0, TASKS[0])]
    (cut,) = [end async for end in play(rows, Flaky(), lambda _: "", 1, patience_s=0.0)]
    assert cut.failed == "connection refused" and not cut.is_done


async def test_a_row_that_was_refused_is_done() -> None:
    class Refusing:
        async def play(self, question: str, key: str) -> str:
            raise RowFailed("too long")

    (end,) = [end async for end in play([(0, TASKS[0])], Refusing(), lambda _: "", 1)]
    assert end.failed == "too long" and end.is_done


async def test_a_row_waits_for_room() -> None:
    room, player = asyncio.Event(), Flaky()
    ends = play([(0, TASKS[0])], player, lambda _: "", 1, room)
    first = asyncio.ensure_future(anext(ends))
    await asyncio.wait([first], timeout=0.05)
    assert not player.tries
    room.set()
    assert (await first).is_done


def test_patience_begins_with_the_first_cut_and_leaves_waiting_for_room_out() -> None:
    patience = Patience(120.0)
    patience.leave_out(1_000.0)
    assert patience.outlasts_cut(at_s=5_000.0)
    assert patience.outlasts_cut(at_s=5_119.0)
    patience.leave_out(600.0)
    assert patience.outlasts_cut(at_s=5_719.0)
    assert not patience.outlasts_cut(at_s=5_721.0)


@pytest.mark.parametrize(
    ("status", "backlog", "expected"),
    [
        (EngineStatus.ROLLING, 0.9, True),
        (EngineStatus.ROLLING, 1.0, False),
        (EngineStatus.BOOTING, 3.0, False),
        (EngineStatus.OFFLINE, 3.0, True),
    ],
)
def test_a_full_backlog_holds_rows_back_unless_no_engine_works_it_off(
    status: EngineStatus, backlog: float, expected: bool
) -> None:
    assert has_room(EngineStatusReply(engine_status=status, backlog=backlog)) is expected


async def test_what_a_replay_asks_the_proxy_carries_its_key() -> None:
    async with OddSwarm() as proxy:
        proxy.answers |= {
            "/fakevllm/tasks": {"keys": ["ka", "kb", "kc"]},
            "/v1/models": {"data": [{"id": "m"}]},
        }
        assert await register(f"{proxy.url}/v1", TASKS, "sk-1") == dict(a="ka", b="kb", c="kc")
        assert proxy.headers["Authorization"] == "Bearer sk-1"
        proxy.headers = {}
        assert await first_model(f"{proxy.url}/v1", "sk-1") == "m"
        assert proxy.headers["Authorization"] == "Bearer sk-1"
        proxy.headers = {}
        async with room_at(f"{proxy.url}/v1", "sk-1"):
            await until(lambda: proxy.calls["/fakevllm/engine"] > 0)
        assert proxy.headers["Authorization"] == "Bearer sk-1"


async def test_a_proxy_that_asks_for_a_key_is_named_with_the_flag() -> None:
    async with OddSwarm() as proxy:
        proxy.answers |= {"/fakevllm/tasks": 401, "/v1/models": 401}
        with pytest.raises(ConfigError, match="--key"):
            await register(f"{proxy.url}/v1", TASKS)
        with pytest.raises(ConfigError, match="--key"):
            await first_model(f"{proxy.url}/v1")


async def test_a_server_that_is_no_proxy_is_not_told_to_be_started() -> None:
    async with OddSwarm() as server:
        server.answers["/fakevllm/tasks"] = 404
        with pytest.raises(ConfigError) as refused:
            await register(f"{server.url}/v1", TASKS)
    told = f"{server.url}/v1 answers with status 404, as no fakevllm proxy does: set --url."
    assert str(refused.value) == told


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
