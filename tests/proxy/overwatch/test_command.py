"""`fakevllm overwatch` before a real server: what is shown, and what the keys do to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from swarm_server.boxes import write_keys

from fakevllm import AsyncSwarmClient, SwarmClient, Task, TrainJob
from fakevllm.errors import UserError
from fakevllm.overwatch.acts import ACTS
from fakevllm.overwatch.app import Overwatch
from fakevllm.overwatch.command import OverwatchSettings, run_overwatch
from fakevllm.overwatch.poll import Poll
from fakevllm.sdk.episode_calls import EpisodeType
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply
from tests.e2e.processes import Processes, wait_until

JOB = TrainJob(num_repeat=2, batch_size=2)
WAIT_S = 30.0
NOBODY = "http://127.0.0.1:9"
DOORS = {act.name: act for act in ACTS}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def once(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fakevllm", "overwatch", "--once", "--swarm-url", url]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=50)


def play(
    client: SwarmClient, task_id: str, rewards: list[float], kind: EpisodeType = "train"
) -> None:
    for reward in rewards:
        with client.episode(Task(task_id=task_id), episode_type=kind) as episode:
            asked = [{"role": "user", "content": "say yes"}]
            episode.openai().chat.completions.create(model="any", messages=asked)  # pyright: ignore[reportArgumentType, reportCallIssue]
            episode.end(reward=reward)


def test_a_run_is_shown_once_and_as_json(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    offline = once(server.url)
    assert offline.returncode == 0 and "OFFLINE" in offline.stdout
    with SwarmClient(server.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        for task_id in ("a", "b"):
            play(client, task_id, [0.0, 1.0])
        wait_until(lambda: client.get_engine_status()[1].get("global_step") == 2, 30.0)
        play(client, "c", [1.0])
        shown, told = once(server.url).stdout, json.loads(once(server.url, "--json").stdout)
    assert "mean reward, steps 1 to 1" in shown and "step 1 → version 1" in shown
    assert told["state"] == "ROLLING" and told["curve"] == [{"step": 1, "reward": 0.5}]
    (task,) = told["tasks"]
    assert (task["task_id"], task["ended"], task["wanted"], task["rewards"]) == ("c", 1, 2, [1.0])


def test_evaluations_are_shown_beside_the_training_and_outlive_a_kill(
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
    shown, told = once(server.url).stdout, json.loads(once(server.url, "--json").stdout)
    assert told["evaluations"][0] == {
        "step": 0,
        "reward": 0.25,
        "low": 0.0,
        "high": 0.5,
        "episodes": 2,
    }
    assert [(one["step"], one["reward"]) for one in told["evaluations"]] == [(0, 0.25), (1, 0.75)]
    assert "mean reward of evaluations, steps 0 to 1" in shown
    assert "0.75, from 0.5 to 1, 2 episodes at step 1" in shown


async def until(shows: Callable[[EngineStatusReply], bool], client: AsyncSwarmClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while not shows(await client.status()):
            await asyncio.sleep(0.05)


async def test_the_keys_start_pause_resume_and_drain_an_engine(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    async with Poll(server.url, None) as poll, AsyncSwarmClient(server.url) as client:
        await client.sync_train_config(JOB)
        app = Overwatch(poll, 0.2)
        async with app.run_test() as pilot:
            await pilot.press("s", "y")
            await until(lambda told: told.engine_status is EngineStatus.ROLLING, client)
            held, _ = await client.begin_episode()
            await pilot.press("p", "y")
            await until(lambda told: told.claims_paused, client)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.begin_episode()
            await pilot.press("r", "y")
            await until(lambda told: not told.claims_paused, client)
            another, _ = await client.begin_episode()
            await client.abort_episode(another)
            await pilot.press("d", "y")
            await until(lambda told: told.claims_paused, client)
            assert await client.can_continue_episode(held)  # it is waited for
            assert (await client.status()).engine_status is EngineStatus.ROLLING
            await client.abort_episode(held)
            await until(lambda told: told.engine_status is EngineStatus.OFFLINE, client)
            assert not (await client.status()).claims_paused


async def test_a_drain_ends_where_somebody_resumes(processes: Processes) -> None:
    server = processes.server("--backend", "fake")
    async with Poll(server.url, None) as poll, AsyncSwarmClient(server.url) as client:
        await client.auto_sync_train_config_and_start_engine(JOB)
        await client.begin_episode()
        drain = asyncio.create_task(poll.do(DOORS["drain"]))
        await until(lambda told: told.claims_paused, client)
        await poll.do(DOORS["resume"])
        with pytest.raises(SwarmError, match="called off"):
            await drain
        assert (await client.status()).engine_status is EngineStatus.ROLLING


async def test_without_a_job_the_mend_is_told(processes: Processes) -> None:
    async with Poll(processes.server("--backend", "fake").url, None) as poll:
        with pytest.raises(SwarmError, match=r"No training config found\. Its job comes from"):
            await poll.do(DOORS["start"])
        with pytest.raises(SwarmError, match="offline"):
            await poll.do(DOORS["pause"])


async def test_where_there_are_keys_a_client_may_look_and_only_an_admin_act(
    processes: Processes, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys")
    url = processes.server("--backend", "fake", "--key-file", str(keys)).url
    async with (
        Poll(url, None) as stranger,
        Poll(url, "sk-alice-1") as alice,
        Poll(url, "sk-root-1") as root,
    ):
        seen = await stranger.look()
        assert seen.is_away and "--key" in (seen.trouble or "")
        assert (await alice.look()).state == "OFFLINE"
        for name in ("start", "pause", "resume", "drain"):
            with pytest.raises(SwarmError, match="is for admins, and the key of alice"):
                await alice.do(DOORS[name])
        with pytest.raises(SwarmError, match="offline"):
            await root.do(DOORS["pause"])


@pytest.mark.parametrize(
    ("url", "is_once", "is_json", "told"),
    [
        ("gpu-box:10086", True, False, "--swarm-url gpu-box:10086: write it as http://HOST:PORT"),
        ("http://a:b@gpu-box", True, False, "a key goes into --key"),
        (NOBODY, False, True, "--json goes with --once"),
    ],
)
def test_a_mistake_is_told_with_its_mend(url: str, is_once: bool, is_json: bool, told: str) -> None:
    with pytest.raises(UserError, match=told):
        run_overwatch(OverwatchSettings(url, None, is_once, is_json), Console())


def test_once_needs_no_textual_and_the_screen_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['textual'] = None; from fakevllm.cli.main import main; "
        f"sys.argv = ['fakevllm', 'overwatch', '--swarm-url', '{NOBODY}', *sys.argv[1:]]; main()"
    )
    for flags, code, told in (
        (["--once"], 1, "AWAY"),
        ([], 2, "in the clone's folder, pip install"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", script, *flags], capture_output=True, text=True, timeout=50
        )
        assert ended.returncode == code and told in ended.stdout + ended.stderr


def test_where_there_is_no_terminal_the_screen_says_so_and_ends() -> None:
    command = [sys.executable, "-m", "fakevllm", "overwatch", "--swarm-url", NOBODY]
    ended = subprocess.run(command, input="", capture_output=True, text=True, timeout=50)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "\x1b" not in ended.stderr and "needs a terminal" in ended.stderr


def test_nobody_there_is_shown_and_ends_with_1() -> None:
    away = once(NOBODY)
    assert away.returncode == 1 and "AWAY" in away.stdout and NOBODY in away.stdout
    told = json.loads(once(NOBODY, "--json").stdout)
    assert told["state"] == "AWAY" and NOBODY in told["trouble"]
