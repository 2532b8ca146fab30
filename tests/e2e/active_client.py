"""A program that claims, calls and ends many episodes at once, until enough ends are acknowledged.

    python tests/e2e/active_client.py --url URL --notes FILE --at-once 50 --ends 150 --go FILE

The program writes each fact to its notes before it acts on the fact. If the process is killed, the
next process continues from the notes: it ends the claimed episodes, and repeats the requests that
were not acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

Json = dict[str, Any]

NUM_REPEAT = 4
LIMIT_S = 20.0
"""Time limit of one request."""
PAUSE_S = 0.2
"""Pause before a request is repeated because the server was down or not ready."""
NOT_CLAIMED = ("not claimed", "not found")
"""Parts of the refusals after a claim has expired: for an end, and for a model call.

The claim of a client that was killed may have expired."""
MAX_WORK_S = 0.5
"""Longest pause of an agent between its call and its end."""


@dataclass(slots=True)
class Notes:
    """The actions of this client and the server's replies, one line for each."""

    file: Path
    claimed: dict[str, Json] = field(default_factory=dict[str, Json])
    """Replies to claims by uuid."""
    sent: dict[str, Json] = field(default_factory=dict[str, Json])
    """Bodies of ends by uuid."""
    ended: set[str] = field(default_factory=set[str])
    """Uuids of the acknowledged ends."""
    refused: set[str] = field(default_factory=set[str])
    """Uuids of the ends that were refused because the claim had expired."""

    def read(self) -> None:
        """Read the notes of earlier processes.

        Each note is one write, so a kill leaves no partial note.
        """
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            self._remember(**json.loads(line))

    def add(self, action: str, uuid: str, body: Json | None = None) -> None:
        """Write a note.

        `body` is the reply to a claim, the request of an end, or the reply to an end.
        """
        with self.file.open("a") as notes:  # closed, and so flushed, before the next action
            notes.write(json.dumps({"action": action, "uuid": uuid, "body": body or {}}) + "\n")
        self._remember(action, uuid, body or {})

    @property
    def open_claims(self) -> list[str]:
        return [uuid for uuid in self.claimed if uuid not in self.ended | self.refused]

    def _remember(self, action: str, uuid: str, body: Json) -> None:
        match action:
            case "claimed":
                self.claimed[uuid] = body
            case "sent":
                self.sent[uuid] = body
            case "ended":
                self.ended.add(uuid)
            case _:
                self.refused.add(uuid)


class Client:
    def __init__(self, url: str, notes: Notes, go: Path, idle_limit_s: float, seed: int) -> None:
        self._url = url
        self._notes = notes
        self._go = go
        self._idle_limit_s = idle_limit_s
        self._random = random.Random(seed)
        self._name = notes.file.stem

    async def run(self, at_once: int, num_ends: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            while (left := num_ends - len(self._notes.ended)) > 0:
                missing = min(at_once, left) - len(self._notes.open_claims)
                await asyncio.gather(*(self._claim() for _ in range(missing)))
                while not self._go.exists():
                    await asyncio.sleep(PAUSE_S)
                if not self._notes.open_claims:
                    await asyncio.sleep(PAUSE_S)
                await asyncio.gather(*(self._play(uuid) for uuid in self._notes.open_claims))

    async def _claim(self) -> None:
        """Claim an episode, or return without one while the next batch is complete."""
        claim = {
            "client_uuid": self._name,
            "episode_type": "train",
            "discard_episode_timeout": self._idle_limit_s,
        }
        reply = await self._post("/claim_episode", claim)
        while not reply["success"] and "post-rolling" not in reply["fail_cause"]:
            await asyncio.sleep(PAUSE_S)
            reply = await self._post("/claim_episode", claim)
        if reply["success"]:
            self._notes.add("claimed", reply["episode_uuid"], reply)

    async def _play(self, uuid: str) -> None:
        if uuid not in self._notes.sent:
            await self._call(self._notes.claimed[uuid])
            await asyncio.sleep(self._random.uniform(0, MAX_WORK_S))
            self._notes.add("sent", uuid, self._end_body(uuid))
        reply = await self._post("/end_episode", self._notes.sent[uuid])
        self._notes.add("ended" if reply.get("success") is True else "refused", uuid, reply)

    def _end_body(self, uuid: str) -> Json:
        number = len(self._notes.sent)
        task_id = f"{self._name} {number // NUM_REPEAT}"
        output = {"reward": number % NUM_REPEAT / 8, "metadata": {"task_id": task_id}}
        return {
            "client_uuid": self._name,
            "episode_uuid": uuid,
            "task_id": task_id,
            "workflow_output": output,
        }

    async def _call(self, claimed: Json) -> None:
        url = claimed["openai_base_url"].removeprefix(self._url) + "/chat/completions"
        messages = [{"role": "user", "content": "[[say yes]]"}]
        key = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
        await self._post(url, {"model": "fake", "messages": messages}, key)

    async def _post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> Json:
        """Send a request until a server process replies."""
        while True:
            try:
                async with self._http.post(self._url + path, json=body, headers=headers) as answer:
                    if answer.status != 503:  # 503 means: try again later
                        reply = await answer.json()
                        is_expired = any(part in str(reply) for part in NOT_CLAIMED)
                        assert answer.status == 200 or is_expired, (path, answer.status, reply)
                        return reply
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument(
        "--go", type=Path, required=True, help="No episode ends before this file exists."
    )
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--ends", type=int, required=True)
    parser.add_argument("--idle-limit-s", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="Time limit of the program.")
    args = parser.parse_args()
    notes = Notes(args.notes)
    notes.read()
    client = Client(args.url, notes, args.go, args.idle_limit_s, args.seed)
    asyncio.run(asyncio.wait_for(client.run(args.at_once, args.ends), args.limit_s))


if __name__ == "__main__":
    main()
