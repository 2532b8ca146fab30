"""A client that sends the swarm protocol's requests as AgentJet's client does.

Bodies are JSON, and an empty body is `{}`. The module uses neither our SDK nor our server's code.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.adapters.job.ajet_jobs import stock
from tests.e2e.processes import Process, Processes, wait_until

Json = dict[str, Any]
BOOT_S = 30.0
ROLLING = "ENGINE.ROLLING"
OFFLINE = "ENGINE.OFFLINE"


class Wire:
    """One swarm client with a connection pool to one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client_uuid = str(uuid.uuid4())
        self.http = httpx.Client(base_url=url, timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.http.close()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, path: str, body: Json | None = None) -> httpx.Response:
        return self.http.post(path, json=body or {})

    def post(self, path: str, body: Json | None = None) -> Any:
        """Send a request, check that the status is 200, and return the body."""
        answer = self.send(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Json | None = None) -> tuple[int, str]:
        """Send a request that must be refused, and return the status and the `detail`."""
        answer = self.send(path, body)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["detail"]

    @property
    def status(self) -> str:
        return self.get("/get_engine_status")["engine_status"]

    def sync(self, text: str) -> None:
        assert self.post("/sync_train_config", {"yaml_as_string": text})["success"] is True

    def start(self, text: str) -> None:
        """Start the engine with a job and wait for ROLLING."""
        self.sync(text)
        assert self.post("/start_engine")["success"] is True
        wait_until(lambda: self.status == ROLLING, BOOT_S, "ENGINE.ROLLING")

    def claim_body(self, **changes: Any) -> Json:
        return {
            "client_uuid": self.client_uuid,
            "episode_type": "train",
            "discard_episode_timeout": 240.0,
            "throttle_policy": None,
            **changes,
        }

    def claim(self, **changes: Any) -> Json:
        claimed = self.post("/claim_episode", self.claim_body(**changes))
        assert claimed["success"] is True, claimed
        return claimed

    def end_body(self, episode: str, task: str, reward: Any = 1.0, **changes: Any) -> Json:
        output = {"reward": reward, "is_success": None, "metadata": {"task_id": task}}
        return {
            "client_uuid": self.client_uuid,
            "episode_uuid": episode,
            "task_id": task,
            "workflow_output": {**output, "log_metrics": {}},
            "declare_client_active": True,
            **changes,
        }

    def abort_body(self, episode: str) -> Json:
        output: Json = {"reward": 0.0, "is_success": None, "metadata": {}, "log_metrics": {}}
        return self.end_body(episode, "") | {"workflow_output": output}

    def end(self, episode: str, task: str, reward: Any = 1.0) -> Any:
        return self.post("/end_episode", self.end_body(episode, task, reward))

    def abort(self, episode: str) -> Any:
        return self.post("/abort_episode", self.abort_body(episode))

    def can_continue(self, episode: str) -> bool:
        body = {"client_uuid": self.client_uuid, "episode_uuid": episode}
        return self.post("/can_continue_episode", body)["can_continue"]

    def pool(self) -> Json:
        return self.get("/get_current_batch_rollout_pool_information")

    def chat(self, claimed: Json, text: str = "hi", **changes: Any) -> httpx.Response:
        """Send a chat completion in an episode, with the model name of AgentJet's client."""
        body = {"model": "reserved_field", "messages": [{"role": "user", "content": text}]}
        return self.call(claimed, "chat/completions", {**body, **changes})

    def call(self, claimed: Json, path: str, body: Json) -> httpx.Response:
        url = f"{claimed['openai_base_url']}/{path}"
        bearer = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
        return self.http.post(url, json=body, headers=bearer)


def small_job(batch_size: int = 2, num_repeat: int = 2, **changes: Any) -> str:
    """Return AgentJet's complete YAML with few episodes per step."""
    return stock(
        ajet__data__train_batch_size=batch_size,
        ajet__rollout__num_repeat=num_repeat,
        ajet__trainer_common__n_gpus_per_node=1,
        **changes,
    )


def stock_job() -> str:
    """Return AgentJet's YAML, whose 32 tasks of 4 episodes make no step in a short test."""
    assert yaml.safe_load(stock())["ajet"]["data"]["train_batch_size"] == 32
    return stock()


@contextmanager
def rolling(server: Process, job: str) -> Generator[Wire]:
    with Wire(server.url) as wire:
        wire.start(job)
        yield wire


@contextmanager
def with_stock_job(folder: Path, *flags: str) -> Generator[Wire]:
    """Start a server with additional flags, and its engine with the stock job."""
    with (
        Processes(folder) as started,
        rolling(started.server("--backend", "fake", *flags), stock_job()) as wire,
    ):
        yield wire
