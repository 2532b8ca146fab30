"""`fakevllm overwatch` with a real server: its output, and the effects of its keys."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from swarm_server.team_server import write_keys

from fakevllm import AsyncSwarmClient, SwarmClient, Task, TrainJob
from fakevllm.errors import UserError
from fakevllm.overwatch.app import OverwatchApp
from fakevllm.overwatch.command import OverwatchSettings, run_overwatch
from fakevllm.overwatch.poller import ServerPoller
from fakevllm.overwatch.server_actions import SERVER_ACTIONS
from fakevllm.sdk.episode_calls import EpisodeType
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes, wait_until

JOB = TrainJob(num_repeat=2, batch_size=2)
WAIT_S = 30.0
DEAD_URL = "http://127.0.0.1:9"
ACTIONS = {action.name: action for action in SERVER_ACTIONS}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def run_once(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "fakevllm", "overwatch", "--once", "--swarm-url", url]
    return PRELOADED_PYTHON.run([*command, *arguments], Path.cwd())


def play(
    client: SwarmClient, task_id: str, rewards: list[float], kind: EpisodeType = "train"
) -> None:
    for reward in rewards:
        with client.episode(Task(task_id=task_id), episode_type=kind) as episode:
            messages = [{"role": "user", "content": "say yes"}]
            episode.openai().chat.completions.create(model="any", messages=messages)  # pyright: ignore[reportArgumentType, reportCallIssue]
            episode.end(reward=reward)


def test_once_prints_a_run_as_text_and_as_json(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    offline = run_once(server.url)
    assert offline.returncode == 0 and "OFFLINE" in offline.stdout
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        for task_id in ("a", "b"):
            play(client, task_id, [0.0, 1.0])
        wait_until(lambda: client.get_engine_status()[1].get("global_step") == 2, 30.0)
        play(client, "c", [1.0])
        shown, data = run_once(server.url).stdout, json.loads(run_once(server.url, "--json").stdout)
    assert "mean reward, steps 1 to 1" in shown and "step 1 → version 1" in shown
    assert data["state"] == "ROLLING" and data["curve"] == [
        {"step": 1, "reward": 0.5, "changed": ""}
    ]
    (task,) = data["tasks"]
    assert (task["task_id"], task["ended"], task["wanted"], task["rewards"]) == ("c", 1, 2, [1.0])


def test_evaluations_are_shown_with_the_training_and_survive_a_kill(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake")
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        play(client, "held out", [0.0, 0.5], kind="eval")
        for task_id in ("a", "b"):
            play(client, task_id, [0.0, 1.0])
        wait_until(lambda: client.get_engine_status()[1].get("global_step") == 2, 30.0)
        play(client, "held out", [1.0, 0.5], kind="eval")
    server.kill()
    server.start()
    server.wait_until_healthy()
    shown, data = run_once(server.url).stdout, json.loads(run_once(server.url, "--json").stdout)
    assert data["evaluations"][0] == {
        "step": 0,
        "reward": 0.25,
        "low": 0.0,
        "high": 0.5,
        "episodes": 2,
    }
    assert [(point["step"], point["reward"]) for point in data["evaluations"]] == [
        (0, 0.25),
        (1, 0.75),
    ]
    assert "mean reward of evaluations, steps 0 to 1" in shown
    assert "0.75, from 0.5 to 1, 2 episodes at step 1" in shown


async def wait_for_status(
    is_reached: Callable[[EngineStatusReply], bool], client: AsyncSwarmClient
) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_reached(await client.status()):
            await asyncio.sleep(0.05)


async def test_the_keys_start_pause_resume_and_drain_an_engine(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    async with ServerPoller(server.url, None) as poller, AsyncSwarmClient(server.url) as client:
        await client.sync_train_config(JOB)
        app = OverwatchApp(poller, 0.2)
        async with app.run_test() as pilot:
            await pilot.press("s", "y")
            await wait_for_status(
                lambda status: status.engine_status is EngineStatus.ROLLING, client
            )
            held, _ = await client.begin_episode()
            await pilot.press("p", "y")
            await wait_for_status(lambda status: status.claims_paused, client)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.begin_episode()
            await pilot.press("r", "y")
            await wait_for_status(lambda status: not status.claims_paused, client)
            another, _ = await client.begin_episode()
            await client.abort_episode(another)
            await pilot.press("d", "y")
            await wait_for_status(lambda status: status.claims_paused, client)
            assert await client.can_continue_episode(held)  # the drain waits for the episode
            assert (await client.status()).engine_status is EngineStatus.ROLLING
            await client.abort_episode(held)
            await wait_for_status(
                lambda status: status.engine_status is EngineStatus.OFFLINE, client
            )
            assert not (await client.status()).claims_paused


async def test_resuming_claims_cancels_a_drain(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    async with ServerPoller(server.url, None) as poller, AsyncSwarmClient(server.url) as client:
        await client.auto_sync_train_config_and_start_engine(JOB)
        await client.begin_episode()
        drain = asyncio.create_task(poller.perform(ACTIONS["drain"]))
        await wait_for_status(lambda status: status.claims_paused, client)
        await poller.perform(ACTIONS["resume"])
        with pytest.raises(SwarmError, match="drain was cancelled"):
            await drain
        assert (await client.status()).engine_status is EngineStatus.ROLLING


async def test_starting_without_a_job_says_where_the_job_comes_from(processes: Processes) -> None:
    async with ServerPoller(processes.server("--backend", "fake").url, None) as poller:
        with pytest.raises(SwarmError, match=r"No training config found\. Its job comes from"):
            await poller.perform(ACTIONS["start"])
        with pytest.raises(SwarmError, match="offline"):
            await poller.perform(ACTIONS["pause"])


async def test_with_keys_a_client_may_watch_and_only_an_admin_may_act(
    processes: Processes, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys")
    url = processes.server("--backend", "fake", "--key-file", str(keys)).url
    async with (
        ServerPoller(url, None) as keyless,
        ServerPoller(url, "sk-alice-1") as alice,
        ServerPoller(url, "sk-root-1") as root,
    ):
        snapshot = await keyless.poll()
        assert snapshot.is_away and "--key" in (snapshot.trouble or "")
        assert (await alice.poll()).state == "OFFLINE"
        for name in ("start", "pause", "resume", "drain"):
            with pytest.raises(SwarmError, match="is for admins, and the key of alice"):
                await alice.perform(ACTIONS[name])
        with pytest.raises(SwarmError, match="offline"):
            await root.perform(ACTIONS["pause"])


@pytest.mark.parametrize(
    ("url", "is_once", "is_json", "message"),
    [
        ("gpu-box:10086", True, False, "--swarm-url gpu-box:10086: write it as http://HOST:PORT"),
        ("http://a:b@gpu-box", True, False, "pass a key with --key"),
        (DEAD_URL, False, True, "--json works only together with --once"),
    ],
)
def test_a_wrong_option_is_refused_with_the_fix(
    url: str, is_once: bool, is_json: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_overwatch(OverwatchSettings(url, None, is_once, is_json), Console())


def test_once_works_without_textual_and_the_screen_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['textual'] = None; from fakevllm.cli.main import main; "
        f"sys.argv = ['fakevllm', 'overwatch', '--swarm-url', '{DEAD_URL}', *sys.argv[1:]]; main()"
    )
    for flags, code, message in (
        (["--once"], 1, "AWAY"),
        ([], 2, "in the folder of the clone, run"),
    ):
        process = subprocess.run(
            [sys.executable, "-c", script, *flags], capture_output=True, text=True, timeout=50
        )
        assert process.returncode == code and message in process.stdout + process.stderr


def test_the_screen_is_refused_without_a_terminal() -> None:
    command = [sys.executable, "-m", "fakevllm", "overwatch", "--swarm-url", DEAD_URL]
    process = subprocess.run(command, input="", capture_output=True, text=True, timeout=50)
    assert process.returncode == 2 and process.stdout == ""
    assert "\x1b" not in process.stderr and "needs a terminal" in process.stderr


def test_once_shows_a_server_that_does_not_answer_and_exits_with_1() -> None:
    away = run_once(DEAD_URL)
    assert away.returncode == 1 and "AWAY" in away.stdout and DEAD_URL in away.stdout
    data = json.loads(run_once(DEAD_URL, "--json").stdout)
    assert data["state"] == "AWAY" and DEAD_URL in data["trouble"]
