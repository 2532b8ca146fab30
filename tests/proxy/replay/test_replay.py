import asyncio
import json
import re
from pathlib import Path

import pytest

from fakevllm.errors import ConfigError
from fakevllm.replay.backpressure import follow_capacity, has_capacity
from fakevllm.replay.command import ReplaySettings, run_replay
from fakevllm.replay.progress import Progress
from fakevllm.replay.proxy_queries import (
    first_model,
    hook_notice,
    register_tasks,
    training_notice,
)
from fakevllm.replay.retry_deadline import FIRST_PAUSE_S, MAX_PAUSE_S, RetryDeadline
from fakevllm.replay.row_runner import RowResult, play
from fakevllm.replay.row_senders import AppPlayer, RowFailed, RowInterrupted
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task
from tests.proxy.scripted_swarm import ScriptedSwarm, until

TASKS = [Task(task_id=name, main_query=f"say {name}") for name in "abc"]
URL = "http://127.0.0.1:9/v1"


def replay_settings(dataset: Path, app_command: str | None) -> ReplaySettings:
    return ReplaySettings(
        dataset=dataset,
        field="question",
        url=URL,
        app_command=app_command,
        model="m",
        concurrency=None,
        limit=None,
        epochs=1,
        max_tokens=None,
        state=dataset.with_name("state"),
        fresh=False,
    )


USER = {"role": "user", "content": "2 plus 3?"}
NO_REQUESTS: list[tuple[object, str]] = [
    ([USER, {"role": "assistant", "content": "5"}], "end with an answer"),
    ([], "are empty"),
    ("2 plus 3?", "are not a list"),
]


@pytest.mark.parametrize(("messages", "problem"), NO_REQUESTS)
def test_a_row_whose_messages_are_no_request_is_named_before_anything_is_sent(
    tmp_path: Path, messages: object, problem: str
) -> None:
    dataset = tmp_path / "rows.jsonl"
    rows = [{"question": "fine", "messages": [USER]}, {"question": "wrong", "messages": messages}]
    dataset.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(
        ConfigError, match=f"rows.jsonl, the row 'wrong' .*messages` that {problem}"
    ):
        run_replay(replay_settings(dataset, None))
    # An app gets only the question, so the row is fine, and the proxy is contacted.
    with pytest.raises(ConfigError, match=re.escape(URL.removesuffix("/v1"))):
        run_replay(replay_settings(dataset, "cat"))


def test_finished_rows_are_skipped_after_a_restart(tmp_path: Path) -> None:
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


