"""One server with keys for a team, and what its members ask of it over real sockets."""

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
ASKED = {"model": "fake", "messages": [{"role": "user", "content": "[[say hello]]"}]}


def write_keys(file: Path, *names: str) -> Path:
    text = ""
    for name in names or KEYS:
        key, role = KEYS[name]
        text = add_key(text, named_key(key, name, "2026-11-22", role))
    file.write_text(text)
    return file


@dataclass(frozen=True, slots=True)
class Member:
    """One who has a key, and a stock client's server URL with it."""

    name: str
    server: Process

    @property
    def key(self) -> str:
        return KEYS[self.name][0]

    @property
    def url(self) -> str:
        return self.server.url.replace("//", f"//{self.name}:{self.key}@")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=20)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20)

    def claim(self) -> Claim:
        answer = self.post(
            "/claim_episode",
            client_uuid=f"{self.name}'s",
            episode_type="train",
            discard_episode_timeout=60,
        )
        told = answer.json()
        assert told["success"], told
        return Claim(told["episode_uuid"], told["openai_base_url"], told["openai_api_key"])

    def about(self, path: str, uuid: str, owner: str | None = None) -> httpx.Response:
        """`/end_episode` and its like. `owner`: whose client uuid is said, by default one's own."""
        return self.post(
            path,
            client_uuid=f"{owner or self.name}'s",
            episode_uuid=uuid,
            task_id="t",
            workflow_output={"reward": 1.0, "metadata": {"task_id": "t"}},
        )


@dataclass(frozen=True, slots=True)
class Claim:
    uuid: str
    base_url: str
    """As the server tells it."""
    key: str

    def asked(self, *, key: str, path: str = "/chat/completions") -> httpx.Response:
        """By a bearer."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.base_url}{path}", json=ASKED, headers=headers, timeout=20)


@dataclass(frozen=True, slots=True)
class Box:
    server: Process

    def member(self, name: str) -> Member:
        return Member(name, self.server)

    def start_engine(self) -> None:
        root = self.member("root")
        assert root.post("/sync_train_config", yaml_as_string=JOB).json()["success"]
        assert root.post("/start_engine").json()["success"]
        self.until_rolling()

    def until_rolling(self) -> None:
        def is_rolling() -> bool:
            status = self.member("root").get("/get_engine_status").json()
            return status["engine_status"] == "ENGINE.ROLLING"

        wait_until(is_rolling, 20)


def box_of(processes: Processes, keys: Path, *flags: str) -> Box:
    server = processes.server("--backend", "fake", "--key-file", str(keys), *flags)
    box = Box(server)
    box.start_engine()
    return box


def asking(member: Member, claim: Claim) -> openai.OpenAI:
    """As the stock client makes it: its own server URL before the path that the claim told."""
    path = urlsplit(claim.base_url).path
    return openai.OpenAI(base_url=member.url + path, api_key=claim.key, max_retries=0)


def ask(app: openai.OpenAI) -> str:
    answer = app.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "[[say hello]]"}]
    )
    return answer.choices[0].message.content or ""
