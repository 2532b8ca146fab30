"""opencode as an active client of the swarm server: every session is an episode with a key of its
own, and its reward is what the workspace's tests say at the end.

    python -m examples.opencode.active [--tasks 20] [--opencode opencode]

Neither hook nor proxy is needed once the server has its job (`fakevllm serve` gives it one);
siblings are whole sessions of the same task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from examples.opencode.recorded import found
from examples.opencode.serving import Opencode, serving
from examples.opencode.tasks import Turn, session

CLIENT = "opencode-example"
AGAIN_AFTER_S = 0.5
"""Where no episode is to be had: the engine is starting, or between two steps."""
IDLE_S = 120.0


class Swarm:
    """The part of the swarm protocol an episode needs."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def model(self) -> str:
        """The name of what it serves: without a proxy nobody knows an alias."""
        answer = await self._http.get("/v1/models")
        return answer.raise_for_status().json()["data"][0]["id"]

    async def begin(self) -> dict[str, Any]:
        body = {"episode_type": "train", "discard_episode_timeout": IDLE_S}
        while True:
            claimed = await self._post("/claim_episode", body)
            if claimed["success"]:
                return claimed
            await asyncio.sleep(AGAIN_AFTER_S)

    async def end(self, claimed: dict[str, Any], task_id: str, reward: float) -> None:
        output = {"reward": reward, "metadata": {"task_id": task_id}}
        body = {"episode_uuid": claimed["episode_uuid"], "task_id": task_id}
        await self._post("/end_episode", body | {"workflow_output": output})

    async def abort(self, claimed: dict[str, Any]) -> None:
        body: dict[str, Any] = {"episode_uuid": claimed["episode_uuid"], "task_id": ""}
        body["workflow_output"] = {"reward": 0.0, "metadata": {}}
        await self._post("/abort_episode", body)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(path, json=body | {"client_uuid": CLIENT})
        return answer.raise_for_status().json()


async def episode(
    swarm: Swarm, opencode: Opencode, workspace: Path, task_id: str, turns: Sequence[Turn]
) -> float:
    """One whole session; its reward is the share of turns whose test holds at the end."""
    claimed = await swarm.begin()
    try:
        _use(workspace, claimed, await swarm.model())
        own = await opencode.new_session(workspace)
        for turn in turns:
            await opencode.ask(workspace, own, turn.question)
        await opencode.leave(workspace)
        reward = fmean(turn.checks(workspace) for turn in turns)
    except BaseException:
        await swarm.abort(claimed)
        raise
    await swarm.end(claimed, task_id, reward)
    return reward


def _use(workspace: Path, claimed: dict[str, Any], model: str) -> None:
    """This folder's opencode asks with the episode's key, and for the model by its own name."""
    options = {"baseURL": claimed["openai_base_url"], "apiKey": claimed["openai_api_key"]}
    workspace.mkdir(parents=True)
    provider = {"options": options, "models": {"app-model": {"id": model}}}
    config = {"provider": {"fakevllm": provider}}
    (workspace / "opencode.json").write_text(json.dumps(config))


async def play(
    swarm_url: str,
    command: str,
    num_tasks: int,
    num_repeat: int,
    concurrency: int,
    seed: int,
    after: Callable[[], object],
) -> list[float]:
    """The mean reward of each task, in order. `after` is called when an episode has ended."""
    room = asyncio.Semaphore(concurrency)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            httpx.AsyncClient(base_url=swarm_url, timeout=60) as http,
            serving(command, Path(folder), f"{swarm_url}/v1", "none") as opencode,
        ):
            swarm = Swarm(http)

            async def one(task: int, repeat: int) -> float:
                turns = session(random.Random(f"{seed} {task}"))
                async with room:
                    workspace = Path(folder) / f"{task}-{repeat}"
                    reward = await episode(swarm, opencode, workspace, f"{seed}-{task}", turns)
                after()
                return reward

            async def siblings(task: int) -> float:
                return fmean(await asyncio.gather(*(one(task, i) for i in range(num_repeat))))

            return await asyncio.gather(*(siblings(task) for task in range(num_tasks)))


def no_server(url: str) -> str | None:
    """What to tell the user where no swarm server answers at `url`; None where one does."""
    try:
        httpx.get(f"{url}/get_engine_status", timeout=60).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = str(error).splitlines()[0]
        mend = "start `fakevllm-server start ...`, or name yours with --swarm-url http://HOST:PORT"
        return f"No swarm server answers at {url} ({cause}): {mend}."
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="opencode as an active client.")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086")
    parser.add_argument("--opencode", default="opencode", type=found, help="its command")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--num-repeat", type=int, default=8, help="as in the server's job")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (trouble := no_server(options.swarm_url)) is not None:
        parser.exit(2, f"{trouble}\n")
    with Progress(console=Console()) as progress:
        bar = progress.add_task("episodes", total=options.tasks * options.num_repeat)
        numbers = options.tasks, options.num_repeat, options.concurrency, options.seed
        playing = play(options.swarm_url, options.opencode, *numbers, lambda: progress.advance(bar))
        means = asyncio.run(playing)
    print(f"mean reward: {fmean(means):.2f}; by task: {' '.join(f'{mean:.2f}' for mean in means)}")


if __name__ == "__main__":
    main()