def test_a_half_written_line_of_the_state_file_counts_as_an_unfinished_row(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(b'{"epoch": 0, "task_id": "a"}\n{"epoch": 0, "ta')
    for num_done in (1, 2, 3):  # each start finds what the one before noted
        progress = Progress(state, fresh=False)
        assert progress.num_done == num_done
        progress.note(num_done, TASKS[1], failed=None)
        progress.close()


def test_a_file_that_is_not_a_state_file_is_refused_and_not_changed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("my novel\nchapter one")
    with pytest.raises(ConfigError, match="is not the state of a replay: set --state"):
        Progress(state, fresh=False)
    assert state.read_text() == "my novel\nchapter one"
    with pytest.raises(ConfigError, match="cannot be used"):
        Progress(tmp_path, fresh=False)


def test_fresh_ignores_the_finished_rows(tmp_path: Path) -> None:
    for fresh in (False, True):
        progress = Progress(tmp_path / "state", fresh=fresh)
        assert len(progress.remaining(TASKS, 1)) == 3
        progress.note(0, TASKS[0], failed=None)
        progress.close()


class FlakyPlayer:
    """A player whose connection breaks in the first two attempts of each row."""

    def __init__(self) -> None:
        self.num_attempts: dict[str, int] = {}

    async def play(self, task: Task, key: str) -> str:
        question = task.main_query
        self.num_attempts[question] = self.num_attempts.get(question, 0) + 1
        if self.num_attempts[question] < 3:
            raise RowInterrupted("connection refused")
        return f"{question} with {key}"


async def collect_results(player: FlakyPlayer) -> list[RowResult]:
    rows = [(0, task) for task in TASKS]
    return [result async for result in play(rows, player, lambda task: task.task_id, concurrency=2)]


async def test_a_row_is_retried_after_a_broken_connection_and_ends_once() -> None:
    ends = await collect_results(FlakyPlayer())
    assert sorted(end.answer or "" for end in ends) == [
        "say a with a",
        "say b with b",
        "say c with c",
    ]


async def test_a_row_whose_connection_stays_broken_is_not_done() -> None:
    rows = [(0, TASKS[0])]
    (cut,) = [
        result async for result in play(rows, FlakyPlayer(), lambda _: "", 1, retry_for_s=0.0)
    ]
    assert cut.failed == "connection refused" and not cut.is_done


async def test_a_row_that_failed_is_done() -> None:
    class Refusing:
        async def play(self, task: Task, key: str) -> str:
            raise RowFailed("too long")

    (end,) = [result async for result in play([(0, TASKS[0])], Refusing(), lambda _: "", 1)]
    assert end.failed == "too long" and end.is_done


async def test_a_row_waits_for_capacity() -> None:
    capacity, player = asyncio.Event(), FlakyPlayer()
    ends = play([(0, TASKS[0])], player, lambda _: "", 1, capacity)
    first = asyncio.ensure_future(anext(ends))
    await asyncio.wait([first], timeout=0.05)
    assert not player.num_attempts
    capacity.set()
    assert (await first).is_done


def test_the_deadline_starts_with_the_first_failure_and_excludes_waiting() -> None:
    deadline = RetryDeadline(120.0)
    deadline.exclude_wait(1_000.0)
    assert deadline.may_retry(at_s=5_000.0)
    assert deadline.may_retry(at_s=5_119.0)
    deadline.exclude_wait(600.0)
    assert deadline.may_retry(at_s=5_719.0)
    assert not deadline.may_retry(at_s=5_721.0)


def test_pauses_between_attempts_are_bounded_and_end_at_the_deadline() -> None:
    deadline = RetryDeadline(120.0)
    pauses = [deadline.pause(5_000.0 + number) for number in range(120)]
    assert all(pause is not None and 0 <= pause <= MAX_PAUSE_S for pause in pauses)
    assert pauses[0] is not None and pauses[0] <= FIRST_PAUSE_S
    assert deadline.pause(5_121.0) is None


@pytest.mark.parametrize(
    ("status", "backlog", "expected"),
    [
        (EngineStatus.ROLLING, 0.9, True),
        (EngineStatus.ROLLING, 1.0, False),
        (EngineStatus.BOOTING, 3.0, False),
        (EngineStatus.OFFLINE, 3.0, True),
    ],
)
def test_rows_wait_for_a_full_backlog_only_while_an_engine_is_running(
    status: EngineStatus, backlog: float, expected: bool
) -> None:
    assert has_capacity(EngineStatusReply(engine_status=status, backlog=backlog)) is expected


async def test_every_query_to_the_proxy_carries_the_key() -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers |= {
            "/fakevllm/tasks": {"keys": ["ka", "kb", "kc"]},
            "/v1/models": {"data": [{"id": "m"}]},
        }
        assert await register_tasks(f"{proxy.url}/v1", TASKS, "sk-1") == dict(
            a="ka", b="kb", c="kc"
        )
        assert await first_model(f"{proxy.url}/v1", "sk-1") == "m"
        async with follow_capacity(f"{proxy.url}/v1", "sk-1"):
            await until(lambda: proxy.calls["/fakevllm/engine"] > 0)
        for path in ("/fakevllm/tasks", "/v1/models", "/fakevllm/engine"):
            assert proxy.headers[path]["Authorization"] == "Bearer sk-1"


async def test_a_missing_key_is_reported_with_the_flag_to_set() -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers |= {"/fakevllm/tasks": 401, "/v1/models": 401}
        with pytest.raises(ConfigError, match="--key"):
            await register_tasks(f"{proxy.url}/v1", TASKS)
        with pytest.raises(ConfigError, match="--key"):
            await first_model(f"{proxy.url}/v1")


@pytest.mark.parametrize(
    ("stats", "notice"),
    [
        ({"paused": True, "release": {}}, "These rows will not be trained: paused"),
        ({"has_hooks": False}, "These rows will not be trained: "),
        ({"release": {}, "arms": {}}, "Only some of these rows will be trained: .*canary_share"),
        ({"release": None, "arms": {}}, "Only some of these rows .*baseline_share"),
    ],
)
async def test_a_notice_says_which_rows_are_not_trained(
    stats: dict[str, object], notice: str
) -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/stats"] = stats
        found = await training_notice(proxy.url)
        assert found is not None and re.match(notice, f"{found.text} {found.reason}")
        proxy.answers["/fakevllm/stats"] = {"has_hooks": True, "release": None, "arms": None}
        assert await training_notice(proxy.url) is None


async def test_a_replay_ends_without_a_notice_if_no_hook_failed_or_the_proxy_is_gone() -> None:
    async with ScriptedSwarm() as proxy:
        for stats in ({}, {"hook_failures": None}):
            proxy.answers["/fakevllm/stats"] = stats
            assert await hook_notice(proxy.url) is None
        failed = {"num_failed": 1, "num_groups": 1, "reason": "hook_nan: reward 1 is nan"}
        proxy.answers["/fakevllm/stats"] = {"hook_failures": failed}
        assert "1 of the latest 1 group (hook_nan" in (await hook_notice(proxy.url) or "")
    assert await hook_notice(proxy.url) is None


async def test_an_empty_list_of_models_is_reported_with_the_flag_to_set() -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers |= {"/v1/models": {"data": []}}
        with pytest.raises(ConfigError, match=r"the list is empty.*--model"):
            await first_model(f"{proxy.url}/v1")


async def test_rows_of_another_key_are_reported_with_what_can_be_done() -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/tasks"] = 409
        with pytest.raises(ConfigError, match="registered with another API key: pass that key"):
            await register_tasks(f"{proxy.url}/v1", TASKS, "sk-1")


async def test_a_server_that_is_not_a_proxy_is_reported_as_a_wrong_url() -> None:
    async with ScriptedSwarm() as server:
        server.answers["/fakevllm/tasks"] = 404
        with pytest.raises(ConfigError) as refused:
            await register_tasks(f"{server.url}/v1", TASKS)
    message = f"{server.url}/v1 answers with status 404, as no fakevllm proxy does: set --url."
    assert str(refused.value) == message


async def test_at_most_the_given_number_of_rows_run_at_once() -> None:
    running, most = 0, 0
    gate = asyncio.Event()

    class Counting:
        async def play(self, task: Task, key: str) -> str:
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


async def test_the_question_replaces_the_placeholder_in_the_arguments() -> None:
    player = AppPlayer.from_command("printf %s 'Q: {question}'", URL)
    assert await player.play(Task(main_query="what; rm -rf"), "key") == "Q: what; rm -rf"


async def test_without_a_placeholder_the_question_goes_to_standard_input() -> None:
    assert await AppPlayer.from_command("cat", URL).play(Task(main_query="hello"), "key") == "hello"


async def test_the_app_gets_the_base_url_and_its_key_in_the_environment() -> None:
    player = AppPlayer.from_command("sh -c 'echo $OPENAI_BASE_URL $OPENAI_API_KEY'", URL)
    assert await player.play(Task(main_query=""), "sk-task-7") == f"{URL} sk-task-7\n"


async def test_a_failed_app_fails_its_row_with_the_last_line_of_its_errors() -> None:
    player = AppPlayer.from_command("sh -c 'echo first >&2; echo last words >&2; exit 3'", URL)
    with pytest.raises(RowFailed, match="exited with 3: last words"):
        await player.play(Task(main_query=""), "key")


async def test_an_app_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="'no-such-app' cannot be run"):
        await AppPlayer.from_command("no-such-app", URL).play(Task(main_query=""), "key")
