"""A server with a key for each member of a team, and the members' requests over real sockets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from fakevllm_adapters.protocol.keys import Role, add_key, named_key
from tests.e2e.processes import Process, Processes, wait_until

JOB = "job: {num_repeat: 2, batch_size: 16, lr: 0.5}"
KEYS = {
    "root": ("sk-root-1", Role.ADMIN),
    "alice": ("sk-alice-1", Role.CLIENT),
    "bob": ("sk-bob-1", Role.CLIENT),
}
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "[[say hello]]"}]}


def write_keys(file: Path, *names: str) -> Path:
    """Write a key file with the keys of `names`, or of the whole team."""
    text = ""
    for name in names or KEYS:
        key, role = KEYS[name]
        text = add_key(text, named_key(key, name, "2026-11-22", role))
    file.write_text(text)
    return file


@dataclass(frozen=True, slots=True)
class Member:
    """A user with a key, who sends requests as the stock client does."""

    name: str
    server: Process

    @property
    def key(self) -> str:
        return KEYS[self.name][0]

    @property
    def url(self) -> str:
        """URL of the server with the member's name and key, as the stock client uses it."""
        return self.server.url.replace("//", f"//{self.name}:{self.key}@")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=20)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20)

    def claim(self) -> Claim:
        reply = self.post(
            "/claim_episode",
            client_uuid=f"{self.name}'s",
            episode_type="train",
            discard_episode_timeout=60,
        ).json()
        assert reply["success"], reply
        return Claim(reply["episode_uuid"], reply["openai_base_url"], reply["openai_api_key"])

    def post_episode(self, path: str, uuid: str, owner: str | None = None) -> httpx.Response:
        """Post to a route about one episode, such as `/end_episode`.

        The body has the client uuid of `owner`, by default the member's own.
        """
        return self.post(
            path,
            client_uuid=f"{owner or self.name}'s",
            episode_uuid=uuid,
            task_id="t",
            workflow_output={"reward": 1.0, "metadata": {"task_id": "t"}},
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed episode."""

    uuid: str
    base_url: str
    """Base URL that the server returned with the claim."""
    key: str

    def call_model(self, *, key: str, path: str = "/chat/completions") -> httpx.Response:
        """Call the model with `key` as a bearer token."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.base_url}{path}", json=CHAT_BODY, headers=headers, timeout=20)


@dataclass(frozen=True, slots=True)
class TeamServer:
    """A server process whose key file has the keys of the team."""

    server: Process

    def member(self, name: str) -> Member:
        return Member(name, self.server)

    def start_engine(self) -> None:
        root = self.member("root")
        assert root.post("/sync_train_config", yaml_as_string=JOB).json()["success"]
        assert root.post("/start_engine").json()["success"]
        self.wait_until_rolling()

    def wait_until_rolling(self) -> None:
        def is_rolling() -> bool:
            status = self.member("root").get("/get_engine_status").json()
            return status["engine_status"] == "ENGINE.ROLLING"

        wait_until(is_rolling, 20)


def start_team_server(processes: Processes, keys: Path, *flags: str) -> TeamServer:
    """Start a server with the fake engine, and wait until it serves."""
    server = processes.server("--backend", "fake", "--key-file", str(keys), *flags)
    team = TeamServer(server)
    team.start_engine()
    return team


def openai_client(member: Member, claim: Claim) -> openai.OpenAI:
    """Return an OpenAI client as the stock client creates it: its base URL is the member's server
    URL and the path of the claim's base URL."""
    path = urlsplit(claim.base_url).path
    return openai.OpenAI(base_url=member.url + path, api_key=claim.key, max_retries=0)


def say_hello(app: openai.OpenAI) -> str:
    """Call the model with a script that makes it answer "hello", and return the answer."""
    answer = app.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "[[say hello]]"}]
    )
    return answer.choices[0].message.content or ""
