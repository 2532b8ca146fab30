"""opencode as an active client of the swarm server.

    python -m examples.opencode.active_client [--tasks 20] [--opencode opencode]

Each session is an episode with an API key of its own. Its reward is the result of the tests in the
workspace. The client needs no hook and no proxy. The server must have a job, which `fakevllm serve`
can send. The siblings of a group are whole sessions of the same task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from examples.opencode.opencode_command import locate_command
from examples.opencode.opencode_server import OpencodeServer, running_opencode
from examples.opencode.tasks import Turn, random_session

CLIENT_ID = "opencode-example"
CLAIM_RETRY_INTERVAL_S = 0.5
"""Seconds between claims while the engine starts or all episodes of the batch are claimed."""
IDLE_TIMEOUT_S = 120.0


class EpisodeClient:
    """The requests of the swarm protocol that an episode needs."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def model(self) -> str:
        """Return the name of the served model, because only a proxy accepts aliases."""
        reply = await self._http.get("/v1/models")
        return reply.raise_for_status().json()["data"][0]["id"]

    async def claim(self) -> dict[str, Any]:
        """Claim an episode. If the server has no free episode, wait for one."""
        body = {"episode_type": "train", "discard_episode_timeout": IDLE_TIMEOUT_S}
        while True:
            claim = await self._post("/claim_episode", body)
            if claim["success"]:
                return claim
            await asyncio.sleep(CLAIM_RETRY_INTERVAL_S)

    async def end(self, claim: dict[str, Any], task_id: str, reward: float) -> None:
        output = {"reward": reward, "metadata": {"task_id": task_id}}
        body = {"episode_uuid": claim["episode_uuid"], "task_id": task_id}
        await self._post("/end_episode", body | {"workflow_output": output})

    async def abort(self, claim: dict[str, Any]) -> None:
        body: dict[str, Any] = {"episode_uuid": claim["episode_uuid"], "task_id": ""}
        body["workflow_output"] = {"reward": 0.0, "metadata": {}}
        await self._post("/abort_episode", body)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._http.post(path, json=body | {"client_uuid": CLIENT_ID})
        return reply.raise_for_status().json()


async def play_episode(
    client: EpisodeClient,
    opencode: OpencodeServer,
    workspace: Path,
    task_id: str,
    turns: Sequence[Turn],
) -> float:
    """Play a session as an episode. Return the reward, which is the share of turns whose test
    passes."""
    claim = await client.claim()
    try:
        _write_config(workspace, claim, await client.model())
        session = await opencode.new_session(workspace)
        for turn in turns:
            await opencode.ask(workspace, session, turn.question)
        await opencode.close_workspace(workspace)
        reward = fmean(turn.passes(workspace) for turn in turns)
    except BaseException:
        await client.abort(claim)
        raise
    await client.end(claim, task_id, reward)
    return reward


def _write_config(workspace: Path, claim: dict[str, Any], model: str) -> None:
    """Write a configuration with which opencode uses the episode's key in this workspace."""
    options = {"baseURL": claim["openai_base_url"], "apiKey": claim["openai_api_key"]}
    workspace.mkdir(parents=True)
    provider = {"options": options, "models": {"app-model": {"id": model}}}
    config = {"provider": {"fakevllm": provider}}
    (workspace / "opencode.json").write_text(json.dumps(config))


@dataclass(frozen=True, slots=True)
class Workload:
    """The number of episodes to play."""

    num_tasks: int
    num_repeat: int
    concurrency: int
    seed: int


async def play(
    swarm_url: str, command: str, workload: Workload, on_episode_end: Callable[[], object]
) -> list[float]:
    """Play all episodes. Return the mean reward of each task, in the order of the tasks."""
    slots = asyncio.Semaphore(workload.concurrency)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            httpx.AsyncClient(base_url=swarm_url, timeout=60) as http,
            running_opencode(command, Path(folder), f"{swarm_url}/v1", "none") as opencode,
        ):
            client = EpisodeClient(http)

            async def play_repeat(task: int, repeat: int) -> float:
                task_id = f"{workload.seed}-{task}"
                turns = random_session(random.Random(f"{workload.seed} {task}"))
                async with slots:
                    workspace = Path(folder) / f"{task}-{repeat}"
                    reward = await play_episode(client, opencode, workspace, task_id, turns)
                on_episode_end()
                return reward

            async def play_task(task: int) -> float:
                repeats = range(workload.num_repeat)
                return fmean(await asyncio.gather(*(play_repeat(task, i) for i in repeats)))

            return await asyncio.gather(*(play_task(task) for task in range(workload.num_tasks)))


def find_problem(url: str) -> str | None:
    """Return an error message if no swarm server answers at `url`, else None."""
    try:
        httpx.get(f"{url}/get_engine_status", timeout=60).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = str(error).splitlines()[0]
        fix = "start `fakevllm-server start ...`, or name yours with --swarm-url http://HOST:PORT"
        return f"No swarm server answers at {url} ({cause}): {fix}."
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Run opencode as an active client.")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086")
    parser.add_argument("--opencode", default="opencode", type=locate_command, help="its command")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--num-repeat", type=int, default=8, help="the server's num_repeat")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (problem := find_problem(options.swarm_url)) is not None:
        parser.exit(2, f"{problem}\n")
    workload = Workload(options.tasks, options.num_repeat, options.concurrency, options.seed)
    with Progress(console=Console()) as progress:
        bar = progress.add_task("episodes", total=options.tasks * options.num_repeat)
        playing = play(options.swarm_url, options.opencode, workload, lambda: progress.advance(bar))
        means = asyncio.run(playing)
    print(f"mean reward: {fmean(means):.2f}; by task: {' '.join(f'{mean:.2f}' for mean in means)}")


if __name__ == "__main__":
    main()
