"""A process of active clients: so many episodes at once, each claimed, called and ended; and again,
until so many ends are acknowledged.

    python tests/e2e/active_client.py --url URL --notes FILE --at-once 50 --ends 150 --go FILE

What must not be forgotten is in the notes before anything follows from it, so the next life of a
process that is killed goes on from there: it ends what it has claimed, and sends again, word by
word, what was not acknowledged.
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
"""Of one request."""
PAUSE_S = 0.2
"""Before one that found no server, or one that was not ready, is sent again."""
GONE = "not claimed"
"""Or not in claimed status: what is said of a claim that has run out, as a client's may that was
dead."""
MOST_WORK_S = 0.5
"""What an agent does between its call and its end."""


@dataclass(slots=True)
class Notes:
    """What this process did, and what it was told; one line each."""

    file: Path
    claimed: dict[str, Json] = field(default_factory=dict[str, Json])
    """Replies by uuid."""
    sent: dict[str, Json] = field(default_factory=dict[str, Json])
    """Bodies of ends by uuid."""
    ended: set[str] = field(default_factory=set[str])
    """Acknowledged."""
    refused: set[str] = field(default_factory=set[str])
    """Their claims had run out."""

    def read(self) -> None:
        """What earlier lives wrote. A note is one write, which a kill does not cut."""
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            self._know(**json.loads(line))

    def add(self, did: str, uuid: str, told: Json | None = None) -> None:
        """`told`: the reply to a claim, the body of an end, why that was refused."""
        with self.file.open("a") as notes:  # closed, and so flushed, before anything follows
            notes.write(json.dumps({"did": did, "uuid": uuid, "told": told or {}}) + "\n")
        self._know(did, uuid, told or {})

    @property
    def in_hand(self) -> list[str]:
        return [uuid for uuid in self.claimed if uuid not in self.ended | self.refused]

    def _know(self, did: str, uuid: str, told: Json) -> None:
        match did:
            case "claimed":
                self.claimed[uuid] = told
            case "sent":
                self.sent[uuid] = told
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
        self._chance = random.Random(seed)
        self._name = notes.file.stem

    async def run(self, at_once: int, num_ends: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            while (left := num_ends - len(self._notes.ended)) > 0:
                missing = min(at_once, left) - len(self._notes.in_hand)
                await asyncio.gather(*(self._claim() for _ in range(missing)))
                while not self._go.exists():
                    await asyncio.sleep(PAUSE_S)
                if not self._notes.in_hand:
                    await asyncio.sleep(PAUSE_S)
                await asyncio.gather(*(self._play(uuid) for uuid in self._notes.in_hand))

    async def _claim(self) -> None:
        """Or not, while a batch is full: it waits for what is claimed already."""
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
            await asyncio.sleep(self._chance.uniform(0, MOST_WORK_S))
            self._notes.add("sent", uuid, self._end_of(uuid))
        reply = await self._post("/end_episode", self._notes.sent[uuid])
        self._notes.add("ended" if reply.get("success") is True else "refused", uuid, reply)

    def _end_of(self, uuid: str) -> Json:
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
        """Until there is an answer, of whichever life of the server."""
        while True:
            try:
                async with self._http.post(self._url + path, json=body, headers=headers) as answer:
                    if answer.status != 503:  # which means: later
                        told = await answer.json()
                        is_gone = GONE in str(told)
                        assert answer.status == 200 or is_gone, (path, answer.status, told)
                        return told
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                pass
            await asyncio.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--go", type=Path, required=True, help="Nothing is ended before it exists.")
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--ends", type=int, required=True)
    parser.add_argument("--idle-limit-s", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="It ends by itself.")
    args = parser.parse_args()
    notes = Notes(args.notes)
    notes.read()
    client = Client(args.url, notes, args.go, args.idle_limit_s, args.seed)
    asyncio.run(asyncio.wait_for(client.run(args.at_once, args.ends), args.limit_s))


if __name__ == "__main__":
    main()
